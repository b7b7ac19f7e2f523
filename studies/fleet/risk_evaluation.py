"""Evaluation of failure predictors on a sampled fleet: timely warnings and false alarms.

Failures are rare (three in ten thousand GPU-days), so a fleet is not simulated whole. Four
strata are sampled and weighted by how often each occurs in it:

    healthy     whole days of GPUs that do not fail          weight: all GPU-days
    contained   two days around an uncorrectable error that is contained, without a failure
                weight: published errors a GPU-day, less those that ended a run
    with_sign   the day before a failure that a sign precedes
                weight: failures a GPU-day x share with a sign, which is a parameter
    without     the day before a failure without one         weight: the rest of them

Each history has a generator of its own, seeded by (seed, stratum, index): results depend
neither on the number of processes nor on the sizes of the other strata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import inf, nan
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel

from rmetric._util.errors import require
from rmetric._util.workers import delayed
from studies.fleet import published
from studies.fleet.gpu_usage import DAY, HOUR, Bools, Floats, JobConditions
from studies.fleet.predictors import ON_CURVES, PREDICTORS, signals
from studies.fleet.telemetry_simulation import GpuHistory, contained, failing, healthy

#: Seconds before a failure in which an alarm is right; the second is what an emergency
#: checkpoint lives on, the first leaves time to drain a GPU.
HORIZONS = {"24 h": 24 * HOUR, "1 h": HOUR}
LEAST_LEAD = 60.0  # seconds that an emergency save needs
QUIET = 600.0  # without an alarm, after which the next one is a new incident
AT_FAILURE = 300.0  # an alarm that begins within this after the failure has detected it
STRATA = ("healthy", "contained", "with_sign", "without")


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Healthy GPUs and their days (at least 0.01), and histories of the other strata."""

    gpus: int = 240
    days: float = 10.0
    contained: int = 100
    with_sign: int = 400
    without: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = {"seed": 0, "days": 0.01}.get(name, 1)
            require(name, value, least <= value < inf, f"at least {least}")

    def sizes(self) -> dict[str, int]:
        return {name: self.gpus if name == "healthy" else getattr(self, name) for name in STRATA}


@dataclass(frozen=True, kw_only=True)
class JudgedAlarms:
    """Result of one predictor on one history.

    Attributes:
        num_false: incidents that begin outside every horizon.
        days: observed time outside every horizon.
        firing: share of that time with an alarm; nan without such time.
        leads: seconds from the first incident within the horizon to each failure; nan
            without one of sufficient lead.
        at_failure: for each failure, detected at its time without a prior warning.
    """

    num_false: int
    days: float
    firing: float
    leads: tuple[float, ...]
    at_failure: tuple[bool, ...]


#: Stratum, horizon and predictor -> a row for each history: its `sign`, and the fields of
#: `JudgedAlarms`, with the lead to its failure (nan where it has none).
Strata = dict[tuple[str, str, str], pd.DataFrame]


class FailureWindows:
    """The `horizon` (seconds) before the failures of one GPU, in which an alarm is right.

    The first alarm of an incident counts: an alarm that began before the horizon is no
    warning. `times` of the readings are increasing, shape (T,).
    """

    def __init__(self, times: Floats, failures: Sequence[float], horizon: float) -> None:
        self.times, self.failures, self.horizon = times, failures, horizon
        spans = np.diff(times, append=times[-1] + np.median(np.diff(times)))
        #: Seconds that each reading stands for, away from failures; of a long silence a part.
        self._seconds = np.minimum(spans, QUIET) * self._elsewhere(times)

    def judge(self, alarms: Bools) -> JudgedAlarms:
        """Judge the alarms after each reading, shape (T,)."""
        begun = beginnings(self.times[alarms])
        leads, at_failure = [], []
        for failure in self.failures:
            right = begun[(begun >= failure - self.horizon) & (begun <= failure - LEAST_LEAD)]
            late = (begun > failure - LEAST_LEAD) & (begun <= failure + AT_FAILURE)
            leads.append(float(failure - right[0]) if right.size else nan)
            at_failure.append(bool(late.any() and not right.size))
        watched = float(self._seconds.sum())
        return JudgedAlarms(
            num_false=int(self._elsewhere(begun).sum()),
            days=watched / DAY,
            firing=float(self._seconds[alarms].sum()) / watched if watched else nan,
            leads=tuple(leads),
            at_failure=tuple(at_failure),
        )

    def _elsewhere(self, times: Floats) -> Bools:
        elsewhere = np.ones(times.size, dtype=np.bool_)
        for at in self.failures:
            elsewhere &= (times < at - self.horizon) | (times > at + AT_FAILURE)
        return elsewhere


def beginnings(times: Floats) -> Floats:
    """Start times of incidents: alarms after `QUIET` seconds without one.

    >>> beginnings(np.array([0.0, 10.0, 610.0, 1220.0]))
    array([   0., 1220.])
    """
    return times[np.diff(times, prepend=-np.inf) > QUIET]


def simulate(plan: EvaluationPlan, job: JobConditions, stratum: str, index: int) -> GpuHistory:
    rng = np.random.default_rng([plan.seed, STRATA.index(stratum), index])
    if stratum == "healthy":
        return healthy(rng, gpu=index, days=plan.days, job=job)
    if stratum == "contained":
        return contained(rng, gpu=index, job=job)
    counts = np.array([published.INTERRUPTIONS[cause] for cause in published.OF_A_GPU])
    cause = str(rng.choice(published.OF_A_GPU, p=counts / counts.sum()))
    return failing(rng, gpu=index, cause=cause, with_sign=stratum == "with_sign", job=job)


def evaluate(
    plan: EvaluationPlan, job: JobConditions | None = None, num_processes: int = 1
) -> Strata:
    """Every predictor on every sampled history."""
    judge = partial(_judged, plan, job or JobConditions())
    pairs = [(name, index) for name, size in plan.sizes().items() for index in range(size)]
    seen = Parallel(n_jobs=num_processes, batch_size=8)(delayed(judge)(*which) for which in pairs)
    found = pd.DataFrame(chain.from_iterable(seen)).explode(["leads", "at_failure"])
    return dict(iter(found.groupby(["stratum", "horizon", "name"])))


def _judged(
    plan: EvaluationPlan, job: JobConditions, stratum: str, index: int
) -> list[dict[str, Any]]:
    history = simulate(plan, job, stratum, index)
    found, failure = signals(history), history.failure
    failures = () if failure is None else (float(history.times[failure.reading]),)
    about = {"stratum": stratum, "sign": "" if failure is None else failure.sign}
    alarms = {predictor.name: predictor.alarms(found) for predictor in (*PREDICTORS, *ON_CURVES)}
    rows = []
    for label, horizon in HORIZONS.items():
        truth = FailureWindows(history.times, failures, horizon)
        about |= {"horizon": label}
        rows += [about | {"name": name} | vars(truth.judge(seen)) for name, seen in alarms.items()]
    return rows
