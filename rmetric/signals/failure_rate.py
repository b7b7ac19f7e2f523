"""λ, the hardware failure rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import nan

SECONDS_PER_HOUR = 3600.0


class FailureRate:
    """Hardware events per hour over the last `window` events (the paper's λ).

    With t₀ the start of the run and tᵢ the event times, at time t

        λ(t) = n / (t - s) · 3600,

    where n counts the last `window` events and s is the time of the event just
    before those, or the start of the run while there have been no more.

    Undefined (nan) until time has passed. Its weakness: after a burst it
    remembers for a long time, because it forgets by events and not by age.

    Args:
        window: number of events remembered, at least 1 (paper: 50).
        start: when the run began, seconds on the clock of the event times.

    >>> rate = FailureRate()
    >>> rate.update(1800.0, [600.0, 1200.0])
    4.0

    Source: Fatima 2025, section 3 (λ over the last 50 events).
    """

    __slots__ = ("_times", "value", "window")

    def __init__(self, window: int = 50, start: float = 0.0) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: it must be at least 1 event")
        self.window = window
        self.value = nan
        # The start of the run stands in for the event before the first.
        self._times = deque((start,), maxlen=window + 1)

    def update(self, time: float, event_times: Iterable[float] = ()) -> float:
        """Move to `time` (s), with the events since the last call; return λ."""
        times = self._times
        times.extend(event_times)
        elapsed = time - times[0]
        if elapsed > 0.0:
            self.value = (len(times) - 1) * SECONDS_PER_HOUR / elapsed
        else:
            self.value = nan
        return self.value
