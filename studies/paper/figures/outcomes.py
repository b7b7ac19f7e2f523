"""The ends of a run: one name, one colour and one mark in every figure."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric.records import Truth
from rmetric.reporting.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from rmetric.simulation.outcome import DEGRADED_NATS, DIVERGED_RATIO


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An end, as figures show it; `meaning`: when a run ends so, in a few short lines."""

    title: str
    meaning: str = ""
    colour: str = PURPLE
    marker: str = "D"


OUTCOMES = {
    "healthy": Outcome(title="healthy", meaning="nothing was injected", colour=GREEN),
    "absorbed": Outcome(title="absorbed", meaning="the training recovers", colour=GREEN),
    "not_applicable": Outcome(
        title="not applicable", meaning="nothing to act on\nin this architecture", colour=GREY
    ),
    "degraded": Outcome(
        title="degraded",
        meaning=f"over {DEGRADED_NATS:.2f} nat above its\ntwin without the fault",
        colour=BLUE,
        marker="o",
    ),
    "diverged": Outcome(
        title="diverged",
        meaning=f"{100 * (DIVERGED_RATIO - 1):.0f} % above the best\nloss, to the end",
        colour=VERMILION,
        marker="^",
    ),
    "non_finite": Outcome(
        title="non-finite",
        meaning="a loss or gradient\nthat is no number",
        colour=BLACK,
        marker="s",
    ),
    "scripted_crash": Outcome(
        title="scripted crash",
        meaning="drawn: (k / 15)² at\nstep k of the fault",
        colour=BLACK,
        marker="s",
    ),
    "lost_worker": Outcome(
        title="lost worker", meaning="the synchronous\njob stops", colour=ORANGE, marker="D"
    ),
}


def name_of(truth: Truth) -> str:
    """The failure's kind, or the outcome of a run that did not fail."""
    return truth.failure_kind or "failed" if truth.failed else truth.outcome


def look_of(name: str) -> Outcome:
    """The look of an end in the figures; an end that is not listed gets the default look."""
    return OUTCOMES.get(name) or Outcome(title=name.replace("_", " "))


def in_order(names: set[str]) -> list[str]:
    """These ends as the figures list them, the unknown ones last."""
    known = list(OUTCOMES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else 99, name))
