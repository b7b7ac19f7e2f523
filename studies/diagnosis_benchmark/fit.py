"""Fit the model of the diagnosis to labelled jobs.

    python -m studies.diagnosis_benchmark.fit --set $(seq 26) development opened --out FILE

Suspects and causes are each ranked by a conditional logit: of the candidates of a job, the sum of
the probabilities of the right ones is made as large as possible. A penalty keeps the weights small,
and evidence against a rank never counts for it (`SIGNED`). Then the model is judged on the jobs of
each author by the weights fitted to those of the others. Two more sets are fitted to and not
counted: the corpus of the tests, whose jobs are small and were made one for each rule, and the
ranks of the injected jobs of the first split, which written jobs lack (slow ones above all).

The shares of right answers are isotonic regressions on the first run with each set of jobs
(first_looks.csv), by the kind of the answer and the confidence of its evidence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import minimize

from rmetric._util.errors import exit_with
from rmetric._util.options import add_jobs
from rmetric.diagnosis.answer import Weighed
from rmetric.diagnosis.decide import gathered
from rmetric.diagnosis.facts.job import Job, short
from rmetric.diagnosis.ingest import ingest_attempts
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.model import HEALTHY, NOBODY, Features, Knots, Model, candidates
from rmetric.diagnosis.report.result import SURE
from rmetric.logs import write_atomically
from studies.common.command import command_parser
from studies.common.csv_rows import read_rows
from studies.common.processes import mapped
from studies.diagnosis_benchmark.cases import INJECTED, JOBS, injected_jobs
from studies.diagnosis_benchmark.cause_meanings import Named, verdict
from studies.diagnosis_benchmark.corpus import corpus
from studies.diagnosis_benchmark.corpus import write as write_files
from studies.diagnosis_benchmark.reliability import CALLED, Stated, calibration_error
from studies.diagnosis_benchmark.tables import FIRST_LOOKS
from studies.diagnosis_benchmark.written_jobs import WrittenScores
from studies.diagnosis_benchmark.written_sets import WrittenCase, add_sets, opened, written_sets

RESULTS = Path(__file__).parent / "results"
SHIPPED = Path("rmetric", "diagnosis", "model.json")
#: Strength of the penalty on squared weights.
PENALTY = 0.3
#: Smaller weights are left out.
MIN_WEIGHT = 0.02
#: Features of causes that may only count for one (+1) or against it (-1). Evidence against a rank
#: never counts for it.
SIGNED = {"confidence": 1, "planned end": 1, "consequence": -1, "faults": -1}
FREE = ("a node", "a file", "nobody")
#: Answers of a kind from a confidence on are sure if so many were right.
SURE_SHARE = 0.95
#: Answers at each confidence that are right as often as it says, lest few answers decide.
PSEUDO_ANSWERS = 2.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A job with its evidence and what is right about it, None where that is not known.

    Attributes:
        group: jobs of a group, of one author, are left out together.
        is_culprit: True for the name of a stream at fault, or for `NOBODY`.
        is_right: True for the id, the family and the stage of a right cause, or for `HEALTHY`.
        counts: it is judged, not only fitted to.
    """

    group: str
    found: Weighed
    is_culprit: Callable[[str], bool] | None
    is_right: Callable[[str, str, str], bool] | None
    counts: bool = True


def of_written(job: WrittenCase, found: Weighed) -> Labelled:
    """A written job, whose author is known by the letter in its name."""
    manifest = job.manifest
    rank, node = manifest["rank"], manifest["node"]

    def is_culprit(target: str) -> bool:
        if rank is None and node is None:
            return target == NOBODY
        if rank is not None:
            return _rank_of(target, found) == rank
        own = found.scene.job.streams.get(target)
        at = found.scene.job.node_of(own) if own is not None else None
        return short(at or target.removeprefix("node ")) == short(node)

    def is_right(cause: str, family: str, stage: str) -> bool:
        if job.case.is_healthy or cause == HEALTHY:
            return job.case.is_healthy and cause == HEALTHY
        return verdict(Named(cause, family, stage), tuple(manifest["causes"])) == "right"

    return Labelled(
        group=_author(job.set, job.case.name),
        found=found,
        is_culprit=None if job.case.is_healthy else is_culprit,
        is_right=is_right,
    )


def _author(set_name: str, job: str) -> str:
    letter = re.match(r"job-([a-z])\d", job)
    return f"{set_name} {letter[1]}" if letter else set_name


def _rank_of(target: str, found: Weighed) -> int | None:
    own = found.scene.job.streams.get(target)
    if own is not None:
        return own.rank
    kind, _, number = target.partition(" ")
    return int(number) if kind == "rank" and number.isdigit() else None


def of_corpus(expected: Mapping[str, Any], topic: str, found: Weighed) -> Labelled:
    """A job of the tests' corpus, which states in part what is right."""
    who = expected.get("who", [expected["first"]] if "first" in expected else None)
    names = [NOBODY] if who == [] else who
    cause, family = expected.get("cause"), expected.get("family")
    causes = [cause] if isinstance(cause, str) else cause or []
    healthy = expected.get("outcome") == "healthy"

    def is_right(id: str, of: str, stage: str) -> bool:
        if healthy or id == HEALTHY:
            return healthy and id == HEALTHY
        return id in causes or of == family or not stated

    stated = bool(causes) or family is not None
    known = stated or healthy or bool(who)  # whom it accuses has failed, whatever the cause
    return Labelled(
        group=f"tests {topic}",
        found=found,
        is_culprit=None if names is None else lambda target: target in names,
        is_right=is_right if known else None,
        counts=False,
    )


@dataclass(frozen=True)
class Choices:
    """Candidates of all jobs, one after another: features, rightness and job, from 0, of each."""

    names: list[str]
    values: Array
    right: npt.NDArray[np.bool_]
    job: npt.NDArray[np.int64]

    @classmethod
    def of(cls, jobs: Sequence[Sequence[tuple[Features, bool]]]) -> Choices:
        frame = pd.DataFrame([features for each in jobs for features, _ in each]).fillna(0.0)
        frame = frame[sorted(frame)]
        right = np.array([right for each in jobs for _, right in each], dtype=bool)
        job = np.repeat(np.arange(len(jobs)), [len(each) for each in jobs])
        return cls([*frame], frame.to_numpy(dtype=float), right, job)

    def fit(self, jobs: npt.NDArray[np.bool_]) -> dict[str, float]:
        """Weights that make the right candidates of some jobs likely; of those that have any."""
        able = np.zeros(len(jobs), dtype=bool)
        np.logical_or.at(able, self.job, self.right)
        use = (able & jobs)[self.job]
        if not use.any():
            return {}
        values, right, job = self.values[use], self.right[use], self.job[use]
        starts = np.flatnonzero(np.r_[True, job[1:] != job[:-1]])
        lengths = np.diff(np.r_[starts, len(job)])

        def loss(weights: Array) -> tuple[float, Array]:
            scores = values @ weights
            scores -= np.repeat(np.maximum.reduceat(scores, starts), lengths)
            each = np.exp(scores)
            each /= np.repeat(np.add.reduceat(each, starts), lengths)
            hit = np.add.reduceat(each * right, starts)
            target = each * right / np.repeat(hit, lengths)
            slope = values.T @ (target - each)
            penalty = PENALTY * weights @ weights / 2
            return float(penalty - np.log(hit).sum()), PENALTY * weights - slope

        of_suspects = "nobody" in self.names
        signs = dict.fromkeys({*self.names} - {*FREE}, 1) if of_suspects else SIGNED
        limits = [
            (0.0 if signs.get(name) == 1 else None, 0.0 if signs.get(name) == -1 else None)
            for name in self.names
        ]
        found = minimize(
            loss, np.zeros(len(self.names)), jac=True, method="L-BFGS-B", bounds=limits,
            options={"maxiter": 1000},
        )  # fmt: skip
        return {
            name: round(float(weight), 3)
            for name, weight in zip(self.names, found.x, strict=True)
            if abs(weight) >= MIN_WEIGHT
        }


def causes_of(job: Labelled, weights: Features) -> list[tuple[Features, bool]]:
    """The features of each hypothesis about a job, and whether it is right."""
    whole, choices = replace(job.found, model=Model(weights, {}, {}, {})), []
    for each, _ in whole.hypotheses:
        family = stage = ""
        if each.id != HEALTHY:
            family, stage = each.cause.family, whole.stage_of(each)
        choices.append((each.features, bool(job.is_right and job.is_right(each.id, family, stage))))
    return choices


def right_first(choices: Choices, weights: Features) -> npt.NDArray[np.bool_]:
    """Whether the candidate with the greatest score is right, for each job."""
    scores = choices.values @ np.array([weights.get(name, 0.0) for name in choices.names])
    order = np.lexsort((-scores, choices.job))
    first = order[np.r_[True, np.diff(choices.job[order]) != 0]]
    return choices.right[first]


def left_out(choices: Choices, groups: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether each job is right by the weights fitted to the jobs of the other groups."""
    each = np.array(groups)
    right = np.zeros(len(each), dtype=bool)
    for group in np.unique(each):
        own = each == group
        right[own] = right_first(choices, choices.fit(~own))[own]
    return right


def shares(looks: Sequence[WrittenScores]) -> tuple[dict[str, Knots], dict[str, float]]:
    """Kind of answer -> its share of right first looks by confidence; and from where it is sure."""
    from sklearn.isotonic import IsotonicRegression

    kinds: dict[str, list[tuple[float, bool]]] = {}
    for row in looks:
        if row.states:
            kinds.setdefault(CALLED.get(row.basis, row.basis), []).append((row.score, row.right))
    knots: dict[str, Knots] = {}
    sure = {}
    for kind, answers in sorted(kinds.items()):
        at, right = (np.array(column, dtype=float) for column in zip(*answers, strict=True))
        places = np.unique(at)
        fit = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(
            np.r_[at, places],
            np.r_[right, places],
            sample_weight=np.r_[np.ones(len(at)), np.full(len(places), PSEUDO_ANSWERS)],
        )
        knots[kind] = [
            (round(float(place), 3), round(float(value), 3))
            for place, value in zip(places, fit.predict(places), strict=True)
        ]
        above = [place for place in places if right[at >= place].mean() >= SURE_SHARE]
        sure[kind] = round(float(min(above, default=1.01)), 3)
    return knots, sure


def calibrated_by_others(looks: Sequence[WrittenScores]) -> str:
    """How well first looks are calibrated by the shares of those at other authors' jobs."""
    answers = []
    for author in sorted({_author(row.set, row.job) for row in looks}):
        known, sure_from = shares([row for row in looks if _author(row.set, row.job) != author])
        limit = Model({}, {}, known, sure_from).limit
        answers += [
            Stated(limit(CALLED.get(row.basis, row.basis), row.score), row.right, author)
            for row in looks
            if row.states and _author(row.set, row.job) == author
        ]
    error, sure = calibration_error(answers), [case for case in answers if case.confidence >= SURE]
    return (
        f"first looks by the shares of other authors: calibration error {error.point:.3f} "
        f"[{error.low:.3f}, {error.high:.3f}], {sum(case.right for case in sure)} of {len(sure)} "
        "sure answers are right"
    )


def report(jobs: Sequence[Labelled], choices: Choices, what: str) -> str:
    """How many are right first, by the weights fitted to all and to the other groups."""
    counted = np.array([job.counts for job in jobs])
    every = right_first(choices, choices.fit(np.ones(len(jobs), dtype=bool)))
    others = left_out(choices, [job.group for job in jobs])[counted]
    return (
        f"{what}: of {counted.sum()} jobs {every[counted].sum()} are right first by the fit to "
        f"all, {others.sum()} by that to the jobs of other authors; of the {(~counted).sum()} that "
        f"are only fitted to {every[~counted].sum()}"
    )


def fitted(jobs: Sequence[Labelled], looks: Sequence[WrittenScores]) -> tuple[Model, list[str]]:
    """The model, and lines that say how good it is."""
    blamed = [job for job in jobs if job.is_culprit]
    whom = Choices.of(
        [
            [(features, is_culprit(target)) for target, features in candidates(rows).items()]
            for is_culprit, rows in ((job.is_culprit, job.found.rows) for job in blamed)
            if is_culprit
        ]
    )
    weights = whom.fit(np.ones(len(blamed), dtype=bool))
    judged = [job for job in jobs if job.is_right]
    why = Choices.of([causes_of(job, weights) for job in judged])
    lines = [
        report(blamed, whom, "rank or node, or nobody"),
        report(judged, why, "cause, or none"),
        calibrated_by_others(looks),
    ]
    return Model(weights, why.fit(np.ones(len(judged), dtype=bool)), *shares(looks)), lines


def tests_jobs() -> Iterator[Labelled]:
    """The jobs of the tests' corpus that are diagnosed, with their evidence."""
    library = SignatureLibrary.shipped()
    for entry in corpus():
        with TemporaryDirectory() as work:
            attempts = ingest_attempts([write_files(entry.files, Path(work) / "job")], library)
            siblings: tuple[Job, ...] = ()
            if entry.healthy:
                path = write_files(entry.healthy, Path(work) / "healthy")
                siblings = (ingest_attempts([path], library)[-1],)
        job = attempts[(entry.attempt or len(attempts)) - 1]
        yield of_corpus(entry.expected, entry.topic, gathered(job, library, siblings))


def injected_ranks() -> Iterator[Labelled]:
    """The injected jobs of the first split with a faulty rank."""
    library = SignatureLibrary.shipped()
    with TemporaryDirectory() as work:
        for case in injected_jobs(INJECTED[0], JOBS, Path(work)):
            if case.rank is None:
                continue
            found = gathered(_last_attempt(case.folder), library)

            def is_culprit(target: str, found: Weighed = found, rank: int = case.rank) -> bool:
                return _rank_of(target, found) == rank

            group = f"injected {case.kind}"
            yield Labelled(
                group=group, found=found, is_culprit=is_culprit, is_right=None, counts=False
            )


def _last_attempt(folder: Path) -> Job:
    return ingest_attempts([folder], SignatureLibrary.shipped())[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print how good it is, and write the model."""
    parser = command_parser("diagnosis_benchmark.fit", __doc__)
    add_sets(parser)
    add_jobs(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the model; shipped: {SHIPPED}")
    given = parser.parse_args(arguments)
    library = SignatureLibrary.shipped()
    with opened(given.sets) as written:
        folders = (labelled.case.folder for labelled in written)
        attempts = mapped(_last_attempt, folders, processes=given.jobs)
        pairs = zip(written, attempts, strict=True)
        jobs = [of_written(labelled, gathered(job, library)) for labelled, job in pairs]
        jobs += [*tests_jobs(), *injected_ranks()]
    sets = {labelled.set for labelled in written}
    looks = [row for row in read_rows(RESULTS / FIRST_LOOKS, WrittenScores) if row.set in sets]
    model, lines = fitted(jobs, looks)
    print("\n".join(lines))
    hashes = "".join(entry.sha256 for name, entry in written_sets().items() if name in sets)
    about = f"{len(jobs)} jobs; {parser.prog}; sets {hashlib.sha256(hashes.encode()).hexdigest()}"
    if given.out is not None:
        content = {
            "about": about,
            "suspects": model.suspects,
            "causes": model.causes,
            "shares": model.shares,
            "sure from": model.sure_from,
        }
        write_atomically(given.out, [json.dumps(content, indent=1).encode(), b"\n"])
    return 0


if __name__ == "__main__":
    exit_with(main)
