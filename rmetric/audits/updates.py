"""Does each parameter get a gradient, and does each step change it?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.training import Seen, Training

#: Steps without a gradient until that is reported.
WITHOUT = 20
#: Measured steps in a row with an exactly zero gradient, or without a change from the first on;
#: those without one of a parameter that had changed, and with one of a frozen parameter.
ZERO, UNCHANGED, STOPPED, THAWED = 15, 12, 3, 3
#: Share of the weights from which on a branch that is not trained is an error, and not a hint.
MOST = 0.5
#: An update of so little may be below the rounding of float32 weights.
BELOW_ROUNDING = 1e-7


class Updates(Audit):
    """Gradients and changes of each parameter, by fingerprints of steps that follow each other.

    Its weakness: later than the first 20 steps only two in twenty are measured, so what begins
    there is found after some sixty steps.
    """

    name = "updates"

    def __init__(self) -> None:
        super().__init__()
        self._last: Seen | None = None
        self._count(0)

    def restart(self) -> None:
        self._last = None

    def _count(self, size: int) -> None:
        """Measured steps in a row, of each parameter."""
        self._without, self._zero = np.zeros(size, dtype=int), np.zeros(size, dtype=int)
        self._unchanged, self._thawed = np.zeros(size, dtype=int), np.zeros(size, dtype=int)
        self._changed = np.zeros(size, dtype=int)  # steps in which each one did

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        last, self._last = self._last, seen if seen.full else None
        if not seen.full:
            return
        if len(self._without) != len(seen.weights):
            self._count(len(seen.weights))
        if (seen.peaks > 0).any():  # where nothing trains, no part is judged
            steps = 1 if seen.step <= WITHOUT else WITHOUT // 2  # of a pair of measured steps
            none = seen.trainable & (seen.peaks < 0)
            self._without = np.where(none, self._without + steps, 0)
            self._zero = np.where(seen.trainable & (seen.peaks == 0), self._zero + 1, 0)
        if last is not None and seen.consecutive and len(last.weights) == len(seen.weights):
            self._count_changes(last, seen)
        held = seen.rates >= 0
        if held.any():  # else no optimiser is known
            yield from self._unmoved(training, seen, held)
            yield from self._silent(training, seen, held)

    def _count_changes(self, last: Seen, seen: Seen) -> None:
        """Compare the weights of two steps; the first one's update lies between them."""
        same, stepped = last.weights == seen.weights, seen.made > last.made
        trained = last.trainable & np.isfinite(last.peaks) & (last.peaks > 0) & (last.rates != 0)
        self._unchanged = np.where(stepped & trained & same, self._unchanged + 1, self._unchanged)
        self._unchanged[~same] = 0
        self._changed += ~same & stepped
        thawed = ~last.trainable & (last.rates > 0) & ~same
        self._thawed = np.where(thawed, self._thawed + 1, 0)

    def _unmoved(self, training: Training, seen: Seen, held: np.ndarray) -> Iterable[Finding]:
        """Parameters that have gradients and stay as they are, and frozen ones that do not."""
        stopped = ~training.half & (self._changed >= UNCHANGED) & (self._unchanged >= STOPPED)
        still = (self._unchanged >= UNCHANGED) | stopped
        below = _below_rounding(training, seen)
        # At the end of a schedule updates become that small on purpose.
        rounded = still & held & below & (self._changed == 0)
        outside = still & ~held
        # Programs that train the last layers alone often leave the others out of the optimizer.
        first = outside.any() and np.flatnonzero(outside).max() < np.flatnonzero(held).min()
        step = seen.step
        outsiders: Severity = "hint" if first else "error"
        yield from self._about(training, step, "not_in_optimizer", outside, outsiders)
        yield from self._about(training, step, "rounded_away", rounded)
        yield from self._about(training, step, "not_updated", still & held & ~below, "error")
        yield from self._about(training, step, "frozen_changes", self._thawed >= THAWED, "error")

    def _silent(self, training: Training, seen: Seen, held: np.ndarray) -> Iterable[Finding]:
        """Parameters of the optimiser without a gradient."""
        without, zero = held & (self._without >= WITHOUT), held & (self._zero >= ZERO)
        yield from self._about(training, seen.step, "no_gradient", without)
        yield from self._about(training, seen.step, "zero_gradient", zero)

    def _about(
        self,
        training: Training,
        step: int,
        kind: str,
        which: np.ndarray,
        severity: Severity | None = None,
    ) -> Iterable[Finding]:
        """A finding on these parameters; its severity is by their share where none is given."""
        if not which.any():
            return
        share = training.share(which)
        severity = severity or ("error" if share >= MOST else "hint")
        percent = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        names = training.named(which)
        yield from self.find(kind, step, severity, parameters=names, share=percent)


def _below_rounding(training: Training, seen: Seen) -> np.ndarray:
    """Parameters in half precision, and those whose rate times gradient is tiny."""
    adaptive = any("exp_avg" in state for o in training.optimizers for state in o.state.values())
    update = seen.rates if adaptive else seen.rates * np.maximum(seen.peaks, 0.0)
    return np.asarray(training.half | (update < BELOW_ROUNDING))
