"""The Page-Hinkley test on the loss."""

from __future__ import annotations

from math import inf, isfinite, nan

from rmetric._util.errors import require
from rmetric.detectors.contract import LossDetector


class PageHinkley(LossDetector):
    """Summed rise of the loss above its mean since the start, upwards.

        U(t) = `forgetting` U(t-1) + L(t) - mean of L up to t - `slack`
        score = U(t) - least U so far,    alarm where score > `limit`

    nan until `least` losses are there. After an alarm it starts anew. A loss that
    is nan or ±inf scores inf and is not remembered.

    Its weaknesses: the limit is in nats times records, so a loss logged rarely,
    or a small one, hardly reaches it; the mean holds the whole fall since the
    start, so late rises below it never count.

    Args:
        least: losses before the first score, at least 1 (the library's 30).
        slack: nats that are let pass, at least 0 (the library's 0.005).
        limit: nats summed, above 0 (the library's 50).
        forgetting: of the sum at each loss, above 0 and at most 1 (the library's
            0.9999).

    All four are the defaults of `PageHinkley` in river, which is followed at every
    record (its mode ``up``) where all losses are finite.

    >>> from rmetric import Record
    >>> test = PageHinkley(least=3, limit=3.0)
    >>> for step, loss in enumerate([2.0, 2.1, 2.0, 4.0, 6.0], start=1):
    ...     _ = test.update(Record(step=step, training_loss=loss))
    >>> round(test.score, 2), test.alarm
    (4.25, True)

    Source: Page 1954, "Continuous inspection schemes"; Hinkley 1971; river's
    documentation of `drift.PageHinkley`.
    """

    ON_LOGARITHM = False

    def __init__(
        self, least: int = 30, slack: float = 0.005, limit: float = 50.0, forgetting: float = 0.9999
    ) -> None:
        require("least", least, least >= 1, "at least 1 loss")
        require("slack", slack, 0 <= slack < inf, "finite and at least 0")
        require("limit", limit, 0 < limit < inf, "finite and above 0")
        require("forgetting", forgetting, 0 < forgetting <= 1, "above 0 and at most 1")
        super().__init__(limit)
        self.least, self.slack, self.limit, self.forgetting = least, slack, limit, forgetting
        self._start()

    def _start(self) -> None:
        self._count = 0
        self._mean = self._sum = 0.0
        self._least_sum = inf

    def _judge(self, x: float) -> float:
        alarmed = self._count >= self.least and self._sum - self._least_sum > self.limit
        # Also where finite losses were so huge that the sums are lost.
        if alarmed or not isfinite(self._sum):
            self._start()
        self._count += 1
        self._mean += (x - self._mean) / self._count
        self._sum = self.forgetting * self._sum + (x - self._mean) - self.slack
        self._least_sum = min(self._least_sum, self._sum)
        return self._sum - self._least_sum if self._count >= self.least else nan

    def _why(self) -> str:
        return (
            f": above its mean of {self._mean:.4g} it adds up to {self.score:.3g}, "
            f"above {self.limit:g}"
        )
