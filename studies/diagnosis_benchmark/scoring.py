"""Scores of an answer against the ground truth, and their sums over jobs with intervals.

Jobs that depend on each other are drawn together.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation import scores
from rmetric.evaluation.intervals import Estimate, Floats, estimate
from studies.diagnosis_benchmark.cases import Label

#: A line: its file and its number.
Place = tuple[str, int]

#: L4 reports the faulty node among the first so many (arXiv 2503.20263).
TOPS = (1, 3, 5, 8)


class Counts(NamedTuple):
    """Events of one job: shown and true, shown and not true, true and not shown."""

    found: int
    wrong: int
    missed: int


def event_counts(
    labels: Iterable[Label], shown: Iterable[Place], event_of: Mapping[Place, int]
) -> Counts:
    """Events shown against events labelled.

    An event is true if any of its lines is a cause or a symptom, and neutral, neither right nor
    wrong, if it has lines of other roles only. A labelled line that belongs to no event is an
    event of its own, and missed; a line shown that belongs to none is wrong.
    """
    roles: dict[Hashable, set[str]] = {}
    for label in labels:
        place = (label.file, label.line)
        roles.setdefault(event_of.get(place, place), set()).add(label.role)
    true = {event for event, of in roles.items() if of & {"cause", "symptom"}}
    answer: set[Hashable] = {event_of.get(place, place) for place in shown}
    return Counts(len(answer & true), len(answer - roles.keys()), len(true - answer))


def hits(ranking: Sequence[Collection[Hashable]], truth: Hashable) -> list[float]:
    """Probability that `truth` is among the first k of a ranking, for each k of `TOPS`.

    Groups of equals, the most suspect first; within one any order is as likely.
    """
    before = 0
    for group in ranking:
        if truth in group:
            return [min(max(top - before, 0) / len(group), 1.0) for top in TOPS]
        before += len(group)
    return [0.0] * len(TOPS)


def mean(values: Sequence[float], groups: Sequence[str]) -> Estimate:
    """The mean over the jobs that have a value (not nan); those of a group are drawn together."""
    values_R = np.asarray(values, dtype=float)
    return estimate(lambda drawn: scores.mean(values_R, drawn), len(values), numbered(groups))


def micro_f1(counts: Sequence[Counts], groups: Sequence[str]) -> Estimate:
    """F1 over the events of all jobs, weighted by events."""
    right_R, whole_R = _parts(counts)
    return estimate(
        lambda drawn: scores.ratio(drawn @ right_R, drawn @ whole_R), len(counts), numbered(groups)
    )


def macro_f1(counts: Sequence[Counts], groups: Sequence[str]) -> Estimate:
    """The mean of each job's own."""
    return mean(list(scores.ratio(*_parts(counts))), groups)


def _parts(counts: Sequence[Counts]) -> tuple[Floats, Floats]:
    """Numerator and denominator of the F1 of each job."""
    found_R, wrong_R, missed_R = np.array(counts, dtype=float).reshape(-1, 3).T
    return 2 * found_R, 2 * found_R + wrong_R + missed_R


def numbered(groups: Sequence[str]) -> NDArray[np.int64] | None:
    """Each job's group as a number from 0, in order of appearance; None of no job."""
    order = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    return np.array([order[name] for name in groups], dtype=np.int64) if groups else None
