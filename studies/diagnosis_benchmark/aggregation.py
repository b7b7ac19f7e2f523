"""Aggregate scores over jobs with intervals; dependent jobs are resampled as a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation import scores
from rmetric.evaluation.intervals import NUM_RESAMPLES, Estimate, estimate
from studies.diagnosis_benchmark.scoring import Counts

#: Note below tables with intervals.
INTERVALS = (
    f"Brackets: 95 % intervals by {NUM_RESAMPLES} bootstrap resamples of whole groups (a real "
    "log's case; an injected job by itself). Where all jobs are alike an interval has no width, "
    "which is no certainty."
)


def mean(values: Sequence[float], groups: Sequence[str]) -> Estimate:
    """The mean over the jobs that have a value (not nan); those of a group are drawn together."""
    values_R = np.asarray(values, dtype=float)
    return estimate(lambda drawn: scores.mean(values_R, drawn), len(values), numbered(groups))


def micro_f1(counts: Sequence[Counts], groups: Sequence[str]) -> Estimate:
    """F1 over the events of all jobs, weighted by events."""
    found_R, wrong_R, missed_R = np.array(counts, dtype=float).reshape(-1, 3).T
    whole_R = 2 * found_R + wrong_R + missed_R
    return estimate(
        lambda drawn: scores.ratio(drawn @ (2 * found_R), drawn @ whole_R),
        len(counts),
        numbered(groups),
    )


def macro_f1(counts: Sequence[Counts], groups: Sequence[str]) -> Estimate:
    """The mean of each job's own."""
    found_R, wrong_R, missed_R = np.array(counts, dtype=float).reshape(-1, 3).T
    return mean(list(scores.ratio(2 * found_R, 2 * found_R + wrong_R + missed_R)), groups)


def numbered(groups: Sequence[str]) -> NDArray[np.int64] | None:
    """Each job's group as a number from 0, in order of appearance; None of no job."""
    order = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    return np.array([order[name] for name in groups], dtype=np.int64) if groups else None
