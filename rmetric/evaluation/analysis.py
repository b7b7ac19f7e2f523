"""Every detector on every run of a study: what tables and figures are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rmetric.detectors import DETECTORS, IN_PAPER
from rmetric.evaluation.ceiling import ceiling
from rmetric.evaluation.intervals import Estimate
from rmetric.evaluation.protocols import Fates, Outcomes, Windows, alerts_of, fates, judge
from rmetric.evaluation.scores import Scores, f1_difference, score
from rmetric.evaluation.study import Study, disagreements
from rmetric.evaluation.traces import Trace, trace_all
from rmetric.evaluation.transfer import WeightGrid, weight_grids
from rmetric.records import Run

REFERENCE_DETECTOR = "r_metric"


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A study and what the detectors said of it.

    Attributes:
        study: the runs.
        traces: for each detector whose runs are there, in the order of `runs`.
    """

    study: Study
    traces: dict[str, list[Trace]]

    @classmethod
    def of(cls, study: Study, *, num_processes: int = 1) -> Analysis:
        """Show every run to the paper's detectors; an ablation sees the runs of its own mode."""
        traces = {
            name: trace_all(name, study.runs[entry.mode], num_processes=num_processes)
            for name, entry in IN_PAPER.items()
            if entry.mode in study.runs
        }
        return cls(study=study, traces=traces)

    def runs(self, detector: str) -> Sequence[Run]:
        return self.study.runs[DETECTORS[detector].mode]

    def outcomes(self, detector: str, protocol: str) -> Outcomes:
        return judge(self.runs(detector), self.traces[detector], protocol)

    def scores(self, detector: str, protocol: str) -> Scores:
        return score(self.outcomes(detector, protocol))

    def f1_difference(self, detector: str, protocol: str) -> Estimate:
        """F1 minus R-Metric's on the runs that both saw, paired."""
        of_reference, of_detector = self.study.paired(DETECTORS[detector].mode)
        return f1_difference(
            self.outcomes(detector, protocol).select(of_detector),
            self.outcomes(REFERENCE_DETECTOR, protocol).select(of_reference),
        )

    def fates(self, detector: str) -> Fates:
        """What became of the failing runs by the detector's first alert."""
        windows = Windows.of(self.runs(detector))
        return fates(windows, alerts_of(windows, self.traces[detector]))

    def ceiling(self, protocol: str, *, after_onset: bool = False) -> Outcomes:
        """What a detector that knows the truth gets on the reference runs."""
        return ceiling(self.study.reference, protocol, after_onset=after_onset)

    @cached_property
    def weight_grids(self) -> dict[str, WeightGrid]:
        """Every weight vector on the reference runs, by protocol."""
        return weight_grids(self.study.reference, ("published", "causal"))

    @cached_property
    def disagreements(self) -> list[str]:
        """Logs whose own R-Metric is not the recomputed one."""
        found = []
        for name, entry in DETECTORS.items():
            if name in self.traces and entry.kind in ("metric", "ablation"):
                stated = self.study.stated[entry.mode]
                found += disagreements(self.runs(name), stated, self.traces[name])
        return found
