"""Baselines without a method: simple heuristics and chance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from studies.diagnosis_benchmark.scoring import Place

#: What a person greps for.
ERROR = re.compile("error|exception|fail|fatal", re.IGNORECASE)
#: Lines of `tail`, by default.
LAST = 10


class LogLine(NamedTuple):
    """A line of the logs; its time is that of the entry it belongs to."""

    place: Place
    rank: int | None
    node: str | None
    time: float | None
    text: str


Ranking = list[list[Hashable]]


def grep(lines: Iterable[LogLine]) -> list[Place]:
    """Every line that a grep for errors finds."""
    return [line.place for line in lines if ERROR.search(line.text)]


def last_lines(lines: Iterable[LogLine]) -> list[Place]:
    """The last ten lines of each file that are not blank."""
    of_file: dict[str, list[Place]] = {}
    for line in lines:
        if line.text.strip():
            of_file.setdefault(line.place[0], []).append(line.place)
    return [place for places in of_file.values() for place in places[-LAST:]]


def error_time(lines: Sequence[LogLine], everyone: Sequence[Hashable], who: str) -> Ranking:
    """Error_time of L4: the sooner somebody's first error, the more suspect.

    By the time that lines state; by their number in the file where an error states none. Who
    wrote no error comes last.
    """
    errors = [line for line in lines if getattr(line, who) is not None and ERROR.search(line.text)]
    timed = all(line.time is not None for line in errors)
    first: dict[Hashable, float] = {}
    for line in errors:
        when = line.time if timed and line.time is not None else float(line.place[1])
        first[getattr(line, who)] = min(first.get(getattr(line, who), inf), when)
    return _by_score({one: -first.get(one, inf) for one in everyone})


def error_count(lines: Iterable[LogLine], everyone: Sequence[Hashable], who: str) -> Ranking:
    """Error_count of L4: the more lines of errors, the more suspect."""
    count = Counter(getattr(line, who) for line in lines if ERROR.search(line.text))
    return _by_score({one: float(count[one]) for one in everyone})


def _by_score(scores: Mapping[Hashable, float]) -> Ranking:
    """Who scores highest comes first, those of one score together."""
    groups: dict[float, list[Hashable]] = {}
    for who, score in scores.items():
        groups.setdefault(score, []).append(who)
    return [groups[score] for score in sorted(groups, reverse=True)]


#: Title -> which lines indicate the failure.
OF_EVENTS: dict[str, Callable[[Sequence[LogLine]], list[Place]]] = {
    "Grep for errors": grep,
    "Last ten lines": last_lines,
}
#: Title -> who of everybody is suspect, by "rank" or "node" of the lines. At random all come in any
#: order, and what that scores on average is exact; always rank 0 has the others after it in order.
OF_RANKS: dict[str, Callable[[Sequence[LogLine], Sequence[Hashable], str], Ranking]] = {
    "Error_time": error_time,
    "Error_count": error_count,
    "Random": lambda lines, everyone, who: [list(everyone)],
    "Always rank 0": lambda lines, everyone, who: [[one] for one in everyone],
}
