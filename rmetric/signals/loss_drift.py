"""ΔL, how far the loss stands above its recent past."""

from __future__ import annotations

from math import inf, nan


class LossDrift:
    """Validation loss minus the mean of the evaluations before it (ΔL, nats).

        ΔL(t) = L(t) - mean of the previous `window` losses (fewer at first)

    nan at the first evaluation, which has no past. A loss that is nan or ±inf
    gives +inf, "very large", and is not remembered: one overflow must not hide
    what comes after. Its weakness: while the loss still falls fast ΔL is
    negative, so a rise back to the mean of the past goes unseen.

    Amortised O(1): the mean is held as sums of whole blocks of `window` losses,
    never by subtracting what leaves, so no rounding error builds up.

    Args:
        window: number of earlier evaluations, at least 1 (paper: 100).
        absolute: return |ΔL|, as the paper's case study does.

    >>> drift = LossDrift()
    >>> [drift.update(loss) for loss in (3.0, 2.0, 3.0)]
    [nan, -1.0, 0.5]

    Source: Fatima 2025, section 3 (ΔL against the moving average).
    """

    __slots__ = ("_absolute", "_current", "_sum", "_tail_sums", "value", "window")

    def __init__(self, window: int = 100, *, absolute: bool = False) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: it must be at least 1 evaluation")
        self.window = window
        self.value = nan
        self._absolute = absolute
        self._current: list[float] = []  # losses of the block being filled
        self._sum = 0.0  # their sum
        self._tail_sums: list[float] = []  # sums of the previous block's ends, shortest first

    def update(self, loss: float) -> float:
        """Take the loss of one evaluation; return ΔL against those before it."""
        if not -inf < loss < inf:
            self.value = inf
            return inf
        current = self._current
        filled = len(current)
        # The past is the current block and as much of the end of the previous one
        # as fits in the window.
        if self._tail_sums:
            rest = self.window - filled
            past = self._sum + self._tail_sums[rest - 1] if rest else self._sum
            value = loss - past / self.window
        else:
            value = loss - self._sum / filled if filled else nan
        self.value = abs(value) if self._absolute else value
        if filled == self.window:
            self._tail_sums = tail_sums(current)
            current.clear()
            self._sum = 0.0
        current.append(loss)
        self._sum += loss
        return self.value


def tail_sums(block: list[float]) -> list[float]:
    """Sums of the last 1, 2, ... values of `block`."""
    sums, total = [], 0.0
    for value in reversed(block):
        total += value
        sums.append(total)
    return sums
