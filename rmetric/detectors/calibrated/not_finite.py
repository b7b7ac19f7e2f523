"""Values that are no longer numbers."""

from __future__ import annotations

from math import inf, isfinite

from rmetric.detectors.calibrated.source import Source
from rmetric.records import Record

#: Overflows in a row that a loss scaler does not explain any more.
_SKIPPED_IN_A_ROW = 8


class NotFinite(Source):
    """Losses, gradients or weights that are nan or infinite.

        not_finite  inf where a loss or the weight norm is not finite, where gradient entries
                    were counted that are not, or where the gradient norm is not twice in a row;
                    else 0. Steps that the optimiser left out are counted only from the eighth
                    in a row on.

    A gradient norm alone must be so twice: a loss scaler meets an overflow now and then, and
    loggers write nan into a last row.
    """

    NAMES = ("not_finite",)
    LABEL = "numbers"

    def __init__(self) -> None:
        self.statistics: dict[str, float] = {}
        self._norms = 0
        self._skipped = 0
        self._what = ""

    def update(self, record: Record) -> None:
        self._skipped = self._skipped + 1 if record.skipped else 0
        if record.gradient_norm is not None:
            self._norms = 0 if isfinite(record.gradient_norm) else self._norms + 1
        found = self._found(record)
        # A lasting state: a later record that says nothing of the values does not mend them.
        if found:
            self._what = found
        elif _says_something(record):
            self._what = ""
        self.statistics["not_finite"] = inf if self._what else 0.0

    def _found(self, record: Record) -> str:
        for name in ("training_loss", "validation_loss", "probe_loss", "parameter_norm"):
            value = getattr(record, name)
            if value is not None and not isfinite(value):
                return f"{name.replace('_', ' ')} is {value}"
        if record.skipped:
            if self._skipped >= _SKIPPED_IN_A_ROW:
                return f"{self._skipped} steps in a row were left out"
            return ""
        if record.non_finite_gradients:
            return f"{record.non_finite_gradients} gradient entries are not finite"
        if self._norms > 1:
            return f"gradient norm is {record.gradient_norm}, {self._norms} records in a row"
        return ""

    def restart(self) -> None:
        """Nothing that is announced makes a nan healthy."""

    def words(self, name: str) -> str:
        return self._what


def _says_something(record: Record) -> bool:
    return record.training_loss is not None or record.gradient_norm is not None
