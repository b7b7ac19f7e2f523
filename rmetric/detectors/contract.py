"""What every detector promises."""

from __future__ import annotations

from typing import Protocol

from rmetric.records import Record, Run


class Detector(Protocol):
    """A stream that takes one record at a time and says whether it is alarmed.

    `update` is called once for each record, in the order of the steps, with
    whatever the record logged: values may be absent (None), nan or infinite. It
    raises nothing for any of them and returns the detector itself. A record
    that says nothing of what the detector watches leaves it as it was.

    Attributes:
        score: higher is worse; nan while there is nothing to judge by.
        alarm: whether the score is above the detector's threshold.
        reason: why it is alarmed, in words and numbers; empty while it is not.

    After n records all three depend on those n alone: nobody looks ahead, except a
    `PeekingDetector`, which says so.
    """

    @property
    def score(self) -> float: ...

    @property
    def alarm(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    def update(self, record: Record) -> Detector: ...


class PeekingDetector(Detector, Protocol):
    """A detector that must be shown the whole run, `fit(run)`, before the first update.

    Only for methods published this way: what it scores could not have been had
    while the run was going on.
    """

    def fit(self, run: Run) -> PeekingDetector: ...
