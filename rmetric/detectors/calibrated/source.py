"""Base of the sources of evidence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import exp
from typing import ClassVar

from rmetric.records import Record


class EvidenceSource(ABC):
    """Statistics of one quantity that a run logs.

    Attributes:
        NAMES: of its statistics, as the threshold file has them.
        LABEL: as people read it.
        AT_ONCE: its statistics alarm with the first record beyond the threshold; those of the
            others must stay there for some records.
        statistics: name -> how strong the evidence is, higher is worse; a name is
            absent while there is nothing to judge by. Each has its own unit,
            which the source's docstring gives.
        begun: name -> step of the first of the records that the statistic rests on now, for
            `reason` and no score; absent where the source does not say. Of one that is smoothed
            it is the first of the present stretch of values that were themselves unusual.

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
