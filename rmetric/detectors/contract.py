"""Contract of all detectors, and the base of those that score one number of a record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf, isfinite, nan
from typing import ClassVar, Protocol, TypeVar

from rmetric.detectors.advice import NOT_FINITE
from rmetric.records import Record, Run

Self = TypeVar("Self", bound="NumberDetector")


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


class NumberDetector(ABC):
    """A detector that scores one number of each record.

    A subclass judges the number where it is finite, and explains an alarm. A number that is nan or
    infinite scores inf and is not judged; a record without it changes nothing.
    """

    #: The field of `Record` that holds the number.
    FIELD: ClassVar[str] = "training_loss"
    #: The attribute above which a score alarms; from which on, where `REACHED`.
    BOUND: ClassVar[str] = "threshold"
    REACHED: ClassVar[bool] = False

    def __init__(self) -> None:
        self.score = self._value = nan

    @property
    def alarm(self) -> bool:
        bound = getattr(self, self.BOUND)
        return bool(self.score >= bound if self.REACHED else self.score > bound)

    @property
    def reason(self) -> str:
        if not self.alarm:
            return ""
        if not isfinite(self._value):
            return self._not_finite()
        return self._explain()

    def update(self: Self, record: Record) -> Self:
        """Take the next record; one without the number changes nothing."""
        x = self._read(record)
        if x is not None:
            self._value = x
            self.score = self._judge(x) if isfinite(x) else inf
        return self

    def _read(self, record: Record) -> float | None:
        """The number, nan and inf as logged; None where the record has none."""
        value: float | None = getattr(record, self.FIELD)
        return value

    def _not_finite(self) -> str:
        return f"{self.FIELD.replace('_', ' ')} is {self._value}: {NOT_FINITE}"

    @abstractmethod
    def _judge(self, x: float) -> float:
        """The score of the next finite number; nan while too few came before it."""

    @abstractmethod
    def _explain(self) -> str:
        """The reason of an alarm of a finite number."""
