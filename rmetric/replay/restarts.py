"""Restarts in a log, or between two logs of one run: both sides, and what that usually means.

A log does not show what a checkpoint held. What a lost part does to loss and rate is known,
see docs/audits.md. Its weakness: a restart whose steps go on within one log does not show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmetric.records import Record, Run

Floats = NDArray[np.float64]
Sides = tuple[float, float]

#: Records on either side that are compared, and the fewest that suffice.
_WIDTH, _FEWEST, _LONG = 20, 5, 80
#: More falls of the step than this are not restarts, but several writers or an odd order.
_MOST = 20
#: Last records of a log, which are compared with the log after it.
_KEPT = 512
#: A rise of the loss is this many standard deviations of its noise, and this share of its level.
_SIGMAS, _SHARE = 5.0, 0.03
#: Share of the way back to the first losses from which on the weights are taken for lost.
_TO_START = 0.6
#: Relative difference of a rate to that of the same step, and to one that had to be extrapolated.
_OTHER_RATE, _FAR_RATE = 0.02, 0.1
_RESUMES = re.compile(r"resume|restart|cont")
#: Words of file names that number the parts of a run.
_PARTS = re.compile(
    r"(?:[_.-]*(?:resumed?|restart(?:ed)?|continued?|cont|part|full|[0-9]+)(?![a-z]))+"
)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart.

    Attributes:
        step, reached: first step after it, and last one before it.
        loss, rate, norm: median of the records before it, or of the same steps as they were, and
            median of the first ones after it; of the rate the one that was due and the first one.
            None where not both are logged and finite.
        meaning: what differs and what that usually means, in words; empty where nothing does.
        log: that came before, where it is another file.
    """

    step: int
    reached: int
    loss: Sides | None
    rate: Sides | None
    norm: Sides | None
    meaning: str
    log: str = ""

    @property
    def words(self) -> str:
        """One line."""
        after = f"{self.reached:,}{f' of {self.log}' if self.log else ''}"
        meaning = self.meaning or "nothing stands out"
        return f"restart at step {self.step:,} after step {after}: {self.sides}: {meaning}"

    @property
    def sides(self) -> str:
        """Before and after, of what is logged on both sides."""
        named = {"loss": self.loss, "rate": self.rate, "gradient norm": self.norm}
        return "; ".join(
            f"{name} {sides[0]:.4g}, then {sides[1]:.4g}" for name, sides in named.items() if sides
        )


class Course(NamedTuple):
    """Columns of records with a training loss; nan where not logged."""

    step: Floats
    loss: Floats
    rate: Floats
    norm: Floats

    def cut(self, which: slice | NDArray[np.bool_]) -> Course:
        return Course(*(column[which] for column in self))


def _course(records: Sequence[Record]) -> Course:
    trained = [record for record in records if record.training_loss is not None]
    names = ("step", "training_loss", "learning_rate", "gradient_norm")
    return Course(*(np.array([getattr(r, name) for r in trained], float) for name in names))


class Restarts:
    """Finds the restarts of runs, one after the other, also between the logs of one run.

    A log goes on with an earlier one where their paths differ in numbers and words like "resume"
    alone, it begins where that ends, or before that, and no other log fits as well.

    Attributes:
        continued: the log with which the one that was requested last goes on, if they are one run:
            its steps begin where that ends, or its name states that it resumes. Else None.
    """

    def __init__(self) -> None:
        self.continued: Path | None = None
        self._ends: dict[str, list[tuple[Path, Floats, Course]]] = {}

    def of(self, run: Run) -> list[Restart]:
        """The restarts of `run`, in its order. Later runs are compared with it too."""
        course, self.continued = _course(run.records), None
        if len(course.step) < _FEWEST:
            return []
        parts = _parts(course)
        start, log = course.loss[:_WIDTH], ""
        if run.source is not None:
            ends = self._ends.setdefault(_PARTS.sub("", str(run.source).lower()), [])
            fitting = [end for end in ends if end[0] != run.source and _goes_on(end[2], course)]
            if len(fitting) == 1:
                ends.remove(fitting[0])
                earlier, start, before = fitting[0]
                log, parts = earlier.name, [before, *parts]
                words = [_RESUMES.findall(str(log).lower()) for log in (earlier, run.source)]
                if len(words[1]) > len(words[0]) or course.step[0] > before.step[-1]:
                    self.continued = earlier
            last = course.cut(slice(-_KEPT, None))
            ends.append((run.source, start, last))
        found, before = [], parts[0]
        for number, after in enumerate(parts[1:]):
            if min(np.sum(before.step < after.step[0]), len(after.step)) >= _FEWEST:
                of = log if number == 0 else ""
                found.append(_compared(before, after, start, of))
            kept = before.cut(before.step < after.step[0])
            before = Course(*map(np.concatenate, zip(kept, after, strict=True)))
        return found


def _parts(course: Course) -> list[Course]:
    falls = np.flatnonzero(np.diff(course.step) < 0) + 1
    if len(falls) > _MOST:
        return [course]
    edges = [0, *falls, len(course.step)]
    return [course.cut(slice(a, b)) for a, b in pairwise(edges)]


def _goes_on(before: Course, after: Course) -> bool:
    interval = 2 * max(np.median(np.diff(before.step)), np.median(np.diff(after.step)))
    first, last = after.step[0], before.step[-1]
    is_later = len(before.step) > _FEWEST and before.step[_FEWEST] < first and last < after.step[-1]
    return bool(is_later and interval < first <= last + interval)


def _compared(before: Course, after: Course, start: Floats, log: str) -> Restart:
    """`start`: the run's first losses."""
    again = before.cut(before.step >= after.step[0])  # steps that are taken twice
    earlier = before.cut(before.step < after.step[0])
    same = again if len(again.step) >= _FEWEST else earlier.cut(slice(-_WIDTH, None))
    first, there = after.cut(slice(_WIDTH)), same.cut(slice(_WIDTH))
    due, now, tolerance = _rates(earlier, again, first)
    meaning = _of_loss(earlier, same, after, start)
    if abs(now - due) > tolerance * max(due, now):
        meaning = "; ".join(filter(None, [_of_rate(due, first), meaning]))
    return Restart(
        step=int(after.step[0]),
        reached=int(before.step[-1]),
        loss=_sides(np.median(there.loss), np.median(first.loss)),
        rate=_sides(due, now),
        norm=_sides(np.median(there.norm), np.median(first.norm)),
        meaning=meaning,
        log=log,
    )


def _sides(before: Any, after: Any) -> Sides | None:
    sides = float(before), float(after)
    return sides if all(map(isfinite, sides)) else None


def _rates(earlier: Course, again: Course, first: Course) -> tuple[float, float, float]:
    """The rate that was due, the one that is there, and the relative difference that counts."""
    _, here, there = np.intersect1d(again.step, first.step, return_indices=True)
    if len(here):
        return float(again.rate[here[0]]), float(first.rate[there[0]]), _OTHER_RATE
    now, last = float(first.rate[0]), float(earlier.rate[-1])
    span = float(earlier.step[-1] - earlier.step[-_FEWEST])
    share = float(first.step[0] - earlier.step[-1]) / span if span else 0.0
    ahead = last + share * (last - float(earlier.rate[-_FEWEST]))
    low, high = sorted((last, max(ahead, 0.0)))
    return min(max(now, low), high), now, _FAR_RATE


def _of_rate(due: float, first: Course) -> str:
    now = first.rate[0]
    if now < 0.5 * due and first.rate[-1] > 1.2 * now:
        return "the rate warms up again: usually the scheduler began anew"
    return "the rate is another: usually the scheduler was not restored, if it is not planned"


def _of_loss(earlier: Course, same: Course, after: Course, start: Floats) -> str:
    """Finding from the losses, compared with `same`: the repeated steps, or those just before."""
    if not all(np.isfinite(part.loss[:_LONG]).all() for part in (earlier, same, after)):
        return ""
    taken_twice = same.loss[: _LONG // 2] if same.step[0] >= after.step[0] else same.loss[:0]
    noise, one_in = _noise(np.concatenate([earlier.loss, taken_twice])[-_LONG:])
    level = float(np.median(same.loss[:_WIDTH]))

    def counts(number: int) -> float:
        """The least difference that counts of two medians of so many losses."""
        return max(_SIGMAS * 1.77 * noise * min(sqrt(one_in / number), 1), _SHARE * abs(level))

    for width in (_FEWEST, _WIDTH):
        learnt = float(np.median(start[:width])) - level
        begin = float(np.median(after.loss[:width]))
        if learnt > counts(width) and begin - level > _TO_START * learnt:
            return "the loss begins as that of an untrained model: usually the weights were lost"
    for width in (3, _WIDTH):
        smooth = _running_median(after.loss, min(width, len(after.loss)))
        peak = int(np.argmax(smooth[:_WIDTH]))
        if smooth[peak] - level > counts(width):
            return _rise(after, smooth, peak, level + 0.4 * counts(width))
    width = min(_LONG, len(same.loss), len(after.loss))
    before = float(np.median(same.loss[:width]))
    fallen = before - float(np.median(after.loss[:width]))
    gone = earlier.loss[-2 * width : -width] if same.step[-1] < after.step[0] else same.loss[:0]
    due = float(np.median(gone)) - before if len(gone) else 0.0
    if fallen > counts(width) + 2 * max(due, 0.0):
        return "the loss is lower than before: usually batches that were trained on come again"
    return ""


def _noise(losses: Floats) -> tuple[float, float]:
    """Standard deviation about a line, and of how many neighbours one is independent."""
    places = np.arange(len(losses))
    rest = losses - np.polyval(np.polyfit(places, losses, 1), places)
    deviation = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    squares = float(rest @ rest)
    shared = min(max(float(rest[1:] @ rest[:-1]) / squares, 0.0), 0.95) if squares else 0.0
    return deviation, (1 + shared) / (1 - shared)


def _rise(after: Course, smooth: Floats, peak: int, level: float) -> str:
    back = np.flatnonzero(smooth[peak:] <= level)
    rises = f"the loss rises to {smooth[peak]:.4g} and is"
    if len(back):
        steps = int(after.step[peak + back[0]] - after.step[0])
        return f"{rises} back after {steps:,} steps: usually the optimizer's moments were lost"
    if len(after.step) > _LONG:
        return f"{rises} not back at the end of the log: usually other weights or other data"
    return f"{rises} not back at the end of the log"


def _running_median(values: Floats, width: int) -> Floats:
    """Median of each value and the following ones, fewer at the end."""
    padded = np.concatenate([values, np.full(width - 1, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    return np.asarray(np.nanmedian(windows, axis=1))
