"""The distance of two snapshots that their cost allows. No torch here."""

from __future__ import annotations

from math import ceil
from statistics import median

#: Share of the time of the training that snapshots may take.
BUDGET = 0.01
#: Snapshots that are timed: the first one has no state of the optimiser.
_TIMED = 3
#: Bounds of the distance, in steps; it is a multiple of the first.
LEAST, MOST = 10, 1000


class SnapshotPace:
    """Finds the distance k of two snapshots from the times of the first ones.

        k = cost / (0.01 step),  from 10 to 1000, rounded up to a multiple of 10

    A step is the median one. The cost of a snapshot is the time until the training goes on, and
    on an accelerator, where the copy runs beside the next step, what that step takes longer too.

    Args:
        beside: copies run beside the training.

    >>> pace = SnapshotPace(beside=True)
    >>> for step in range(31):
    ...     if step % 10 == 0:
    ...         pace.snapshot_taken(0.01)
    ...     pace.step_made(0.55 if step % 10 == 0 else 0.2)
    >>> pace.distance, pace.words
    (180, 'a snapshot takes 0.36 s, a step 0.2 s')
    """

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._snapshots: list[float] = []
        self._after: list[float] = []  # steps after a snapshot, and all others
        self._others: list[float] = []
        self._is_after = False

    def snapshot_taken(self, seconds: float) -> None:
        """Take the time that a snapshot held the training up."""
        self._snapshots.append(seconds)
        self._is_after = True

    def step_made(self, seconds: float) -> None:
        """Take the time from one boundary between two steps to the next."""
        (self._after if self._is_after else self._others).append(seconds)
        self._is_after = False

    @property
    def is_known(self) -> bool:
        return len(self._after) > _TIMED and bool(self._others)

    @property
    def distance(self) -> int:
        """Steps from one snapshot to the next; only where `is_known`."""
        steps = self._cost / (BUDGET * max(self._step, 1e-9))
        return min(max(LEAST, LEAST * ceil(round(steps / LEAST, 6))), MOST)

    @property
    def words(self) -> str:
        return f"a snapshot takes {self._cost:.2g} s, a step {self._step:.2g} s"

    @property
    def _step(self) -> float:
        return median(self._others)

    @property
    def _cost(self) -> float:
        longer = max(median(self._after[1:]) - self._step, 0.0) if self._beside else 0.0
        return median(self._snapshots[1:]) + longer
