"""Baselines without a method: simple heuristics and chance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from studies.diagnosis_benchmark.scoring import Place, by_score

#: What a person greps for.
ERROR = re.compile("error|exception|fail|fatal", re.IGNORECASE)
#: Lines of `tail`, by default.
LAST = 10


class RankedLine(NamedTuple):
    """One line of a job's logs; `who` is its rank, or its node where nodes are judged."""

    place: Place
    who: Hashable | None
    time: float | None
    text: str


Ranking = list[list[Hashable]]


def grep(lines: Iterable[RankedLine]) -> list[Place]:
    """Every line that a grep for errors finds."""
    return [line.place for line in lines if ERROR.search(line.text)]


def last_lines(lines: Iterable[RankedLine]) -> list[Place]:
    """The last ten lines of each file that are not blank."""
    of_file: dict[str, list[Place]] = {}
    for line in lines:
        if line.text.strip():
            of_file.setdefault(line.place[0], []).append(line.place)
    return [place for places in of_file.values() for place in places[-LAST:]]


def error_time(lines: Sequence[RankedLine], everyone: Sequence[Hashable]) -> Ranking:
    """Error_time of L4: the sooner somebody's first error, the more suspect.

    By the time that lines state; by their number in the file where an error states none. Who
    wrote no error comes last.
    """
    errors = [line for line in lines if line.who is not None and ERROR.search(line.text)]
    timed = all(line.time is not None for line in errors)
    first: dict[Hashable, float] = {}
    for line in errors:
        when = line.time if timed and line.time is not None else float(line.place[1])
        first[line.who] = min(first.get(line.who, inf), when)
    return by_score({who: -first.get(who, inf) for who in everyone})


def error_count(lines: Iterable[RankedLine], everyone: Sequence[Hashable]) -> Ranking:
    """Error_count of L4: the more lines of errors, the more suspect."""
    count = Counter(line.who for line in lines if ERROR.search(line.text))
    return by_score({who: float(count[who]) for who in everyone})


def random(lines: Iterable[RankedLine], everyone: Sequence[Hashable]) -> Ranking:
    """All in any order; what it scores on average is exact."""
    return [list(everyone)]


def rank_0(lines: Iterable[RankedLine], everyone: Sequence[Hashable]) -> Ranking:
    """Always the first, whoever failed; the others after it in order."""
    return [[who] for who in everyone]


#: Title -> which lines indicate the failure.
OF_EVENTS: dict[str, Callable[[Sequence[RankedLine]], list[Place]]] = {
    "Grep for errors": grep,
    "Last ten lines": last_lines,
}
#: Title -> who is suspect.
OF_RANKS: dict[str, Callable[[Sequence[RankedLine], Sequence[Hashable]], Ranking]] = {
    "Error_time": error_time,
    "Error_count": error_count,
    "Random": random,
    "Always rank 0": rank_0,
}
