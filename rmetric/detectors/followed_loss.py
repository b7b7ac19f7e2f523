"""The loss that a detector of single steps follows, and what such detectors share."""

from __future__ import annotations

from abc import abstractmethod
from math import isfinite, log, nan
from typing import ClassVar

from rmetric.detectors.advice import LOSS, NOT_FINITE
from rmetric.detectors.contract import NumberDetector
from rmetric.records import Record


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
    """A detector that scores the followed loss, or its logarithm.

    A subclass judges in `_judge` and explains in `_why`.

    Args:
        bound: scores above it alarm.
    """

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
