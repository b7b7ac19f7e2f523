"""Which lines are one entry: tracebacks, stack frames, reports of launchers."""

from __future__ import annotations

from enum import IntEnum

#: Lines joined to one entry at most; characters of it that are kept (job.MAX_TEXT).
MAX_LINES = 200


class Kind(IntEnum):
    """What a line is by itself; the same whatever its digits are, so it can be remembered."""

    PLAIN = 0
    BLANK = 1


class State(IntEnum):
    """What the entry so far of a stream is. Begin with `PLAIN`."""

    PLAIN = 0


#: NEXT[state][kind] = (whether the line is part of the entry before, the state after it).
NEXT: list[list[tuple[bool, State]]] = []


def kind_of(line: bytes) -> Kind:
    """Of a line without its prefix."""
    raise NotImplementedError


class Entry:
    """The text of an entry as its lines come in: the first and the last characters are kept.

    `add` is for joined lines only; after `MAX_LINES` of them `full` is True: begin another entry.
    """

    def __init__(self, first: str) -> None:
        raise NotImplementedError

    full: bool

    def add(self, line: str) -> None:
        raise NotImplementedError

    def text(self) -> str:
        """At most `MAX_TEXT` characters; " ..." stands for what was cut from the middle."""
        raise NotImplementedError
