"""Simulated jobs of the cost study and their measurements.

Each job is measured once with the same seeds as every other, so that two jobs are compared
under the same failures, seed by seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation import Estimate
from rmetric.guard.policy import young
from studies.fleet import published
from studies.fleet.guarded_job import SHARES, JobOutcome, replicate
from studies.fleet.job_settings import FailurePredictor, Fleet, FleetJob, Saves

#: Failures on a node-day; the job's own are so many times its nodes.
RATES = {
    "RSC-1": 6.50e-3,
    "RSC-2": 2.34e-3,
    "Llama 3 405B": published.STOPS_PER_DAY / (published.LLAMA_GPUS / 8),
}
SIZES = (8, 64, 512, 2048, 16_384)
RECALLS = (0.1, 0.2, 0.5, 0.9)
#: Measured on 504 B200 (arXiv 2605.09370): recall, and false alarms on a GPU-day.
TODAY = FailurePredictor(
    recall=published.PRECURSORS_SEEN / published.PRECURSORS_ASKED,
    false_alarms_per_gpu_day=0.84 / 504,
)
SAVES = {
    "synchronous": Saves(interval_seconds=None, blocking_seconds=120.0, durable_seconds=120.0),
    "asynchronous": Saves(interval_seconds=None, blocking_seconds=20.0, durable_seconds=120.0),
}
#: A job's length: so many failures in the mean, fewer where that would take too many saves.
MOST_FAILURES, LEAST_FAILURES, MOST_SAVES = 100.0, 2.0, 600.0
#: A job without any save is of so many days, as it depends on it.
UNSAVED_DAYS = 7.0


@dataclass(frozen=True)
class Measured:
    """Measurements of one job, as arrays over the seeds, shape (S,)."""

    ettr_S: NDArray[np.float64]
    shares_S: Mapping[str, NDArray[np.float64]]

    @classmethod
    def of(cls, outcomes: Sequence[JobOutcome]) -> Measured:
        wall_S = np.array([job.wall for job in outcomes])
        return cls(
            np.array([job.ettr for job in outcomes]),
            {name: np.array([job.spent[name] for job in outcomes]) / wall_S for name in SHARES},
        )

    @property
    def ettr(self) -> Estimate:
        return mean(self.ettr_S)

    def gain(self, base: Measured) -> Estimate:
        """Gain over `base` in percentage points of ETTR, seed by seed."""
        return mean(100.0 * (self.ettr_S - base.ettr_S))


def mean(values_S: NDArray[np.float64]) -> Estimate:
    """Mean with Student's interval."""
    from scipy.stats import t

    n = len(values_S)
    point = float(values_S.mean())
    half = float(t.ppf(0.975, n - 1)) * float(values_S.std(ddof=1)) / sqrt(n)
    return Estimate(point, point - half, point + half)


def a_job(
    num_gpus: int,
    saves: str,
    predictor: FailurePredictor | None = None,
    *,
    interval: float | None = None,
    least_gap: float = 0.25,
    **settings: Any,
) -> FleetJob:
    """A job at Young/Daly's interval, or another, in whole steps; `settings` are of its `Fleet`."""
    fleet = Fleet(num_gpus=num_gpus, **settings)
    costs, mtbf = SAVES[saves], fleet.seconds_between_failures
    interval = young(costs.blocking_seconds, mtbf) if interval is None else interval
    if interval > 0:
        interval = max(round(interval / 10.0), 1) * 10.0
    failures = min(max(MOST_SAVES * interval / mtbf, LEAST_FAILURES), MOST_FAILURES)
    return FleetJob(
        fleet=fleet,
        saves=replace(costs, interval_seconds=interval, least_gap=least_gap),
        predictor=FailurePredictor() if predictor is None else predictor,
        work_seconds=failures * mtbf,
        longest_seconds=100.0 * failures * mtbf,
    )


def one_percent(num_gpus: int, **settings: Any) -> dict[str, Any]:
    """Settings of a fleet with one spare to 100 nodes, and whole replicas of a 128th of it."""
    num_nodes = num_gpus // 8
    return {
        "num_spares": round(num_nodes / 100),
        "replica_nodes": max(num_nodes // 128, 1),
        **settings,
    }


def measure(
    jobs: Iterable[FleetJob], replications: int, processes: int
) -> dict[FleetJob, Measured]:
    """Measure each job once; the result does not depend on the number of processes."""
    from joblib import Parallel

    from rmetric._util.workers import delayed

    distinct = list(dict.fromkeys(jobs))
    outcomes = Parallel(n_jobs=processes, batch_size=1)(
        delayed(_outcomes)(job, replications) for job in distinct
    )
    return {job: Measured.of(of_job) for job, of_job in zip(distinct, outcomes, strict=True)}


def _outcomes(job: FleetJob, replications: int) -> list[JobOutcome]:
    return [replicate(job, seed) for seed in range(replications)]
