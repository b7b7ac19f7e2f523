"""Verdicts of the benchmark: neutral, strict, and their costs.

Shape suffixes: R runs, X alternatives, B bootstrap samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmetric._util.errors import require
from rmetric.evaluation.protocols import Alerts, Outcomes, Windows, judge_alerts
from rmetric.evaluation.scores import ratio
from rmetric.evaluation.traces import Trace
from rmetric.records import Run
from studies.detector_benchmark.cases import Cases

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

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
    """As `strict`, but alarms on absorbed faults are neither hits nor false.

    The fault was real, and its absorption could not be predicted at the alarm. Such alarms are
    counted separately. An alarm before the onset is false in every run.
    """
    outcomes = strict(cases, alerts, protocol)
    excused = real_but_absorbed(cases, alerts)
    return replace(outcomes, false_alarm=outcomes.false_alarm & ~excused)


def with_check(cases: Cases, outcomes: Outcomes, alerts: Alerts) -> Outcomes:
    """Verdicts on the detector together with the check before the step.

    A failure without any warning counts as detected if the loss or the gradient of its own step
    is not finite: the check sees that before the weights change (`Monitor`, ``SkipStep``).
    """
    quiet = alerts.first >= cases.windows.onset
    checked = cases.windows.failed & ~cases.warned & cases.seen_before_step & quiet
    return replace(outcomes, hit=outcomes.hit | checked)


def early(cases: Cases, outcomes: Outcomes, alerts: Alerts) -> Bools:
    """A hit at least `EARLY_STEPS` steps before the training loss has visibly broken."""
    return outcomes.hit & (alerts.first <= cases.broken - EARLY_STEPS)


class Rate(NamedTuple):
    """False alarms in time rather than in runs.

    Attributes:
        episodes_per_1000: periods of alarmed records that begin in healthy steps, per 1000
            healthy steps; an alarm that never ends is one.
        episodes_per_1000_records: the same per 1000 records, for logs of different spacing.
        share_alarmed: share of the records of healthy steps that are alarmed.
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
    """Costs of false alarms and missed failures, in minutes of training.

    Attributes:
        false_alarm: cost of an inspection, or of a stopped run.
        lead_step: additional saving of each step between alarm and failure.
        lead_cap: steps of lead beyond which nothing more is saved.
    """

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
        """Saving as a share of the oracle's, shape (B,): 0 without alarms, 1 for the oracle.

        Below 0 if the false alarms cost more than the hits save; nan if nothing can be saved.
        """
        return ratio(self.gain(outcomes) @ counts_BR.T, self.gain(oracle) @ counts_BR.T)


def oracle_trace(run: Run, windows: Windows, index: int, *, skip_onset: bool = False) -> Trace:
    """Alarms of a detector that uses the truth: from onset to failure.

    With `skip_onset` the record of the onset step itself does not count: it comes before that
    step's update and shows nothing of a fault in the update.
    """
    steps = np.array([record.step for record in run.records], dtype=np.int64)
    alarms = (windows.onset[index] + skip_onset <= steps) & (steps < windows.failure[index])
    alarms &= bool(windows.failed[index])
    return Trace(
        detector="oracle", run_id=run.id, steps=steps, scores=alarms.astype(float), alarms=alarms
    )
