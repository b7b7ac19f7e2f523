"""σ², the spread of the workers' gradient norms."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, nan


class GradientVariance:
    """Population variance of the workers' gradient norms (the paper's σ²).

    With gᵢ the L2 norm of worker i's own gradient and ḡ their mean,

        σ² = Σ (gᵢ - ḡ)² / workers        [squared norm units].

    A norm that is nan or inf makes σ² infinite: it was observed, and it is
    beyond all bounds. Fewer than two workers have no spread: nan. Its weakness:
    averaging hides a fault that strikes all workers alike.

    >>> GradientVariance().update([1.0, 1.0, 4.0])
    2.0

    Source: Fatima 2025, section 3 (σ² across data-parallel workers).
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = nan

    def update(self, norms: Sequence[float]) -> float:
        """Take the norms of one step, shape (workers,); return σ²."""
        self.value = population_variance(norms)
        return self.value


class TrailingGradientVariance:
    """Variance of the one logged gradient norm over a trailing window.

    A stand-in for σ² in runs that log a single norm. It measures change over
    time and not disagreement between workers, so every report that uses it must
    state that. O(window) a step; nan until two norms were seen.

    Args:
        window: number of norms, at least 2.
    """

    __slots__ = ("_norms", "value")

    def __init__(self, window: int = 20) -> None:
        if window < 2:
            raise ValueError(f"window is {window}: a variance needs at least 2 norms")
        self.value = nan
        self._norms: deque[float] = deque(maxlen=window)

    def update(self, norm: float) -> float:
        """Take the norm of one step; return the variance over the window."""
        if not isfinite(norm):
            # Kept out of the window, or one overflow would blind the next `window` steps.
            self.value = inf
        else:
            self._norms.append(norm)
            self.value = population_variance(tuple(self._norms))
        return self.value


def population_variance(norms: Sequence[float]) -> float:
    """Variance about the mean, divided by n; inf if any norm is not finite."""
    if not norms:
        return nan
    variance = mean_and_variance(norms)[1]
    return nan if len(norms) == 1 and variance < inf else variance


def mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Mean less the first value, and population variance, of at least one value.

    One pass over differences to the first value, in a fixed order of plain additions: a
    constant sequence gives exactly 0, and logs come out the same on all versions of Python,
    of which `sum` and `math.dist` round differently. The variance is at least 0, and inf where
    a value is not finite.
    """
    first = values[0]
    total = squares = 0.0
    for value in values:
        away = value - first
        total += away
        squares += away * away
    mean = total / len(values)
    variance = (squares - total * mean) / len(values)
    if variance < inf:
        return mean, variance if variance > 0.0 else 0.0
    return mean, inf
