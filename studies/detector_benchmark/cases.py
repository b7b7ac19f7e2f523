"""Facts about each run of a data set, independent of the detectors.

Shape suffixes: R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pandas import factorize

from rmetric._util.errors import require
from rmetric.evaluation.protocols import Alerts, Outcomes, Windows, judge_alerts
from rmetric.evaluation.scores import ratio
from rmetric.evaluation.traces import Trace
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
    """Kind of a run by its outcome; a fault without effect on this architecture is a control."""
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
            groups=factorize(np.array(group_names, dtype=object))[0],
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


def visibly_broken(run: Run) -> float:
    """The first step from the onset on at which the training loss has visibly broken, or inf.

    It is not finite, or the median of its last `SMOOTH_RECORDS` values is more than `BROKEN_NATS`
    above the median of the last `TREND_RECORDS` finite ones before the onset. The falling trend is
    not extrapolated, so the step is late rather than early.
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
    """True if loss, gradient norm or gradient entries of the failure's own step are not finite."""
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


# -- verdicts

#: An alarm at least this many steps before the loss has visibly broken is early.
EARLY_STEPS = 5


def real_but_absorbed(cases: Cases, alerts: Alerts) -> Bools:
    """The first alarm came at or after the onset of a fault that the run absorbed, shape (X, R)."""
    after = (cases.windows.onset <= alerts.first) & (alerts.first < inf)
    return cases.of_kind("absorbed") & after


def strict(cases: Cases, alerts: Alerts, protocol: str = "causal") -> Outcomes:
    """Every alarm in a run that did not fail is false."""
    return judge_alerts(cases.windows, alerts, protocol)


def neutral(cases: Cases, alerts: Alerts, protocol: str = "causal") -> Outcomes:
    """Like `strict`, but alarms on absorbed faults, which were real, count neither way."""
    outcomes = strict(cases, alerts, protocol)
    excused = real_but_absorbed(cases, alerts)
    return replace(outcomes, false_alarm=outcomes.false_alarm & ~excused)


def with_check(cases: Cases, outcomes: Outcomes, alerts: Alerts) -> Outcomes:
    """Add the check before the step, which detects a loss or gradient that is not finite."""
    quiet = alerts.first >= cases.windows.onset
    checked = cases.windows.failed & ~cases.warned & cases.seen_before_step & quiet
    return replace(outcomes, hit=outcomes.hit | checked)


def early(cases: Cases, outcomes: Outcomes, alerts: Alerts) -> Bools:
    """A hit at least `EARLY_STEPS` steps before the training loss has visibly broken."""
    return outcomes.hit & (alerts.first <= cases.broken - EARLY_STEPS)


class Rate(NamedTuple):
    """False alarms in healthy steps, in time rather than in runs.

    Attributes:
        episodes_per_1000: periods of alarmed records, per 1000 steps; one that never ends is one.
        episodes_per_1000_records: the same per 1000 records, for logs of different spacing.
        share_alarmed: of the records.
    """

    episodes_per_1000: float
    episodes_per_1000_records: float
    share_alarmed: float


def false_alarm_rate(cases: Cases, traces: Sequence[Trace]) -> Rate:
    """Rate of false alarms in healthy steps, without latching."""
    begun = alarmed = records = 0
    for trace, begin, end in zip(traces, cases.healthy_from, cases.healthy_to, strict=True):
        inside = (begin <= trace.steps) & (trace.steps < end)
        begun += int((trace.begins & inside).sum())
        alarmed += int((trace.alarms & inside).sum())
        records += int(inside.sum())
    steps = float((cases.healthy_to - cases.healthy_from).sum())
    return Rate(*ratio([1000 * begun, 1000 * begun, alarmed], [steps, records, records]).tolist())


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Minutes of training; beyond `lead_cap` steps of lead nothing more is saved."""

    false_alarm: float = 30.0
    missed_failure: float = 120.0
    lead_step: float = 1.0
    lead_cap: float = 60.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(name, value, value >= 0 and isfinite(value), "finite and at least 0")
        if not (self.missed_failure or self.lead_step):
            raise ValueError("missed_failure and lead_step are both 0: a hit is worth nothing")

    def gain(self, outcomes: Outcomes) -> Floats:
        """Minutes saved against a detector that never alarms, run by run, shape (X, R)."""
        lead = np.clip(np.nan_to_num(outcomes.lead_steps), 0.0, self.lead_cap)
        saved = outcomes.hit * (self.missed_failure + self.lead_step * lead)
        return saved - self.false_alarm * outcomes.false_alarm

    def utility(self, outcomes: Outcomes, oracle: Outcomes, counts_BR: Floats) -> Floats:
        """Saving as a share of the oracle's, shape (B,); nan if nothing can be saved."""
        return ratio(self.gain(outcomes) @ counts_BR.T, self.gain(oracle) @ counts_BR.T)


def oracle_trace(run: Run, windows: Windows, index: int, *, skip_onset: bool = False) -> Trace:
    """Alarms by the truth: from the onset (`skip_onset`: the step after) to the failure."""
    steps = np.array([record.step for record in run.records], dtype=np.int64)
    alarms = (windows.onset[index] + skip_onset <= steps) & (steps < windows.failure[index])
    alarms &= bool(windows.failed[index])
    return Trace(
        detector="oracle", run_id=run.id, steps=steps, scores=alarms.astype(float), alarms=alarms
    )
