"""Workers whose gradient norms drift apart: σ² as it should have been normalised."""

from __future__ import annotations

from math import inf, isfinite, nan, sqrt

from rmetric._util.errors import require
from rmetric.detectors.contract import WORKERS, NumberDetector
from rmetric.detectors.rolling_baseline import RobustBaseline, plain_mean
from rmetric.records import Record
from rmetric.signals.gradient_variance import population_variance


class WorkerDispersion(NumberDetector):
    """Robust z-score of how far the workers' gradient norms lie apart, upwards.

        score = (d(t) - median) / (1.4826 MAD),    d = sqrt(σ²) / mean of |g_i|
        alarm where score > `threshold`

    σ² is the paper's variance over the workers. Divided by their mean it has no
    unit and does not grow with the gradient; against the median and the median
    absolute deviation of its own `window` values before t it is unusual or not,
    where a min-max only shows that it is the largest so far. Not a robust spread
    over the workers themselves: with four of them that would hide the one that
    is sick. A norm that is nan or ±inf scores inf and is not remembered; fewer
    than two workers, or norms whose mean is not above 0, are left out.

    Its weaknesses: what strikes all workers alike does not part them; and the
    spread of a few norms is skewed, so single records of healthy runs alarm.

    Args:
        threshold: robust standard deviations, above 0 (3.5, as in the source).
        window: earlier records with workers' norms (ours: 100).
        least: of them needed before the first score (ours: 20).

    Nothing was tuned on any log.

    >>> workers = WorkerDispersion(least=3)
    >>> for step, sick in enumerate([1.0, 1.1, 1.2, 1.1, 3.0], start=1):
    ...     _ = workers.update(Record(step=step, worker_gradient_norms=(1.0, 1.0, 1.0, sick)))
    >>> workers.alarm
    True

    Source: Fatima 2025, section 3 (σ²); Iglewicz, Hoaglin 1993 (the robust z).
    """

    def __init__(self, threshold: float = 3.5, window: int = 100, least: int = 20) -> None:
        require("threshold", threshold, 0 < threshold < inf, "finite and above 0")
        super().__init__()
        self.threshold = threshold
        self._usual = nan
        self._past = RobustBaseline(window, least)

    def _not_finite(self) -> str:
        return f"a worker's gradient norm is not finite: {WORKERS}"

    def _explain(self) -> str:
        return (
            f"the workers' gradient norms lie {self._value:.3g} of their mean apart, usually "
            f"{self._usual:.3g}: {self.score:.3g} robust standard deviations, above "
            f"{self.threshold:g}: {WORKERS}"
        )

    def _read(self, record: Record) -> float | None:
        norms = record.worker_gradient_norms
        if norms is None or len(norms) < 2:
            return None
        variance, mean = population_variance(norms), plain_mean(norms)
        if not isfinite(variance):
            return inf
        return sqrt(variance) / mean if mean > 0 else None

    def _judge(self, x: float) -> float:
        usual = self._past.before(x)
        if usual is None:
            return nan
        self._usual, deviation = usual
        return (x - self._usual) / deviation
