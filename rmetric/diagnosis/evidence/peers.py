"""Ranks that deviate from their peers in events, numbers, settings or their end; a bad loss."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.facts.job import Iteration, Occurrence
from rmetric.diagnosis.inferred import FINISHED_ALONE, NOT_FINITE, STARTED_OTHERWISE
from rmetric.diagnosis.patterns.values import NumberOutlier, loss_not_finite, setting_outliers


def unlike_numbers(scene: Scene) -> list[Row]:
    """Rows against ranks whose losses or times are not those of the others."""
    return divided(
        Row(one.stream, "numbers", compared(one), entry=one.place) for one in scene.number_outliers
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
