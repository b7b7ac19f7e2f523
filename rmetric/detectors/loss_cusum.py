"""Log loss whose excess over its own past adds up."""

from __future__ import annotations

from math import inf, nan

from rmetric._util.errors import require
from rmetric.detectors.contract import LossDetector
from rmetric.detectors.rolling_baseline import RollingBaseline


class LossCusum(LossDetector):
    """Cumulative sum of how far the log loss lies above its own past.

        S(t) = max(0, S(t-1) + (x(t) - m) / s - `slack`),    x = log L
        score = S,    alarm where score > `limit`; S then starts again from 0

    m and s are the mean and the standard deviation of the `window` values before
    t, so the chart starts by itself. A loss that is nan or ±inf scores inf and is
    not remembered; one of 0 or less is left out.

    Its weaknesses: the values of a trending loss are not independent, as the
    theory of its limits wants; and a rise slower than the window goes unseen.

    Args:
        slack: standard deviations that are let pass, at least 0 (the usual 0.5,
            for shifts of one standard deviation).
        limit: standard deviations summed, above 0 (the usual 5).
        window: earlier records (ours: 100).
        least: records needed before the first score (ours: 20).

    Nothing was tuned on any log.

    >>> from rmetric import Record
    >>> cusum = LossCusum(least=4)
    >>> for step, loss in enumerate([2.0, 2.1, 2.0, 2.1, 2.2, 2.2], start=1):
    ...     _ = cusum.update(Record(step=step, training_loss=loss))
    >>> round(cusum.score, 2), cusum.alarm
    (3.49, False)

    Source: Page 1954, "Continuous inspection schemes"; Montgomery, "Introduction to
    Statistical Quality Control", for slack and limit.
    """

    def __init__(
        self, slack: float = 0.5, limit: float = 5.0, window: int = 100, least: int = 20
    ) -> None:
        require("slack", slack, 0 <= slack < inf, "finite and at least 0")
        require("limit", limit, 0 < limit < inf, "finite and above 0")
        super().__init__(limit)
        self.slack = slack
        self.limit = limit
        self._sum = 0.0
        self._past = RollingBaseline(window, least)

    def _judge(self, x: float) -> float:
        usual = self._past.before(x)
        if usual is None:
            return nan
        mean, deviation = usual
        begun = 0.0 if self._sum > self.limit else self._sum
        self._sum = max(0.0, begun + (x - mean) / deviation - self.slack)
        return self._sum

    def _why(self) -> str:
        return (
            f": what it lay above its recent mean adds up to {self.score:.3g} standard "
            f"deviations, above {self.limit:g}"
        )
