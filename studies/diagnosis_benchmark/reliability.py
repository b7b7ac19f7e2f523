"""Compare stated confidences with the share of right answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rmetric.diagnosis.model import Model
from rmetric.diagnosis.report.result import SURE
from rmetric.evaluation.intervals import Estimate, Floats, estimate, wilson
from studies.common.table import Cell, Table
from studies.diagnosis_benchmark.answers import Answer
from studies.diagnosis_benchmark.cause_meanings import KINDS, Named
from studies.diagnosis_benchmark.results import JobScores, Results
from studies.diagnosis_benchmark.scoring import numbered
from studies.diagnosis_benchmark.written_jobs import WrittenScores

#: Titles of the answers of first looks, and of those of today.
FIRST, TODAY = "written, first looks", "written, today"
#: Kind of answer at the first looks -> as the model calls it.
CALLED = {"missing rank": "inferred", "contradicted cause": "cause"}
#: Bins of stated confidence, from its lower edge to below the next; the last one has its end too.
EDGES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Stated(NamedTuple):
    """An answer that states a cause or an outcome; those of one group are not independent."""

    confidence: float
    right: bool
    group: str


def stated(results: Results) -> list[Stated]:
    """The answers of the headline method that state a cause or an outcome."""
    return [
        Stated(_confidence(answer), is_right(job, answer), results.drawn_with(job))
        for job in results.jobs
        if (answer := job.answers[results.headline]).outcome != "unknown" or answer.cause
    ]


def _confidence(of: Answer | WrittenScores) -> float:
    """Confidence of today's model in such an answer; without a basis, the stated one."""
    if of.basis is None or of.score is None:
        return of.confidence or 0.0
    return Model.shipped().limit(CALLED.get(of.basis, of.basis), of.score)


def stated_on_written(jobs: Iterable[WrittenScores], *, first: bool = False) -> list[Stated]:
    """The same for the written jobs; first looks get the confidence of today's model."""
    return [
        Stated(_confidence(job) if first else job.confidence, job.right, f"{job.set} {job.job}")
        for job in jobs
        if job.states
    ]


def is_right(job: JobScores, answer: Answer) -> bool:
    """True if the stated cause is right, or the outcome where no cause is stated.

    A cause is right by the published class or the injected kind of fault. Where neither is known,
    the outcome and the role of the first line shown decide.
    """
    if answer.cause is None:
        return answer.outcome == job.outcome
    if job.is_healthy:
        return False
    if answer.class_right is not None:
        return answer.class_right
    if job.kind:
        return Named(answer.cause, answer.family or "").means(KINDS[job.kind])
    return answer.outcome == job.outcome and answer.line_right is not False


def calibration_error(answers: Sequence[Stated]) -> Estimate:
    """Expected calibration error: mean distance of confidence and share right over `EDGES`.

    Bins are weighted by their answers. The interval resamples groups, and leans upwards.
    """
    bins = bin_of([case.confidence for case in answers])
    in_bin_RK = np.equal.outer(bins, np.arange(len(EDGES) - 1)).astype(float)
    gap_R = np.array([case.right - case.confidence for case in answers], dtype=float)

    def error(drawn_BR: Floats) -> Floats:
        gaps_BK = np.abs((drawn_BR * gap_R) @ in_bin_RK)
        return np.asarray(gaps_BK.sum(axis=1) / drawn_BR.sum(axis=1))

    return estimate(error, len(answers), numbered([case.group for case in answers]))


def bin_of(confidences: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Number of the bin of `EDGES` of each confidence, 0 to 1."""
    return np.digitize(np.asarray(confidences, dtype=float), EDGES[1:-1]).astype(np.int64)


def reliability(of_source: Mapping[str, Sequence[Stated]]) -> Table:
    """Bins of confidence of each source, by its title."""
    rows: list[tuple[Cell, ...]] = []
    for title, answers in of_source.items():
        bins = bin_of([case.confidence for case in answers])
        for number, (low, high) in enumerate(itertools.pairwise(EDGES)):
            inside = [case for case, place in zip(answers, bins, strict=True) if place == number]
            if inside:
                right = sum(case.right for case in inside)
                mean = sum(case.confidence for case in inside) / len(inside)
                share = wilson(right, len(inside))
                rows.append((title, f"{low:.1f} to {high:.1f}", len(inside), mean, right, share))
    return Table(
        "reliability",
        "Stated confidence and the share of right answers",
        "Data | Confidence | Answers | Mean confidence | Right | Share right",
        rows,
        notes=[
            "Answers that state a cause or an outcome. A stated cause must be right, not in part; "
            "without one the outcome. Shares: Wilson intervals, as if jobs were independent.",
        ],
        grouped=True,
    )


def calibration(of_source: Mapping[str, Sequence[Stated]]) -> Table:
    """The calibration error and the sure answers of each source."""
    rows: list[tuple[Cell, ...]] = []
    for title, answers in of_source.items():
        sure = [case for case in answers if case.confidence >= SURE]
        right = sum(case.right for case in sure)
        error = calibration_error(answers)
        share = wilson(right, len(sure))
        rows.append((title, len(answers), error, len(sure), right, share))
    return Table(
        "calibration",
        "Calibration of the confidence",
        "Data | Answers | Expected calibration error | Sure answers | Sure and right | "
        "Share of the sure ones",
        rows,
        notes=[
            f"Sure: a confidence of {SURE} or more. Calibration error: over the bins of the table "
            "of confidences, weighted by answers; 95 % intervals by bootstrap over groups.",
        ],
    )


def calibration_tables(
    results: Iterable[Results], first: Iterable[WrittenScores], today: Iterable[WrittenScores]
) -> list[Table]:
    """Both tables, "all" without the first looks; none where there is no answer."""
    of_source = {TODAY: stated_on_written(today)} | {part.title: stated(part) for part in results}
    known = {title: answers for title, answers in of_source.items() if answers}
    if not known:
        return []
    everything = [case for answers in known.values() for case in answers]
    looks = {FIRST: found} if (found := stated_on_written(first, first=True)) else {}
    return [
        calibration(looks | known | {"all of today": everything}),
        reliability(looks or {TODAY: everything}),
    ]
