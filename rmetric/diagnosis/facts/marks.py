"""What the pass over a file records of the places where an attempt may begin (see starts.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

#: Different entries of a log's beginning that are followed.
MAX_TEMPLATES = 64
#: An entry that recurs at so many different steps belongs to the training, not to a start.
MAX_STEPS_OF_TEMPLATE = 200
#: Occurrences that are kept of one entry; failures and planned ends of a file.
MAX_OCCURRENCES = 4000
MAX_ENDS = 100_000
#: Least number of different entries of a beginning.
MIN_ENTRIES = 3
#: Lines that are searched for so many different ones with which the log begins.
MAX_OPENING = 20

#: A line of a kernel's log, which repeats itself and begins nothing.
KERNEL_LINE = re.compile(
    rb"(?:<\d+>)?\[ *\d+\.\d{6}\] "
    rb"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) \S+ kernel: "
)


class Place(NamedTuple):
    """A line, the number of step lines before it, and the node, rank or task that wrote it."""

    line: int
    steps: int
    writer: str = ""


class Mark(NamedTuple):
    """One entry of a beginning.

    Attributes:
        line: from 1.
        template: its number in the file.
        steps: number of step lines before it.
        ends: number of failures and planned ends before it.
        ended: one of them stands after the last step line.
        rank: of the stream, where the line's prefix states it; -1 otherwise.
    """

    line: int
    template: int
    steps: int
    ends: int
    ended: bool = False
    rank: int = -1


#: `Mark._make`, at a third of its cost.
_mark = partial(tuple.__new__, Mark)


class StartMarks:
    """Records the entries of a log's beginning whenever they recur.

    Attributes:
        restarts: a launcher's lines that it starts its ranks again.
        steps: number of step lines so far.
    """

    def __init__(self) -> None:
        self.restarts: list[Place] = []
        self.steps = self._last_step = 0
        #: (line, template, step lines before it, the last of them, rank) of each mark
        self._marks: list[tuple[int, int, int, int, int]] = []
        #: lines of failures and planned ends
        self._ends: list[int] = []
        self._origin = (0, 0)  # numbers of steps and ends before the attempt
        #: entry -> its occurrences, the steps before the last, the different numbers of steps
        self._seen: dict[int, list[int]] = {}
        self._dropped: set[int] = set()

    @property
    def under_way(self) -> bool:
        """True if the attempt made progress or failed."""
        return (self.steps, len(self._ends)) != self._origin

    def begin_attempt(self) -> None:
        """Record that an attempt begins."""
        self._origin = (self.steps, len(self._ends))

    def follows(self, template: int) -> bool:
        """True if the entry is one of the beginning, and every occurrence is wanted."""
        begins = not self.steps and len(self._seen) < MAX_TEMPLATES
        if template not in self._seen and begins and template not in self._dropped:
            self._seen[template] = [0, -1, 0]
        return template in self._seen

    def leave_out(self, template: int) -> None:
        """Never follow an entry."""
        self._dropped.add(template)

    def add(self, line: int, template: int, rank: int = -1) -> bool:
        """Record an occurrence of an entry; False if it is not followed (any more)."""
        seen = self._seen.get(template)
        if seen is None:
            return False
        seen[0] += 1
        steps = self.steps
        if seen[1] != steps:
            seen[1] = steps
            seen[2] += 1
        if seen[2] > MAX_STEPS_OF_TEMPLATE or seen[0] > MAX_OCCURRENCES:
            del self._seen[template]
            self._dropped.add(template)
            self._marks = [mark for mark in self._marks if mark[1] != template]
            return False
        self._marks.append((line, template, steps, self._last_step, rank))
        return True

    def add_step(self, line: int) -> None:
        """Count a step line."""
        self.steps += 1
        self._last_step = line

    def add_end(self, line: int) -> None:
        """Record a failure or a planned end; the lines come in any order."""
        if len(self._ends) < MAX_ENDS:
            self._ends.append(line)

    def add_restart(self, line: int, steps: int, writer: str = "") -> None:
        """Record that a launcher starts its ranks again, after so many step lines."""
        if len(self.restarts) < MAX_OCCURRENCES:
            self.restarts.append(Place(line, steps, writer))

    def ends(self) -> list[int]:
        """Lines of failures and planned ends, in order."""
        return sorted(self._ends)

    def marks(self) -> list[Mark]:
        """All of them, in the order of their lines."""
        ends, before, marks = self.ends(), 0, list[Mark]()
        for line, template, steps, last, rank in self._marks:
            while before < len(ends) and ends[before] < line:
                before += 1
            ended = before > 0 and ends[before - 1] >= last
            marks.append(_mark((line, template, steps, before, ended, rank)))
        return marks


class Opening:
    """The first lines of a log, with which its next attempt is expected to begin."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def places(self, keys: list[bytes]) -> Iterator[int]:
        """Places in the next lines of the log where such lines begin.

        Args:
            keys: the lines without their digits.
        """
        if not self._keys:
            self._learn(keys)
        at = -1
        while self._keys:
            try:
                at = keys.index(self._keys[0], at + 1)
            except ValueError:
                return
            # They may end behind the last of these lines.
            if keys[at : at + len(self._keys)] == self._keys[: len(keys) - at]:
                yield at

    def _learn(self, keys: Sequence[bytes]) -> None:
        begin = next((at for at, key in enumerate(keys) if key.strip()), len(keys))
        few = keys[begin : begin + MAX_OPENING]
        for at in range(1, len(few) + 1):
            if len(set(few[:at])) == MIN_ENTRIES:
                self._keys = list(few[:at])
                return
