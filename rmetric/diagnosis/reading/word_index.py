"""Find which of many literal texts occur in a line: the one prefilter of all patterns.

Each literal is filed under one run of letters of it that few others have; the runs of a line, of
which several indexes can make use, select those that are sought in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Letters of a run; shorter literals are sought in every line.
RUN = 3


class WordIndex(Generic[Item]):
    """Items by literals in lower case.

    Args:
        literals: (literal, its item); a literal may be given several times.
    """

    def __init__(self, literals: Iterable[tuple[bytes, Item]]) -> None:
        literals = list(literals)
        number = Counter(run for literal, _ in literals for run in runs_of(literal))
        self._by_run: dict[bytes, list[tuple[bytes, Item]]] = defaultdict(list)
        for literal, item in literals:
            run = min(runs_of(literal), key=lambda one: (number[one], one), default=b"")
            self._by_run[run].append((literal, item))
        self._short = self._by_run.pop(b"", [])

    def items(self, line: bytes, runs: Collection[bytes] | None = None) -> list[Item]:
        """Items of the literals that occur in a line in lower case; an item may recur."""
        found = self._by_run.keys() & (runs_of(line) if runs is None else runs)
        candidates = [self._short, *map(self._by_run.__getitem__, found)]
        return [item for each in candidates for literal, item in each if literal in line]


def runs_of(line: bytes) -> set[bytes]:
    """All runs of `RUN` bytes in a line, each once."""
    return {line[at : at + RUN] for at in range(len(line) - RUN + 1)}
