"""Rolling baselines: mean or median and spread of the last values of a run; its stretches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from math import sqrt
from statistics import fmean, median

from rmetric._util.errors import require
from rmetric.signals.gradient_variance import mean_and_variance

#: A spread below this is rounding: logs keep nine digits at most.
LEAST_SPREAD = 1e-9
#: Standard deviation of a Gaussian over its median absolute deviation.
MAD_TO_DEVIATION = 1.4826
#: Stretches are at most so many; so many are needed for a judgement, and so many last ones agree.
MOST, FEWEST, LAST = 64, 8, 2


class RollingBaseline:
    """Mean and standard deviation of the last `window` values.

    Args:
        window: values remembered, at least `least`.
        least: values needed before anything is scored, at least 2.

    >>> past = RollingBaseline(window=3, least=2)
    >>> [past.before(x) for x in (9.0, 1.0, 3.0, 5.0, 0.0)][-1]
    (3.0, 1.632993161855452)
    """

    def __init__(self, window: int, least: int) -> None:
        require("least", least, 2 <= least <= window, f"from 2 to the window of {window} values")
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
        require("least", least, 2 <= least <= window, f"from 2 to the window of {window} values")
        self.least = least
        self._window = SortedWindow(window)

    def before(self, x: float) -> tuple[float, float] | None:
        """Same as `RollingBaseline.before`."""
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


class Stretches:
    """Levels of equally long stretches of a series, at most `MOST`: neighbours are merged.

    So two stretches of a run can be compared whatever its length, and memory stays bounded.

    Attributes:
        levels: what `merge`, by default the mean, gives of the values of each whole stretch.
        begins: step of its first value.

    >>> stretches = Stretches()
    >>> for step in range(100):
    ...     _ = stretches.add(step, float(step))
    >>> len(stretches.levels), stretches.levels[:2], stretches.begins[:2]
    (50, [0.5, 2.5], [0, 2])
    """

    def __init__(self, merge: Callable[[Iterable[float]], float] = fmean) -> None:
        self._merge = merge
        self.levels: list[float] = []
        self.begins: list[int] = []
        self.count = 0
        self._open: list[float] = []
        self._length, self._begin = 1, 0

    def add(self, step: int, value: float) -> bool:
        """Take the next value; True if it completes a stretch."""
        self.count += 1
        if not self._open:
            self._begin = step
        self._open.append(value)
        if len(self._open) < self._length:
            return False
        self.levels.append(self._merge(self._open))
        self.begins.append(self._begin)
        self._open = []
        if len(self.levels) == MOST:
            pairs = zip(self.levels[::2], self.levels[1::2], strict=True)
            self.levels = list(map(self._merge, pairs))
            self.begins = self.begins[::2]
            self._length *= 2
        return True

    @property
    def is_known(self) -> bool:
        return len(self.levels) >= FEWEST

    @property
    def change(self) -> float:
        """The usual change from one stretch to the next."""
        return median(abs(b - a) for a, b in pairwise(self.levels))

    @property
    def best(self) -> float:
        """The highest level of `LAST` stretches in a row, but for the last of all."""
        pairs = zip(self.levels[: -LAST - 1], self.levels[1:-LAST], strict=True)
        return max(map(fmean, pairs))

    @property
    def first(self) -> float:
        """The level of the first stretches."""
        return median(self.levels[: FEWEST // 2])
