"""The course of one loss over a whole log: its level, its noise, its rises and its end.

No measure has a unit: a loss that is multiplied by a constant has the same rises, and so has every
tenth record where a tenth still shows them. docs/verdict.md states the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmetric.records import Record

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Losses below which nothing is judged but a value that is not finite.
FEWEST_RECORDS = 10
#: A rise counts from the largest of these: a share of the level before it, a share of what the
#: loss had fallen since the start, and spreads of its noise. Half of that is "back". The
#: noise of few records is less certain: spreads are multiplied by 1 + `FEW_RECORDS` / records.
SHARE_OF_LEVEL, SHARE_OF_FALL, SPREADS, FEW_RECORDS = 0.2, 0.1, 8.0, 20
#: Noise is that of the records near the lowest level so far, where they are this share and number.
CALM_SHARE, CALM_RECORDS = 0.25, 15
#: One record alone counts if the log skips steps, from so many spreads, and this much beyond the
#: largest of the records that do not count; at most so many do.
LONE_SPREADS, LONE_GAP, MOST_LONE = 10.0, 2.0, 3
#: A level of so many times the one before is another one.
RATIO = 2.0
#: A rise is gradual where it takes a larger share of the log; a step to a new level is complete
#: within the second one.
ABRUPT_SHARE, STEP_SHARE = 0.1, 0.02
#: Records of a level.
WIDTH = 5
_SPREAD = 1.4826 * 1.2  # of a median deviation from a median of five that contains the value
_MOST_PLANNED = 10


@dataclass(frozen=True)
class Loss:
    """The logged values of one loss, without steps that the optimiser skipped.

    Attributes:
        name: ``training_loss`` or ``validation_loss``.
        steps, values: shape (n,).
        places: the steps, or the records where the steps fall back, which is the `unit`.
        planned: True at the first value after an announced change.
    """

    name: str
    steps: NDArray[np.int64]
    places: Floats
    values: Floats
    planned: Bools
    unit: str

    @classmethod
    def of(cls, records: Sequence[Record], name: str) -> Loss | None:
        """One loss of a run; None where it is not logged."""
        planned, chosen, due = [], [], False
        for position, record in enumerate(records):
            due = due or bool(record.planned_events)
            if getattr(record, name) is None or (record.skipped and name == "training_loss"):
                continue
            chosen.append(position)
            planned.append(due)
            due = False
        if not chosen:
            return None
        steps = np.array([records[position].step for position in chosen], dtype=np.int64)
        values = np.array([getattr(records[position], name) for position in chosen], dtype=float)
        falls_back = bool(np.any(np.diff(steps) < 0))
        places = np.array(chosen, dtype=float) if falls_back else steps.astype(float)
        marks = np.array(planned) & (sum(planned) <= _MOST_PLANNED)
        return cls(name, steps, places, values, marks, "record" if falls_back else "step")

    @property
    def length(self) -> float:
        return float(self.places[-1] - self.places[0])

    @property
    def spacing(self) -> float:
        return float(np.median(np.diff(self.places))) if len(self.places) > 1 else 1.0

    @property
    def word(self) -> str:
        return "loss" if self.name == "training_loss" else "validation loss"

    @property
    def finite(self) -> Floats:
        return self.values[np.isfinite(self.values)]

    def step(self, record: int) -> int:
        return int(self.steps[record])

    def part(self, end: int) -> Loss:
        """The first records."""
        names = ("steps", "places", "values", "planned")
        return replace(self, **{name: getattr(self, name)[:end] for name in names})

    def before(self, first: int, base: float = np.inf) -> float | None:
        """The level before a record: of the last records before it, or else `base`."""
        level = level_of(self.values[max(0, first - WIDTH) : first])
        return base if level is None and np.isfinite(base) else level


@dataclass(frozen=True)
class Rise:
    """Records `first` to before `end` are above the level `base`; no `end` where it lasts."""

    first: int
    end: int | None
    base: float
    fall: float  # of the level, from the start to the base
    peak: float  # the highest value that is finite
    finite: bool = True

    @property
    def height(self) -> tuple[bool, float]:
        """To compare rises by."""
        return not self.finite, self.peak - self.base


class Course:
    """The rises of a loss above its lowest level so far.

    Attributes:
        level: running median, inf where the values are not finite, shape (n,).
        spread: of its noise.
        singles: records outside of the rises that stand out by more than any noise, one at a time.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        values = np.where(np.isfinite(loss.values), loss.values, np.inf)
        # Two records in a row make a level where the log skips steps, else three.
        self.level = level = _running_median(values, WIDTH if loss.spacing <= 1 else 3)
        base, fall = np.empty_like(level), np.empty_like(level)
        starts = [0, *(np.flatnonzero(loss.planned[1:]) + 1).tolist(), len(values)]
        for low, high in pairwise(starts):
            part = level[low:high]
            base[low:high] = np.minimum.accumulate(part)
            known = part[np.isfinite(part)]
            fall[low:high] = (known[0] if len(known) else 0.0) - base[low:high]
        away = values - _running_median(values, WIDTH)
        floor = np.maximum(SHARE_OF_LEVEL * np.abs(base), SHARE_OF_FALL * fall)
        # If a run is wild for most of the log, its calm records give the noise.
        calm = (level - base <= floor) & np.isfinite(away)
        is_calm = calm.sum() >= max(CALM_RECORDS, CALM_SHARE * len(calm))
        known = away[calm] if is_calm else away[np.isfinite(away)]
        self.spread = _SPREAD * float(np.median(np.abs(known))) if len(known) else 0.0
        noise = SPREADS * (1 + FEW_RECORDS / len(values)) * self.spread
        floor = np.where(np.isfinite(floor), np.maximum(floor, noise), np.inf)
        far = (away > LONE_SPREADS * self.spread) & (values - base > floor) & np.isfinite(values)
        far[:WIDTH] = False  # the first have no past
        above = (level - base > floor) | ~np.isfinite(loss.values)
        raised = above | (level - base > floor / 2)
        # Where the steps skip, the record after a lone one may be half-way back.
        lone = self._lone(far, away)
        above[lone] = raised[lone] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[False], raised, [False]]).astype(np.int8)))
        spans = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        found = (self._rise(values, above, base, fall, floor, *span) for span in spans)
        self.rises = [rise for rise in found if rise is not None]
        for rise in self.rises:  # the record where one is over may stand out again
            far[rise.first : rise.end] = False
        self.singles = np.flatnonzero(far)

    def _lone(self, far: Bools, away: Floats) -> NDArray[np.int64]:
        """Records that stand out alone, in a log that skips steps and has few such."""
        if self.loss.spacing <= 1 or len(far) <= FEWEST_RECORDS:
            return np.array([], dtype=np.int64)
        away = np.where(np.isfinite(away), away, 0.0)
        candidates = np.flatnonzero(far)
        candidates = candidates[np.argsort(-away[candidates])]
        away[:WIDTH] = 0.0
        ranked, found = np.sort(away)[::-1], 0
        for number in range(1, min(len(candidates), MOST_LONE) + 1):
            if number == len(ranked) or ranked[number - 1] >= LONE_GAP * ranked[number]:
                found = number
        return candidates[:found]

    def _rise(
        self, values: Floats, above: Bools, base: Floats, fall: Floats, floor: Floats,
        start: int, stop: int,
    ) -> Rise | None:  # fmt: skip
        """The rise of records half above; None if none is fully above, or without a past."""
        inside, places = np.flatnonzero(above[start:stop]), self.loss.places
        if not len(inside):
            return None
        if stop == len(values) and not above[max(start, stop - WIDTH) : stop].any():
            stop = start + int(inside[-1]) + 1
        part = values[start:stop]
        if np.all(part <= base[start] + floor[start]):  # a low record between high ones
            part = values[max(0, start - 1) : stop + 1]
        finite = part[np.isfinite(part)]
        whole = len(finite) == len(part)
        at_end = stop == len(values) and bool(above[max(start, stop - 2) : stop].any())
        early = start < WIDTH and (
            stop <= 3 * WIDTH or places[stop - 1] - places[start] < ABRUPT_SHARE * self.loss.length
        )
        back = bool(np.any(values[stop:] <= values[: max(1, start)].max()))
        if not at_end and early and back and whole:
            return None
        return Rise(
            first=_onset(values, start, float(base[start] + floor[start] / 2)),
            end=None if at_end else min(stop, len(values) - 1),
            base=float(base[start]),
            fall=float(fall[start]),
            peak=float(np.max(finite)) if len(finite) else np.inf,
            finite=whole,
        )

    @property
    def early_divergence(self) -> Rise | None:
        """A run that diverged at once and stays far above its first losses, however noisy.

        Without a calm part no noise can be estimated. Each loss of the second half is then
        above four of the first five.
        """
        values = self.loss.values
        if len(values) < 4 * WIDTH:
            return None
        before, late = values[:WIDTH], values[len(values) // 2 :]
        base, end, line = float(np.median(before)), float(np.median(late)), np.sort(before)[-2]
        if base <= 0 or late.min() <= line or end < RATIO * base:
            return None
        if float(values.max()) < RATIO * float(np.median(values[-WIDTH:])):
            return None  # it grows and stays, as an accuracy does
        first = int(np.argmax(values > line))
        return Rise(first, None, float(before.min()), 0.0, float(values.max()))

    def lasted(self, rise: Rise) -> float:
        """Steps, or records, from its first record to its end."""
        places = self.loss.places
        return float(places[-1 if rise.end is None else rise.end] - places[rise.first])

    def share(self, rises: Sequence[Rise]) -> float:
        """Share of the log that lies in `rises`."""
        return ratio(sum(map(self.lasted, rises)), self.loss.length)

    def is_abrupt(self, rise: Rise) -> bool:
        """True if most of the rise is done within a tenth of the log."""
        high, places = self.level[rise.first :], self.loss.places
        finite = high[np.isfinite(high)]
        if not len(finite):
            return True
        wanted = rise.base + 0.6 * (float(np.max(finite)) - rise.base)
        reached = rise.first + int(np.argmax(high >= wanted))
        window = max(ABRUPT_SHARE * self.loss.length, 2 * self.loss.spacing)
        return bool(places[reached] - places[rise.first] <= window)

    def is_step(self, rise: Rise, at_last: float) -> bool:
        """True for a step to a new level at which the loss stays or from which it falls."""
        places, inside = self.loss.places, self.level[rise.first : rise.end]
        if not len(inside) or not np.isfinite(inside).all():
            return False
        window = max(STEP_SHARE * self.loss.length, 2 * self.loss.spacing)
        within = places[rise.first : rise.end] <= places[rise.first] + window
        reached, height = float(np.max(inside[within])), float(np.max(inside)) - rise.base
        slack = SPREADS / 2 * self.spread
        return reached - rise.base >= 0.8 * height - slack and at_last <= reached + slack


def _onset(values: Floats, first: int, line: float) -> int:
    """The first record of the rise above `line`: a running median moves it to neighbours."""
    at = first
    while at < len(values) - 1 and values[at] <= line and at < first + WIDTH:
        at += 1
    while at > 0 and values[at - 1] > line and at > first - WIDTH:
        at -= 1
    return at


def level_of(values: Floats) -> float | None:
    """The median of the finite values; None if it is not finite or there are none."""
    finite = values[np.isfinite(values)]
    level = float(np.median(finite)) if len(finite) else np.inf
    return level if np.isfinite(level) else None


def ratio(high: float, base: float) -> float:
    return high / base if base > 0 else np.inf


def _running_median(values: Floats, width: int) -> Floats:
    """The median of `width` neighbours, of fewer at the ends."""
    reach = width // 2
    if len(values) < width:
        return np.full_like(values, np.median(values))
    found = np.empty_like(values)
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    found[reach : len(values) - reach] = np.median(windows, axis=1)
    for i in range(reach):
        found[i] = np.median(values[: i + reach + 1])
        found[-1 - i] = np.median(values[-(i + reach + 1) :])
    return found
