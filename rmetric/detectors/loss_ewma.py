"""Smoothed log loss above the control limit of its own past."""

from __future__ import annotations

from math import inf, nan, sqrt

from rmetric._util.errors import require
from rmetric.detectors.contract import LossDetector
from rmetric.detectors.rolling_baseline import RollingBaseline


class LossEwma(LossDetector):
    """EWMA control chart of the log loss, one-sided upwards.

        z(t) = a x(t) + (1 - a) z(t-1),    x = log L,    z(first) = x(first)
        score = (z - m) / (s sqrt(a / (2 - a))),    alarm where score > `limit`

    m and s are the mean and the standard deviation of the `window` values before
    t: the chart starts by itself and its limits move along. The trend is not
    taken out: while the loss falls z lies below m and s holds the fall, so early
    rises must be large to be seen. Of L the logarithm, as the noise of a loss
    goes with its height, and units cancel. A loss that is nan or ±inf scores inf
    and is not remembered; one of 0 or less has no logarithm and is left out.

    Its weakness: whatever raises the loss for some ten records alarms, a change
    of data as much as a fault; and the limits follow a rise that lasts.

    Args:
        smoothing: a, above 0 and at most 1 (usual in the literature: 0.2).
        limit: standard deviations of z, above 0 (the usual 3).
        window: earlier records (ours: 100).
        least: records needed before the first score (ours: 20).

    Nothing was tuned on any log.

    >>> from rmetric import Record
    >>> ewma = LossEwma(least=4)
    >>> for step, loss in enumerate([2.0, 2.1] * 5 + [2.4, 2.6], start=1):
    ...     _ = ewma.update(Record(step=step, training_loss=loss))
    >>> ewma.reason  # doctest: +ELLIPSIS
    'training loss 2.6: its smoothed logarithm is 0.0584 above its recent mean, 3.43 ...'

    Source: Roberts 1959, "Control chart tests based on geometric moving averages";
    Lucas, Saccucci 1990 for smoothing and limit.
    """

    def __init__(
        self, smoothing: float = 0.2, limit: float = 3.0, window: int = 100, least: int = 20
    ) -> None:
        require("smoothing", smoothing, 0 < smoothing <= 1, "above 0 and at most 1")
        require("limit", limit, 0 < limit < inf, "finite and above 0")
        super().__init__(limit)
        self.smoothing = smoothing
        self.limit = limit
        self._level = self._rise = nan
        self._past = RollingBaseline(window, least)

    def _judge(self, x: float) -> float:
        first = self._level != self._level
        self._level = x if first else self._level + self.smoothing * (x - self._level)
        usual = self._past.before(x)
        if usual is None:
            return nan
        mean, deviation = usual
        self._rise = self._level - mean
        return self._rise / (deviation * sqrt(self.smoothing / (2 - self.smoothing)))

    def _why(self) -> str:
        return (
            f": its smoothed logarithm is {self._rise:.3g} above its recent mean, "
            f"{self.score:.3g} standard deviations where {self.limit:g} are the limit"
        )
