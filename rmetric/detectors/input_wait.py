"""Steps that wait for their data."""

from __future__ import annotations

from math import inf
from statistics import median

from rmetric.detectors.rolling_baseline import Stretches
from rmetric.records import Record

#: Steps that wait for data this share of their time are input-bound.
_INPUT_BOUND = 0.25


class InputWait:
    """The share of a step's time in which it waits for data, after the warm-up."""

    def __init__(self) -> None:
        self._shares = Stretches()

    def update(self, record: Record) -> None:
        """Take the next record; one without both times changes nothing."""
        seconds, wait = record.step_seconds, record.data_wait_seconds
        if seconds and wait is not None and 0 <= wait <= seconds < inf:
            self._shares.add(record.step, wait / seconds)

    @property
    def words(self) -> str:
        """``input-bound: 43 % of the step waits for data``; empty below a quarter."""
        if not self._shares.is_known:
            return ""
        shares = self._shares.levels
        share = median(shares[len(shares) // 8 :])
        waits = f"input-bound: {100 * share:.0f} % of the step waits for data"
        return waits if share > _INPUT_BOUND else ""
