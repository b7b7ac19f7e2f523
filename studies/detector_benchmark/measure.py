"""Scores of one detector on one data set: a row of plain values that JSON can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation.intervals import Estimate, estimate, wilson
from rmetric.evaluation.protocols import Alerts, Outcomes, alerts_of, first_alerts, judge_alerts
from rmetric.evaluation.scores import f1, precision, ratio, recall
from rmetric.evaluation.traces import Trace
from studies.detector_benchmark.cases import (
    Cases,
    Costs,
    early,
    false_alarm_rate,
    neutral,
    oracle_trace,
    real_but_absorbed,
    strict,
    with_check,
)
from studies.detector_benchmark.data_sets import DataSet
from studies.detector_benchmark.real_logs import EARLY_INTERVALS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Row = dict[str, Any]

QUARTILES = (25, 50, 75)
#: Detectors with which every other one is compared, if they were run.
REFERENCES = ("loss_ewma", "r_metric")
CEILINGS = {"ceiling": False, "ceiling_after_onset": True}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Alarms of one detector and the causal verdicts on the first ones, shape (R,)."""

    traces: Sequence[Trace]
    alerts: Alerts
    neutral: Outcomes
    strict: Outcomes

    @classmethod
    def of(cls, cases: Cases, traces: Sequence[Trace]) -> Judged:
        alerts = alerts_of(cases.windows, traces)
        verdicts = {"neutral": neutral(cases, alerts), "strict": strict(cases, alerts)}
        return cls(traces=traces, alerts=alerts, **verdicts)


def ceilings(data: DataSet) -> dict[str, Judged]:
    """Verdicts on detectors that use the truth; empty for real logs, whose truth is unknown."""
    if data.confidence is not None:
        return {}
    windows = data.cases.windows
    return {
        name: Judged.of(
            data.cases,
            [oracle_trace(run, windows, i, skip_onset=skip) for i, run in enumerate(data.runs)],
        )
        for name, skip in CEILINGS.items()
    }


def measure(
    data: DataSet,
    seen: Judged,
    *,
    oracle: Judged,
    references: dict[str, Judged],
    costs: Costs | None = None,
) -> Row:
    """One detector on the laboratory or the stress study; `oracle` is one that uses the truth."""
    cases, costs = data.cases, costs or Costs()
    failed = cases.windows.failed
    by_group = _grouped(cases)
    verdict = seen.neutral
    published = judge_alerts(cases.windows, seen.alerts, "published")
    unlatched = neutral(cases, seen.alerts, "causal_unlatched")
    alarmed = seen.alerts.first < inf
    acute, degraded = cases.of_kind("acute"), cases.of_kind("degraded")
    rate = false_alarm_rate(cases, seen.traces)
    outcomes = {
        "": verdict,
        "_strict": seen.strict,
        "_warned": replace(verdict, failed=failed & cases.warned),
        "_strict_warned": replace(seen.strict, failed=failed & cases.warned),
        "_checked": with_check(cases, verdict, seen.alerts),
    }
    soon = early(cases, verdict, seen.alerts)
    return {
        **{f"f1{name}": by_group(partial(f1, found)) for name, found in outcomes.items()},
        "instant": int((failed & ~cases.warned).sum()),
        "instant_checked": int((outcomes["_checked"].hit & ~cases.warned).sum()),
        "precision": by_group(partial(precision, verdict)),
        "recall": by_group(partial(recall, verdict)),
        "recall_warned": share(verdict.hit, cases.warned),
        "recall_acute": share(verdict.hit, acute),
        "recall_degraded": share(verdict.hit, degraded),
        "early": share(soon, acute),
        "early_possible": share(soon, early(cases, oracle.neutral, oracle.alerts) & acute),
        "controls": share(alarmed, cases.of_kind("control")),
        "benign": share(alarmed, cases.of_kind("benign")),
        "absorbed": share(real_but_absorbed(cases, seen.alerts), cases.of_kind("absorbed")),
        "premature": share(seen.alerts.first < cases.windows.onset, cases.windows.onset > -inf),
        "hits": int(verdict.hit.sum()),
        "false_alarms": int(verdict.false_alarm.sum()),
        "failed": int(failed.sum()),
        **_quartiles("lead_acute", verdict.lead_steps[acute]),
        **_quartiles("lead_degraded", verdict.lead_steps[degraded]),
        "episodes_per_1000": rate.episodes_per_1000,
        "share_alarmed": rate.share_alarmed,
        "utility": by_group(partial(costs.utility, verdict, oracle.neutral)),
        "f1_published": by_group(partial(f1, published)),
        "f1_unlatched": by_group(partial(f1, unlatched)),
        "recall_unlatched": by_group(partial(recall, unlatched)),
        **differences(cases, verdict, {n: other.neutral for n, other in references.items()}),
        "faults": by_fault(data, seen),
        "curve": curve(cases, seen.traces),
    }


def measure_real(data: DataSet, seen: Judged, *, references: dict[str, Judged]) -> Row:
    """One detector on real logs.

    Plain rule: a run is caught by an alarm up to two logging intervals after the labelled onset,
    also long before it: compare with the healthy runs alarmed. Causal rule: an alarm more than ten
    intervals before the onset is false, and the run is missed.
    """
    cases = data.cases
    assert data.confidence is not None
    assert data.spacing is not None
    high = data.confidence == "high"
    first, verdict = seen.alerts.first, seen.neutral
    caught = cases.windows.failed & (first < cases.windows.failure)
    alarmed, healthy = first < inf, cases.of_kind("control")
    troubled = cases.windows.failed
    labelled = verdict.hit & cases.warned
    delay = (first - cases.windows.onset)[labelled] / data.spacing[labelled] - EARLY_INTERVALS
    rate = false_alarm_rate(cases, seen.traces)
    return {
        "caught_high": share(caught, troubled & high),
        "caught": share(caught, troubled),
        "caught_failing": share(caught, cases.of_kind("failing")),
        "caught_spiking": share(caught, cases.of_kind("spiking")),
        "causal_high": share(verdict.hit, troubled & high),
        "causal": share(verdict.hit, troubled),
        "healthy_high": share(alarmed, healthy & high),
        "healthy": share(alarmed, healthy),
        **{
            statistic.__name__: estimate(partial(statistic, verdict), len(cases), cases.groups)
            for statistic in (f1, precision, recall)
        },
        **differences(cases, verdict, {name: other.neutral for name, other in references.items()}),
        **_quartiles("delay", delay),
        "episodes_per_1000": rate.episodes_per_1000_records,
        "share_alarmed": rate.share_alarmed,
        "failed": int(troubled.sum()),
        "hits": int(verdict.hit.sum()),
        "false_alarms": int(verdict.false_alarm.sum()),
        "missed": missed(data, seen),
        "curve": curve(cases, seen.traces, data.spacing, before=EARLY_INTERVALS),
    }


def missed(data: DataSet, seen: Judged) -> dict[str, list[str]]:
    """The runs of high confidence missed by the plain rule, and the healthy runs alarmed."""
    cases, first = data.cases, seen.alerts.first
    assert data.confidence is not None
    high = data.confidence == "high"
    failed = cases.windows.failed
    late = failed & high & ~(first < cases.windows.failure)
    return {
        "missed": [run.id for run, it in zip(data.runs, late, strict=True) if it],
        "alarmed": [
            run.id for run, it in zip(data.runs, ~failed & (first < inf), strict=True) if it
        ],
    }


def differences(cases: Cases, verdict: Outcomes, references: dict[str, Outcomes]) -> Row:
    """F1 minus that of each reference on the same resamples; None against itself."""

    def minus(other: Outcomes, counts: Floats) -> Any:
        return f1(verdict, counts) - f1(other, counts)

    return {
        f"minus_{name}": None if other is verdict else _grouped(cases)(partial(minus, other))
        for name, other in references.items()
    }


def by_fault(data: DataSet, seen: Judged) -> Row:
    """Fault -> number of its runs that failed, hit, did not fail, alarmed from the onset on."""
    names = np.array([run.truth.fault if run.truth else "NONE" for run in data.runs])
    failed, hit = data.cases.windows.failed, seen.neutral.hit
    after = (seen.alerts.first < inf) & (seen.alerts.first >= data.cases.windows.onset)
    benign = np.array([bool(run.truth and run.truth.benign) for run in data.runs])
    return {
        name: {
            "benign": bool(benign[here].all()),
            "failed": int((here & failed).sum()),
            "hit": int((here & hit).sum()),
            "not_failed": int((here & ~failed).sum()),
            "alarmed": int((here & ~failed & after).sum()),
        }
        for name in sorted(set(names.tolist()) - {"NONE"})
        for here in [names == name]
    }


def curve(
    cases: Cases, traces: Sequence[Trace], spacing: Floats | float = 1.0, before: float = 0.0
) -> Row:
    """The detector at every threshold on its score: for plots, not for choosing a threshold.

    `spacing` of the records in steps, shape (R,), if delays are counted in records; windows begin
    `before` the onset, in the same unit.
    """
    bounds = thresholds(traces)
    steps = [trace.steps for trace in traces]
    alarms = (trace.scores[:, None] > bounds for trace in traces)
    row = operating(cases, first_alerts(cases.windows, steps, alarms), spacing, before)
    row["threshold"] = bounds
    own = operating(cases, alerts_of(cases.windows, traces), spacing, before)
    return {
        "own": {name: _rounded(values)[0] for name, values in own.items()},
        **{name: _rounded(values) for name, values in row.items()},
    }


def operating(
    cases: Cases, alerts: Alerts, spacing: Floats | float = 1.0, before: float = 0.0
) -> Row:
    """Coordinates of alternatives in the two figures, shape (X,).

    `false_alarm_share` is of controls and benign runs. `time_used` is the share of the time from
    onset to failure (or deadline) that has passed at the first alarm: mean over the detectable
    failures, 1 for a missed one, 0 for an alarm in time before the onset.
    """
    verdict = neutral(cases, alerts)
    once = np.ones(len(cases))
    quiet = cases.of_kind("benign", "control")
    onset = _finite(cases.windows.onset) + before * spacing
    with np.errstate(invalid="ignore", divide="ignore"):
        used = (alerts.first - onset) / (cases.windows.failure - onset)
    used_XR = np.where(verdict.hit, np.clip(used, 0.0, 1.0), 1.0)[..., cases.warned]
    return {
        "precision": precision(verdict, once),
        "recall": recall(verdict, once),
        "f1": f1(verdict, once),
        "false_alarm_share": ratio((alerts.first < inf) @ quiet.astype(float), quiet.sum()),
        "time_used": ratio(used_XR.sum(axis=-1), used_XR.shape[-1]),
    }


def thresholds(traces: Sequence[Trace]) -> Floats:
    """Quantiles of all scores and of the runs' highest, so that the tail is covered."""
    scores = [trace.scores[np.isfinite(trace.scores)] for trace in traces]
    tops = [part.max() for part in scores if len(part)]
    if not tops:
        return np.array([0.0])
    ranks = np.linspace(0, 1, 40)
    pooled = np.concatenate(scores)
    chosen = np.concatenate([np.quantile(pooled, ranks), np.quantile(tops, ranks)])
    below = np.nextafter(chosen.min(), -inf)  # where everything is alarmed
    return np.unique(np.concatenate([[below], chosen]))


def share(hits_R: Bools, among_R: Bools) -> Estimate:
    """Share of hits among some runs, with Wilson's interval."""
    return wilson(int((hits_R & among_R).sum()), int(among_R.sum()))


def _grouped(cases: Cases) -> Callable[..., Estimate]:
    return lambda statistic: estimate(statistic, len(cases), cases.groups)


def quartiles(values: Floats) -> list[float]:
    """Quartiles of the finite values; nan without any."""
    known = values[np.isfinite(values)]
    return np.percentile(known, QUARTILES).tolist() if len(known) else [np.nan] * 3


def _quartiles(name: str, values: Floats) -> Row:
    return {f"{name}_{q}": v for q, v in zip(QUARTILES, quartiles(values), strict=True)}


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.5g}") for value in np.atleast_1d(values).tolist()]
