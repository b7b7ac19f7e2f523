"""Evaluation of detectors on runs: traces, protocols, scores, intervals."""

from rmetric.evaluation.comparison import Comparison, Side, compare
from rmetric.evaluation.intervals import Estimate
from rmetric.evaluation.protocols import PROTOCOLS, Outcomes, judge
from rmetric.evaluation.run_verdict import judge_run
from rmetric.evaluation.scores import Scores, evaluate, f1_difference, score
from rmetric.evaluation.study import Study, UnusableStudy, read_study
from rmetric.evaluation.traces import Trace, trace, trace_all
from rmetric.evaluation.verdict_words import RunVerdict

__all__ = [
    "PROTOCOLS",
    "Comparison",
    "Estimate",
    "Outcomes",
    "RunVerdict",
    "Scores",
    "Side",
    "Study",
    "Trace",
    "UnusableStudy",
    "compare",
    "evaluate",
    "f1_difference",
    "judge",
    "judge_run",
    "read_study",
    "score",
    "trace",
    "trace_all",
]
