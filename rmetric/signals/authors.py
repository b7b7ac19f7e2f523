"""The signals as the authors' code computes them, bit for bit.

The equations are the paper's; what differs is the past that ΔL is taken against, the
order in which numbers are added (NumPy's) and what a non-finite loss becomes. They are
here for reproducing published numbers; `RMetricConfig.variant` selects them.

Source: the repository of Fatima 2025, commit a3f0b99 and its case study.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, nan

from rmetric.normalisers import SlidingMinMax

#: Nats that stand for a non-finite loss in the authors' simulators.
NON_FINITE_DRIFT = 100.0


def numpy_variance(norms: Sequence[float]) -> float:
    """Population variance of the workers' norms, shape (workers,), added up by NumPy.

    inf if a norm is not finite, nan for fewer than two norms, as `population_variance`.
    """
    # Imported here: the metric itself needs no NumPy, and a program that only replays is quicker.
    import numpy as np

    if len(norms) < 2:
        return nan
    with np.errstate(all="ignore"):
        variance = float(np.var(norms))
    return variance if isfinite(variance) else inf


class FirstLossDrift:
    """Loss minus the first finite loss: ΔL in commit a3f0b99.

    The store of past losses there takes up only the first, so its moving average is
    that loss. nan at the first loss, +inf at one that is not finite.

    >>> drift = FirstLossDrift()
    >>> [drift.update(loss) for loss in (3.0, 2.0, 2.5)]
    [nan, -1.0, -0.5]
    """

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: float | None = None

    def update(self, loss: float) -> float:
        """Take the loss of one evaluation; return ΔL, nats."""
        if not isfinite(loss):
            return inf
        if self._first is None:
            self._first = loss
            return nan
        return loss - self._first


class NumpyLossDrift:
    """Loss minus the NumPy mean of the losses before it.

    +inf at a loss that is not finite, which is not remembered.

    Args:
        window: earlier losses, at least 1.
        absolute: return |ΔL|.
        least: losses needed before ΔL is defined.
        before: ΔL until then; a number, unlike nan, enters the window of n(ΔL).
    """

    __slots__ = ("_absolute", "_before", "_least", "_past")

    def __init__(
        self, window: int = 100, *, absolute: bool = False, least: int = 1, before: float = nan
    ) -> None:
        self._past: deque[float] = deque(maxlen=window)
        self._absolute, self._least, self._before = absolute, least, before

    def update(self, loss: float) -> float:
        """Take the loss of one evaluation; return ΔL, nats."""
        import numpy as np

        if not isfinite(loss):
            return inf
        drift = self._before
        if len(self._past) >= self._least:
            drift = loss - float(np.mean(self._past))
            drift = abs(drift) if self._absolute else drift
        self._past.append(loss)
        return drift


class UnclippedMinMax(SlidingMinMax):
    """Sliding min-max in which +inf counts as `NON_FINITE_DRIFT`, not clipped to 1.

    Such a value does not enter the window: R reaches about 14 in some of the authors' logs.

    >>> scale = UnclippedMinMax()
    >>> [scale.update(x) for x in (0.0, 2.0, float("inf"))]
    [0.0, 1.0, 50.0]
    """

    __slots__ = ()

    def update(self, x: float) -> float:
        """Take one value; return it normalised."""
        if x != inf:
            return super().update(x)
        span = self._highs[0] - self._lows[0] if self._lows else 0.0
        self.value = (NON_FINITE_DRIFT - self._lows[0]) / span if span else 0.0
        return self.value
