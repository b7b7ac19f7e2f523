"""How the job ended: as planned, for one rank alone, or with a loss that is not finite."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.inferred import FINISHED_ALONE, NOT_FINITE
from rmetric.diagnosis.patterns.values import loss_not_finite


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
