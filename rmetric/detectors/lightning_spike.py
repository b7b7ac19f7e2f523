"""The rule of Lightning's SpikeDetection callback."""

from __future__ import annotations

from collections import deque
from math import inf, nan

from rmetric._util.errors import require
from rmetric.detectors.contract import LossDetector
from rmetric.detectors.rolling_baseline import plain_mean


class LightningSpike(LossDetector):
    """A loss that is worse than the last and far from the mean of the last ten.

        score = |L(t) - m| / |m| where L(t) > L(last), else 0,    alarm where score >= `factor`

    m is the mean of the last `window` losses that were not a spike; a spike enters
    neither m nor L(last). A loss that is nan or ±inf is a spike.

    It is the callback's relative tolerance with all its defaults; it has an
    absolute one too, off by default, which is left out. The callback ends the
    training at the first spike; this goes on, with the spikes kept out of m, as
    the callback does after a restart. It follows the validation loss where a run
    logs no training loss.

    Its weakness: the loss must be three times its mean, which few failing runs
    reach before they are lost; and after a lasting jump it never falls silent.

    Args:
        factor: multiples of the mean, above 0 (its default: 2).
        window: losses, at least 1 (its default: 10).

    >>> from rmetric import Record
    >>> spike = LightningSpike()
    >>> [spike.update(Record(step=i, training_loss=x)).alarm
    ...  for i, x in enumerate([2.0, 2.1, 4.0, 8.5, 2.0])]
    [False, False, False, True, False]

    Source: lightning.ai documentation, "SpikeDetection" of lightning.pytorch.callbacks
    and lightning.fabric (2.6).
    """

    ON_LOGARITHM = False
    REACHED = True

    def __init__(self, factor: float = 2.0, window: int = 10) -> None:
        require("factor", factor, 0 < factor < inf, "finite and above 0")
        require("window", window, window >= 1, "at least 1 loss")
        super().__init__(factor)
        self.factor = factor
        self._last = self._mean = nan
        self._recent: deque[float] = deque(maxlen=window)

    def _judge(self, x: float) -> float:
        distance = self._distance(x)
        if not distance >= self.factor:
            self._recent.append(x)
            self._last = x
        return distance

    def _why(self) -> str:
        return (
            f", usual {self._mean:.4g} ({self.score:.3g} times that away from it, "
            f"limit {self.factor:g})"
        )

    def _distance(self, loss: float) -> float:
        if not self._recent:
            return nan
        self._mean = mean = plain_mean(self._recent)
        if loss <= self._last:
            return 0.0
        return abs(loss - mean) / abs(mean) if mean else inf
