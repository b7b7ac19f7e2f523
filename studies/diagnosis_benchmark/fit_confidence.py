"""Fit the calibration of the diagnosis' confidence to scored answers.

    python -m studies.diagnosis_benchmark.fit_confidence RESULTS [...] --out FILE

RESULTS are files of scores: real_*.json, injected_*.json, written.csv, first_looks.csv.

Each kind of evidence (`rmetric.diagnosis.confidence.KINDS`) has an isotonic regression of "the
answer is right" on the score of the evidence. At each score some pseudo-answers that are right as
often as the score says keep few answers from deciding alone. The calibration error of the fit is
printed cross-validated: each case is judged by a table fitted to the others, and again each kind of
fault by a table fitted to the other kinds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rmetric._util.errors import exit_with
from rmetric.diagnosis.confidence import KINDS, MIN_CONFIDENCE, Basis, Table, calibrated
from rmetric.logs import write_atomically
from studies.common.renderers import to_text
from studies.diagnosis_benchmark.csv_rows import read_rows
from studies.diagnosis_benchmark.reliability import (
    Stated,
    calibration,
    is_right,
    kind_of,
    reliability,
)
from studies.diagnosis_benchmark.results import read_results
from studies.diagnosis_benchmark.written_jobs import WrittenScores

#: Answers at each score that are right as often as the score says.
PSEUDO_ANSWERS = 2.0
#: A kind of fewer cases keeps its score.
MIN_CASES = 5
TABLE = Path("rmetric", "diagnosis", "confidence.json")


class Evidence(NamedTuple):
    """An answer before its calibration, and if it is right.

    Attributes:
        kind: of the evidence.
        case: answers of one case are not independent.
        fault: its kind of fault; of real logs the case.
    """

    kind: str
    score: float
    right: bool
    case: str
    fault: str


def evidence_of(path: Path) -> list[Evidence]:
    """The answers in a file of scores that state a cause or an outcome.

    Raises:
        ValueError: the file is no result of the benchmark.
    """
    if path.suffix == ".csv":
        return [
            Evidence(one.basis, one.score, one.right, f"{one.set} {one.job}", one.kind)
            for one in read_rows(path, WrittenScores)
            if one.states
        ]
    return list(_jobs(path))


def _jobs(path: Path) -> Iterator[Evidence]:
    results = read_results(path)
    for job in results.jobs:
        answer = job.answers[results.headline]
        if answer.outcome == "unknown" and answer.cause is None:
            continue
        case = f"{results.source} {results.split} {results.drawn_with(job)}"
        fault = job.kind or (job.group if results.source == "real" else "healthy")
        score = answer.confidence if answer.score is None else answer.score
        yield Evidence(kind_of(answer), score or 0.0, is_right(job, answer), case, fault)


def fit(answers: Sequence[Evidence]) -> Table:
    """Knots (score, confidence) of each kind that has at least `MIN_CASES` cases."""
    from sklearn.isotonic import IsotonicRegression

    table = {}
    for kind, highest in KINDS.items():
        own = [one for one in answers if one.kind == kind]
        if len({one.case for one in own}) < MIN_CASES:
            continue
        scores = sorted({one.score for one in own})
        right = [[one.right for one in own if one.score == score] for score in scores]
        weights = np.array([len(some) + PSEUDO_ANSWERS for some in right])
        hits = [
            sum(some) + PSEUDO_ANSWERS * score for score, some in zip(scores, right, strict=True)
        ]
        model = IsotonicRegression(y_min=MIN_CONFIDENCE, y_max=highest)
        values = model.fit_transform(scores, np.array(hits) / weights, sample_weight=weights)
        table[kind] = _corners(
            [(score, round(float(value), 3)) for score, value in zip(scores, values, strict=True)]
        )
    return table


def _corners(knots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the knots between two of the same value."""
    inner = range(1, len(knots) - 1)
    flat = {at for at in inner if knots[at - 1][1] == knots[at][1] == knots[at + 1][1]}
    return [knot for at, knot in enumerate(knots) if at not in flat]


def judged(answers: Sequence[Evidence], table: Table) -> list[Stated]:
    """The answers with the confidence that a table gives them."""
    return [
        Stated(calibrated(Basis(one.kind), one.score, table), one.right, one.case)
        for one in answers
    ]


def cross_validated(
    answers: Sequence[Evidence], group_of: Callable[[Evidence], str]
) -> list[Stated]:
    """The answers of each group by the table of all other groups."""
    groups: dict[str, list[Evidence]] = {}
    for one in answers:
        groups.setdefault(group_of(one), []).append(one)
    out = []
    for name, own in groups.items():
        kinds = {one.kind for one in own}
        others = [one for one in answers if one.kind in kinds and group_of(one) != name]
        out += judged(own, fit(others))
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.diagnosis_benchmark.fit_confidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"write the table there; shipped: {TABLE}"
    )
    given = parser.parse_args(arguments)
    answers = [one for path in given.results for one in evidence_of(path)]
    views = {
        "before": [Stated(one.score, one.right, one.case) for one in answers],
        "fitted to the same answers": judged(answers, fit(answers)),
        "cross-validated by case": cross_validated(answers, lambda one: one.case),
        "cross-validated by fault": cross_validated(answers, lambda one: one.fault),
    }
    for make in (calibration, reliability):
        print(to_text(make(views)))
    table_of_all = fit(answers)
    for kind, knots in table_of_all.items():
        number = sum(one.kind == kind for one in answers)
        print(f"{kind} ({number}):", ", ".join(f"{at:g} -> {value:g}" for at, value in knots))
    if given.out is not None:
        about = f"{len(answers)} answers; made by {parser.prog}"
        text = json.dumps({"about": about, "table": table_of_all}, indent=1)
        write_atomically(given.out, [text.encode(), b"\n"])
    return 0


if __name__ == "__main__":
    exit_with(main)
