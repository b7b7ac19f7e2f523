"""ΔL, how far the loss stands above its recent past."""

from __future__ import annotations

from math import inf, isfinite, nan


class LossDrift:
    """Validation loss minus the mean of the evaluations before it (ΔL, nats).

        ΔL(t) = L(t) - mean of the previous `window` losses (fewer at first)

    nan at the first evaluation, which has no past. A loss that is nan or ±inf gives +inf, "very
    large", and is not remembered: one overflow must not hide what comes after. Its weakness: while
    the loss still falls fast ΔL is negative, so a rise back to the mean of the past goes unseen.

    Amortised O(1): the mean is held as sums of differences to a loss in the window, over blocks of
    `window` losses: no rounding error builds up, and where the loss stands still ΔL is exactly 0.
    (Where finite losses are so huge that a sum overflows, ΔL is ±inf or nan until they have left.)

    Args:
        window: number of earlier evaluations, at least 1 (paper: 100).
        absolute: return |ΔL|, as the paper's case study does.

    >>> drift = LossDrift()
    >>> [drift.update(loss) for loss in (3.0, 2.0, 3.0)]
    [nan, -1.0, 0.5]

    Source: Fatima 2025, section 3 (ΔL against the moving average).
    """

    __slots__ = (
        "_absolute",
        "_block",
        "_count",
        "_origin",
        "_sum",
        "_tail_sums",
        "value",
        "window",
    )

    def __init__(self, window: int = 100, *, absolute: bool = False) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: it must be at least 1 evaluation")
        self.window = window
        self.value = nan
        self._absolute = absolute
        self._count = 0  # losses that the mean is taken over
        self._origin = nan  # the last loss of the previous block; at first the first loss
        self._block: list[float] = []  # losses of the block being filled
        self._sum = 0.0  # of their differences to the origin
        self._tail_sums = [0.0] * window  # the same of the previous block, from each place on

    def update(self, loss: float) -> float:
        """Take the loss of one evaluation; return ΔL against those before it."""
        if not isfinite(loss):
            self.value = inf
            return inf
        block, count = self._block, self._count
        if count:
            difference = loss - self._origin
            # The past is this block and, of the previous one, the end that fits in the window.
            value = difference - (self._sum + self._tail_sums[len(block)]) / count
            self.value = value = abs(value) if self._absolute else value
        else:
            self._origin, difference, value = loss, 0.0, nan
        if count < self.window:
            self._count = count + 1
        self._sum += difference
        block.append(loss)
        if len(block) == self.window:
            self._origin = loss
            self._tail_sums = tail_sums(block)
            self._sum = 0.0
            block.clear()
        return value


def tail_sums(block: list[float]) -> list[float]:
    """Sums of the differences to the last of `block`, from each place to the end."""
    sums, total = [0.0] * len(block), 0.0
    for place in range(len(block) - 1, -1, -1):
        total += block[place] - block[-1]
        sums[place] = total
    return sums
