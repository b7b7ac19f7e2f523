"""Gradient norm far above its recent median."""

from __future__ import annotations

from collections import deque
from math import inf, nan
from statistics import median

from rmetric._util.errors import require
from rmetric.detectors.contract import GRADIENT, NumberDetector


class GradientNorm(NumberDetector):
    """The gradient norm as a multiple of its trailing median.

        score = |g(t)| / median of the `window` norms before t,    alarm where score > `factor`

    A ratio needs no unit, so one factor serves small and large models; a median
    is not moved by the spikes it is there to see. nan until `least` norms are
    past. A norm that is nan or ±inf scores inf and is not remembered.

    Its weakness: faults that leave the norm alone (stale, mislabelled or
    repeated data) go unseen, and so does a slow growth over the whole window.

    Args:
        factor: multiple of the median that is an alarm, above 1 (ours: 3).
        window: earlier norms, at least `least` (ours: 20).
        least: norms needed before the first score, at least 1 (ours: 5).

    None of the three was tuned on any log.

    >>> from rmetric import Record
    >>> norm = GradientNorm(least=2)
    >>> [norm.update(Record(step=i, gradient_norm=g)).score for i, g in enumerate([1, 3, 8.0])]
    [nan, nan, 4.0]
    """

    FIELD = "gradient_norm"
    BOUND = "factor"

    def __init__(self, factor: float = 3.0, window: int = 20, least: int = 5) -> None:
        require("factor", factor, 1 < factor < inf, "finite and above 1")
        require("least", least, 1 <= least <= window, f"from 1 to the window of {window} norms")
        super().__init__()
        self.factor = factor
        self.least = least
        self._usual = nan
        self._past: deque[float] = deque(maxlen=window)

    def _explain(self) -> str:
        return (
            f"gradient norm {self._value:.4g}, usual {self._usual:.4g} ({self.score:.3g} times, "
            f"limit {self.factor:g}): {GRADIENT}"
        )

    def _judge(self, x: float) -> float:
        known = len(self._past) >= self.least
        self._usual = usual = median(self._past) if known else nan
        self._past.append(x)
        if not known or usual > 0:
            return x / usual
        return inf if x > 0 else 0.0
