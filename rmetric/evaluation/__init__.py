"""From what detectors said to how good they were: protocols, scores, intervals."""

from rmetric.evaluation.ceiling import ceiling
from rmetric.evaluation.intervals import Estimate
from rmetric.evaluation.protocols import PROTOCOLS, Outcomes, judge
from rmetric.evaluation.scores import Scores, evaluate, f1_difference, score
from rmetric.evaluation.study import Study, UnusableStudy, read_study
from rmetric.evaluation.sweep import Sweep, threshold_sweep
from rmetric.evaluation.traces import Trace, trace, trace_all
from rmetric.evaluation.transfer import (
    Transfer,
    mean_loss,
    mean_overfit,
    transfers,
    weight_grids,
)

__all__ = [
    "PROTOCOLS",
    "Estimate",
    "Outcomes",
    "Scores",
    "Study",
    "Sweep",
    "Trace",
    "Transfer",
    "UnusableStudy",
    "ceiling",
    "evaluate",
    "f1_difference",
    "judge",
    "mean_loss",
    "mean_overfit",
    "read_study",
    "score",
    "threshold_sweep",
    "trace",
    "trace_all",
    "transfers",
    "weight_grids",
]
