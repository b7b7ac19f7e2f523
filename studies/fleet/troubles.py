"""When failures strike a job, which of them are warned of, and when somebody cries wolf."""

from __future__ import annotations

from collections.abc import Iterator
from math import gamma, isinf
from typing import NamedTuple

import numpy as np

from studies.fleet.job_settings import DAY, Fleet, Job

#: Drawn at once: a Generator is slow for single numbers.
BLOCK = 256


class Failure(NamedTuple):
    """One node fails.

    Attributes:
        time: seconds since the job's beginning.
        slot: from 0; the nodes that a shrunken job has are those below their number.
        lead: seconds that a warning comes before; None without one.
    """

    time: float
    slot: int
    lead: float | None = None


class FalseAlarm(NamedTuple):
    """A warning of nothing, on the node in `slot` from `time`, for `lasts` seconds."""

    time: float
    slot: int
    lasts: float


def failures(job: Job, seed: int) -> Iterator[Failure]:
    """All failures, in order, without end.

    The same seed strikes at the same times whatever is saved, warned of or repaired, and a
    higher recall warns of the same failures and of more.
    """
    fleet, predictor = job.fleet, job.predictor
    mean = fleet.seconds_between_failures
    if isinf(mean):
        return
    shape = fleet.weibull_shape
    scale = mean / gamma(1.0 + 1.0 / shape)
    time = 0.0
    for gap, slot, mark, lead in _draws(np.random.default_rng([seed, 0]), shape, fleet):
        time += scale * gap
        warned = mark < predictor.recall
        yield Failure(time, slot, predictor.mean_lead_seconds * lead if warned else None)


def false_alarms(job: Job, seed: int) -> Iterator[FalseAlarm]:
    """All false alarms, in order, without end."""
    fleet, predictor = job.fleet, job.predictor
    if not predictor.false_alarms_per_gpu_day:
        return
    mean = DAY / (predictor.false_alarms_per_gpu_day * fleet.num_gpus)
    time = 0.0
    for gap, slot, _, lasts in _draws(np.random.default_rng([seed, 1]), 1.0, fleet):
        time += mean * gap
        yield FalseAlarm(time, slot, predictor.mean_lead_seconds * lasts)


def _draws(
    rng: np.random.Generator, shape: float, fleet: Fleet
) -> Iterator[tuple[float, int, float, float]]:
    """Gap (Weibull of scale 1), slot, mark (uniform), duration (exponential of mean 1)."""
    while True:
        yield from zip(
            rng.weibull(shape, BLOCK).tolist(),
            rng.integers(fleet.num_nodes, size=BLOCK).tolist(),
            rng.random(BLOCK).tolist(),
            rng.exponential(size=BLOCK).tolist(),
            strict=True,
        )
