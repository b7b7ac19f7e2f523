"""Ranks that deviate from their peers, and events and iterations that are unusual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rmetric.diagnosis.evidence.scene import Row, Scene, divided
from rmetric.diagnosis.facts.job import Iteration, Occurrence
from rmetric.diagnosis.patterns.recorder import culprits
from rmetric.diagnosis.patterns.spatial import peer_outliers
from rmetric.diagnosis.patterns.values import NumberOutlier, loss_not_finite, setting_outliers
from rmetric.diagnosis.reading.text import level
from rmetric.diagnosis.signature import (
    DIFFERENT,
    ELSEWHERE,
    FINISHED_ALONE,
    NOT_ENTERED,
    NOT_FINITE,
    STARTED_OTHERWISE,
)

#: Share of its strength that evidence of a recorder has where hardly any other waits.
LEAST_SHARE = 0.9
SLOW = "step {one.step} took {one.seconds:.3g} s, usual {one.usual_seconds:.3g} s"
#: Largest number of unusual events that are kept.
MAX_ODD = 12
#: Events of an outlier that are unusual ones.
MAX_EVENTS_OF_OUTLIER = 3


def recorders(scene: Scene) -> list[Row]:
    """Rows against the ranks that hold up others, the stronger the more wait for them."""
    beside = scene.job.beside
    blamed = culprits(beside.dumps) if beside is not None else {}
    most = max((len(one.others) for one in blamed.values()), default=1)
    share = {rank: (1 - LEAST_SHARE) * len(one.others) / most for rank, one in blamed.items()}
    return divided(
        Row(f"rank {rank}", "recorder", one.words, LEAST_SHARE + share[rank], NOT_ENTERED)
        for rank, one in blamed.items()
    )


def stacks(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks whose stack is not that of most."""
    odd = scene.odd_stacks.items()
    kind = "stack" if any(one.stays for _, one in odd) else "stack of one that moves"
    yield from divided(
        Row(name, kind, one.words, 1.0, ELSEWHERE, stage=one.awaits) for name, one in odd if name
    )
    for name, one in odd:
        if not name and one.awaits:  # of a process of which no more is known
            yield Row("", "stack", one.words, 1.0, ELSEWHERE, stage=one.awaits)
    yield from divided(
        Row(name, "stack in a collective", one.words, 1.0, DIFFERENT)
        for name, one in odd
        if one.collective
    )


def unlike_numbers(scene: Scene) -> list[Row]:
    """Rows against ranks whose losses or times are not those of the others."""
    return divided(
        Row(one.stream, "numbers", _compared(one), entry=one.place) for one in scene.number_outliers
    )


def _compared(one: NumberOutlier) -> str:
    return f"its {one.name} is {one.value:.4g}, the others' {one.usual:.4g}"


def unlike_settings(scene: Scene) -> list[Row]:
    """Rows against ranks that were started otherwise; a job that reached its steps bore it."""
    words = "logs {0.name} {0.value}; {0.others} others log {0.usual}"
    first = {name: stream.first for name, stream in scene.job.streams.items()}
    return divided(
        Row(one.stream, "settings", words.format(one), 1.0, STARTED_OTHERWISE, first[one.stream])
        for one in setting_outliers(scene.job, scene.known.siblings)
        if not scene.job.trained
    )


def done_alone(scene: Scene) -> list[Row]:
    """Rows against ranks that reached their planned end while the others failed."""
    alone = scene.alone if scene.faults else frozenset()
    words = f"states its planned end; {len(scene.job.active_streams) - len(alone)} others do not"
    return divided(
        Row(name, "done alone", words, 1.0, FINISHED_ALONE, scene.job.streams[name].last)
        for name in sorted(alone)
    )


def not_finite(scene: Scene) -> Iterator[Row]:
    """The row of a loss that never was finite again, whatever ended the job."""
    first = loss_not_finite(scene.job)
    if first is not None:
        last = scene.job.furthest.last_step if scene.job.furthest else None
        since = "to the end" if first.step is None else f"from step {first.step} to {last}"
        yield Row("", "not finite", since, hypothesis=NOT_FINITE, entry=first)


@dataclass(frozen=True, kw_only=True)
class Unusual:
    """Unusual events of a job, entries, and notes on them.

    Attributes:
        events: (event, why), the oddest first.
        errors: those of errors that first occur after the last step; they often describe the
            failure.
        numbers: (entry, why) of those whose numbers deviate from other ranks'.
        slow: (entry, why) of slow steps.
        first_odd: the first iteration that differs in its events or its duration, and from which
            the training did not recover.
    """

    events: Sequence[tuple[int, str]]
    errors: Sequence[tuple[int, str]]
    numbers: Sequence[tuple[Occurrence, str]]
    slow: Sequence[tuple[Occurrence, str]]
    first_odd: Iteration[Occurrence] | None
    notes: Sequence[str]


def unusual(scene: Scene) -> Unusual:
    """Everything unusual in a job, by the parts that are not switched off."""
    job, after, key = scene.job, scene.ordering.after, scene.ordering.key
    odd = job.odd_iterations.values() if scene.switches.temporal else ()
    numbers = scene.number_outliers if scene.switches.spatial else []
    steps = [one.last_step_at for one in job.streams.values() if one.last_step_at is not None]
    last = max(steps, key=key, default=None)
    events, errors = list[tuple[int, str]](), list[tuple[int, str]]()
    for event in sorted(job.events, key=lambda one: key(one.first)):
        if event.number in scene.known.ordinary or not (last is None or after(event.last, last)):
            continue
        if level(event.last.text) == "error":
            events.append((event.number, "an error, after the last step"))
            if last is not None and after(event.first, last):
                errors.append(events[-1])
        elif scene.known.pool is not None and last is not None:
            events.append((event.number, "not in healthy jobs, after the last step"))
    shown = {number for number, _ in events}
    for name, number in _of_outliers(scene) if scene.switches.spatial else ():
        if number not in shown and job.events[number].counts.get(name):
            shown.add(number)
            events.append((number, f"makes {name} differ from its peers"))
    return Unusual(
        events=events[:MAX_ODD],
        errors=errors[:MAX_ODD],
        numbers=[(one.place, f"{one.stream}: {_compared(one)}") for one in numbers],
        slow=[
            (
                one.place,
                f"step {one.step} took {one.seconds:.3g} s, usual {one.usual_seconds:.3g} s",
            )
            for one in odd
            if one.seconds is not None
        ],
        first_odd=min(
            (one for one in odd if not one.recovered),
            key=lambda one: key(one.place),
            default=None,
        ),
        notes=[
            f"{one.stream}: {_compared(one)}, at {one.steps} of the last steps"
            for one in numbers[:1]
        ],
    )


def _of_outliers(scene: Scene) -> Iterator[tuple[str, int]]:
    """Peers whose events deviate (L4, section 4.3), each with those in which it does most.

    Events by which ranks report that they lost another make no outlier by their wording.
    """
    echoes = (one.events for one in scene.faults if one.role == "echo")
    rng, ordinary = np.random.default_rng(scene.seed), scene.known.ordinary.union(*echoes)
    for one in peer_outliers(scene.job, rng=rng, ordinary=ordinary):
        yield from ((one.name, number) for number in one.events[:MAX_EVENTS_OF_OUTLIER])
