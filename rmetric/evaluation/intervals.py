"""95 % intervals by bootstrap over runs, or over independent groups of runs.

A resample draws as many runs as there are, with replacement. What is counted
in each is a sum over runs, so a resample is a row of how often each run was
drawn, and all of them are one matrix product. Where runs are not independent
(branches of one control, runs of one configuration) whole groups are drawn.

Shape suffixes: B samples (row 0 is the runs as they are, the rest are
resamples), R runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SEED = 0
NUM_RESAMPLES = 2000
LEVEL = 95.0
Z = 1.959964  # of a normal distribution, for the same level


class Estimate(NamedTuple):
    """A number and its 95 % interval; all nan where it is undefined."""

    point: float
    low: float
    high: float


@lru_cache(maxsize=64)
def resample_counts(num_runs: int) -> Floats:
    """Number of times each run is in each sample, shape (B, R).

    The same number of runs gives the same resamples, so that two detectors on
    the same runs are compared on the same draws.
    """
    generator = np.random.default_rng([SEED, num_runs])
    drawn = generator.integers(num_runs, size=(NUM_RESAMPLES, num_runs))
    drawn += num_runs * np.arange(NUM_RESAMPLES)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
    counts_BR = np.vstack([np.ones(num_runs), counts.astype(float)])
    counts_BR.flags.writeable = False
    return counts_BR


def estimate(
    statistic: Callable[[Floats], Floats], num_runs: int, groups_R: NDArray[np.int64] | None = None
) -> Estimate:
    """`statistic` of the runs, with its percentile interval.

    Resamples in which it is undefined (nan) are left out; a point that is undefined has
    no interval.

    Args:
        statistic: from counts of shape (B, R) to values of shape (B,).
        num_runs: R.
        groups_R: which runs are drawn together, numbered from 0 without a gap; None where each
            stands alone. It answers how much the number would move with other groups, not with
            other runs of these.
    """
    if num_runs == 0:
        return Estimate(np.nan, np.nan, np.nan)
    drawn = np.arange(num_runs) if groups_R is None else groups_R
    counts_BR = resample_counts(int(drawn.max()) + 1)[:, drawn]
    values = statistic(counts_BR)
    if np.isnan(values[0]):
        return Estimate(np.nan, np.nan, np.nan)
    tail = (100 - LEVEL) / 2
    low, high = np.nanpercentile(values[1:], [tail, 100 - tail])
    return Estimate(float(values[0]), float(low), float(high))


def wilson(hits: int, number: int) -> Estimate:
    """A share with its 95 % interval; nan of nothing.

    It answers how far a count of independent runs pins the share down, and has width even
    where nothing or everything was hit.

    >>> tuple(round(x, 3) for x in wilson(0, 100))
    (0.0, 0.0, 0.037)
    """
    # Equal to scipy's binomtest(...).proportion_ci("wilson") but for the digits of Z, which moves
    # the sixth digit of two committed numbers; that one also takes a millisecond a call.
    if number == 0:
        return Estimate(np.nan, np.nan, np.nan)
    share, spread = hits / number, Z * Z / number
    middle = (share + spread / 2) / (1 + spread)
    half = Z * (share * (1 - share) / number + spread / (4 * number)) ** 0.5 / (1 + spread)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))
