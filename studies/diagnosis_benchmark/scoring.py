"""Score one answer on one job; pure functions of answer and ground truth."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

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
    missed, wrong, found = _told_apart(labels, shown, event_of, true_roles)
    return Counts(len(found), len(wrong), len(missed))


def faults(
    labels: Iterable[Label], shown: Iterable[Place], event_of: Mapping[Place, int]
) -> tuple[list[Place], list[Place]]:
    """The first labelled line of each event that is missed, the line shown of each wrong one."""
    missed, wrong, _ = _told_apart(labels, shown, event_of, ("cause", "symptom"))
    return sorted(missed.values()), sorted(wrong.values())


Events = dict[Hashable, Place]


def _told_apart(
    labels: Iterable[Label],
    shown: Iterable[Place],
    event_of: Mapping[Place, int],
    true_roles: Collection[str],
) -> tuple[Events, Events, Events]:
    """Events missed, wrong and found, each with a line."""
    true: Events = {}
    neutral: set[Hashable] = set()
    for label in labels:
        place = (label.file, label.line)
        if label.role in true_roles:
            true.setdefault(event_of.get(place, place), place)
        else:
            neutral.add(event_of.get(place, place))
    answer: Events = {}
    for place in shown:
        answer.setdefault(event_of.get(place, place), place)
    missed = {event: place for event, place in true.items() if event not in answer}
    found = {event: place for event, place in answer.items() if event in true}
    wrong = {
        event: place
        for event, place in answer.items()
        if event not in true and event not in neutral
    }
    return missed, wrong, found


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
