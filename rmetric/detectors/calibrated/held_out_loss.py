"""Statistics of losses on fixed data: validation loss and probe loss."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite, nan

from rmetric.detectors.advice import roll_back
from rmetric.detectors.calibrated.source import EvidenceSource, bounded
from rmetric.records import Record

_EVALUATIONS = 8
_LEAST_CHANGE = 0.003
_SMOOTHING = 0.3
_PER_CENT = 0.02
_WARM_UP, _SETTLED = 5, 15


class ValidationLoss(EvidenceSource):
    """Rise of the validation loss above its best.

        validation_rise  the lower of the last two evaluations above the best before, in
                         usual changes from one evaluation to the next (median of the last
                         eight, at least 0.3 %)

    Two in a row, since a single evaluation can be noisy.
    """

    NAMES = ("validation_rise",)
    LABEL = "validation loss"

    def __init__(self) -> None:
        super().__init__()
        self._changes: deque[float] = deque(maxlen=_EVALUATIONS)
        self._last = self._best = nan
        self._before = nan
        self._step = 0

    def update(self, record: Record) -> None:
        loss = record.validation_loss
        if loss is None or not isfinite(loss):
            return
        loss = bounded(loss)
        if self._last == self._last:
            if len(self._changes) >= _EVALUATIONS // 2:
                usual = sorted(self._changes)[len(self._changes) // 2]
                least = _LEAST_CHANGE * abs(self._best)
                rise = (loss - self._best) / max(usual, least, 1e-9)
                if self._before == self._before:
                    self.statistics["validation_rise"] = min(rise, self._before)
                    self.begun["validation_rise"] = self._step  # the earlier of the two
                self._before = rise
            self._changes.append(abs(loss - self._last))
        self._best = loss if self._best != self._best else min(self._best, loss)
        self._last = loss
        self._step = record.step

    def restart(self) -> None:
        super().restart()
        self._changes.clear()
        self._last = self._best = self._before = nan

    def words(self, name: str) -> str:
        return f"validation loss {self._last:.4g}, best {self._best:.4g}"

    def advice(self, name: str, since: int) -> str:
        return f"stop where the training loss still falls (overfitting), else {roll_back(since)}"


class ProbeLoss(EvidenceSource):
    """Rise of the loss on a small batch that stays the same: what the weights have lost.

        probe_rise  EWMA (0.3) of the probe loss above the lowest that it was after the fifth,
                    in units of 2 % of that, at least 0.001; from the sixteenth on

    No noise of the data is in it, so it tells harder data from damaged weights.
    """

    NAMES = ("probe_rise",)
    LABEL = "probe loss"

    def __init__(self) -> None:
        super().__init__()
        self._level = nan
        self._lowest = inf
        self._count = 0

    def update(self, record: Record) -> None:
        loss = record.probe_loss
        if loss is None or not isfinite(loss):
            return
        loss = bounded(loss)
        self._count += 1
        first = self._level != self._level
        self._level = loss if first else self._level + _SMOOTHING * (loss - self._level)
        if self._count > _SETTLED:
            unit = _PER_CENT * max(abs(self._lowest), 0.05)
            self.statistics["probe_rise"] = (self._level - self._lowest) / unit
            self.note("probe_rise", record.step, (loss - self._lowest) / unit, 1.0)
        if self._count > _WARM_UP:
            self._lowest = min(self._lowest, self._level)

    def restart(self) -> None:
        super().restart()
        self._level = nan
        self._lowest = inf
        self._count = 0

    def words(self, name: str) -> str:
        return f"probe loss {self._level:.4g} (smoothed), lowest {self._lowest:.4g}"

    def advice(self, name: str, since: int) -> str:
        return roll_back(since)
