"""Timelines as lanes over one time axis, drawn by the template without a script.

Positions are percentages of the axis, so that a lane scales with the page and text does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from rmetric.diagnosis.render import clock
from rmetric.telemetry.lines import LAST_TIME

#: Seconds; what is earlier has no year, or counts from a machine's start.
FIRST_TIME = 1e8
#: Share of the axis below which what happened is shown on an axis of its own, too.
_CROWDED = 0.15
#: Least seconds beside what is shown on such an axis.
_BESIDE = 5.0
_TICKS = 4


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A stretch of time, or with `end` None a moment.

    Attributes:
        start, end: seconds since 1970.
        kind: of its colour: a role, a level, ``stage1`` to ``stage8``, ``alarm``.
        label: what it is, for who points at it.
        shown: written into a stretch.
    """

    start: float
    kind: str
    label: str
    end: float | None = None
    shown: str = ""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Marks under one name."""

    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Lanes over an axis from `start` to `end`, in seconds since 1970; `end` is the later."""

    start: float
    end: float
    lanes: Sequence[Lane]

    def place(self, time: float) -> str:
        """Of a moment on the axis; of one beyond it, its end.

        >>> Timeline(start=0.0, end=8.0, lanes=()).place(1.0)
        '12.5%'
        """
        share = (time - self.start) / (self.end - self.start)
        return f"{100 * min(max(share, 0.0), 1.0):.6g}%"

    def width(self, mark: Mark) -> str:
        """Of a stretch, as far as it is on the axis.

        >>> mark = Mark(start=6.0, end=99.0, kind="fatal", label="Xid 79")
        >>> Timeline(start=0.0, end=8.0, lanes=()).width(mark)
        '25%'
        """
        end = min(mark.start if mark.end is None else mark.end, self.end)
        share = (end - max(mark.start, self.start)) / (self.end - self.start)
        return f"{100 * max(share, 0.0):.6g}%"

    @property
    def ticks(self) -> list[tuple[str, str, str]]:
        """Place, label and anchor; the first has the date."""
        found = []
        for i in range(_TICKS + 1):
            time = self.start + (self.end - self.start) * i / _TICKS
            anchor = "start" if i == 0 else "end" if i == _TICKS else "middle"
            found.append((self.place(time), clock(time, date=i == 0), anchor))
        return found


def on_axis(time: float | None) -> bool:
    """Whether it is a date with its year."""
    return time is not None and isfinite(time) and FIRST_TIME <= time <= LAST_TIME


def timeline(lanes: Iterable[Lane], start: float, end: float) -> Timeline:
    """The lanes that have marks on the axis, with those marks; `end` is after `start`."""
    kept = []
    for lane in lanes:
        marks = [one for one in lane.marks if _reaches(one, start, end)]
        if marks:
            kept.append(Lane(name=lane.name, marks=marks))
    return Timeline(start=start, end=end, lanes=kept)


def _reaches(mark: Mark, start: float, end: float) -> bool:
    return mark.start <= end and (mark.start if mark.end is None else mark.end) >= start


def around(times: Sequence[float], start: float, end: float) -> tuple[float, float] | None:
    """An axis for these moments alone; None where they have room on that from start to end."""
    if len(set(times)) < 2 or max(times) - min(times) > _CROWDED * (end - start):
        return None
    beside = max(0.1 * (max(times) - min(times)), _BESIDE)
    return min(times) - beside, max(times) + beside
