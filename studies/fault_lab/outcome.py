"""Outcome of a run, derived from its log.

The definitions of diverged and degraded are the simulator's (`simulation.outcome`)
and can be set; the twin is the control that the run branched from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from rmetric._util.errors import require
from rmetric.records import Record, Truth
from rmetric.simulation.outcome import DEGRADED_NATS, DIVERGED_RATIO, soft_failure

#: Changes of the evaluation alone: what is evaluated under them says nothing of the weights.
OF_THE_EVALUATION = ("NOISY_EVALUATION",)


@dataclass(frozen=True, kw_only=True)
class Definitions:
    """Definitions of failure.

    Attributes:
        diverged_ratio: the median of three evaluations stays above this multiple of the best so
            far, to the end of the run; above 1.
        degraded_nats: it stays this far above the twin's, to the end; above 0.
    """

    diverged_ratio: float = DIVERGED_RATIO
    degraded_nats: float = DEGRADED_NATS

    def __post_init__(self) -> None:
        require("diverged_ratio", self.diverged_ratio, self.diverged_ratio > 1, "above 1")
        require("degraded_nats", self.degraded_nats, self.degraded_nats > 0, "above 0")


def judge(
    injected: Truth,
    records: Sequence[Record],
    twin: Sequence[Record] | None = None,
    definitions: Definitions | None = None,
) -> Truth:
    """The truth of a whole run under the injected fault, whose outcome is ignored.

    `twin` are the records of the control; None for a control itself.
    """
    failure = _failure(injected, records, twin, definitions or Definitions())
    if failure is not None:
        kind, step = failure
        return replace(injected, outcome="failed", failure_kind=kind, failure_step=step)
    outcome = "healthy" if injected.fault == "NONE" else "absorbed"
    return replace(injected, outcome=outcome, failure_kind=None, failure_step=None)


def is_finite(record: Record) -> bool:
    """Whether loss, gradient and weights of a step are numbers."""
    measured = (
        record.training_loss,
        record.gradient_norm,
        record.parameter_norm,
        record.validation_loss,
    )
    return all(value is None or isfinite(value) for value in measured)


def _failure(
    injected: Truth,
    records: Sequence[Record],
    twin: Sequence[Record] | None,
    definitions: Definitions,
) -> tuple[str, int] | None:
    """Kind and step: not finite, else diverged or degraded."""
    for record in records:
        if not is_finite(record):
            return "non_finite", record.step
    losses = evaluations(injected, records)
    steps, loss_T = list(losses), np.array(list(losses.values()))
    twin_T = None
    if twin is not None:
        of_twin = evaluations(Truth(), twin)
        twin_T = np.array([of_twin[step] for step in steps])
    failure = soft_failure(
        loss_T, twin_T, ratio=definitions.diverged_ratio, nats=definitions.degraded_nats
    )
    return failure and (failure[0], steps[failure[1]])


def evaluations(injected: Truth, records: Sequence[Record]) -> dict[int, float]:
    """Step -> validation loss, without evaluations under added noise."""
    left_out = range(0)
    if injected.fault in OF_THE_EVALUATION:
        begin, duration = injected.onset_step or 0, injected.duration_steps or 0
        left_out = range(begin, begin + duration)
    return {
        record.step: record.validation_loss
        for record in records
        if record.validation_loss is not None and record.step not in left_out
    }
