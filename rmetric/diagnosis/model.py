"""The fitted model: weights of evidence, from which suspects and causes are ranked.

Each candidate (a rank or node; a cause) has features, most of them the strengths of the rows of
evidence that speak for it. Its score is their weighted sum, and the probabilities of the candidates
of one job are the softmax of the scores: a conditional logit. The weights are in model.json, which
`python -m studies.diagnosis_benchmark.fit` makes; none is set by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path

import numpy as np

from rmetric.diagnosis.result import SURE

#: Just below what is called sure.
MOST_UNSURE = SURE - 0.01

Features = Mapping[str, float]
#: (score, share of right answers) in rising order; linear between, constant beyond.
Knots = Sequence[tuple[float, float]]

_FILE = Path(__file__).with_name("model.json")


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
        content = json.loads(_FILE.read_text(encoding="utf-8"))
        return cls(content["suspects"], content["causes"], content["shares"], content["sure from"])

    def limit(self, kind: str, strength: float) -> float:
        """The most confidence that an answer of a kind may have, by the confidence of its evidence.

        Just below what is called sure where too few of such answers were right.
        """
        share = interpolated(self.shares[kind], strength) if kind in self.shares else 1.0
        return share if strength >= self.sure_from.get(kind, 1.01) else min(share, MOST_UNSURE)


def score(features: Features, weights: Features) -> float:
    """Weighted sum; a feature without a weight counts nothing."""
    return sum(value * weights.get(name, 0.0) for name, value in features.items())


def probabilities(scores: Sequence[float]) -> list[float]:
    """The softmax of scores.

    >>> probabilities([0.0, 0.0])
    [0.5, 0.5]
    """
    top = max(scores, default=0.0)
    each = [exp(one - top) for one in scores]
    return [one / sum(each) for one in each]


def interpolated(knots: Knots, at: float) -> float:
    """The value of a piecewise linear function.

    >>> interpolated([(0.5, 0.2), (0.9, 0.6)], 0.7)
    0.4
    """
    places, values = zip(*knots, strict=True)
    return round(float(np.interp(at, places, values)), 6)


def reasons(features: Features, others: Features, weights: Features, most: int = 3) -> list[str]:
    """Names of the features that carry a candidate over the next one, the strongest first.

    Those that it has and that speak for it, and those against the other that it has not.
    """
    gain = {
        name: weights.get(name, 0.0) * (features.get(name, 0.0) - others.get(name, 0.0))
        for name in {*features, *others}
        if features.get(name, 0.0) > 0 or weights.get(name, 0.0) < 0
    }
    names = sorted(gain, key=lambda one: (-gain[one], one))
    return [name for name in names if gain[name] > 0][:most]
