"""What was usual so far, and what is far from it: three sigma, with floors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import sqrt
from statistics import median

#: A stream is judged after so many iterations, the first of which are compared with fewer.
LEAST_PAST = 8
#: An iteration is slow from so many times the usual on, and so many seconds more than usual
#: where times have fractions or only whole seconds.
SLOW, LEAST_SECONDS, LEAST_WHOLE_SECONDS = 3.0, 0.5, 5.0


@dataclass
class Usual:
    """Running mean and deviation (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        off = value - self.mean
        self.mean += off / self.count
        self.squares += off * (value - self.mean)

    @property
    def deviation(self) -> float:
        return sqrt(self.squares / self.count) if self.count else 0.0


def usual_if_slow(before: Collection[float], seconds: float | None, steps: int) -> float | None:
    """The median of the durations before; None unless `seconds` is far longer.

    Far longer: three sigma above their mean, several times the median, more than any before.

    Args:
        before, seconds: for a step.
        steps: that the iteration counts.
    """
    if seconds is None or len(before) < LEAST_PAST or seconds <= max(before):
        return None
    usual, mean = median(before), sum(before) / len(before)
    deviation = sqrt(sum((one - mean) ** 2 for one in before) / len(before))
    whole = all((one * steps).is_integer() for one in (seconds, *before))
    least = (LEAST_WHOLE_SECONDS if whole else LEAST_SECONDS) / max(1, steps)
    slow_from = max(mean + 3.0 * deviation, SLOW * usual, usual + least)
    return usual if seconds > slow_from else None
