"""Base of the sources of evidence, and the rolling baselines that they hold values against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from math import exp, inf, log
from typing import ClassVar

from rmetric.detectors.rolling_baseline import SortedWindow
from rmetric.records import Record

#: Quantiles over their Gaussian distance from the median: half of a spread is enough to
#: see noise with a heavy upper tail as wide as it is upwards.
_QUARTILES = 1.349
_UPPER_TENTH = 1.2816
#: Median size of the difference of two Gaussian values over the standard deviation of one.
_HALF_NORMAL = 0.954
#: A spread estimated from few values is too small too often: n values widen it by 8 / n.
_FEW = 8.0


class EvidenceSource(ABC):
    """Statistics of one quantity that a run logs.

    Attributes:
        NAMES: of its statistics, as the threshold file has them.
        AT_ONCE: its statistics alarm with the first record beyond the threshold; those of the
            others must stay there for some records.
        statistics: name -> how strong the evidence is, higher is worse; a name is
            absent while there is nothing to judge by. Each has its own unit,
            which the source's docstring gives.
        begun: name -> step of the first of the records that the statistic rests on now, for
            `reason` only; absent where the source has none. For a smoothed statistic it is
            the first of the present stretch of values that were themselves unusual.

    `update` is called once a record; one that does not hold what the source
    watches leaves it as it was. `restart` is called where the user announced a
    change: what was usual before does not count after it. `words` gives the measurement of a
    statistic with its usual value, `advice` one suggested action.
    """

    NAMES: ClassVar[tuple[str, ...]]
    LABEL: ClassVar[str]
    AT_ONCE: ClassVar[bool] = False

    def __init__(self) -> None:
        self.statistics: dict[str, float] = {}
        self.begun: dict[str, int] = {}

    def note(self, name: str, step: int, newest: float, unusual: float, usual: float = 0.0) -> None:
        """A stretch begins with a newest value above `unusual`, and ends with one at `usual`."""
        if newest > unusual:
            self.begun.setdefault(name, step)
        elif newest <= usual:
            self.begun.pop(name, None)

    def smooth(self, name: str, x: float, weight: float) -> None:
        """Take `x` into the exponentially weighted mean that is the statistic; it begins at 0."""
        level = self.statistics.get(name, 0.0)
        self.statistics[name] = level + weight * (x - level)

    @abstractmethod
    def update(self, record: Record) -> None: ...

    def restart(self) -> None:
        self.statistics.clear()
        self.begun.clear()

    @abstractmethod
    def words(self, name: str) -> str: ...

    @abstractmethod
    def advice(self, name: str, since: int) -> str:
        """One action for a failure whose evidence began at step `since`."""


#: What is beyond is cut: differences and quotients of such values stay numbers.
LARGEST = 1e30


def clipped(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def bounded(x: float) -> float:
    """A finite value, cut to ±`LARGEST`."""
    return clipped(x, -LARGEST, LARGEST)


def amount(logarithm: float) -> str:
    """A positive value as text.

    >>> amount(0.0), amount(1000.0)
    ('1', 'more than 1e+300')
    """
    return f"{exp(logarithm):.3g}" if logarithm < 690.7 else "more than 1e+300"


def times(logarithm: float) -> str:
    """A ratio as text.

    >>> times(0.7), times(1000.0)
    ('2 times', 'more than 1e+09 times')
    """
    return f"{exp(logarithm):.2g} times" if logarithm < 20.8 else "more than 1e+09 times"


class LaggedPast:
    """Middle and upward spread of a window of values that ends `lag` values ago.

    The lag keeps a rise that is under way out of what it is held against; a
    level that lasts becomes the usual one after about half a window.

    Args:
        window: values remembered, at least `least`.
        lag: newest values left out; may be changed.
        least: values needed before anything is scored, at least 4; may be changed.

    >>> past = LaggedPast(window=8, lag=2, least=4)
    >>> for x in (1.0, 2.0, 3.0, 4.0, 5.0, 900.0, 900.0):
    ...     past.remember(x)
    >>> past.usual, past.ready
    (3.0, True)
    """

    def __init__(self, window: int = 80, lag: int = 5, least: int = 8) -> None:
        self.lag, self.least = lag, least
        self._recent: deque[float] = deque()
        self._window = SortedWindow(window)

    @property
    def ready(self) -> bool:
        return len(self._window) >= self.least

    @property
    def usual(self) -> float:
        """The median; only where `ready`."""
        return self._window.median

    @property
    def spread(self) -> float:
        """Chance distance of a value above the median; only where `ready`."""
        ordered = self._window.ordered
        count = len(ordered)
        quartiles = (ordered[3 * count // 4] - ordered[count // 4]) / _QUARTILES
        upper = (ordered[9 * count // 10] - self.usual) / _UPPER_TENTH
        return max(quartiles, upper) * (1 + _FEW / count)

    @property
    def widened(self) -> float:
        """The median of sizes that are never negative, wider where few are known."""
        return self.usual / _HALF_NORMAL * (1 + _FEW / len(self._window))

    def remember(self, x: float) -> None:
        """Take a finite value."""
        self._recent.append(x)
        while len(self._recent) > self.lag:
            self._window.remember(self._recent.popleft())

    def forget(self) -> None:
        """Begin anew."""
        self._recent.clear()
        self._window.forget()


class Deviation:
    """Deviation of a value above its rolling baseline, in spreads.

        z = (x - usual) / max(spread, `relative` |usual|, `absolute`), 0 where all three are 0

    Attributes:
        usual, rise, z: of the last value; nan while too few are past.
        absolute: may be changed from value to value.

    >>> deviation = Deviation(LaggedPast(window=20, lag=0, least=4), absolute=0.1)
    >>> [round(deviation.update(x), 1) for x in (2.0, 2.0, 2.0, 2.0, 2.6)]
    [nan, nan, nan, nan, 6.0]
    """

    def __init__(self, past: LaggedPast, *, relative: float = 0.0, absolute: float = 0.0) -> None:
        self._past = past
        self.relative = relative
        self.absolute = absolute
        self.usual = self.rise = self.z = float("nan")

    def update(self, x: float) -> float:
        """Judge a finite value by those before it, then remember it."""
        past = self._past
        if past.ready:
            self.usual = past.usual
            self.rise = x - self.usual
            spread = max(past.spread, self.relative * abs(self.usual), self.absolute)
            self.z = self.rise / spread if spread > 0 else 0.0
        past.remember(x)
        return self.z

    def forget(self) -> None:
        """Begin anew."""
        self._past.forget()
        self.usual = self.rise = self.z = float("nan")


class Resolution:
    """Smallest step between values that differ, `lag` values ago: how finely a log is rounded.

    One step may be a rise; several of them show the rounding, and `step` is 0 until eight values
    differed from the one before. With the lag a rise does not set its own resolution.

    >>> resolution = Resolution(lag=1)
    >>> for x in (0.0, 0.002, 0.001) * 4 + (7.0,):
    ...     resolution.update(x)
    >>> resolution.step
    0.001
    """

    _NEEDED = 8

    def __init__(self, lag: int) -> None:
        self._smallest, self._num_steps = inf, 0
        self._recent: deque[float] = deque(maxlen=lag + 2)

    @property
    def step(self) -> float:
        return self._smallest if self._num_steps >= self._NEEDED else 0.0

    def update(self, x: float) -> None:
        """Take a finite value."""
        recent = self._recent
        recent.append(x)
        if len(recent) == recent.maxlen:
            apart = abs(recent[1] - recent[0])
            if apart > 0:
                self._num_steps += 1
                self._smallest = min(self._smallest, apart)


class ExcursionLimit:
    """Limit of a statistic that learns from the excursions that it came back from.

        limit = max(base max(1, ln n / ln 400), 1.8 min(highest excursion, 1.5))

    n is the number of values. A constant limit is exceeded by chance once in so many records,
    however long the run is healthy. Noise that is correlated or has a heavy tail shows by its
    earlier excursions. An excursion above 1.5 counts as 1.5, or one spike hid all later failures.
    """

    _SETTLED, _TIMES, _MOST = 400, 1.8, 1.5
    _BEGINS, _ENDS = 0.25, 0.1

    def __init__(self, base: float) -> None:
        self.base = base
        self._count = 0
        self._peak = self._highest = 0.0

    def update(self, x: float) -> float:
        """Limit for `x`, which only counts for later values."""
        self._count += 1
        limit = self.base
        if self._count > self._SETTLED:
            limit *= log(self._count) / log(self._SETTLED)
        limit = max(limit, self._TIMES * min(self._highest, self._MOST))
        if x > self._BEGINS:
            self._peak = max(self._peak, x)
        elif x < self._ENDS and self._peak > 0:
            self._highest, self._peak = max(self._highest, self._peak), 0.0
        return limit

    def forget(self) -> None:
        """Begin anew."""
        self._count = 0
        self._peak = self._highest = 0.0
