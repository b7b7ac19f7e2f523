"""Events and iterations that are unusual, to be shown beside the known faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rmetric.diagnosis.evidence.peers import compared, took
from rmetric.diagnosis.evidence.row import Scene
from rmetric.diagnosis.facts.job import Iteration, Occurrence
from rmetric.diagnosis.reading.text import level

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
