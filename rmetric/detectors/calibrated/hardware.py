"""Statistics of reported hardware events."""

from __future__ import annotations

from collections import deque
from math import lgamma, log

from rmetric.detectors.calibrated.source import EvidenceSource
from rmetric.records import Record

_WINDOW = 50  # records
_MIN_RECORDS_BEFORE = 50


class HardwareEvents(EvidenceSource):
    """More hardware events than this run has had so far.

        hardware_events  -log10 of the chance of so many events or more in the last 50
                         records, were they Poisson at the rate of all records before

    One event is added to those before, so that a first event does not alarm by itself; nothing is
    reported before the hundredth record.
    Events of the application are not counted.
    """

    NAMES = ("hardware_events",)
    LABEL = "hardware"

    def __init__(self) -> None:
        super().__init__()
        self._counts: deque[int] = deque()
        self._recent = 0
        self._before = 0
        self._records = 0

    def update(self, record: Record) -> None:
        if record.events is None:
            return
        count = sum(event.is_hardware for event in record.events)
        self._counts.append(count)
        self._recent += count
        if len(self._counts) > _WINDOW:
            oldest = self._counts.popleft()
            self._recent -= oldest
            self._before += oldest
            self._records += 1
        if self._records >= _MIN_RECORDS_BEFORE:
            expected = (self._before + 1) * _WINDOW / self._records
            self.statistics["hardware_events"] = poisson_surprise(self._recent, expected)

    def restart(self) -> None:
        """Do nothing: a change of the training says nothing about the hardware."""

    def words(self, name: str) -> str:
        rate = self._before / max(self._records, 1) * _WINDOW
        return f"{self._recent} hardware events in {_WINDOW} records, usual {rate:.2g}"

    def advice(self, name: str, since: int) -> str:
        return "find the GPU with `rmetric telemetry` and take it out"


def poisson_surprise(count: int, expected: float) -> float:
    """-log10 of the chance of `count` events or more where `expected` (above 0) are.

    0 where there are no more than expected.

    >>> round(poisson_surprise(1, 0.1), 3), poisson_surprise(0, 3.0)
    (1.022, 0.0)
    """
    if count <= expected:
        return 0.0
    # The tail is its first term times a series that falls faster than a geometric one.
    term = total = 1.0
    step = count
    while term > 1e-12 * total:
        step += 1
        term *= expected / step
        total += term
    first = count * log(expected) - expected - lgamma(count + 1)
    return max(0.0, -(first + log(total)) / log(10))
