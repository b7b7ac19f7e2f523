"""Sampled failures, warnings and false alarms of a simulated job."""

from __future__ import annotations

from collections.abc import Iterator
from math import gamma, isinf
from typing import NamedTuple

import numpy as np

from studies.fleet.job_settings import DAY, Fleet, FleetJob

#: Numbers drawn at once, since a Generator is slow for single numbers.
BLOCK = 256


class NodeFailure(NamedTuple):
    """Failure of one node.

    Attributes:
        time: seconds since the start of the job.
        slot: index of the node, from 0; a job shrunk to n nodes uses the slots below n.
        lead: time of the warning before the failure, seconds; None without a warning.
    """

    time: float
    slot: int
    lead: float | None = None


class FalseAlarm(NamedTuple):
    """Warning without a failure, on the node in `slot` from `time`, for `lasts` seconds."""

    time: float
    slot: int
    lasts: float


def failures(job: FleetJob, seed: int) -> Iterator[NodeFailure]:
    """Endless sequence of failures, in order of time; relapses are drawn with the repairs.

    Failure times depend on the seed only, not on saves, warnings or repairs; a higher
    recall adds warnings and removes none.
    """
    fleet, predictor = job.fleet, job.predictor
    mean = fleet.seconds_between_failures / (1.0 - fleet.relapse_share)
    if isinf(mean):
        return
    shape = fleet.weibull_shape
    scale = mean / gamma(1.0 + 1.0 / shape)
    time = 0.0
    for gap, slot, mark, lead in _draws(np.random.default_rng([seed, 0]), shape, fleet):
        time += scale * gap
        warned = mark < predictor.recall
        yield NodeFailure(time, slot, predictor.mean_lead_seconds * lead if warned else None)


def false_alarms(job: FleetJob, seed: int) -> Iterator[FalseAlarm]:
    """Endless sequence of false alarms, in order of time."""
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
