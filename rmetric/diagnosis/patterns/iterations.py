"""Temporal pattern: find the first iteration that differs from its predecessors.

After L4 (arXiv 2503.20263, section 4.4): an iteration is the sequence of events of a stream from
one step line to the next. Its similarity is the mean over the ten iterations before it; three
sigma below the usual similarity flags it. Added here: an iteration is flagged only for an event
that its stream never logged, or never lacked, before. Evaluations and checkpoints are excluded,
so that periodic work raises no periodic alarm.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from rmetric.diagnosis.job import Iteration, Occurrence
from rmetric.diagnosis.patterns.alignment import similarity
from rmetric.diagnosis.patterns.baseline import LEAST_PAST, Durations, RunningStats
from rmetric.diagnosis.patterns.counting import Counting
from rmetric.diagnosis.patterns.steps import StepMatch

#: Iterations before it that one is compared with (L4, section 4.4).
WINDOW = 10
#: Events of an iteration that are kept; what follows is not compared.
MAX_EVENTS = 128
#: After so many iterations the usual similarity is measured on every tenth: alignment is dear.
MEASURED_ALL = 100
#: Odd iterations that are kept for a stream.
MAX_ODD = 10
#: Forms of step lines that are told apart in a stream.
MAX_FORMS = 8
#: A mean similarity must fall by so much at least, however alike the iterations before were.
LEAST_FALL = 0.02
#: Stages whose entries are no part of an iteration.
ASIDE = ("load data", "compile", "evaluate", "checkpoint", "tear-down")
#: Stands for the line that ends an iteration, for its words may change as training goes on: an
#: estimate of the time left, a loss that is not yet known.
_STEP_LINE = -1

Place = TypeVar("Place")


@dataclass
class _Past(Generic[Place]):
    """Iteration state of one stream.

    Attributes:
        opened, opened_time: of the step line that began the iteration.
        again: iterations on end that equal the last of the window and that `having` lacks.
    """

    form: str = ""
    counting: dict[str, Counting] = field(default_factory=dict)
    top: int = -1
    stride: int = 1
    opened: Place | None = None
    opened_time: float | None = None
    aside: bool = False
    was_aside: bool = False
    now: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    having: Counter[int] = field(default_factory=Counter)
    again: int = 0
    iterations: int = 0
    news: int = 0
    window: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    usual: RunningStats = field(default_factory=RunningStats)
    seconds: Durations = field(default_factory=lambda: Durations(5 * WINDOW))
    odd: list[Iteration] = field(default_factory=list)


class IterationWatch(Generic[Place]):
    """Watches the iterations of any number of streams during one pass.

    Memory is bounded by streams x `WINDOW` x `MAX_EVENTS`. Feed each stream in order: `take` for
    entries, `enter` when it enters a stage, `tell` for an entry that tells a step (and not
    `take`), `finish` at the end.

    Args:
        entry: makes the entry of a place and its time: few of them are ever asked for.
    """

    def __init__(self, entry: Callable[[Place, float | None], Occurrence]) -> None:
        self._entry = entry
        self._pasts: dict[str, _Past[Place]] = defaultdict(_Past)
        self._alike: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def take(self, stream: str, events: Iterable[int]) -> None:
        """Events of entries that tell no step, in order; many at a time is cheaper."""
        past = self._pasts[stream]
        events = tuple(events)
        if past.opened is None or past.aside:
            past.known.update(events)
        else:
            past.now += events[: max(0, MAX_EVENTS - len(past.now))]

    def enter(self, stream: str, stage: str) -> None:
        """The stream enters a stage; those of `ASIDE` last until its next step line.

        The iteration that one of them breaks is not judged: a part of it is all there is.
        """
        past = self._pasts[stream]
        past.aside = stage in ASIDE
        past.was_aside |= past.aside

    def tell(
        self, stream: str, match: StepMatch, event: int, place: Place, time: float | None
    ) -> int:
        """An entry that tells a step ends an iteration if the step is a new one.

        The iterations of a stream are those of one form of line, the first that it used unless
        another counts on and on (an evaluation's bar, a plan that names a step). Lines of other
        forms are entries as any other, and so are those that repeat a step.

        Returns:
            The step at which the stream is.
        """
        past = self._pasts[stream]
        new = self._counts(past, *match)
        if new:
            past.aside = False
            event = _STEP_LINE
        if past.opened is None or past.aside:
            past.known.add(event)
        elif len(past.now) < MAX_EVENTS:
            past.now.append(event)
        if not new:
            return max(past.top, 0)
        step = match[1]
        if past.opened is not None:
            self._close(stream, past, step, time)
            if step > past.top:
                past.stride = step - past.top
        past.top, past.opened, past.opened_time = step, place, time
        past.now, past.was_aside = [], False
        return step

    def finish(self, last: dict[str, Occurrence] | None = None) -> dict[str, list[Iteration]]:
        """The odd iterations of each stream that has any, the first first.

        What comes after a stream's last step line is its last iteration, `unfinished`: it lacks
        nothing yet, but may hold events never said before. It is odd in most jobs, in those that
        ended well too, and is for the caller to judge.

        Args:
            last: stream -> its last entry, to see how long the last iteration took.
        """
        found = {}
        for stream, past in self._pasts.items():
            odd = [one for one in past.odd if not self._habit(past, one)]
            tail = self._tail(stream, past, (last or {}).get(stream))
            if odd or tail:
                found[stream] = odd[: MAX_ODD - len(tail)] + tail
        return found

    @staticmethod
    def _counts(past: _Past[Place], form: str, step: int) -> bool:
        """Return True if the line states a new step in the form that counts."""
        mine = past.counting.get(form)
        if mine is None:
            if len(past.counting) >= MAX_FORMS:
                return False
            mine = past.counting[form] = Counting()
        new = mine.take(step)
        if form == past.form:
            return new
        if not past.form:
            past.form = form
        elif mine.rises > 2 * past.counting[past.form].rises:
            past.form, past.opened, past.now, past.iterations = form, None, [], 0
            past.having.clear()
            past.again = 0
            past.window.clear()
            past.seconds = Durations(5 * WINDOW)
            past.usual = RunningStats()
        return new and form == past.form

    def _close(self, stream: str, past: _Past[Place], step: int, time: float | None) -> None:
        events = tuple(past.now)
        if past.was_aside:
            past.known.update(events)
            return
        # Most iterations equal the one before, and then nothing is new and nothing is missing.
        same = bool(past.window) and events == past.window[-1]
        measured = past.iterations % 10 == 0 or past.iterations < MEASURED_ALL
        seconds = self._seconds(past, step, time)
        usual = None if seconds is None else past.seconds.usual_if_slow(seconds, step - past.top)
        if measured or not same or usual is not None:
            self._judge(stream, past, step, events, seconds, usual)
        past.iterations += 1
        past.window.append(events)
        if same:
            past.again += 1
            return
        past.having.update(set(events))
        past.known.update(events)

    def _judge(
        self,
        stream: str,
        past: _Past[Place],
        step: int,
        events: tuple[int, ...],
        seconds: float | None,
        usual: float | None,
    ) -> None:
        """Measure the iteration, and keep it if it is odd."""
        missing, extra = self._differences(past, events)
        past.news += bool(extra)
        told_anew = (missing or extra) and past.news <= WINDOW + past.iterations / 4
        measured = past.iterations % 10 == 0 or past.iterations < MEASURED_ALL
        mean = self._mean(past, events) if measured or told_anew else past.usual.mean
        differs = bool(missing or extra) and self._falls(past, mean)
        if (differs or usual is not None) and len(past.odd) < 4 * MAX_ODD:
            assert past.opened is not None
            past.odd.append(
                Iteration(
                    stream=stream,
                    step=step,
                    place=self._entry(past.opened, past.opened_time),
                    similarity=mean,
                    expected=past.usual.mean,
                    deviation=past.usual.deviation,
                    missing=missing if differs else (),
                    extra=extra if differs else (),
                    seconds=_whole(seconds, usual, step - past.top),
                    usual_seconds=_whole(usual, usual, step - past.top),
                )
            )
        if measured and not differs and past.window:
            past.usual.add(mean)

    @staticmethod
    def _falls(past: _Past[Place], mean: float) -> bool:
        fall = max(3.0 * past.usual.deviation, LEAST_FALL)
        return past.iterations >= LEAST_PAST and mean < past.usual.mean - fall

    @staticmethod
    def _catch_up(past: _Past[Place]) -> None:
        if past.again:
            past.having.update(dict.fromkeys(past.window[-1], past.again))
            past.again = 0

    def _mean(self, past: _Past[Place], events: tuple[int, ...]) -> float:
        if not past.window:
            return 1.0
        return sum(self._similarity(events, one) for one in past.window) / len(past.window)

    def _similarity(self, first: tuple[int, ...], second: tuple[int, ...]) -> float:
        """Remembered: a training says the same few sequences again and again."""
        if first == second:
            return 1.0
        pair = (first, second) if first < second else (second, first)
        value = self._alike.get(pair)
        if value is None:
            if len(self._alike) > 2000:
                self._alike.clear()
            value = self._alike[pair] = similarity(*pair)
        return value

    def _differences(
        self, past: _Past[Place], events: tuple[int, ...]
    ) -> tuple[tuple[int, ...], ...]:
        """Events that no iteration lacked before, and events that were never said before."""
        self._catch_up(past)
        said = set(events)
        always = (one for one, count in past.having.items() if count == past.iterations)
        return tuple(sorted(set(always) - said)), tuple(sorted(said - past.known))

    @staticmethod
    def _seconds(past: _Past[Place], step: int, time: float | None) -> float | None:
        """How long the iteration took for each step that it counts; None where unknown."""
        if past.opened_time is None or time is None or past.was_aside:
            return None
        took = time - past.opened_time
        return took / max(1, step - past.top) if took >= 0.0 else None

    def _habit(self, past: _Past[Place], one: Iteration) -> bool:
        """It came back: its new events now and then, or its slowness at equal distances."""
        if one.missing:
            return False
        self._catch_up(past)
        if one.extra:
            times = min(past.having[event] for event in one.extra)
            return 3 <= times <= past.iterations / 4
        slow = [each.step for each in past.odd if each.usual_seconds is not None]
        apart = [after - before for before, after in pairwise(slow)]
        return len(apart) >= 2 and max(apart) <= 1.1 * min(apart)

    def _tail(self, stream: str, past: _Past[Place], last: Occurrence | None) -> list[Iteration]:
        if past.opened is None or past.iterations < LEAST_PAST:
            return []
        events = tuple(past.now)
        _, extra = self._differences(past, events)
        seconds = self._seconds(past, past.top + past.stride, last.time if last else None)
        usual = None if seconds is None else past.seconds.usual_if_slow(seconds, past.stride)
        if not extra and usual is None:
            return []
        return [
            Iteration(
                stream=stream,
                step=past.top + past.stride,
                place=self._entry(past.opened, past.opened_time),
                similarity=self._mean(past, events),
                expected=past.usual.mean,
                deviation=past.usual.deviation,
                extra=extra,
                seconds=_whole(seconds, usual, past.stride),
                usual_seconds=_whole(usual, usual, past.stride),
                unfinished=True,
            )
        ]


def _whole(seconds: float | None, usual: float | None, steps: int) -> float | None:
    """Duration of all steps of a slow iteration."""
    if seconds is None or usual is None:
        return None
    return round(seconds * max(1, steps), 3)
