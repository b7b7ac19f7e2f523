"""Summarise a `rmetric telemetry` recording beside a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from rmetric._util.printed import counted
from rmetric.diagnosis.report.render import clock
from rmetric.diagnosis.report.timeline import on_axis
from rmetric.diagnosis.result import Diagnosis
from rmetric.telemetry.lines import GpuVerdict
from rmetric.telemetry.sources import ReplayedReadings


class Gpus(NamedTuple):
    """GPU verdicts of a recording.

    Attributes:
        news: verdicts that changed, in their order.
        until: time of the last reading of each, by key.
    """

    news: Sequence[GpuVerdict]
    until: dict[str, float]

    @property
    def unwell(self) -> list[str]:
        """Keys of those that were not always healthy, in the order in which they showed it."""
        return list(dict.fromkeys(one.key for one in self.news if one.level != "healthy"))


def read_gpus(path: Path) -> Gpus:
    source = ReplayedReadings(path, inf)
    news = source.poll()
    return Gpus(news=news, until={key: one.time for key, one in source.verdicts().items()})


def rows(gpus: Gpus, diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Verdict changes since a GPU was first unhealthy, with their time before the cause."""
    nodes = {one.node for one in diagnosis.nodes if one.node}
    rows, unwell = [], set()
    for one in gpus.news:
        # That a GPU was well is news where it was not before.
        if one.level != "healthy" or one.key in unwell:
            unwell.add(one.key)
            before = _before(one.time, diagnosis)
            rows.append({"verdict": one, "suspect": one.node in nodes, "before": before})
    return rows


def _before(time: float, diagnosis: Diagnosis) -> str:
    if not on_axis(diagnosis.time) or diagnosis.time is None:
        return ""
    seconds = diagnosis.time - time
    return f"{_duration(abs(seconds))} {'before' if seconds >= 0 else 'after'} the cause"


def _duration(seconds: float) -> str:
    """In the unit that suits it.

    >>> _duration(35.2), _duration(7200.0)
    ('35 s', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def in_words(gpus: Gpus, diagnosis: Diagnosis) -> tuple[str, list[str]]:
    """A headline and sentences."""
    count = counted(len(gpus.until), "GPU")
    unwell = [one for one in gpus.news if one.level != "healthy"]
    if not unwell:
        return "All healthy", [f"{count} recorded; none was at risk or failed."]
    worst = next((one for one in unwell if one.level == "fatal"), unwell[0])
    when = _before(worst.time, diagnosis) or clock(worst.time)
    named = worst.node and worst.node in {one.node for one in diagnosis.nodes}
    found = [
        f"{'; '.join(worst.reasons)}." if worst.reasons else "",
        f"{when[0].upper()}{when[1:]}.",
        "The logs point to its node too." if named else "",
        f"{len(gpus.unwell)} of {count} were not always healthy.",
    ]
    return f"GPU {worst.key}: {worst.level}", [one for one in found if one]
