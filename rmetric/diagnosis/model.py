"""Who may be at fault and what may have ended a job, ranked by the fitted model.

Each candidate (a rank or node; a cause) has features, most of them the strengths of the rows of
evidence that speak for it. Its score is their weighted sum, and the probabilities of the candidates
of one job are the softmax of the scores: a conditional logit. The weights are in model.json, which
`python -m studies.diagnosis_benchmark.fit` makes; none is set by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, log1p
from pathlib import Path

import numpy as np

from rmetric.diagnosis.evidence.scene import Row, Scene, grouped, strongest
from rmetric.diagnosis.facts.job import Job, JobStream
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.report.result import MAX_NODES, SURE, Suspect
from rmetric.diagnosis.signature import HUNG, InferredCause, Signature, inferred_causes
from rmetric.readers.step_forms import planned_steps

Features = Mapping[str, float]
#: (score, share of right answers) in rising order; linear between, constant beyond.
Knots = Sequence[tuple[float, float]]

#: From this score on a suspect is named: it is likelier than that nobody is at fault.
NAMED = 0.5
#: Suspects that differ by less are as suspect.
SAME_SCORE = 0.05
#: That a target is nobody.
NOBODY = ""
#: That nothing failed.
HEALTHY = "healthy"
#: Share of the planned steps below which a log stops early.
MIN_PLANNED_STEP_SHARE = 0.95
#: Confidences of signatures are kept so far from 0 and 1.
MARGIN = 0.02


@dataclass(frozen=True)
class Model:
    """Weights by feature, and what answers of a kind were worth.

    Attributes:
        suspects: weights of the features of ranks and nodes.
        causes: weights of the features of causes.
        shares: kind of answer -> its share of right answers at first looks, by the confidence of
            its evidence; "sure from" is the least confidence of evidence that may be sure.
    """

    suspects: Features
    causes: Features
    shares: Mapping[str, Knots]
    sure_from: Mapping[str, float]

    @classmethod
    @cache
    def shipped(cls) -> Model:
        content = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
        return cls(content["suspects"], content["causes"], content["shares"], content["sure from"])

    def limit(self, kind: str, strength: float) -> float:
        """The most confidence of an answer of a kind, by the confidence of its evidence.

        Just below what is called sure where too few of such answers were right.
        """
        share = 1.0
        if kind in self.shares:
            places, values = zip(*self.shares[kind], strict=True)
            share = round(float(np.interp(strength, places, values)), 6)
        return share if strength >= self.sure_from.get(kind, 1.01) else min(share, SURE - 0.01)


def score(features: Features, weights: Features) -> float:
    """Weighted sum; a feature without a weight counts nothing."""
    return sum(value * weights.get(name, 0.0) for name, value in features.items())


def probabilities(scores: Sequence[float]) -> list[float]:
    """The softmax of scores.

    >>> probabilities([0.0, 0.0])
    [0.5, 0.5]
    """
    top = max(scores, default=0.0)
    powers = [exp(value - top) for value in scores]
    return [value / sum(powers) for value in powers]


def reasons(features: Features, others: Features, weights: Features) -> list[str]:
    """At most three features that carry a candidate over the next one, the strongest first.

    They speak for it, or against the other, which alone has them.
    """
    gain = {
        name: weights.get(name, 0.0) * (features.get(name, 0.0) - others.get(name, 0.0))
        for name in {*features, *others}
        if features.get(name, 0.0) > 0 or weights.get(name, 0.0) < 0
    }
    names = sorted(gain, key=lambda name: (-gain[name], name))
    return [name for name in names if gain[name] > 0][:3]


def candidates(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Target -> its features: the strongest row of each kind; `NOBODY` is one of the targets."""
    found: dict[str, dict[str, float]] = {NOBODY: {"nobody": 1.0}}
    for target, against in grouped(rows, "target").items():
        found[target] = features = {kind: row.strength for kind, row in strongest(against).items()}
        if target.startswith("node "):
            features["a node"] = 1.0
        elif not target.startswith("rank "):
            features["a file"] = 1.0
    return found


def suspects(scene: Scene, rows: Sequence[Row], weights: Features) -> tuple[Suspect, ...]:
    """All streams with evidence, the most suspect first; `named` selects from them."""
    features = candidates(rows)
    innocent, node_of_all, found = score(features[NOBODY], weights), only_node(scene.job), []
    for target, against in grouped(rows, "target").items():
        its = strongest(against).values()
        carried = sorted(its, key=lambda row: -weights.get(row.kind, 0.0) * row.strength)
        kind, _, rest = target.partition(" ")
        stream = scene.job.streams.get(target) or JobStream(  # it has no log lines
            name=target,
            rank=int(rest) if kind == "rank" and rest.isdigit() else None,
            node=rest if kind == "node" else None,
        )
        rank = stream.rank
        node = scene.job.node_of(stream) or (None if rank is None else node_of_all)
        share = round(1.0 / (1.0 + exp(innocent - score(features[target], weights))), 3)
        why = "; ".join(row.words for row in carried[:3])
        found.append(Suspect(name=target, rank=rank, node=node, score=share, why=why))
    found.sort(key=lambda who: (-who.score, -1 if who.rank is None else who.rank, who.name))
    return tuple(found)


def named(ranked: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """Those above the threshold, at most `MAX_NODES`; none where too many are as suspect.

    The only rank on the first node, if it is one of them, stands before it: it names both.
    """
    over = [who for who in ranked if who.score >= NAMED]
    if over and over[0].rank is None and over[0].node is not None:
        on_it = [who for who in over[1:] if who.rank is not None and who.node == over[0].node]
        if len(on_it) == 1:
            over = on_it + [who for who in over if who is not on_it[0]]
    if len(over) > MAX_NODES and over[0].score - over[MAX_NODES].score < SAME_SCORE:
        return ()
    return tuple(over[:MAX_NODES])


def only_node(job: Job) -> str | None:
    """The node of a job whose ranks are all on one."""
    nodes = {stream.node for stream in job.streams.values()} - {None}
    single = len(nodes) == 1 and (job.world_size or 0) <= (job.ranks_per_node or 0)
    return nodes.pop() if single else None


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One thing that may have ended the job.

    Attributes:
        id: of a signature or of an inferred cause; `HEALTHY` for no failure.
        features: name -> value.
        fault: the known fault; None else.
        rows: evidence for an inferred cause, that of the likeliest suspect first.
    """

    id: str
    features: Features
    fault: Fault | None = None
    rows: Sequence[Row] = ()

    @property
    def cause(self) -> Signature | InferredCause:
        """What is known of the cause; there is none of `HEALTHY`."""
        return self.fault.signature if self.fault else inferred_causes()[self.id]


def hypotheses(scene: Scene, rows: Sequence[Row], ranked: Sequence[Suspect]) -> list[Hypothesis]:
    """All hypotheses about a job; a fault that was survived is none."""
    suspected = {suspect.name: suspect.score for suspect in ranked}
    by_cause = grouped(rows, "hypothesis")
    found = [_known(fault, HUNG in by_cause) for fault in scene.faults]
    for cause, its in by_cause.items():
        its.sort(key=lambda row: -suspected.get(row.target, 0.0))
        hang = float(any(row.kind == "hang" for row in its))
        found.append(Hypothesis(id=cause, features={cause: 1.0, "hang": hang}, rows=its))
    ended = scene.job.succeeded is not None and not scene.alone
    if ended or scene.job.trained or not found:
        features = {HEALTHY: 1.0, "planned end": float(ended), "faults": log1p(len(scene.faults))}
        found.append(Hypothesis(id=HEALTHY, features=features))
    return found


def _known(fault: Fault, hangs: bool) -> Hypothesis:
    sure = min(max(fault.confidence, MARGIN), 1.0 - MARGIN)
    features = {
        fault.role: 1.0,
        "confidence": log(sure / (1.0 - sure)),
        "survivable": float(fault.signature.survivable),
        "consequence": float(bool(fault.follows)),
        "ending of a hang": float(hangs and fault.role == "ending"),
    }
    return Hypothesis(id=fault.signature.id, features=features, fault=fault)


def early_stop(scene: Scene) -> str:
    """Describe where the log stops, if that is before the planned number of steps."""
    if scene.job.cut_off:
        return ", but the log is cut off before its end"
    last = scene.job.furthest
    if last is None or last.last_step_at is None:
        return ""
    step = last.last_step or 0
    planned = planned_steps(last.last_step_at.text, step)
    if planned is None or step >= MIN_PLANNED_STEP_SHARE * planned:
        return ""
    return f", but the log stops at step {step:,} of {planned:,}"
