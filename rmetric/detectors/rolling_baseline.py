"""Rolling baselines: mean or median and spread of the last values of a run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from math import sqrt

from rmetric._util.errors import require
from rmetric.signals.gradient_variance import mean_and_variance

#: A spread below this is rounding: logs keep nine digits at most.
LEAST_SPREAD = 1e-9
#: Of a Gaussian, the standard deviation over the median absolute deviation.
MAD_TO_DEVIATION = 1.4826


class RollingBaseline:
    """Mean and standard deviation of the last `window` values.

    Args:
        window: values remembered, at least `least`.
        least: values needed before anything is said, at least 2.

    >>> past = RollingBaseline(window=3, least=2)
    >>> [past.before(x) for x in (9.0, 1.0, 3.0, 5.0, 0.0)][-1]
    (3.0, 1.632993161855452)
    """

    def __init__(self, window: int, least: int) -> None:
        _check(window, least)
        self.least = least
        self._values: deque[float] = deque(maxlen=window)

    def before(self, x: float) -> tuple[float, float] | None:
        """Both before a finite value, which is remembered; None while too few are past.

        The deviation is at least LEAST_SPREAD.
        """
        usual = None
        if len(self._values) >= self.least:
            mean, variance = mean_and_variance(self._values)
            usual = self._values[0] + mean, max(sqrt(variance), LEAST_SPREAD)
        self._values.append(x)
        return usual


class SortedWindow:
    """The last `size` values, kept in order as well, so that quantiles are looked up.

    Attributes:
        ordered: the values from the least to the largest.

    >>> window = SortedWindow(3)
    >>> for x in (9.0, 1.0, 5.0, 3.0):
    ...     window.remember(x)
    >>> window.ordered, window.median
    ([1.0, 3.0, 5.0], 3.0)
    """

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self.ordered: list[float] = []

    def __len__(self) -> int:
        return len(self.ordered)

    @property
    def median(self) -> float:
        """Only where there are values."""
        return _middle(self.ordered)

    def remember(self, x: float) -> None:
        """Take a finite value."""
        if len(self._values) == self._values.maxlen:
            del self.ordered[bisect_left(self.ordered, self._values[0])]
        self._values.append(x)
        insort(self.ordered, x)

    def forget(self) -> None:
        """Begin anew."""
        self._values.clear()
        self.ordered.clear()


class RobustBaseline:
    """Median and scaled median absolute deviation of the last `window` values.

    Half of the window may be spikes before either is led astray. The arguments
    are those of `RollingBaseline`.

    >>> past = RobustBaseline(window=5, least=2)
    >>> [past.before(x) for x in (1.0, 2.0, 3.0, 4.0, 900.0, 0.0)][-1]
    (3.0, 1.4826)
    """

    def __init__(self, window: int, least: int) -> None:
        _check(window, least)
        self.least = least
        self._window = SortedWindow(window)

    def before(self, x: float) -> tuple[float, float] | None:
        """As `RollingBaseline.before`."""
        found = None
        if len(self._window) >= self.least:
            usual = self._window.median
            away = _middle(sorted([abs(value - usual) for value in self._window.ordered]))
            found = usual, max(MAD_TO_DEVIATION * away, LEAST_SPREAD)
        self._window.remember(x)
        return found


def plain_mean(values: Collection[float]) -> float:
    """The mean in plain additions: `sum` rounds differently from one Python to the next."""
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    # Halved first: the sum of two huge values would overflow.
    return ordered[half - 1] / 2 + ordered[half] / 2


def _check(window: int, least: int) -> None:
    require("least", least, 2 <= least <= window, f"from 2 to the window of {window} values")
