"""Validation loss that rises twice in a row, the paper's second baseline."""

from __future__ import annotations

from math import inf, nan

from rmetric._util.errors import require
from rmetric.detectors.contract import LOSS
from rmetric.records import Record


class LossRise:
    """Counts how often in a row the validation loss has risen.

        score = k where L(t) > L(t-1) > ... > L(t-k),    alarm where k >= `times`

    A loss that is nan or ±inf counts as a rise and is not compared against.
    Its weakness: the size of a rise does not matter, so evaluation noise alone
    gives two rises about once in six evaluations on a plateau.

    Args:
        times: rises in a row that are an alarm, at least 1 (the baseline: 2).

    >>> rise = LossRise()
    >>> [rise.update(Record(step=i, validation_loss=x)).alarm
    ...  for i, x in enumerate([3.0, 2.0, 2.1, 2.2, 2.0])]
    [False, False, False, True, False]
    """

    def __init__(self, times: int = 2) -> None:
        require("times", times, times >= 1, "at least 1 rise")
        self.times = times
        self.score = nan
        self._previous = self._loss = nan  # the last finite loss, the last of any kind

    @property
    def alarm(self) -> bool:
        return self.score >= self.times

    @property
    def reason(self) -> str:
        if not self.alarm:
            return ""
        return (
            f"validation loss rose {self.score:.0f} times in a row, to {self._loss:.4g}; "
            f"{self.times} are an alarm: {LOSS}"
        )

    def update(self, record: Record) -> LossRise:
        """Take the next record; one without a validation loss changes nothing."""
        loss = record.validation_loss
        if loss is None:
            return self
        self._loss = loss
        so_far = 0.0 if self.score != self.score else self.score
        if not -inf < loss < inf:
            self.score = so_far + 1
        else:
            self.score = so_far + 1 if loss > self._previous else 0.0
            self._previous = loss
        return self
