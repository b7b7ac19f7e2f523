"""Run all patterns and convert their findings into rank evidence and unusual events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rmetric.diagnosis.job import Iteration, Job, Occurrence
from rmetric.diagnosis.ordering import Ordering, stage_now
from rmetric.diagnosis.patterns.clocks import clock_notes, clock_offsets
from rmetric.diagnosis.patterns.numbers import NumberOutlier, number_outliers
from rmetric.diagnosis.patterns.settings import SettingOutlier, setting_outliers
from rmetric.diagnosis.patterns.spatial import THRESHOLD, PeerOutlier, peer_outliers
from rmetric.diagnosis.patterns.unfiltered import absences
from rmetric.diagnosis.pool import Pool
from rmetric.diagnosis.reading.text import level
from rmetric.diagnosis.suspects import RankEvidence

#: Robust z of evidence with full strength.
FULL_STRENGTH_Z = 2.0 * THRESHOLD
#: Prefixes of stack lines, which are not informative alone.
FRAME_PREFIXES = ("File ", "frame #", "Thread ")
#: Factor on a deviating setting in a job that reached its steps.
SETTING_WEIGHT_AFTER_STEPS = 0.2
#: Largest number of unusual events that are kept.
MAX_ODD = 12
#: Events of an outlier that are unusual ones.
MAX_EVENTS_OF_OUTLIER = 3
#: Least number of streams with steps, to compare their iterations.
MIN_STREAMS_WITH_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Parts of the method, to be turned off one by one in an ablation."""

    cross_job: bool = True
    spatial: bool = True
    temporal: bool = True
    library: bool = True
    unfiltered: bool = True


@dataclass(frozen=True, kw_only=True)
class HealthyReference:
    """Reference data from healthy jobs of similar settings.

    Attributes:
        siblings: the jobs, where their logs were given.
        pool: their event statistics.
        ordinary: events of the job at hand that are frequent there.
    """

    siblings: tuple[Job, ...] = ()
    pool: Pool | None = None
    ordinary: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class PatternFindings:
    """Findings of all patterns in a job.

    Attributes:
        odd: (event, why), the oddest first.
        errors: (event, why) of errors that first occur after the last step, in order.
        number_outliers: (entry, why) of those whose numbers deviate from other ranks'.
        slow: (entry, why) of slow steps.
        first_odd: the first iteration that differs in its events or its duration, and from which
            the training did not recover.
        stopped: why the job seems to have ended before healthy ones do; "" where it does not.
        stage: the last one of the job.
        ordering: orders the job's entries, its clocks corrected.
    """

    signs: tuple[RankEvidence, ...]
    odd: tuple[tuple[int, str], ...]
    errors: tuple[tuple[int, str], ...]
    number_outliers: tuple[tuple[Occurrence, str], ...]
    slow: tuple[tuple[Occurrence, str], ...]
    first_odd: Iteration[Occurrence] | None
    stopped: str
    stage: str
    ordering: Ordering
    notes: tuple[str, ...]


def find_patterns(
    job: Job, known: HealthyReference, switches: Switches, rng: np.random.Generator,
    echoes: frozenset[int] = frozenset(),
) -> PatternFindings:  # fmt: skip
    """Run every pattern that is not switched off; `rng` seeds the Isolation Forest.

    `echoes` are events by which ranks report that they lost another: a rank is no outlier by
    their wording.
    """
    offsets = clock_offsets(job)
    ordering = Ordering(job=job, offsets=offsets)
    siblings = known.siblings
    outliers: list[PeerOutlier] = []
    numbers: list[NumberOutlier] = []
    settings: list[SettingOutlier] = []
    missing: list[RankEvidence] = []
    if switches.spatial:
        outliers = peer_outliers(job, rng=rng, ordinary=known.ordinary | echoes, siblings=siblings)
        numbers = number_outliers(job)
        settings = setting_outliers(job, siblings)
    if switches.unfiltered:
        missing = absences(job, siblings=siblings, offsets=offsets)
    iterations = list(job.odd_iterations.values()) if switches.temporal else []
    last_steps = [one.last_step_at for one in job.streams.values() if one.last_step_at is not None]
    last = max(last_steps, key=ordering.key, default=None)
    signs = [
        *_of_outliers(job, outliers),
        *(
            RankEvidence(one.stream, "numbers", _compared(one), 1.0 / len(numbers) ** 0.5)
            for one in numbers
        ),
        *_of_settings(job, settings),
        *missing,
        *_of_iterations(job, iterations),
    ]
    notes = [f"{one.stream}: {_compared(one)}, at {one.steps} of the last steps" for one in numbers]
    return PatternFindings(
        signs=tuple(signs),
        odd=tuple(_odd_events(job, known, outliers, last, ordering))[:MAX_ODD],
        errors=tuple(_new_errors(job, known, last, ordering))[:MAX_ODD],
        number_outliers=tuple((one.place, f"{one.stream}: {_compared(one)}") for one in numbers),
        slow=tuple((one.place, _took(one)) for one in iterations if one.seconds is not None),
        first_odd=min(
            (one for one in iterations if not one.recovered),
            key=lambda one: ordering.key(one.place),
            default=None,
        ),
        stopped=_stopped(job, known),
        stage=_stage(job, ordering),
        ordering=ordering,
        notes=(*clock_notes(offsets), *notes[:1]),
    )


def _of_outliers(job: Job, outliers: Sequence[PeerOutlier]) -> Iterator[RankEvidence]:
    for one in outliers:
        texts = [job.events[event].template[:60] for event in one.events]
        shown = [text for text in texts if not text.startswith(FRAME_PREFIXES)][:2] or texts[:1]
        words = f"differs from its peers in: {'; '.join(shown)}"
        yield RankEvidence(one.name, "unlike", words, min(1.0, one.score / FULL_STRENGTH_Z))


def _of_settings(job: Job, settings: Sequence[SettingOutlier]) -> Iterator[RankEvidence]:
    # A job that reached its steps was not kept from them by the start of a rank.
    weight = SETTING_WEIGHT_AFTER_STEPS if job.trained else 1.0
    strength = weight / max(1, len({one.stream for one in settings})) ** 0.5
    for one in settings:
        words = f"logs {one.name} {one.value}; {one.others} others log {one.usual}"
        yield RankEvidence(one.stream, "settings", words, strength)


def _compared(one: NumberOutlier) -> str:
    return f"its {one.name} is {one.value:.4g}, the others' {one.usual:.4g}"


def _took(one: Iteration[Occurrence]) -> str:
    return f"step {one.step} took {one.seconds:.3g} s, usual {one.usual_seconds:.3g} s"


def _of_iterations(job: Job, iterations: Sequence[Iteration[Occurrence]]) -> Iterator[RankEvidence]:
    if sum(stream.steps > 1 for stream in job.streams.values()) < MIN_STREAMS_WITH_STEPS:
        return
    strength = 1.0 / max(1, len(iterations)) ** 0.5
    for one in iterations:
        if one.seconds is not None:
            yield RankEvidence(one.place.stream, "slow", _took(one), strength)
        else:
            words = f"step {one.step} differs from those before"
            yield RankEvidence(one.place.stream, "iteration differs", words, strength)


def _odd_events(
    job: Job,
    known: HealthyReference,
    outliers: Sequence[PeerOutlier],
    last: Occurrence | None,
    ordering: Ordering,
) -> Iterator[tuple[int, str]]:
    """Events after the last step that are errors, or that healthy jobs lack; those of outliers."""
    shown = set()
    for event in sorted(job.events, key=lambda one: ordering.key(one.first)):
        at_end = last is None or ordering.after(event.last, last)
        if event.number in known.ordinary or not at_end:
            continue
        if level(event.last.text) == "error":
            shown.add(event.number)
            yield event.number, "an error, after the last step"
        elif known.pool is not None and last is not None:
            shown.add(event.number)
            yield event.number, "not in healthy jobs, after the last step"
    for one in outliers:
        for number in one.events[:MAX_EVENTS_OF_OUTLIER]:
            if number not in shown and job.events[number].counts.get(one.name):
                shown.add(number)
                yield number, f"makes {one.name} differ from its peers"


def _new_errors(
    job: Job, known: HealthyReference, last: Occurrence | None, ordering: Ordering
) -> Iterator[tuple[int, str]]:
    """Yield errors that first occur after the last step; they often describe the failure."""
    if last is None:
        return
    for event in job.events:
        new = event.number not in known.ordinary and ordering.after(event.first, last)
        if new and level(event.first.text) == "error":
            yield event.number, "an error, after the last step"


def _stopped(job: Job, known: HealthyReference) -> str:
    pool = known.pool
    if job.succeeded is not None or pool is None or pool.succeeded < pool.jobs:
        return ""
    return "successful jobs of these settings state their end; this one does not"


def _stage(job: Job, ordering: Ordering) -> str:
    last = [one.last for one in job.streams.values() if one.last is not None]
    if not job.stages:
        return max(last, key=ordering.key).stage if last else ""
    stage = job.stages[-1][0]
    saving = [one for one in last if one.stage == stage == "checkpoint"]
    return "train" if saving and all(stage_now(job, one) == "train" for one in saving) else stage
