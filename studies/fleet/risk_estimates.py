"""Fleet estimates from the sampled strata: point, interval and n.

Shares have Wilson's interval, weighted sums of strata that of Zou and Donner (2008, "Construction
of confidence intervals: a closed-form approach"), medians that of order statistics. A rate
of false alarms has the wider of two intervals: a bootstrap over GPUs, which includes the
correlation of alarms on one GPU, and the exact Poisson interval, which has a width even without
alarms.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isnan, nan, sqrt

import numpy as np
from scipy.stats import binom, chi2

from rmetric.evaluation.intervals import Estimate, estimate, wilson
from studies.fleet import published
from studies.fleet.gpu_usage import DAY
from studies.fleet.risk_evaluation import HORIZONS, LEAST_LEAD, GpuAlarms

Strata = dict[str, list[GpuAlarms]]

#: Contained errors a GPU-day: the published rate, less those that ended a run.
CONTAINED_PER_GPU_DAY = published.MEMORY_ERRORS_PER_GPU_DAY - (
    (published.INTERRUPTIONS["hbm"] + published.INTERRUPTIONS["sram"]) / published.GPU_DAYS
)
CONTAINED_DAYS = 2.0  # of one history of that stratum


def poisson(count: int, exposure: float) -> Estimate:
    """A rate with its exact 95 % interval (Garwood 1936).

    >>> [round(x, 2) for x in poisson(0, 1.0)]
    [0.0, 0.0, 3.69]
    """
    low = chi2.ppf(0.025, 2 * count) / 2 if count else 0.0
    high = chi2.ppf(0.975, 2 * count + 2) / 2
    return Estimate(count / exposure, float(low) / exposure, float(high) / exposure)


def weighted(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Weighted sum of independent estimates, with weights of at least 0."""
    point = sum(weight * part.point for weight, part in parts)
    below = sqrt(sum((weight * (part.point - part.low)) ** 2 for weight, part in parts))
    above = sqrt(sum((weight * (part.high - part.point)) ** 2 for weight, part in parts))
    return Estimate(point, max(0.0, point - below), point + above)


def recall_in(strata: Strata, stratum: str, horizon: str, name: str) -> Estimate:
    """Share of the failures of one stratum that were announced."""
    leads = [lead for one in strata[stratum] for lead in one.judged[horizon][name].leads]
    return wilson(sum(not isnan(lead) for lead in leads), len(leads))


def recall(strata: Strata, share: float, horizon: str, name: str) -> Estimate:
    """Share of a GPU's failures that were announced, where `share` of them have a sign."""
    parts = [
        (share, recall_in(strata, "with_sign", horizon, name)),
        (1 - share, recall_in(strata, "without", horizon, name)),
    ]
    return weighted(parts)


def at_failure(strata: Strata, share: float, horizon: str, name: str) -> Estimate:
    """Share of a GPU's failures that were not announced, but detected as they happened."""

    def of(stratum: str) -> Estimate:
        seen = [late for one in strata[stratum] for late in one.judged[horizon][name].at_failure]
        return wilson(sum(seen), len(seen))

    return weighted([(share, of("with_sign")), (1 - share, of("without"))])


def false_alarms(strata: Strata, horizon: str, name: str) -> Estimate:
    """False alarms a GPU-day."""
    judged = [one.judged[horizon][name] for one in strata["contained"]]
    numbers = np.array([one.num_false for one in judged], dtype=float)
    a_window = estimate(lambda drawn: drawn @ numbers / drawn.sum(axis=1), numbers.size)
    in_windows = CONTAINED_PER_GPU_DAY * CONTAINED_DAYS
    return weighted(
        [(1 - in_windows, _ordinary(strata, horizon, name)), (CONTAINED_PER_GPU_DAY, a_window)]
    )


def _ordinary(strata: Strata, horizon: str, name: str) -> Estimate:
    judged = [one.judged[horizon][name] for one in strata["healthy"]]
    numbers = np.array([one.num_false for one in judged], dtype=float)
    days = np.array([one.days for one in judged])
    exact = poisson(int(numbers.sum()), float(days.sum()))
    drawn = estimate(lambda counts: (counts @ numbers) / (counts @ days), numbers.size)
    return Estimate(exact.point, min(exact.low, drawn.low), max(exact.high, drawn.high))


def precision(found: Estimate, false: Estimate) -> Estimate:
    """Precision of the alarms; its interval combines the extremes of both rates."""

    def share(recalled: float, alarms: float) -> float:
        right = published.FAILURES_PER_GPU_DAY * recalled
        return right / (right + alarms) if right + alarms > 0 else nan

    point = share(found.point, false.point)
    if isnan(point):
        return Estimate(nan, nan, nan)
    return Estimate(point, share(found.low, false.high), share(found.high, false.low))


def by_chance(false: Estimate, horizon: str) -> float:
    """Recall of alarms of the same rate at random times."""
    return 1 - exp(-false.point * (HORIZONS[horizon] - LEAST_LEAD) / DAY)


def firing(strata: Strata, horizon: str, name: str) -> Estimate:
    """Share of the readings of healthy GPUs at which it alarms."""
    shares = np.array([one.judged[horizon][name].firing for one in strata["healthy"]])
    return estimate(lambda counts: counts @ shares / counts.sum(axis=1), shares.size)


def median(values: Sequence[float]) -> Estimate:
    """Median with an interval from order statistics; nan without values."""
    if not values:
        return Estimate(nan, nan, nan)
    ordered = np.sort(values)
    low = int(max(0, binom.ppf(0.025, ordered.size, 0.5) - 1))
    high = int(min(ordered.size - 1, binom.ppf(0.975, ordered.size, 0.5)))
    return Estimate(float(np.median(ordered)), float(ordered[low]), float(ordered[high]))
