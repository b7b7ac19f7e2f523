"""Find where a log begins anew: attempts of one job that were appended to one file.

A restarted program writes its first lines again. `StartMarks` records during the pass whenever an
entry of the beginning, before the first step, recurs; `attempt_starts` selects the places where
most of them recur together after the training had made progress or had failed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
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

#: A line of a kernel's log, which repeats itself and begins nothing.
KERNEL_LINE = re.compile(
    rb"(?:<\d+>)?\[ *\d+\.\d{6}\] "
    rb"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) \S+ kernel: "
)


class Restart(NamedTuple):
    """A launcher's line, the step lines before it, and the node, rank or task that wrote it."""

    line: int
    steps: int
    writer: str = ""


class Mark(NamedTuple):
    """One entry of a beginning.

    Attributes:
        steps, ends: number of step lines, of failures and planned ends, before it.
        ended: one of the latter stands after the last step line.
        rank: of the stream, where the line's prefix states it; -1 otherwise.
    """

    line: int
    template: int
    steps: int
    ends: int
    ended: bool = False
    rank: int = -1


class StartMarks:
    """Records the entries of a log's beginning whenever they recur."""

    def __init__(self) -> None:
        #: a launcher's lines that it starts its ranks again
        self.restarts: list[Restart] = []
        self.steps = self._last_step = 0
        #: (line, template, step lines before it, the last of them, rank) of each mark
        self.marks: list[tuple[int, int, int, int, int]] = []
        #: lines of failures and planned ends
        self.ends: list[int] = []
        #: entry -> its occurrences, the steps before the last, the different numbers of steps;
        #: None of one that is not followed (any more)
        self._seen: dict[int, list[int] | None] = {}

    @property
    def progress(self) -> int:
        """Number of step lines, failures and planned ends so far."""
        return self.steps + len(self.ends)

    def follows(self, template: int) -> bool:
        """True if the entry is one of the beginning, and every occurrence is wanted."""
        if template not in self._seen and not self.steps and len(self._seen) < MAX_TEMPLATES:
            self._seen[template] = [0, -1, 0]
        return self._seen.get(template) is not None

    def leave_out(self, template: int) -> None:
        """Never follow an entry."""
        self._seen[template] = None

    def add(self, line: int, template: int, rank: int = -1) -> bool:
        """Record an occurrence of an entry; False if it is not followed (any more)."""
        seen = self._seen.get(template)
        if seen is None:
            return False
        seen[0] += 1
        if seen[1] != self.steps:
            seen[1] = self.steps
            seen[2] += 1
        if seen[2] > MAX_STEPS_OF_TEMPLATE or seen[0] > MAX_OCCURRENCES:
            self._seen[template] = None
            self.marks = [mark for mark in self.marks if mark[1] != template]
            return False
        self.marks.append((line, template, self.steps, self._last_step, rank))
        return True

    def add_step(self, line: int) -> None:
        """Count a step line."""
        self.steps += 1
        self._last_step = line

    def add_end(self, line: int) -> None:
        """Record a failure or a planned end; the lines come in any order."""
        if len(self.ends) < MAX_ENDS:
            self.ends.append(line)

    def add_restart(self, line: int, steps: int, writer: str = "") -> None:
        """Record that a launcher starts its ranks again, after so many step lines."""
        if len(self.restarts) < MAX_OCCURRENCES:
            self.restarts.append(Restart(line, steps, writer))


#: Least share of a beginning's entries that recur, behind a failure, at the next one; and where no
#: step was made before it, of their number.
MIN_SHARE, MIN_TIMES_SHARE = 0.4, 0.8
#: Of so many of the first entries that are written once this share is enough, or the very first.
LEADING, LEADING_SHARE = 4, 0.75
LEADS = 2
#: Steps that other ranks may log between the first lines of a beginning.
INTERLEAVED_STEPS = 2


def starts_of(found: StartMarks) -> tuple[int, ...]:
    """First lines of the second and later attempts in a file; empty for one attempt."""
    ends, marks = sorted(found.ends), list[Mark]()
    for line, template, steps, last, rank in found.marks:
        before = bisect_left(ends, line)
        ended = before > 0 and ends[before - 1] >= last
        marks.append(Mark(line, template, steps, before, ended, rank))
    begun = attempt_starts(marks, last_end=max(ends, default=0))
    made = {(one.steps, one.ends): one.line for one in reversed(begun)}
    restarts = [
        one
        for one in _of_launchers(found.restarts)
        if made.get((one.steps, bisect_left(ends, one.line)), one.line + 1) > one.line
    ]
    # What begins behind such a line is the same attempt.
    starts = {
        one.line
        for one in begun
        if not any(each.line < one.line and each.steps == one.steps for each in restarts)
    }
    return tuple(sorted(starts | {one.line + 1 for one in restarts}))


def _of_launchers(restarts: Sequence[Restart]) -> list[Restart]:
    """Restarts; where the launcher of each node states one after the same steps, the last."""
    found: list[Restart] = []
    stated: set[str] = set()
    for one in restarts:
        if found and one.writer and one.writer not in stated and one.steps == found[-1].steps:
            found.pop()
        else:
            stated.clear()
        found.append(one)
        stated.add(one.writer)
    return found


class _Beginning:
    """The entries from one mark on until the training makes progress or fails.

    `once`: the first of those that are written once, as a launcher or a script writes its own.
    """

    def __init__(self, marks: Sequence[Mark], begin: int) -> None:
        first, end = marks[begin], begin
        steps = first.steps + INTERLEAVED_STEPS
        while end < len(marks) and marks[end].steps <= steps and marks[end].ends <= first.ends:
            end += 1
        self.first, self.marks = first, marks[begin:end]
        self.counts = Counter(mark.template for mark in self.marks)
        self.once = [template for template, times in self.counts.items() if times == 1][:LEADING]

    def recurs(self, found: _Beginning, origin: Mark, last_end: int) -> bool:
        """True if another one is its repetition, after an attempt that began at `origin`."""
        first, shared = found.first, found.counts.keys() & self.counts.keys()
        leads = self.once[:LEADS] == [*found.counts][:LEADS] and len(self.once) >= LEADS
        if len(shared) < MIN_ENTRIES:  # the head of a script, before one that fails at once
            whole = self.once[:LEADS] == [*self.counts][:LEADS]
            return leads and whole and first.ended and first.line < last_end
        # Other ranks may begin after the first of them failed, and an evaluation or an epoch
        # repeats a part of the beginning.
        most = max(2, LEADING_SHARE * len(self.once))
        if leads or (first.template in self.once and len(shared & {*self.once}) >= most):
            return True
        if not first.ended or len(shared) < MIN_SHARE * len(self.counts):
            return False
        times = (found.counts & self.counts).total()
        return first.steps > origin.steps or times >= MIN_TIMES_SHARE * self.counts.total()


def attempt_starts(marks: Sequence[Mark], *, last_end: int = 0) -> list[Mark]:
    """First entries of the second and later attempts in a file, in order; none for one attempt.

    >>> first = [Mark(line, line, 0, 0) for line in (1, 2, 3)]
    >>> attempt_starts([*first, *(Mark(50 + one.line, one.template, 40, 1) for one in first)])
    [Mark(line=51, template=1, steps=40, ends=1, ended=False, rank=-1)]
    """
    if not marks:
        return []
    starts: list[Mark] = []
    first = current = _Beginning(marks, 0)
    at, tried = 0, (0, 0)
    #: entries that the ranks have written since the attempt began
    written: set[tuple[int, int]] = set()
    while at < len(marks):
        mark, origin = marks[at], current.first
        under_way = mark.steps > origin.steps or mark.ends > origin.ends
        again = mark.template in current.counts or mark.template in first.counts
        # A rank that had not written it begins later than others.
        known = mark.rank < 0 or (mark.template, mark.rank) in written
        # What follows in the same place has less in common with a beginning, if it does not lead.
        news = (mark.steps, mark.ends) != tried or mark.template in (*current.once, *first.once)
        if under_way and again and known and news:
            tried, found = (mark.steps, mark.ends), _Beginning(marks, at)
            if any(one.recurs(found, origin, last_end) for one in (current, first)):
                starts.append(mark)
                current = found
                written = {(one.template, one.rank) for one in found.marks}
                at += len(found.marks)
                continue
        written.add((mark.template, mark.rank))
        at += 1
    return starts
