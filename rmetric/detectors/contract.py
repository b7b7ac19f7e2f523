"""Contract of all detectors, the bases of those that score one number, and suggested actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf, isfinite, log, nan
from typing import ClassVar, Protocol, TypeVar

from rmetric.records import Record, Run

Self = TypeVar("Self", bound="NumberDetector")

# How the reason of an alarm ends, of detectors that do not know where their evidence began.
LOSS = "roll back to a checkpoint before the rise if the next losses stay as high"
GRADIENT = "leave the step out, or roll back to a checkpoint before it"
NOT_FINITE = "roll back to a checkpoint before the first such value"
WORKERS = "check the data and the GPU of the worker that differs from the others"


def roll_back(since: int) -> str:
    """Rollback to weights of before the evidence."""
    return f"roll back to a checkpoint before step {since}"


def leave_out_or_roll_back(since: int) -> str:
    """The same, for a condition that may be one bad batch."""
    return f"leave the step out, or {roll_back(since)}"


class Detector(Protocol):
    """A stream that takes one record at a time and states whether it is alarmed.

    `update` is called once for each record, in the order of the steps, with
    whatever the record logged: values may be absent (None), nan or infinite. It
    raises nothing for any of them and returns the detector itself. A record
    without any of what the detector watches leaves it as it was.

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
    """A detector, of a method published so, that needs the whole run before the first update."""

    def fit(self, run: Run) -> PeekingDetector: ...


class NumberDetector(ABC):
    """A detector that scores one number of each record.

    A number that is nan or infinite scores inf; a record without it changes nothing.
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


class FollowedLoss:
    """The training loss; the validation loss of runs that never log a training loss.

    Decided record by record without looking ahead: once a training loss has been
    seen, validation losses are left out. One that was logged before it has been
    followed by then; both are in nats per token.

    >>> followed = FollowedLoss()
    >>> [followed.of(record) for record in (
    ...     Record(step=1, validation_loss=3.0),
    ...     Record(step=2, training_loss=2.0, validation_loss=2.5),
    ...     Record(step=3, validation_loss=2.5))]
    [3.0, 2.0, None]
    """

    def __init__(self) -> None:
        self._on_training_loss = False
        self.loss = nan  # the last one

    @property
    def name(self) -> str:
        return "training loss" if self._on_training_loss else "validation loss"

    @property
    def shown(self) -> str:
        """Name and value of the last loss."""
        return f"{self.name} {self.loss:.4g}"

    def of(self, record: Record) -> float | None:
        """The loss to follow, nan and inf as logged; None where there is none."""
        loss = record.training_loss
        if loss is not None:
            self._on_training_loss = True
        elif not self._on_training_loss:
            loss = record.validation_loss
        if loss is not None:
            self.loss = loss
        return loss

    def log_of(self, record: Record) -> float | None:
        """Its logarithm; nan where it is not finite, None where it has none (at most 0)."""
        loss = self.of(record)
        if loss is None:
            return None
        if not isfinite(loss):
            return nan
        return log(loss) if loss > 0 else None


class LossDetector(NumberDetector):
    """A detector that scores the followed loss, or its logarithm; scores above `bound` alarm."""

    BOUND = "_bound"
    ON_LOGARITHM: ClassVar[bool] = True

    def __init__(self, bound: float) -> None:
        super().__init__()
        self._bound = bound
        self._followed = FollowedLoss()

    def _read(self, record: Record) -> float | None:
        followed = self._followed
        return followed.log_of(record) if self.ON_LOGARITHM else followed.of(record)

    def _not_finite(self) -> str:
        return f"{self._followed.shown}: {NOT_FINITE}"

    def _explain(self) -> str:
        return f"{self._followed.shown}{self._why()}: {LOSS}"

    @abstractmethod
    def _why(self) -> str:
        """The part of the reason after the loss."""
