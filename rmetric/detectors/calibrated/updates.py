"""Statistics of the update norm."""

from __future__ import annotations

from math import inf, log

from rmetric.detectors.calibrated.source import EvidenceSource, LaggedPast, amount, clipped, times
from rmetric.detectors.contract import roll_back
from rmetric.records import Record

_FAST_SMOOTHING = 0.3
_DOWN, _UP = -3.0, 5.0
#: An update that is half as large again is itself unusual.
_UNUSUAL = log(1.5)
#: Below this share of its peak the scheduled rate predicts the update badly.
_FINISHED = 0.01


class Updates(EvidenceSource):
    """Updates of the weights that are larger than the schedule explains.

        update_size  EWMA (0.3) of log(update norm / scheduled rate) above its median over 80
                     steps that ended 10 ago: the logarithm of how many times too large

    Each is cut to -3 and 5. The scheduled rate is needed: without it a warm-up would look like a
    fault. Steps at less than 1 % of the highest rate so far are left out.
    """

    NAMES = ("update_size",)
    LABEL = "updates"

    def __init__(self) -> None:
        super().__init__()
        self._ratios = LaggedPast(window=80, lag=10, least=12)
        self._peak_rate = 0.0
        self._norm = self._usual = 0.0  # of the last record, and what its rate explains; logarithms

    def update(self, record: Record) -> None:
        norm, rate = record.update_norm, record.learning_rate
        if norm is None or rate is None or not 0 < norm < inf or not 0 < rate < inf:
            return
        self._peak_rate = max(self._peak_rate, rate)
        if rate <= _FINISHED * self._peak_rate:
            return
        # Not the logarithm of the quotient, which may be beyond the largest number.
        ratio = log(norm) - log(rate)
        if self._ratios.ready:
            self._norm, self._usual = log(norm), self._ratios.usual + log(rate)
            above = clipped(ratio - self._ratios.usual, _DOWN, _UP)
            self.note("update_size", record.step, above, _UNUSUAL)
            self.smooth("update_size", above, _FAST_SMOOTHING)
        self._ratios.remember(ratio)

    def restart(self) -> None:
        super().restart()
        self._ratios.forget()
        self._peak_rate = 0.0

    def words(self, name: str) -> str:
        usual = f"usual {amount(self._usual)} at this learning rate"
        size = f"{times(self.statistics[name])}, smoothed"
        return f"update norm {amount(self._norm)}, {usual} ({size})"

    def advice(self, name: str, since: int) -> str:
        return f"check the learning rate and the optimiser's state, or {roll_back(since)}"
