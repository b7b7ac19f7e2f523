"""Every detector on every run of a study: the input of tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isclose, isnan, nan
from typing import NamedTuple

import numpy as np

from rmetric.detectors import IN_PAPER, Entry
from rmetric.evaluation.intervals import Estimate
from rmetric.evaluation.protocols import (
    Alerts,
    Outcomes,
    Windows,
    alerts_of,
    first_alerts,
    judge,
    judge_alerts,
)
from rmetric.evaluation.scores import Scores, f1_difference, score
from rmetric.evaluation.study import StatedScore, Study
from rmetric.evaluation.traces import SEED, Trace, generator_for, trace_all, trace_by
from rmetric.metric import PAPER_WEIGHTS, Components, RMetric, RMetricConfig
from rmetric.metric_settings import settings_of, stated_threshold
from rmetric.records import Run
from studies.paper.transfer import WeightGrid, weight_grids


def metric_trace(
    name: str, run: Run, stated: Sequence[StatedScore] = (), config: RMetricConfig | None = None
) -> Trace:
    """R at every record of a run, by the settings that its log states, or by `config`.

    Where the log lacks a signal that has a weight and states R (`stated`, one for each record), the
    stated R is taken; where it lacks all of them and states nothing, R is nan.
    """
    own = settings_of(run).config
    scores, missing = computed(run, config or own)
    threshold = (config or own).threshold
    if any(missing) and config is None and any(s.score is not None for s in stated):
        scores = np.array([nan if s.score is None else s.score for s in stated], dtype=float)
        own_threshold = stated_threshold(run.config)
        threshold = threshold if own_threshold is None else own_threshold
    elif all(missing):
        scores = np.full(len(run.records), nan)
    return Trace(
        detector=name,
        run_id=run.id,
        steps=np.array([record.step for record in run.records], dtype=np.int64),
        scores=scores,
        alarms=scores > threshold,
    )


def computed(run: Run, config: RMetricConfig) -> tuple[np.ndarray, Components]:
    """R after each record, shape (T,), and which signals with a weight the run never logged.

    A signal without a weight counts as missing only where all others are.
    """
    metric, scores = RMetric(config), []
    logged = [False] * 3
    for record in run.records:
        scores.append(metric.update(record).score)
        sources = zip(logged, metric.sources, strict=True)
        logged = [was or source is not None for was, source in sources]
    weighted = [weight > 0 for weight in config.weights]
    nothing = not any(was and counts for was, counts in zip(logged, weighted, strict=True))
    missing = (
        nothing or (counts and not was) for was, counts in zip(logged, weighted, strict=True)
    )
    return np.array(scores, dtype=float), Components(*missing)


def _same(stated: float, ours: float) -> bool:
    return isclose(stated, ours, abs_tol=1e-9) or (isnan(stated) and isnan(ours))


def disagreements(
    runs: Sequence[Run], stated: Sequence[list[StatedScore]], traces: Sequence[Trace]
) -> list[str]:
    """Logs whose own R, or alarm, is not what the metric gives for their records."""
    found = []
    for run, own, trace in zip(runs, stated, traces, strict=True):
        for step, theirs, ours, alarm in zip(
            trace.steps, own, trace.scores, trace.alarms, strict=True
        ):
            if theirs.score is not None and not _same(theirs.score, ours):
                difference = f"r_metric is {theirs.score:.6g}, recomputed {ours:.6g}"
            elif theirs.alarm is not None and theirs.alarm != alarm:
                difference = f"the alert is {theirs.alarm}, recomputed {bool(alarm)}"
            else:
                continue
            found.append(f"{run.source or run.id}, step {step}: {difference}")
            break
    return found


# -- every detector

REFERENCE_DETECTOR = "r_metric"
#: Kinds of detectors that are the metric of the study itself, with the settings of its logs.
OWN_SETTINGS = ("metric", "ablation")
WITHOUT_LAMBDA = RMetricConfig.simulation(weights=PAPER_WEIGHTS._replace(failure_rate=0.0))
#: Rows of the paper's tables: its detectors, and R without λ beside R.
ENTRIES: dict[str, Entry] = {
    "r_metric": IN_PAPER["r_metric"],
    "r_metric_without_lambda": replace(
        IN_PAPER["r_metric"],
        title="R-Metric without λ",
        kind="variant",
        make=lambda generator: RMetric(WITHOUT_LAMBDA),
    ),
    **IN_PAPER,
}


#: The metric and its ablations.
OF_THE_METRIC = [name for name, entry in IN_PAPER.items() if entry.kind in OWN_SETTINGS]


class OutcomeCounts(NamedTuple):
    """Counts of the failing runs by their first alert; the four add up to all of them."""

    in_time: int
    premature: int
    late: int
    never: int


def outcome_counts(windows: Windows, alerts: Alerts) -> OutcomeCounts:
    """Count the runs by their first alert: in the window, before it, after it, or none."""
    first, failed = alerts.first, windows.failed
    premature = first < windows.onset
    late = (windows.failure <= first) & (first < inf)
    never = first == inf
    counts = (np.sum(failed & end) for end in (~premature & ~late & ~never, premature, late, never))
    return OutcomeCounts(*(int(count) for count in counts))


def ceiling(runs: Sequence[Run], protocol: str, *, after_onset: bool = False) -> Outcomes:
    """The best outcomes that any detector can reach: by the truth, under a causal protocol.

    It alarms at the first record from the onset up to the failure. With `after_onset` the record of
    the onset step is excluded: it comes before that step's update and cannot show a fault in it.
    """
    windows = Windows.of(runs)
    open_ = replace(windows, onset=windows.onset + after_onset)
    steps = [np.array([record.step for record in run.records], dtype=np.int64) for run in runs]
    every = first_alerts(open_, steps, (np.ones((len(step), 1), dtype=bool) for step in steps))
    in_time = np.where(windows.failed, every.inside.ravel(), inf)
    return judge_alerts(windows, Alerts(first=in_time, inside=in_time), protocol)


def is_measured(traces: Sequence[Trace]) -> bool:
    """True if the logs hold anything that the detector could judge by."""
    with_records = [trace for trace in traces if len(trace.steps)]
    return not with_records or any(
        np.isfinite(trace.scores).any() or trace.alarms.any() for trace in with_records
    )


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A study, and the traces of each detector whose runs are there, in the order of `runs`."""

    study: Study
    traces: dict[str, list[Trace]]

    @classmethod
    def of(
        cls, study: Study, names: Iterable[str] = ENTRIES, *, num_processes: int = 1
    ) -> Analysis:
        """Run the detectors on every run; an ablation uses the runs of its own mode."""
        traces = {
            name: _traces(name, study, num_processes)
            for name in names
            if ENTRIES[name].mode in study.runs
        }
        return cls(study=study, traces=traces)

    def is_measured(self, detector: str) -> bool:
        """True if the logs contain any input of the detector."""
        return is_measured(self.traces[detector])

    def runs(self, detector: str) -> Sequence[Run]:
        return self.study.runs[ENTRIES[detector].mode]

    def outcomes(self, detector: str, protocol: str) -> Outcomes:
        return judge(self.runs(detector), self.traces[detector], protocol)

    def scores(self, detector: str, protocol: str) -> Scores:
        return score(self.outcomes(detector, protocol), measured=self.is_measured(detector))

    def f1_difference(self, detector: str, protocol: str) -> Estimate:
        """F1 minus R-Metric's on the common runs, paired."""
        of_reference, of_detector = self.study.paired(ENTRIES[detector].mode)
        if not (self.is_measured(detector) and self.is_measured(REFERENCE_DETECTOR)):
            return Estimate(np.nan, np.nan, np.nan)
        return f1_difference(
            self.outcomes(detector, protocol).select(of_detector),
            self.outcomes(REFERENCE_DETECTOR, protocol).select(of_reference),
        )

    def outcome_counts(self, detector: str) -> OutcomeCounts:
        """Counts of the failing runs by the detector's first alarm."""
        windows = Windows.of(self.runs(detector))
        return outcome_counts(windows, alerts_of(windows, self.traces[detector]))

    @cached_property
    def weight_grids(self) -> dict[str, WeightGrid]:
        """Every weight vector on the reference runs, by protocol; {} without any signal."""
        runs = self.study.reference
        if all(all(computed(run, settings_of(run).config)[1]) for run in runs):
            return {}
        return weight_grids(runs, ("published", "causal"))

    @cached_property
    def disagreements(self) -> list[str]:
        """Logs whose own R-Metric is not the recomputed one."""
        found = []
        for name in self.traces:
            entry = ENTRIES[name]
            if entry.kind in OWN_SETTINGS:
                stated = self.study.stated[entry.mode]
                found += disagreements(self.runs(name), stated, self.traces[name])
        return found


def _traces(name: str, study: Study, num_processes: int) -> list[Trace]:
    """Traces; the metric and its ablations use the settings in the log."""
    entry = ENTRIES[name]
    runs = study.runs[entry.mode]
    if name not in IN_PAPER:
        return [trace_by(entry.make(generator_for(SEED, name, run.id)), run, name) for run in runs]
    if entry.kind not in OWN_SETTINGS:
        return trace_all(name, runs, num_processes=num_processes)
    stated = study.stated[entry.mode]
    return [metric_trace(name, run, own) for run, own in zip(runs, stated, strict=True)]
