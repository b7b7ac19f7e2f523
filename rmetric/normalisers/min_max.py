"""Sliding min-max, the paper's normalisation."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite, nan


class SlidingMinMax:
    """Scales a value between the least and the greatest of its recent past.

        n(x) = (x - min) / (max - min)   over the last `window` values, x included

    0 while the window holds fewer than two values or is constant. A value of
    +inf scores 1, -inf and nan score 0, and none of the three enters the
    window: one overflow must not flatten everything that follows.

    Two monotonic queues give amortised O(1) a value and at most `window`
    entries each. Its weakness, and the metric's: the newest extreme always
    scores 1, however small the change, and in a falling loss the scale shrinks
    until noise fills it.

    Args:
        window: number of values, at least 1 (paper: 1000 in the simulation, 100
            in the case study).

    >>> scale = SlidingMinMax(window=3)
    >>> [scale.update(x) for x in (2.0, 4.0, 3.0, 3.5)]
    [0.0, 1.0, 0.5, 0.5]

    Source: Fatima 2025, section 3; the queues: Lemire 2006, "Streaming
    maximum-minimum filter using no more than three comparisons per element".
    """

    __slots__ = ("_highs", "_lows", "_recent", "value", "window")

    def __init__(self, window: int = 1000) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: it must be at least 1 value")
        self.window = window
        self.value = 0.0
        # Filled with nan, which equals nothing: until the window is full nothing leaves.
        self._recent = deque([nan] * window, maxlen=window)
        # The values that are, or can still become, the minimum (rising) and the
        # maximum (falling); equal ones are kept, each leaves with its own.
        self._lows: deque[float] = deque()
        self._highs: deque[float] = deque()

    def update(self, x: float) -> float:
        """Take one value; return it normalised to [0, 1]."""
        if not isfinite(x):
            self.value = 1.0 if x == inf else 0.0
            return self.value
        recent, lows, highs = self._recent, self._lows, self._highs
        leaving = recent[0]
        recent.append(x)
        while lows and lows[-1] > x:
            lows.pop()
        lows.append(x)
        while highs and highs[-1] < x:
            highs.pop()
        highs.append(x)
        low, high = lows[0], highs[0]
        if low == leaving:
            lows.popleft()
            low = lows[0]
        if high == leaving:
            highs.popleft()
            high = highs[0]
        span = high - low
        if span == 0.0:
            value = 0.0
        elif span < inf:
            value = (x - low) / span
        else:
            # The span of huge finite values overflows: halve it.
            value = (x / 2 - low / 2) / (high / 2 - low / 2)
        self.value = value
        return value
