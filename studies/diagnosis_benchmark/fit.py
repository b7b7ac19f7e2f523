"""Fit the model of the diagnosis to labelled jobs.

    python -m studies.diagnosis_benchmark.fit --written DIR --out rmetric/diagnosis/model.json

Suspects and causes are each ranked by a conditional logit: of the candidates of a job, the sum of
the probabilities of the right ones is made as large as possible. A penalty keeps the weights small,
and evidence against a rank never counts for it (`SIGNED`). Then the model is judged on each set of
jobs by the weights fitted to the others.

The shares of right answers come from first looks at jobs that nobody had seen: by the kind of the
answer and the confidence of its evidence, as isotonic regressions (first_answers.csv).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from rmetric.diagnosis.decide import Gathered, weigh
from rmetric.diagnosis.hypotheses import HEALTHY
from rmetric.diagnosis.inferred import inferred_causes
from rmetric.diagnosis.job import short
from rmetric.diagnosis.model import Features, Model
from rmetric.diagnosis.suspects import NOBODY, candidates
from rmetric.logs import write_atomically
from studies.diagnosis_benchmark.cause_meanings import Named, verdict

FIRST_ANSWERS = Path(__file__).parent / "results" / "first_answers.csv"
#: Strength of the penalty on squared weights.
PENALTY = 0.3
#: Smaller weights are left out.
MIN_WEIGHT = 0.02
#: Features of causes that may only speak for one (+1) or against it (-1). Evidence against a rank
#: never speaks for it.
SIGNED = {
    "confidence": 1, "explains": 1, "trained": 1, "survived": -1, "consequence": -1,
    "stops early": -1, "faults": -1, "lacks its end": -1,
}  # fmt: skip
FREE = ("a node", "a file", "nobody")
#: Answers of a kind from a confidence on are sure if so many were right.
SURE_SHARE = 0.95
#: Answers at each confidence that are right as often as it says, lest few answers decide.
PSEUDO_ANSWERS = 2.0
#: Kind of answer in the first looks -> as the model calls it.
KINDS = {
    "contradicted cause": "cause",
    "missing rank": "inferred",
}

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A job with its evidence and what is right about it (a manifest of the written jobs).

    Attributes:
        group: jobs of a group are left out together.
    """

    name: str
    group: str
    told: Mapping[str, Any]
    found: Gathered

    @property
    def is_healthy(self) -> bool:
        return bool(self.told["outcome"] == "healthy")

    def is_culprit(self, target: str) -> bool:
        """True for the stream of the rank, or else the node, that is at fault; or nobody."""
        rank, node = self.told["rank"], self.told["node"]
        if rank is None and node is None:
            return target == NOBODY
        stream = self.found.scene.job.streams.get(target)
        own = stream.rank if stream is not None else _rank_of(target)
        if rank is not None:
            return own == rank
        at = self.found.scene.job.node_of(stream) if stream is not None else None
        at = at or target.removeprefix("node ")
        return short(at) == short(node)

    def is_right(self, cause: str, family: str, stage: str) -> bool:
        if self.is_healthy or cause == HEALTHY:
            return self.is_healthy and cause == HEALTHY
        return verdict(Named(cause, family, stage), tuple(self.told["causes"])) == "right"


def _rank_of(target: str) -> int | None:
    kind, _, number = target.partition(" ")
    return int(number) if kind == "rank" and number.isdigit() else None


@dataclass(frozen=True)
class Choices:
    """Candidates of all jobs, one after another.

    Attributes:
        names: of the features.
        values: one row a candidate.
        right: the candidate is right.
        job: of each candidate, from 0 in order.
    """

    names: list[str]
    values: Array
    right: npt.NDArray[np.bool_]
    job: npt.NDArray[np.int64]

    @classmethod
    def of(cls, jobs: Sequence[Sequence[tuple[Features, bool]]]) -> Choices:
        names = sorted({name for each in jobs for features, _ in each for name in features})
        place = {name: at for at, name in enumerate(names)}
        values = np.zeros((sum(map(len, jobs)), len(names)))
        row = 0
        for each in jobs:
            for features, _ in each:
                for name, value in features.items():
                    values[row, place[name]] = value
                row += 1
        right = np.array([right for each in jobs for _, right in each], dtype=bool)
        return cls(names, values, right, np.repeat(np.arange(len(jobs)), [len(e) for e in jobs]))

    @property
    def signs(self) -> Mapping[str, int]:
        """Feature -> +1 or -1, of those whose sign is known."""
        if "nobody" in self.names:
            return {name: 1 for name in self.names if name not in FREE}
        return SIGNED

    def fit(self, jobs: npt.NDArray[np.bool_]) -> dict[str, float]:
        """Weights that make the right candidates of some jobs likely; of those that have any."""
        able = np.zeros(len(jobs), dtype=bool)
        np.logical_or.at(able, self.job, self.right)
        use = (able & jobs)[self.job]
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

        signs = self.signs
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


def suspect_choices(jobs: Sequence[Labelled]) -> Choices:
    """The suspects of all jobs that failed; of healthy ones nobody is."""
    return Choices.of(
        [
            [
                (features, one.is_culprit(target))
                for target, features in candidates(one.found.rows).items()
            ]
            for one in jobs
        ]
    )


def cause_choices(jobs: Sequence[Labelled], weights: Features) -> Choices:
    """The hypotheses about all jobs, by the suspects that such weights rank."""
    return Choices.of([causes_of(one, weights) for one in jobs])


def causes_of(one: Labelled, weights: Features) -> list[tuple[Features, bool]]:
    """The features of each hypothesis about a job, and whether it is right."""
    whole, choices = weigh(one.found, Model(weights, {}, {}, {})), []
    for each, _ in whole.hypotheses:
        family = stage = ""
        if each.id != HEALTHY:
            known = each.fault.signature if each.fault else inferred_causes()[each.id]
            family, stage = known.family, whole.stage_of(each)
        choices.append((each.features, one.is_right(each.id, family, stage)))
    return choices


def right_first(choices: Choices, weights: Features) -> npt.NDArray[np.bool_]:
    """For each job: the candidate with the greatest score is right."""
    scores = choices.values @ np.array([weights.get(name, 0.0) for name in choices.names])
    order = np.lexsort((-scores, choices.job))
    first = order[np.r_[True, np.diff(choices.job[order]) != 0]]
    return choices.right[first]


def left_out(choices: Choices, groups: Sequence[str]) -> npt.NDArray[np.bool_]:
    """For each job: right by the weights fitted to the jobs of the other groups."""
    each = np.array(groups)
    right = np.zeros(len(each), dtype=bool)
    for group in np.unique(each):
        own = each == group
        right[own] = right_first(choices, choices.fit(~own))[own]
    return right


def shares(path: Path) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """Kind of answer -> its share of right first looks by confidence; and from where it is sure."""
    from sklearn.isotonic import IsotonicRegression

    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kinds: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        kind = KINDS.get(row["basis"], row["basis"])
        kinds.setdefault(kind, []).append((float(row["score"]), row["right"] == "yes"))
    knots, sure = {}, {}
    for kind, answers in sorted(kinds.items()):
        at = np.array([one for one, _ in answers])
        right = np.array([float(one) for _, one in answers])
        places = np.unique(at)
        fit = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
        fit.fit(
            np.r_[at, places],
            np.r_[right, places],
            sample_weight=np.r_[np.ones(len(at)), np.full(len(places), PSEUDO_ANSWERS)],
        )
        knots[kind] = [
            (round(float(one), 3), round(float(fit.predict([one])[0]), 3)) for one in places
        ]
        above = [one for one in places if right[at >= one].mean() >= SURE_SHARE]
        sure[kind] = round(float(min(above, default=1.01)), 3)
    return knots, sure


def report(jobs: Sequence[Labelled], choices: Choices, what: str, failed: bool) -> str:
    """How many are right first, by the weights fitted to all and to the other groups."""
    counted = np.array([one.is_healthy != failed for one in jobs])
    every = right_first(choices, choices.fit(np.ones(len(jobs), dtype=bool)))
    others = left_out(choices, [one.group for one in jobs])
    total = int(counted.sum())
    return (
        f"{what}: {int(every[counted].sum())} of {total} right first by the fit to all, "
        f"{int(others[counted].sum())} by that to the other groups"
    )


def fitted(jobs: Sequence[Labelled]) -> tuple[Model, list[str]]:
    """The model, and lines that say how good it is."""
    all_jobs = np.ones(len(jobs), dtype=bool)
    failing = [one for one in jobs if not one.is_healthy]
    whom = suspect_choices(failing)
    weights = whom.fit(np.ones(len(failing), dtype=bool))
    why = cause_choices(jobs, weights)
    lines = [
        report(failing, whom, "rank or node, or nobody", True),
        report(jobs, why, "cause", True),
        report(jobs, why, "healthy", False),
    ]
    knots, sure = shares(FIRST_ANSWERS)
    return Model(weights, why.fit(all_jobs), knots, sure), lines


def written(path: Path, model: Model, about: Mapping[str, Any]) -> None:
    """Write a model as `Model.shipped` reads it."""
    content = {
        "about": about,
        "suspects": model.suspects,
        "causes": model.causes,
        "shares": model.shares,
        "sure from": model.sure_from,
    }
    write_atomically(path, [json.dumps(content, indent=1).encode(), b"\n"])
