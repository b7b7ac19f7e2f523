"""Ranks that deviate from their peers, and events and iterations that are unusual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rmetric.diagnosis.evidence.scene import Row, Scene, divided
from rmetric.diagnosis.facts.job import Iteration, Occurrence
from rmetric.diagnosis.patterns.recorder import culprits
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
    """Rows against ranks whose losses or times are not those of the others.

    Numbers at several steps tell more than one in an exception, which counts operations mostly.
    """
    kinds = {True: "numbers", False: "number in an error"}
    return divided(
        Row(one.stream, kinds[one.steps > 1], compared(one), entry=one.place)
        for one in scene.number_outliers
    )


def compared(one: NumberOutlier) -> str:
    return f"its {one.name} is {one.value:.4g}, the others' {one.usual:.4g}"


def unlike_settings(scene: Scene) -> list[Row]:
    """Rows against ranks that were started otherwise; a job that reached its steps bore it."""
    if scene.job.trained:
        return []
    rows = []
    for one in setting_outliers(scene.job, scene.known.siblings):
        words = f"logs {one.name} {one.value}; {one.others} others log {one.usual}"
        first = scene.job.streams[one.stream].first
        rows.append(Row(one.stream, "settings", words, 1.0, STARTED_OTHERWISE, first))
    return divided(rows)


def took(one: Iteration[Occurrence]) -> str:
    return f"step {one.step} took {one.seconds:.3g} s, usual {one.usual_seconds:.3g} s"


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


#: Largest number of unusual events that are kept.
MAX_ODD = 12
#: Events of an outlier that are unusual ones.
MAX_EVENTS_OF_OUTLIER = 3


@dataclass(frozen=True, kw_only=True)
class Unusual:
    """Unusual events of a job.

    Attributes:
        events: (event, why), the oddest first.
        errors: those of errors that first occur after the last step; they often describe the
            failure.
        numbers: (entry, why) of those whose numbers deviate from other ranks'.
        slow: (entry, why) of slow steps.
        first_odd: the first iteration that differs in its events or its duration, and from which
            the training did not recover.
        notes: on numbers that deviate.
    """

    events: Sequence[tuple[int, str]]
    errors: Sequence[tuple[int, str]]
    numbers: Sequence[tuple[Occurrence, str]]
    slow: Sequence[tuple[Occurrence, str]]
    first_odd: Iteration[Occurrence] | None
    notes: Sequence[str]


def unusual(scene: Scene) -> Unusual:
    """Everything unusual in a job, by the parts that are not switched off."""
    job, ordering, switches = scene.job, scene.ordering, scene.switches
    iterations = list(job.odd_iterations.values()) if switches.temporal else []
    numbers = scene.number_outliers if switches.spatial else []
    steps = [one.last_step_at for one in job.streams.values() if one.last_step_at is not None]
    last = max(steps, key=ordering.key, default=None)
    events = list(_odd_events(scene, last))
    new = {
        one.number
        for one in job.events
        if last is not None and ordering.after(one.first, last) and level(one.first.text) == "error"
    }
    return Unusual(
        events=events[:MAX_ODD],
        errors=[(number, why) for number, why in events if number in new][:MAX_ODD],
        numbers=[(one.place, f"{one.stream}: {compared(one)}") for one in numbers],
        slow=[(one.place, took(one)) for one in iterations if one.seconds is not None],
        first_odd=min(
            (one for one in iterations if not one.recovered),
            key=lambda one: ordering.key(one.place),
            default=None,
        ),
        notes=[
            f"{one.stream}: {compared(one)}, at {one.steps} of the last steps"
            for one in numbers[:1]
        ],
    )


def _odd_events(scene: Scene, last: Occurrence | None) -> Iterator[tuple[int, str]]:
    """Events after the last step that are errors, or that healthy jobs lack; those of outliers."""
    job, known, ordering, shown = scene.job, scene.known, scene.ordering, set()
    for event in sorted(job.events, key=lambda one: ordering.key(one.first)):
        at_end = last is None or ordering.after(event.last, last)
        if event.number in known.ordinary or not at_end:
            continue
        error = level(event.last.text) == "error"
        if error or (known.pool is not None and last is not None):
            shown.add(event.number)
            what = "an error" if error else "not in healthy jobs"
            yield event.number, f"{what}, after the last step"
    for one in scene.outliers if scene.switches.spatial else ():
        for number in one.events[:MAX_EVENTS_OF_OUTLIER]:
            if number not in shown and job.events[number].counts.get(one.name):
                shown.add(number)
                yield number, f"makes {one.name} differ from its peers"
