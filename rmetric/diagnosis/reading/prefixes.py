"""Who says a line: the prefixes of launchers and libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Who:
    """Who says a line, as far as its prefixes tell.

    Attributes:
        kinds: the forms found, outermost first: ("srun", "torchrun").
        rank: global rank.
        local_rank: rank within its node.
        task: task number of srun or its like: a rank, or a node's number where each task is a
            launcher of several ranks. `World.place` knows which.
        node: the node's name or address.
        pid: process number on its node.
    """

    kinds: tuple[str, ...] = ()
    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    node: str | None = None
    pid: int | None = None


NOBODY = Who()


class Prefixes:
    """The forms of prefixes that a file uses.

    Attributes:
        pattern: matches the whole prefix of any line, possibly empty; its groups together decide
            the `Who`: `split` looks `match.groups()` up in a dictionary, `match.end()` is where
            the text begins.
    """

    pattern: re.Pattern[bytes]

    @classmethod
    def learn(cls, lines: Iterable[bytes]) -> Prefixes:
        """The forms of a file, from a sample of it (`Source.sample`).

        Forms that nothing else looks like count wherever they stand; those that prose may look
        like ("3: ") only where most lines have them.
        """
        raise NotImplementedError

    def split(self, line: bytes) -> tuple[Who, int]:
        """Who says it and where its text begins; `NOBODY` (the object) and 0 without a prefix.

        Equal prefixes give the same object: `Who` can be compared by `is` and be a dict's key.
        """
        raise NotImplementedError

    def time(self, line: bytes) -> float | None:
        """Seconds that the line states, before, within or after its prefix (timestamps.py)."""
        raise NotImplementedError
