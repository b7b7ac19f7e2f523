"""95 % intervals by bootstrap over runs.

A resample draws as many runs as there are, with replacement. What is counted
in each is a sum over runs, so a resample is a row of how often each run was
drawn, and all of them are one matrix product.

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


class Estimate(NamedTuple):
    """A number and its 95 % interval; all nan where it is undefined."""

    point: float
    low: float
    high: float


@lru_cache(maxsize=64)
def resample_counts(num_runs: int) -> Floats:
    """How often each run is in each sample, shape (B, R).

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


def estimate(statistic: Callable[[Floats], Floats], num_runs: int) -> Estimate:
    """`statistic` of the runs, with its percentile interval.

    `statistic` takes counts of shape (B, R) and returns shape (B,). Resamples
    in which it is undefined (nan) are left out; a point that is undefined has
    no interval.
    """
    if num_runs == 0:
        return Estimate(np.nan, np.nan, np.nan)
    values = statistic(resample_counts(num_runs))
    if np.isnan(values[0]):
        return Estimate(np.nan, np.nan, np.nan)
    tail = (100 - LEVEL) / 2
    low, high = np.nanpercentile(values[1:], [tail, 100 - tail])
    return Estimate(float(values[0]), float(low), float(high))
