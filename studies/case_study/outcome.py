"""What became of a run: absorbed, non-finite, diverged or degraded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from rmetric.records import Record, Truth
from rmetric.simulation.outcome import soft_failure


def truth_of(injected: Truth, records: Sequence[Record], twin: Sequence[Record] | None) -> Truth:
    """The truth of a whole run: `injected` with what became of it.

    - non_finite: the loss is nan or infinite, and stays so to the end;
    - diverged: the validation loss stays 20 % above its best so far, and ends there;
    - degraded: it stays 0.10 nat above the twin's.

    The last two hold for the median of three evaluations, and count from the
    evaluation since which they do. A loss that falls fast leaves that median
    above its best as well: only one that also ends above it has diverged.
    `twin` are the records of the same run without the fault; None where it was not run.
    """
    failure = _not_finite(records) or _worse(records, twin)
    if failure is not None:
        kind, step = failure
        return replace(injected, outcome="failed", failure_kind=kind, failure_step=step)
    return replace(injected, outcome="healthy" if injected.fault == "NONE" else "absorbed")


def _not_finite(records: Sequence[Record]) -> tuple[str, int] | None:
    """A gradient that overflows is no failure: under loss scaling it is how the scale is found."""
    failed = None
    for record in records:
        losses = [x for x in (record.training_loss, record.validation_loss) if x is not None]
        if losses:
            failed = None if all(map(isfinite, losses)) else failed or record.step
    return None if failed is None else ("non_finite", failed)


def _worse(records: Sequence[Record], twin: Sequence[Record] | None) -> tuple[str, int] | None:
    """Diverged or degraded, and since which step."""
    loss = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
    beside = {r.step: r.validation_loss for r in twin or ()}
    twin_T = None if twin is None else np.array([beside[step] for step in loss])
    failure = soft_failure(np.array(list(loss.values()), dtype=float), twin_T, ends_there=True)
    return failure and (failure[0], list(loss)[failure[1]])
