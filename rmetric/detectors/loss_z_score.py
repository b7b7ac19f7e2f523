"""Loss far from its recent mean, the paper's third baseline."""

from __future__ import annotations

from collections import deque
from math import inf, nan, sqrt

from rmetric._util.errors import require
from rmetric.detectors.contract import LOSS, NumberDetector
from rmetric.signals.gradient_variance import mean_and_variance


class LossZScore(NumberDetector):
    """Distance of the validation loss from its recent past, in standard deviations.

        score = |L(t) - m| / s,    alarm where score > `threshold`

    m and s are the mean and the population standard deviation of the `window`
    losses before t, the current one left out. nan until `least` losses are
    past; inf where the past is constant and the loss is another. A loss that is
    nan or ±inf scores inf and is not remembered.

    Its weaknesses: a steady fall of the loss widens s and hides a rise, and a
    sudden improvement alarms like a sudden rise.

    Args:
        window: earlier evaluations, at least `least` (ours: 20).
        threshold: standard deviations, above 0 (the usual 3).
        least: losses needed before the first score, at least 2 (ours: 5).

    The window and the threshold are conventional and were not tuned on any log.

    >>> from rmetric import Record
    >>> z = LossZScore()
    >>> for step, loss in enumerate([2.0, 2.2, 2.0, 2.2, 2.1, 2.9]):
    ...     _ = z.update(Record(step=step, validation_loss=loss))
    >>> round(z.score, 2), z.alarm
    (8.94, True)
    """

    FIELD = "validation_loss"

    def __init__(self, window: int = 20, threshold: float = 3.0, least: int = 5) -> None:
        require("least", least, 2 <= least <= window, f"from 2 to the window of {window} losses")
        require("threshold", threshold, 0 < threshold < inf, "finite and above 0")
        super().__init__()
        self.threshold = threshold
        self.least = least
        self._past: deque[float] = deque(maxlen=window)

    def _explain(self) -> str:
        return (
            f"validation loss {self._value:.4g} is {self.score:.3g} standard deviations from its "
            f"recent mean, above {self.threshold:g}: {LOSS}"
        )

    def _judge(self, x: float) -> float:
        past = tuple(self._past)
        self._past.append(x)
        if len(past) < self.least:
            return nan
        mean, variance = mean_and_variance(past)
        away = abs(x - past[0] - mean)
        if variance > 0:
            return away / sqrt(variance)
        return inf if away > 0 else 0.0
