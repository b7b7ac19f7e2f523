"""A series cut into stretches of equal length, which grow with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import fmean, median

#: Stretches are at most so many; so many are needed for a judgement, and so many last ones agree.
MOST, FEWEST, LAST = 64, 8, 2


class Stretches:
    """Levels of equally long stretches of a series, at most `MOST`: neighbours are merged.

    So two stretches of a run can be compared whatever its length, and memory stays bounded.

    Args:
        merge: of the values of a stretch, and of neighbours; the mean by default.

    Attributes:
        count: of values.
        levels: what `merge` gives of each whole stretch.
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
