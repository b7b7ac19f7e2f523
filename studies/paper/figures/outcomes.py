"""The ends of a run: one name, one colour and one mark in every figure."""

from __future__ import annotations

from typing import NamedTuple

from rmetric.records import Truth
from rmetric.reporting.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from rmetric.simulation.outcome import DEGRADED_NATS, DIVERGED_RATIO


class Outcome(NamedTuple):
    """An end, as figures show it; `meaning`: when a run ends so, in a few short lines."""

    title: str
    meaning: str = ""
    colour: str = PURPLE
    marker: str = "D"


OUTCOMES = {
    "healthy": Outcome("healthy", "nothing was injected", GREEN),
    "absorbed": Outcome("absorbed", "the training recovers", GREEN),
    "not_applicable": Outcome("not applicable", "nothing to act on\nin this architecture", GREY),
    "degraded": Outcome(
        "degraded", f"over {DEGRADED_NATS:.2f} nat above its\ntwin without the fault", BLUE, "o"
    ),
    "diverged": Outcome(
        "diverged", f"{100 * (DIVERGED_RATIO - 1):.0f} % above the best\nloss, to the end",
        VERMILION, "^",
    ),
    "non_finite": Outcome("non-finite", "a loss or gradient\nthat is no number", BLACK, "s"),
    "scripted_crash": Outcome(
        "scripted crash", "drawn: (k / 15)² at\nstep k of the fault", BLACK, "s"
    ),
    "lost_worker": Outcome("lost worker", "the synchronous\njob stops", ORANGE, "D"),
}  # fmt: skip


def name_of(truth: Truth) -> str:
    """The failure's kind, or the outcome of a run that did not fail."""
    return truth.failure_kind or "failed" if truth.failed else truth.outcome


def look_of(name: str) -> Outcome:
    """The look of an end in the figures; an end that is not listed gets the default look."""
    return OUTCOMES.get(name) or Outcome(name.replace("_", " "))


def in_order(names: set[str]) -> list[str]:
    """These ends as the figures list them, the unknown ones last."""
    known = list(OUTCOMES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else 99, name))
