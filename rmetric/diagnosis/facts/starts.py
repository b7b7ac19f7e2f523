"""Find where a log begins anew: attempts of one job that were appended to one file.

A restarted program writes its first lines again. `StartMarks` records during the pass whenever an
entry of the beginning, before the first step, recurs; `attempt_starts` selects the places where
most of them recur together after the training had made progress or had failed.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
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


class Place(NamedTuple):
    """A line, the number of step lines before it, and the node, rank or task that wrote it."""

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
        self.restarts: list[Place] = []
        self.steps = self._last_step = 0
        #: (line, template, step lines before it, the last of them, rank) of each mark
        self._marks: list[tuple[int, int, int, int, int]] = []
        #: lines of failures and planned ends, in order
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
            self._marks = [mark for mark in self._marks if mark[1] != template]
            return False
        self._marks.append((line, template, self.steps, self._last_step, rank))
        return True

    def add_step(self, line: int) -> None:
        """Count a step line."""
        self.steps += 1
        self._last_step = line

    def add_end(self, line: int) -> None:
        """Record a failure or a planned end; the lines come in any order."""
        if len(self.ends) < MAX_ENDS:
            insort(self.ends, line)

    def add_restart(self, line: int, steps: int, writer: str = "") -> None:
        """Record that a launcher starts its ranks again, after so many step lines."""
        if len(self.restarts) < MAX_OCCURRENCES:
            self.restarts.append(Place(line, steps, writer))

    def marks(self) -> list[Mark]:
        """All of them, in the order of their lines."""
        marks = []
        for line, template, steps, last, rank in self._marks:
            before = bisect_left(self.ends, line)
            ended = before > 0 and self.ends[before - 1] >= last
            marks.append(Mark(line, template, steps, before, ended, rank))
        return marks


#: Least share of a beginning's entries that recur at the next one, and of all of them where no
#: step was made or nothing else indicates a start.
MIN_SHARE = 0.4
MIN_WHOLE_SHARE = 0.6
#: So many entries, and the whole share, are a start without a failure before it.
MANY_ENTRIES = 8
#: Where no step was made, so many of the first entries that were written once must recur, or this
#: share of the beginning's number.
LEADING = 4
LEADING_SHARE = 0.75
MIN_TIMES_SHARE = 0.8
#: Behind a failure so many of the very first entries are enough, if they were written once.
LEADS = 2
#: Steps that other ranks may log between the first lines of a beginning.
INTERLEAVED_STEPS = 2


def starts_of(found: StartMarks) -> tuple[int, ...]:
    """First lines of the second and later attempts in a file; empty for one attempt."""
    begun = attempt_starts(found.marks(), last_end=found.ends[-1] if found.ends else 0)
    restarts = []
    for restart in _of_launchers(found.restarts):
        made = restart.steps, bisect_left(found.ends, restart.line)
        # An attempt that has neither made a step nor failed since it began is not restarted.
        if not any(mark.line <= restart.line and (mark.steps, mark.ends) == made for mark in begun):
            restarts.append(restart)
    # What begins behind such a line is the same attempt.
    starts = {
        mark.line
        for mark in begun
        if not any(restart.line < mark.line and restart.steps == mark.steps for restart in restarts)
    }
    return tuple(sorted(starts | {restart.line + 1 for restart in restarts}))


def _of_launchers(restarts: Sequence[Place]) -> list[Place]:
    """Restarts; where the launcher of each node states one after the same steps, the last."""
    found: list[Place] = []
    stated: set[str] = set()
    for place in restarts:
        if found and place.writer and place.writer not in stated and place.steps == found[-1].steps:
            found.pop()
        else:
            stated.clear()
        found.append(place)
        stated.add(place.writer)
    return found


class _Beginning:
    """The entries from one mark on until the training makes progress or fails."""

    def __init__(self, marks: Sequence[Mark], begin: int) -> None:
        steps, ends, end = marks[begin].steps + INTERLEAVED_STEPS, marks[begin].ends, begin
        while end < len(marks) and marks[end].steps <= steps and marks[end].ends <= ends:
            end += 1
        self.marks = marks[begin:end]
        self.order = [mark.template for mark in self.marks]
        self.counts = Counter(self.order)
        self.once = [template for template, times in self.counts.items() if times == 1][:LEADING]

    def begins_with(self, templates: Sequence[int]) -> bool:
        """True if these two are the first different templates in it."""
        return [*self.counts][:LEADS] == [*templates][:LEADS] and len(templates) >= LEADS

    def fails_at_once(self, again: _Beginning) -> bool:
        """True for a head of entries that are written once, as a script's is, and recur."""
        return self.order[:LEADS] == self.once[:LEADS] and again.begins_with(self.order)


def attempt_starts(marks: Sequence[Mark], *, last_end: int = 0) -> list[Mark]:
    """First entries of the second and later attempts in a file, in order; none for one attempt.

    >>> first = [Mark(line, line, 0, 0) for line in (1, 2, 3)]
    >>> attempt_starts([*first, *(Mark(50 + mark.line, mark.template, 40, 1) for mark in first)])
    [Mark(line=51, template=1, steps=40, ends=1, ended=False, rank=-1)]
    """
    if not marks:
        return []
    starts: list[Mark] = []
    first = current = _Beginning(marks, 0)
    origin, at, tried = marks[0], 0, (0, 0)
    #: entries that the ranks have written since the attempt began
    written: set[tuple[int, int]] = set()
    while at < len(marks):
        mark = marks[at]
        under_way = mark.steps > origin.steps or mark.ends > origin.ends
        again = mark.template in current.counts or mark.template in first.counts
        # What follows in the same place has less in common with a beginning, if it does not lead.
        leads = mark.template in (*current.once[:LEADS], *first.once[:LEADS])
        news = leads or (mark.steps, mark.ends) != tried
        # A rank that had not written it begins later than others.
        known = mark.rank < 0 or (mark.template, mark.rank) in written
        if under_way and again and news and known:
            tried, found = (mark.steps, mark.ends), _Beginning(marks, at)
            fails = mark.ended and mark.line < last_end and first.fails_at_once(found)
            if fails or _recurs(found, current, origin) or _recurs(found, first, origin):
                starts.append(mark)
                current, origin = found, mark
                written = {(entry.template, entry.rank) for entry in found.marks}
                at += len(found.marks)
                continue
        written.add((mark.template, mark.rank))
        at += 1
    return starts


def _recurs(found: _Beginning, before: _Beginning, origin: Mark) -> bool:
    """True if what a beginning has is found again, after an attempt that began at `origin`."""
    again, counts, once, mark = found.counts, before.counts, before.once, found.marks[0]
    made_steps, leads = mark.steps > origin.steps, mark.template in once[:LEADS]
    shared = again.keys() & counts.keys()
    # What is written once is of a launcher; other ranks may begin after the first of them failed,
    # and an evaluation or an epoch repeats a part of the beginning.
    if len(shared) >= MIN_ENTRIES and leads and (
        found.begins_with(once) or len(shared & {*once}) >= max(2, LEADING_SHARE * len(once))
    ):  # fmt: skip
        return True
    share = (MIN_SHARE if made_steps else MIN_WHOLE_SHARE) * len(counts)
    if len(shared) < max(min(len(counts), MIN_ENTRIES) if made_steps else MIN_ENTRIES, share):
        return False
    if made_steps:
        return len(shared) >= max(MANY_ENTRIES, MIN_WHOLE_SHARE * len(counts)) or mark.ended
    times = sum(min(again[template], counts[template]) for template in shared)
    return times >= MIN_TIMES_SHARE * before.counts.total()
