"""What one answer scores on one job: pure functions of the answer and of what is known."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import comb
from typing import NamedTuple

from rmetric.diagnosis.evaluation.cases import Label

#: A line: its file and its number.
Place = tuple[str, int]

#: L4 reports the faulty node among the first so many (arXiv 2503.20263, table 4).
TOPS = (1, 3, 5, 8)


class Counts(NamedTuple):
    """Events of one job: shown and true, shown and not true, true and not shown."""

    found: int
    wrong: int
    missed: int


def event_counts(
    labels: Iterable[Label],
    shown: Iterable[Place],
    event_of: Mapping[Place, int],
    true_roles: Collection[str] = ("cause", "symptom"),
) -> Counts:
    """Events shown against events labelled.

    An event is true if any of its lines has a role of `true_roles`, and neutral, neither right
    nor wrong, if it has lines of other roles only. A labelled line that belongs to no event is an
    event of its own, and missed; a line shown that belongs to none is wrong.
    """
    true: set[Hashable] = set()
    neutral: set[Hashable] = set()
    for label in labels:
        place = (label.file, label.line)
        (true if label.role in true_roles else neutral).add(event_of.get(place, place))
    answer: set[Hashable] = {event_of.get(place, place) for place in shown}
    answer -= neutral - true
    return Counts(len(answer & true), len(answer - true), len(true - answer))


def hits(ranking: Sequence[Collection[Hashable]], truth: Hashable) -> list[float]:
    """Whether `truth` is among the first of a ranking, for each of `TOPS`; a chance among ties.

    Args:
        ranking: groups of equals, the most suspect first; within one any order is as likely.
    """
    before = 0
    for group in ranking:
        if truth in group:
            return [min(max(top - before, 0) / len(group), 1.0) for top in TOPS]
        before += len(group)
    return [0.0] * len(TOPS)


def by_score(scores: Mapping[Hashable, float]) -> list[list[Hashable]]:
    """A ranking of who scores highest, those of one score together."""
    groups: dict[float, list[Hashable]] = {}
    for who, score in scores.items():
        groups.setdefault(score, []).append(who)
    return [groups[score] for score in sorted(groups, reverse=True)]


def chance(among: int) -> list[float]:
    """`hits` of a random order of so many, of whom one is faulty, in closed form.

    >>> chance(16)[0]
    0.0625
    """
    return [1.0 - comb(among - 1, min(top, among)) / comb(among, min(top, among)) for top in TOPS]
