"""Gradient norm far above its recent median, in robust standard deviations."""

from __future__ import annotations

from math import inf, log, nan

from rmetric._util.errors import require
from rmetric.detectors.contract import GRADIENT, NumberDetector
from rmetric.detectors.rolling_baseline import RobustBaseline
from rmetric.records import Record


class RobustGradientNorm(NumberDetector):
    """Robust z-score of the log gradient norm, one-sided upwards.

        score = (x(t) - median) / (1.4826 MAD),    x = log |g|,    alarm above `threshold`

    Median and median absolute deviation are those of the `window` values before
    t: half of them may be spikes. Where `GradientNorm` needs one factor, this
    measures how noisy the run's own norm is. nan until `least` norms are past. A norm
    that is nan or ±inf scores inf and is not remembered; one of 0 or less has no
    logarithm and is left out.

    Its weaknesses: norms have heavier tails than a Gaussian, so single spikes of
    healthy runs alarm; faults that leave the norm alone go unseen.

    Args:
        threshold: robust standard deviations, above 0 (3.5, as in the source).
        window: earlier norms (ours: 100).
        least: norms needed before the first score (ours: 20).

    Nothing was tuned on any log.

    >>> norm = RobustGradientNorm(least=3)
    >>> for step, g in enumerate([1.0, 1.1, 1.0, 1.1, 2.0], start=1):
    ...     _ = norm.update(Record(step=step, gradient_norm=g))
    >>> round(norm.score, 1), norm.alarm
    (9.1, True)

    Source: Iglewicz, Hoaglin 1993, "How to detect and handle outliers".
    """

    FIELD = "gradient_norm"

    def __init__(self, threshold: float = 3.5, window: int = 100, least: int = 20) -> None:
        require("threshold", threshold, 0 < threshold < inf, "finite and above 0")
        super().__init__()
        self.threshold = threshold
        self._past = RobustBaseline(window, least)

    def _explain(self) -> str:
        return (
            f"gradient norm {self._value:.4g}: its logarithm is {self.score:.3g} robust standard "
            f"deviations above its recent median, more than {self.threshold:g}: {GRADIENT}"
        )

    def _read(self, record: Record) -> float | None:
        norm = record.gradient_norm
        return None if norm is None or -inf < norm <= 0 else norm

    def _judge(self, x: float) -> float:
        logarithm = log(x)
        usual = self._past.before(logarithm)
        return nan if usual is None else (logarithm - usual[0]) / usual[1]
