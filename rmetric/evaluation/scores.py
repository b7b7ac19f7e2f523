"""Precision, recall, F1 and lead time, each with its interval and n.

Where a ratio has nothing to divide by it is nan, never 0:

    precision = TP / (TP + FP)             nan without any alarm
    recall    = TP / (TP + FN)             nan without any failing run
    F1        = 2 TP / (2 TP + FP + FN)    nan only where nothing failed and nothing alarmed

so a detector that stays silent while runs fail has F1 0 and no precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rmetric.detectors.contract import Detector
from rmetric.evaluation.intervals import Estimate, estimate
from rmetric.evaluation.protocols import Outcomes, judge
from rmetric.evaluation.traces import Trace, trace_all, trace_by
from rmetric.records import Run

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of one detector on some runs under one protocol.

    Attributes:
        num_runs, num_failed: n, and how many of them failed.
        hits, false_alarms, misses: TP, FP and FN. A failing run whose first
            alert came before its onset is both an FP and an FN when causal.
        precision, recall, f1: nan where undefined.
        lead_steps, lead_minutes: means over the hits.
        median_lead_steps: median over the hits, nan without any.
        measured: False where the logs hold nothing to judge by; ratios and leads are then
            undefined, and the counts are meaningless.
    """

    num_runs: int
    num_failed: int
    hits: int
    false_alarms: int
    misses: int
    precision: Estimate
    recall: Estimate
    f1: Estimate
    lead_steps: Estimate
    lead_minutes: Estimate
    median_lead_steps: float
    measured: bool = True


def evaluate(
    runs: Sequence[Run],
    detector: str | Callable[[], Detector] | Sequence[Trace] = "calibrated",
    protocol: str = "causal",
) -> Scores:
    """Score one detector on runs of which the outcome is known.

    Args:
        runs: with `Run.truth`, as `simulate` and the logs of a study have it.
        detector: a name in `DETECTORS`; or a function without arguments that makes a fresh
            detector, such as its class; or the detector's traces in the order of `runs`.
        protocol: a name in `PROTOCOLS`. ``causal`` counts a first alarm between onset and
            failure, ``published`` an alarm at any step of a failing run.

    Returns:
        Precision, recall, F1 and lead times, each with its interval and n.

    Raises:
        ValueError: a run has no truth, or the protocol's name is unknown.
        KeyError: the detector's name is unknown.
    """
    if isinstance(detector, str):
        traces: Sequence[Trace] = trace_all(detector, runs)
    elif callable(detector):
        name = getattr(detector, "__name__", "detector")
        traces = [trace_by(detector(), run, name) for run in runs]
    else:
        traces = detector
    return score(judge(runs, traces, protocol))


def score(outcomes: Outcomes, *, measured: bool = True) -> Scores:
    """The scores of one detector from the verdicts on its runs, shape (R,).

    `measured` is False where the runs' logs do not hold what it judges by.
    """
    num_runs, num_failed = len(outcomes.failed), int(outcomes.failed.sum())
    hits = int(outcomes.hit.sum())
    leads = outcomes.lead_steps[np.isfinite(outcomes.lead_steps)]

    def of(statistic: Callable[[Floats], Floats]) -> Estimate:
        return estimate(statistic, num_runs if measured else 0)

    return Scores(
        num_runs=num_runs,
        num_failed=num_failed,
        hits=hits,
        false_alarms=int(outcomes.false_alarm.sum()),
        misses=num_failed - hits,
        precision=of(lambda counts: precision(outcomes, counts)),
        recall=of(lambda counts: recall(outcomes, counts)),
        f1=of(lambda counts: f1(outcomes, counts)),
        lead_steps=of(lambda counts: mean(outcomes.lead_steps, counts)),
        lead_minutes=of(lambda counts: mean(outcomes.lead_minutes, counts)),
        median_lead_steps=float(np.median(leads)) if len(leads) else np.nan,
        measured=measured,
    )


def f1_difference(ours: Outcomes, reference: Outcomes) -> Estimate:
    """F1 of `ours` minus that of `reference`, paired: both on the same runs in the same order."""
    return estimate(lambda counts: f1(ours, counts) - f1(reference, counts), len(reference.failed))


# Each takes verdicts of shape (R,) or (X, R) and counts of shape (B, R) or (R,), and
# returns shape (B,), (X,) or (X, B): one matrix product a sum.


def precision(outcomes: Outcomes, counts: Floats) -> Floats:
    hits = outcomes.hit @ counts.T
    return ratio(hits, hits + outcomes.false_alarm @ counts.T)


def recall(outcomes: Outcomes, counts: Floats) -> Floats:
    return ratio(outcomes.hit @ counts.T, outcomes.failed @ counts.T)


def f1(outcomes: Outcomes, counts: Floats) -> Floats:
    # TP + FN is the number of failing runs.
    hits = outcomes.hit @ counts.T
    failed = outcomes.failed @ counts.T
    return ratio(2 * hits, hits + outcomes.false_alarm @ counts.T + failed)


def mean(values_R: Floats, counts: Floats) -> Floats:
    """The mean over the runs that have a value."""
    known = np.isfinite(values_R)
    return ratio(np.where(known, values_R, 0.0) @ counts.T, known @ counts.T)


def ratio(above: ArrayLike, below: ArrayLike) -> Floats:
    """Quotient; nan where there is nothing to divide by."""
    above, below = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    out = np.full(np.broadcast_shapes(above.shape, below.shape), np.nan)
    np.divide(above, below, out=out, where=below != 0)
    return out
