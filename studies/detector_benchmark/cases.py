"""Facts about each run of a data set, independent of the detectors.

Shape suffixes: R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation.protocols import Windows
from rmetric.records import Record, Run, Truth

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: A run fails acutely (not finite, diverged, a lost worker) or ends worse than its twin; or it
#: went through a fault that it absorbed, a benign change, or nothing.
KINDS = ("acute", "degraded", "absorbed", "benign", "control")

#: The training loss has visibly broken where it stands so far above its trend.
BROKEN_NATS = 0.5
TREND_RECORDS = 50  # before the onset, whose median is the trend
SMOOTH_RECORDS = 3  # whose median must be above: one bad batch is not broken


def kind_of(truth: Truth) -> str:
    """Kind of a run by its outcome: a benign change after which the run failed is a failure.

    Such a change was planned, but it damaged the run. A fault without effect on this architecture
    is a control.
    """
    if truth.failed:
        return "degraded" if truth.failure_kind == "degraded" else "acute"
    if truth.benign:
        return "benign"
    return "absorbed" if truth.outcome == "absorbed" else "control"


@dataclass(frozen=True, kw_only=True)
class Cases:
    """The facts that verdicts are derived from, shape (R,).

    Attributes:
        windows: periods in which an alarm is a hit.
        kinds: one of `KINDS`.
        groups: of runs that are not independent, numbered from 0.
        broken: step at which the training loss has visibly broken, or the failure if that
            comes first; inf for runs that did not fail.
        warned: it failed, and has a record from the onset up to the failure.
        seen_before_step: it failed, and loss or gradient of the failure's step are not finite.
        healthy_from, healthy_to: the steps [from, to) in which an alarm is false and that no
            other run of the data set contains.
    """

    windows: Windows
    kinds: NDArray[np.str_]
    groups: NDArray[np.int64]
    broken: Floats
    warned: Bools
    seen_before_step: Bools
    healthy_from: Floats
    healthy_to: Floats

    def __len__(self) -> int:
        return len(self.kinds)

    def of_kind(self, *kinds: str) -> Bools:
        return np.isin(self.kinds, kinds)

    @classmethod
    def of(cls, runs: Sequence[Run], group_names: Sequence[str]) -> Cases:
        """From the runs' truths; a branch (`config["branch_of"]`) shares its control's past."""
        windows = Windows.of(runs)
        truths = [run.truth for run in runs if run.truth is not None]
        healthy = [_healthy_steps(run, truth) for run, truth in zip(runs, truths, strict=True)]
        spans = list(zip(runs, windows.onset, windows.failure, windows.failed, strict=True))
        return cls(
            windows=windows,
            kinds=np.array([kind_of(truth) for truth in truths], dtype=np.str_),
            groups=numbered(group_names),
            broken=np.array(
                [min(visibly_broken(run), end) if bad else inf for run, _, end, bad in spans],
                dtype=float,
            ),
            warned=np.array(
                [
                    bad and any(begin <= record.step < end for record in run.records)
                    for run, begin, end, bad in spans
                ],
                dtype=bool,
            ),
            seen_before_step=np.array([seen_before_step(run) for run in runs], dtype=bool),
            healthy_from=np.array([begin for begin, _ in healthy], dtype=float),
            healthy_to=np.array([end for _, end in healthy], dtype=float),
        )


def numbered(names: Sequence[Any]) -> NDArray[np.int64]:
    """Equal names get equal numbers, from 0 in the order of first occurrence."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def visibly_broken(run: Run) -> float:
    """The step at which the training loss has visibly broken.

    The first step at or after the onset at which the loss is not finite, or the median of
    its last `SMOOTH_RECORDS` values is more than `BROKEN_NATS` above the trend, the median
    of the last `TREND_RECORDS` finite ones before the onset. The falling trend is not
    extrapolated, so the step is late rather than early. inf if the loss never breaks or is not
    logged.
    """
    onset = -inf if run.truth is None or run.truth.onset_step is None else run.truth.onset_step
    losses = [(r.step, r.training_loss) for r in run.records if r.training_loss is not None]
    before = [loss for step, loss in losses if step < onset and isfinite(loss)]
    bound = float(np.median(before[-TREND_RECORDS:])) + BROKEN_NATS if before else inf
    for i, (step, loss) in enumerate(losses):
        if step < onset:
            continue
        last = [value for _, value in losses[max(0, i - SMOOTH_RECORDS + 1) : i + 1]]
        if not isfinite(loss) or np.median(last) > bound:
            return step
    return inf


def seen_before_step(run: Run) -> bool:
    """True if the check between backward and the optimiser's step detects the failure.

    In the record of the failure the loss, the gradient norm or single gradient entries are not
    finite. These values are available before the weights change (the rule ``non_finite`` of
    `rmetric.monitor.rules`).
    """
    record = failure_record(run)
    measured = record and (record.training_loss, record.gradient_norm)
    return bool(record and record.non_finite_gradients) or any(
        value is not None and not isfinite(value) for value in measured or ()
    )


def weights_not_finite(run: Run) -> bool:
    """True if the weights after the step of the failure are not finite."""
    record = failure_record(run)
    return bool(
        record and record.parameter_norm is not None and not isfinite(record.parameter_norm)
    )


def failure_record(run: Run) -> Record | None:
    step = run.truth.failure_step if run.truth is not None and run.truth.failed else None
    return next((r for r in run.records if step is not None and r.step == step), None)


def _healthy_steps(run: Run, truth: Truth) -> tuple[float, float]:
    """Healthy steps [from, to): before a fault's onset; a branch excludes its control's past."""
    if not run.records:
        return 0.0, 0.0
    begin, end = run.records[0].step, run.records[-1].step + 1
    if truth.onset_step is not None:
        if run.config.get("branch_of") is not None:
            begin = truth.onset_step
        if kind_of(truth) not in ("benign", "control"):
            end = min(end, truth.onset_step)
    return begin, max(begin, end)
