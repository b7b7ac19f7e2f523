"""Log loss whose excess over its own past adds up."""

from __future__ import annotations

from math import inf, nan

from rmetric.detectors.followed_loss import FollowedLoss
from rmetric.detectors.own_past import OwnPast
from rmetric.records import Record


class LossCusum:
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

    >>> cusum = LossCusum(least=4)
    >>> for step, loss in enumerate([2.0, 2.1, 2.0, 2.1, 2.2, 2.2], start=1):
    ...     _ = cusum.update(Record(step=step, training_loss=loss))
    >>> round(cusum.score, 2), cusum.alarm
    (3.49, False)

    Source: Page 1954, "Continuous inspection schemes"; Montgomery, "Introduction to
    Statistical Quality Control", for slack and limit.
    """

    __slots__ = ("_followed", "_past", "_sum", "limit", "score", "slack")

    def __init__(
        self, slack: float = 0.5, limit: float = 5.0, window: int = 100, least: int = 20
    ) -> None:
        if not 0 <= slack < inf:
            raise ValueError(f"slack is {slack}: it must be finite and at least 0")
        if not 0 < limit < inf:
            raise ValueError(f"limit is {limit}: it must be finite and above 0")
        self.slack = slack
        self.limit = limit
        self.score = nan
        self._sum = 0.0
        self._past = OwnPast(window, least)
        self._followed = FollowedLoss()

    @property
    def alarm(self) -> bool:
        return self.score > self.limit

    @property
    def reason(self) -> str:
        if not self.alarm:
            return ""
        seen = f"{self._followed.name} {self._followed.loss:.4g}"
        if self.score == inf:
            return seen
        return (
            f"{seen}: what it lay above its recent mean adds up to {self.score:.3g} standard "
            f"deviations, above {self.limit:g}"
        )

    def update(self, record: Record) -> LossCusum:
        """Take the next record; one without a loss changes nothing."""
        x = self._followed.log_of(record)
        if x is None:
            return self
        if x != x:
            self.score = inf
            return self
        usual = self._past.mean_and_deviation()
        if usual is None:
            self.score = nan
        else:
            mean, deviation = usual
            begun = 0.0 if self._sum > self.limit else self._sum
            self.score = self._sum = max(0.0, begun + (x - mean) / deviation - self.slack)
        self._past.remember(x)
        return self
