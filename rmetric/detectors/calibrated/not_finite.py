"""Values that are no longer numbers."""

from __future__ import annotations

from math import inf, isfinite

from rmetric.detectors.calibrated.source import EvidenceSource
from rmetric.detectors.contract import leave_out_or_roll_back, roll_back
from rmetric.records import Record

#: Overflows in a row that a loss scaler does not explain any more.
_SKIPPED_IN_A_ROW = 8
_NUMBERS = ("training_loss", "validation_loss", "probe_loss", "parameter_norm")
_WATCHED = (*_NUMBERS, "gradient_norm", "non_finite_gradients", "skipped")


class NotFinite(EvidenceSource):
    """Losses, gradients or weights that are nan or infinite.

        not_finite  inf where a loss or the weight norm is not finite, where gradient entries
                    were counted that are not, or where the gradient norm is not twice in a row;
                    else 0. Steps that the optimiser left out are counted only from the eighth
                    in a row on. It lasts until the same thing is logged as a number again,
                    for counted entries whose norm was not finite until the norm is.

    A gradient norm alone must be so twice: a loss scaler meets an overflow now and then, and
    loggers write nan into a last row.
    """

    NAMES = ("not_finite",)
    LABEL = "numbers"
    AT_ONCE = True

    def __init__(self) -> None:
        super().__init__()
        self._norms = self._skipped = self._norms_from = self._skipped_from = 0
        self._field = self._what = ""

    def update(self, record: Record) -> None:
        self._count(record)
        field, what = self._found(record)
        if what:
            self._field, self._what = field, what
            first = {"skipped": self._skipped_from, "gradient_norm": self._norms_from}
            self.begun["not_finite"] = first.get(field, record.step)
        elif self._what and self._is_mended(record):
            self._what = ""
        if self.statistics or any(getattr(record, name) is not None for name in _WATCHED):
            self.statistics["not_finite"] = inf if self._what else 0.0

    def _count(self, record: Record) -> None:
        if record.skipped:
            # What a loss scaler leaves out is counted as such, not as a gradient norm.
            self._skipped += 1
            if self._skipped == 1:
                self._skipped_from = record.step
            return
        if record.skipped is not None or record.training_loss is not None:
            self._skipped = 0
        if record.gradient_norm is not None:
            self._norms = 0 if isfinite(record.gradient_norm) else self._norms + 1
            if self._norms == 1:
                self._norms_from = record.step

    def _found(self, record: Record) -> tuple[str, str]:
        """The field and what is wrong with it, in words; empty where nothing is."""
        for name in _NUMBERS:
            value = getattr(record, name)
            if value is not None and not isfinite(value):
                return name, f"{name.replace('_', ' ')} is {value}"
        if record.skipped:
            if self._skipped >= _SKIPPED_IN_A_ROW:
                return "skipped", f"{self._skipped} steps in a row were left out"
            return "", ""
        if record.non_finite_gradients:
            # The norm shows sooner that it is over: entries are counted every few steps.
            field = "gradient_norm" if self._norms else "non_finite_gradients"
            return field, f"at least {record.non_finite_gradients} gradient entries are not finite"
        if record.gradient_norm is not None and self._norms > 1:
            what = f"gradient norm is {record.gradient_norm}, {self._norms} records in a row"
            return "gradient_norm", what
        return "", ""

    def _is_mended(self, record: Record) -> bool:
        # A record without the values does not mend them.
        if self._field == "skipped":
            return self._skipped == 0
        return not record.skipped and getattr(record, self._field) is not None

    def restart(self) -> None:
        """Nothing that is announced makes a nan healthy."""

    def words(self, name: str) -> str:
        return self._what

    def advice(self, name: str, since: int) -> str:
        of_one_step = self._field in ("training_loss", "gradient_norm", "non_finite_gradients")
        return leave_out_or_roll_back(since) if of_one_step else roll_back(since)
