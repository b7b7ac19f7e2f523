"""Bayesian online change-point detection on the log loss."""

from __future__ import annotations

from math import inf, lgamma, log, nan, pi

import numpy as np

from rmetric._util.errors import require
from rmetric.detectors.contract import LossDetector
from rmetric.detectors.rolling_baseline import RollingBaseline

#: Standard deviations; further out nothing is learnt.
FURTHEST = 20.0
#: Prior of the Gaussian's mean and variance, for values in standard deviations: a
#: mean that may be far from 0, a variance of about 1 (weakly informative; ours).
MEAN_WEIGHT, SHAPE, SCALE = 0.1, 1.0, 1.0
#: A stretch of more records than this counts as one of as many.
LONGEST = 1000
#: Stretches kept beside each other, the most probable ones.
KEPT = 64

_COUNTS = np.arange(LONGEST + 1)
_WEIGHTS = MEAN_WEIGHT + _COUNTS
_SHAPES = SHAPE + _COUNTS / 2
#: What of the log density of Student's t goes by the length of the stretch alone.
_CONSTANTS = np.array([lgamma(a + 0.5) - lgamma(a) - 0.5 * log(2 * a * pi) for a in _SHAPES])


class BayesianChangePoint(LossDetector):
    """Probability that a stretch of higher loss has begun a short while ago.

        P(r, z(1..t)): r = 0 with probability `hazard`, else r grows by one
        score = P(r <= `recent` and the mean of z in it > `shift`),    alarm above 1/2

    z is the log loss in standard deviations from the mean of the `window` values
    before it, which takes the trend out; r is the number of records since the
    last change. Within a stretch z is Gaussian with unknown mean and variance
    (a normal-gamma prior, so it is predicted by Student's t). The 64 most
    probable stretches are kept: O(1) a record. nan until `recent` values were
    judged. A loss that is nan or ±inf scores inf and is not remembered; one of 0
    or less is left out.

    Its weakness: it shows that something changed, and a change of data or of the
    learning rate is a change too.

    Args:
        hazard: of a change at each record, between 0 and 1 (1/250, as in the
            source's first example).
        recent: records that a new stretch may have, at least 1 (ours: 20).
        shift: standard deviations above its past, at least 0 (ours: 1).
        window: earlier records that z is taken against (ours: 100).
        least: of them needed (ours: 20).

    Nothing was tuned on any log.

    >>> from rmetric import Record
    >>> detector = BayesianChangePoint(least=4, recent=4)
    >>> for step, loss in enumerate([2.0, 2.1] * 8 + [2.6, 2.7, 2.6, 2.7], start=1):
    ...     _ = detector.update(Record(step=step, training_loss=loss))
    >>> detector.alarm
    True

    Source: Adams, MacKay 2007, "Bayesian online changepoint detection"; Murphy 2007,
    "Conjugate Bayesian analysis of the Gaussian distribution".
    """

    def __init__(
        self,
        hazard: float = 1 / 250,
        recent: int = 20,
        shift: float = 1.0,
        window: int = 100,
        least: int = 20,
    ) -> None:
        require("hazard", hazard, 0 < hazard < 1, "between 0 and 1")
        require("recent", recent, recent >= 1, "at least 1 record")
        require("shift", shift, 0 <= shift < inf, "finite and at least 0")
        super().__init__(0.5)
        self.hazard, self.recent, self.shift = hazard, recent, shift
        self._judged = 0
        self._past = RollingBaseline(window, least)
        # One entry for each stretch, the newest first; it begins with nothing seen.
        self._counts = np.zeros(1, dtype=np.int64)
        self._probabilities = np.ones(1)
        self._means = np.zeros(1)
        self._rates = np.full(1, SCALE)

    def _judge(self, x: float) -> float:
        usual = self._past.before(x)
        if usual is not None:
            z = (x - usual[0]) / usual[1]
            self._take(min(max(z, -FURTHEST), FURTHEST))
            self._judged += 1
        if self._judged <= self.recent:
            return nan
        risen = (self._counts <= self.recent) & (self._means > self.shift)
        return float(self._probabilities[risen].sum())

    def _why(self) -> str:
        return (
            f": with probability {self.score:.3g} its logarithm went up by more than "
            f"{self.shift:g} standard deviations within the last {self.recent} records"
        )

    def _take(self, z: float) -> None:
        counts, means, rates = self._counts, self._means, self._rates
        weights, shapes = _WEIGHTS[counts], _SHAPES[counts]
        away = z - means
        # Student's t: 2 `shapes` degrees of freedom, scale² `spread` / `shapes`.
        spread = rates * (weights + 1) / weights
        gain = away * away / (2 * spread)
        density = _CONSTANTS[counts] - 0.5 * np.log(spread / shapes)
        density -= (shapes + 0.5) * np.log1p(gain)
        grown = self._probabilities * np.exp(density - density.max())
        grown /= grown.sum()
        self._means = np.concatenate([[0.0], means + away / (weights + 1)])
        self._rates = np.concatenate([[SCALE], rates + gain * rates])
        self._counts = np.concatenate([[0], np.minimum(counts + 1, LONGEST)])
        self._probabilities = np.concatenate([[self.hazard], grown * (1 - self.hazard)])
        self._forget_the_least_probable()

    def _forget_the_least_probable(self) -> None:
        if len(self._counts) <= KEPT:
            return
        kept = np.arange(len(self._counts)) != 1 + self._probabilities[1:].argmin()
        self._counts, self._means = self._counts[kept], self._means[kept]
        self._rates, self._probabilities = self._rates[kept], self._probabilities[kept]
        self._probabilities /= self._probabilities.sum()
