"""Temporal pattern: find the first iteration that differs from its predecessors.

After L4 (arXiv 2503.20263, section 4.4): an iteration is the sequence of events of a stream from
one step line to the next. Its similarity, by dynamic time warping, is the mean over the ten
iterations before it; three sigma below the usual similarity flags it. Added here: an iteration is
flagged only for an event that its stream never logged, or never lacked, before, and one that takes
far longer is flagged too. Evaluations and checkpoints are excluded, so that periodic work raises no
periodic alarm.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, pstdev
from typing import Any, Generic, NamedTuple

import numpy as np

from rmetric.diagnosis.facts.job import Iteration, Place
from rmetric.readers.step_forms import SAMPLES, StepMatch

#: Iterations before it that one is compared with (L4, section 4.4).
WINDOW = 10
#: A stream is judged after so many iterations.
LEAST_PAST = 8
#: Events of an iteration that are kept; what follows is not compared.
MAX_ITERATION_EVENTS = 128
#: After so many iterations the usual similarity is measured on every tenth: alignment is dear.
MEASURED_ALL = 100
#: Odd iterations of a stream that are kept until it is known which of them recur.
MAX_ODD_ITERATIONS = 40
#: Forms of step lines that are distinguished in a stream.
MAX_FORMS = 8
#: After so many usual iterations the training had recovered from an odd one.
RECOVERED = 2 * WINDOW
#: Least fall of the mean similarity, however similar the iterations before were.
LEAST_FALL = 0.02
#: A slow iteration takes at least this many times the median duration,
SLOW_RATIO = 3.0
#: and so many seconds more: where times have whole seconds only, the second.
MIN_EXCESS_SECONDS = 0.5
MIN_EXCESS_WHOLE_SECONDS = 5.0
#: Stages whose entries are not part of an iteration.
ASIDE = ("load data", "compile", "evaluate", "checkpoint", "tear-down")
#: Stands for the line that ends an iteration, for its words may change as training goes on: an
#: estimate of the time left, a loss that is not yet known.
_STEP_LINE = -1


def distance(first: Sequence[int], second: Sequence[int]) -> int:
    """Dynamic time warping between two sequences of symbols at cost 0 for equal, 1 for unequal.

    An empty sequence is as far from another as the other is long.

    >>> distance([1, 2, 3], [1, 2, 2, 3]), distance([1, 2, 3], [1, 7, 3])
    (0, 1)
    """
    from dtaidistance import dtw, dtw_ndim  # not where no iteration differs

    if not first or not second:
        return max(len(first), len(second))
    # Symbols become unit vectors, at squared distance 2 from each other, so that the library's is
    # twice the number of unequal pairs on the best path. Those of one sequence alone share one.
    place = {symbol: row for row, symbol in enumerate(sorted({*first} & {*second}), start=2)}
    unit = np.eye(len(place) + 2)
    ours = unit[[place.get(symbol, 0) for symbol in first]]
    theirs = unit[[place.get(symbol, 1) for symbol in second]]
    compiled = dtw.dtw_cc is not None
    return round(float(dtw_ndim.distance(ours, theirs, use_c=compiled)) ** 2 / 2.0)


# A training logs the same few sequences again and again.
@lru_cache(maxsize=2000)
def similarity(first: tuple[int, ...], second: tuple[int, ...]) -> float:
    """1 for equal, 0 for all unequal: no distance is more than the length of the longer."""
    return 1.0 if first == second else 1.0 - distance(first, second) / max(len(first), len(second))


def usual_if_slow(kept: deque[float], seconds: float, steps: int) -> float | None:
    """Add a duration to those kept; the median of those before if it is far longer, else None.

    Far longer: three sigma above their mean, several times the median, more than any before. All
    are seconds for one step of the `steps` in the iteration.
    """
    before = tuple(kept)
    kept.append(seconds)
    if len(before) < LEAST_PAST or seconds <= max(before):
        return None
    usual = median(before)
    whole = all((duration * steps).is_integer() for duration in (seconds, *before))
    least = (MIN_EXCESS_WHOLE_SECONDS if whole else MIN_EXCESS_SECONDS) / steps
    slow_from = max(fmean(before) + 3.0 * pstdev(before), SLOW_RATIO * usual, usual + least)
    return usual if seconds > slow_from else None


@dataclass(slots=True)
class _StepCount:
    """The steps in the lines of one form; `below`: those below the last that rise."""

    top: int = -1
    highest: int = -1
    rises: int = 0
    below: list[int] = field(default_factory=list)

    def add(self, step: int) -> bool:
        """True for a new step: above the last, or a restarted count."""
        # Ranks that share a log repeat a step many times, and the last of them when the first is
        # at the next; so a lower one is new only when it is the third in a row that rises.
        if step > self.highest:
            self.highest = step
            self.rises += 1
        if step <= self.top:
            if step == self.top or (self.below and step < self.below[-1]):
                self.below.clear()
            if step < self.top and step not in self.below[-1:]:
                self.below.append(step)
            if len(self.below) < 3:
                return False
        self.top = step
        self.below.clear()
        return True


class _Odd(NamedTuple):
    """An odd iteration, and the events that no iteration lacked, or had, before it."""

    iteration: Iteration[Any]
    number: int  # of the stream's iterations before it
    missing: frozenset[int]
    extra: frozenset[int]


@dataclass
class _Past(Generic[Place]):
    """Iteration state of one stream: of the one that goes on, and of those before it."""

    form: str = ""  # of the step lines that count
    step_counts: dict[str, _StepCount] = field(default_factory=lambda: defaultdict(_StepCount))
    top: int = -1
    opened: Place | None = None
    opened_time: float | None = None
    aside: bool = False  # a stage of `ASIDE` lasts
    was_aside: bool = False  # one was entered in this iteration
    events: list[int] = field(default_factory=list)  # of the one that goes on
    known: set[int] = field(default_factory=set)  # events of iterations before
    having: Counter[int] = field(default_factory=Counter)  # event -> number of iterations with it
    iterations: int = 0
    news: int = 0  # iterations with a new event
    window: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    similarities: tuple[int, float, float] = (0, 0.0, 0.0)  # number, sum, sum of squares
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=5 * WINDOW))
    odd: list[_Odd] = field(default_factory=list)

    def is_habit(self, odd: _Odd) -> bool:
        """True if it recurs: its new events now and then, or its slowness periodically."""
        if odd.missing:
            return False
        if odd.extra:
            times = min(self.having[event] for event in odd.extra)
            return 3 <= times <= self.iterations / 4
        iterations = [other.iteration for other in self.odd]
        slow = [iteration.step for iteration in iterations if iteration.usual_seconds is not None]
        apart = [after - before for before, after in pairwise(slow)]
        return len(apart) >= 2 and max(apart) <= 1.1 * min(apart)

    def starts_new_step(self, form: str, step: int) -> bool:
        """True if the line states a new step in the form that counts."""
        if form not in self.step_counts and len(self.step_counts) >= MAX_FORMS:
            return False
        mine = self.step_counts[form]
        new = mine.add(step)
        if not self.form:
            self.form = form
        elif form not in (self.form, SAMPLES) and (
            self.form == SAMPLES or mine.rises > 2 * self.step_counts[self.form].rises
        ):
            self.form, self.opened, self.events, self.iterations = form, None, [], 0
            for kept in (self.having, self.window, self.seconds):
                kept.clear()
            self.similarities = (0, 0.0, 0.0)
        return new and form == self.form

    def close(self, step: int, time: float | None) -> None:
        """The iteration ends: is it odd?"""
        events, steps = tuple(self.events), max(1, step - self.top)
        if self.was_aside:
            self.known.update(events)
            return
        took = before = None
        if self.opened_time is not None and time is not None and time >= self.opened_time:
            seconds = (time - self.opened_time) / steps
            usual = usual_if_slow(self.seconds, seconds, steps)
            if usual is not None:
                took, before = round(seconds * steps, 3), round(usual * steps, 3)
        missing, extra = self._difference(events)
        if (missing or extra or took is not None) and len(self.odd) < MAX_ODD_ITERATIONS:
            odd = Iteration(step=step, place=self.opened, seconds=took, usual_seconds=before)
            self.odd.append(_Odd(odd, self.iterations, missing, extra))
        self.iterations += 1
        self.window.append(events)
        self.having.update(set(events))
        self.known.update(events)

    def _difference(self, events: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
        """Measure the iteration; missing and extra events if it differs, else none."""
        none = frozenset[int]()
        measured = self.iterations % 10 == 0 or self.iterations < MEASURED_ALL
        # Most iterations equal the one before, and then nothing is new and nothing is missing.
        if not measured and self.window and events == self.window[-1]:
            return none, none
        now = frozenset(events)
        always = {event for event, count in self.having.items() if count == self.iterations}
        missing, extra = frozenset(always - now), now - self.known
        self.news += bool(extra)
        is_news = (missing or extra) and self.news <= WINDOW + self.iterations / 4
        count, total, squares = self.similarities
        mean = usual = total / max(1, count)
        if self.window and (measured or is_news):
            similar = [similarity(*sorted((earlier, events))) for earlier in self.window]
            mean = sum(similar) / len(similar)
        fall = max(3.0 * sqrt(max(0.0, squares / max(1, count) - usual**2)), LEAST_FALL)
        if self.iterations >= LEAST_PAST and mean < usual - fall and (missing or extra):
            return missing, extra
        if measured and self.window:
            self.similarities = (count + 1, total + mean, squares + mean * mean)
        return none, none


class IterationWatch(Generic[Place]):
    """Watches the iterations of any number of streams during one pass.

    Memory is bounded by streams x `WINDOW` x `MAX_ITERATION_EVENTS`. Feed each stream in order:
    `add_events` for entries, `enter` when it enters a stage, `add_step` for an entry that states
    a step (and not `add_events`); read `first_odd` at the end.
    """

    def __init__(self) -> None:
        self._pasts: dict[str, _Past[Place]] = defaultdict(_Past)

    def add_events(self, stream: str, events: Iterable[int]) -> None:
        """Events of entries without a step, in order; many at a time is cheaper."""
        past = self._pasts[stream]
        events = tuple(events)
        if past.opened is None or past.aside:
            past.known.update(events)
        else:
            past.events += events[: max(0, MAX_ITERATION_EVENTS - len(past.events))]

    def enter(self, stream: str, stage: str) -> None:
        """The stream enters a stage; one of `ASIDE` lasts until its next step line."""
        past = self._pasts[stream]
        past.aside = stage in ASIDE
        past.was_aside |= past.aside

    def add_step(
        self, stream: str, match: StepMatch, event: int, place: Place, time: float | None
    ) -> int:
        """An entry that states a step ends an iteration if it is a new one; the stream's last step.

        The iterations of a stream are those of one form of line, the first that it used unless
        another counts on and on (an evaluation's bar, a plan that names a step). Lines of other
        forms are entries as any other, and so are those that repeat a step.
        """
        past, step = self._pasts[stream], match.step
        new = past.starts_new_step(match.form, step)
        if new:
            past.aside, event = False, _STEP_LINE
        self.add_events(stream, (event,))
        if not new:
            return max(past.top, 0)
        if past.opened is not None:
            past.close(step, time)
        past.top, past.opened, past.opened_time = step, place, time
        past.events, past.was_aside = [], False
        return step

    def first_odd(self) -> dict[str, Iteration[Place]]:
        """The first odd iteration of each stream that has one and did not recover from it.

        If it recovered from all, the first of all. What follows the last step line is none: new
        events are usual there, in jobs that end well too.
        """
        found = {}
        for stream, past in self._pasts.items():
            odd = [candidate for candidate in past.odd if not past.is_habit(candidate)]
            if not odd:
                continue
            # The first of those with no long row of usual iterations behind them counts.
            first, end = replace(odd[0].iteration, recovered=True), past.iterations
            for candidate in reversed(odd):
                if end - candidate.number > RECOVERED:
                    break
                first, end = candidate.iteration, candidate.number
            found[stream] = first
        return found

    def counts_samples(self, stream: str) -> bool:
        """True if the stream's steps are numbers of samples."""
        return stream in self._pasts and self._pasts[stream].form == SAMPLES
