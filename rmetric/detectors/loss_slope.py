"""Validation loss that climbs along a line, beyond what its noise explains."""

from __future__ import annotations

from collections import deque
from math import inf, nan, sqrt

from rmetric._util.errors import require
from rmetric.detectors.contract import LOSS, NumberDetector


class LossSlope(NumberDetector):
    """The least-squares slope of the last validation losses, in its own standard errors.

        score = b / s,    alarm where score > `errors`
        b = sum of x (L - mean of L) / sum of x²
        s = sqrt(sum of squared residuals / (n - 2) / sum of x²)

    over the last n = `window` losses, the current one included, where x counts
    evaluations from their middle: they are taken as evenly spaced. nan until n
    are there; on an exact line inf, -inf or, where it is level, 0. A loss that
    is nan or ±inf scores inf and is not remembered.

    Its weaknesses: a line does not fit a sudden step, which is seen only at its
    second evaluation, however high it is; and noise alone gives such a slope
    about once in 23 windows on a plateau.

    Args:
        window: losses the line is fitted to, at least 3 (ours: 5).
        errors: standard errors, above 0 (ours: 2.5, as a clean step of five
            losses scores 1.7 at its first evaluation and 3 at its second).

    Neither was tuned on any log.

    >>> from rmetric import Record
    >>> slope = LossSlope()
    >>> for step, loss in enumerate([2.0, 2.1, 2.1, 2.3, 2.4]):
    ...     _ = slope.update(Record(step=step, validation_loss=loss))
    >>> round(slope.score, 2), slope.alarm
    (6.12, True)
    """

    FIELD = "validation_loss"
    BOUND = "errors"

    def __init__(self, window: int = 5, errors: float = 2.5) -> None:
        require("window", window, window >= 3, "at least 3 losses")
        require("errors", errors, 0 < errors < inf, "finite and above 0")
        super().__init__()
        self.window = window
        self.errors = errors
        self._last: deque[float] = deque(maxlen=window)

    def _explain(self) -> str:
        return (
            f"validation loss climbs from {self._last[0]:.4g} to {self._value:.4g} in "
            f"{self.window} evaluations: {self.score:.3g} standard errors, above "
            f"{self.errors:g}: {LOSS}"
        )

    def _judge(self, x: float) -> float:
        self._last.append(x)
        return self._steepness() if len(self._last) == self.window else nan

    def _steepness(self) -> float:
        # About the first loss: a constant window gives exactly 0.
        rises = [loss - self._last[0] for loss in self._last]
        mean = sum(rises) / self.window
        places = [i - (self.window - 1) / 2 for i in range(self.window)]
        spread = sum(x * x for x in places)
        slope = sum(x * (y - mean) for x, y in zip(places, rises, strict=True)) / spread
        residuals = [y - mean - slope * x for x, y in zip(places, rises, strict=True)]
        error = sqrt(sum(r * r for r in residuals) / (self.window - 2) / spread)
        if error > 0:
            return slope / error
        return slope * inf if slope else 0.0
