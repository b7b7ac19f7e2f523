"""Find where a log begins anew: attempts of one job that were appended to one file.

A restarted program writes its first lines again. So the entries of a log's beginning, before the
first step, are recorded whenever they recur (`StartMarks`, during the pass); `attempt_starts`
selects the places where most of them recur together after the training had made progress or had
failed. No list of start-up messages is needed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
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


#: Least share of a beginning's entries that recur at the next one, and of all of them where no
#: step was made or nothing else tells of a start.
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
    ends = found.ends()

    def same(one: Place, other: Place) -> bool:
        """True if nothing was made, and nothing failed, between two lines."""
        between = bisect_left(ends, one.line) != bisect_left(ends, other.line)
        return one.steps == other.steps and not between

    begun = attempt_starts(found.marks(), last_end=ends[-1] if ends else 0)
    restarts = [
        restart
        for restart in _of_launchers(found.restarts)
        if not any(one.line <= restart.line and same(one, restart) for one in begun)
    ]
    # What begins behind such a line is the same attempt.
    starts = [
        one
        for one in begun
        if not any(each.line < one.line and each.steps == one.steps for each in restarts)
    ] + [one._replace(line=one.line + 1) for one in restarts]
    return tuple(sorted({one.line for one in starts}))


def _of_launchers(restarts: Sequence[Place]) -> list[Place]:
    """Restarts; where the launcher of each node states one after the same steps, the last.

    >>> said = [(9, 40, "a"), (12, 40, "b"), (30, 40, "a"), (50, 60, ""), (51, 60, "")]
    >>> [one.line for one in _of_launchers([Place(*one) for one in said])]
    [12, 30, 50, 51]
    """
    found: list[Place] = []
    stated: set[str] = set()
    for one in restarts:
        if found and one.writer and one.writer not in stated and one.steps == found[-1].steps:
            found.pop()
        else:
            stated.clear()
        found.append(one)
        stated.add(one.writer)
    return found


def attempt_starts(marks: Sequence[Mark], *, last_end: int = 0) -> list[Place]:
    """First lines of the second and later attempts in a file, in order; none for one attempt.

    Args:
        marks: occurrences of the entries of the beginning, by line.
        last_end: line of the file's last failure or planned end.

    >>> first = [Mark(line, line, 0, 0) for line in (1, 2, 3)]
    >>> attempt_starts([*first, *(Mark(50 + one.line, one.template, 40, 1) for one in first)])
    [Place(line=51, steps=40, writer='')]
    """
    found = _by_beginnings(marks, last_end) if marks else []
    return [Place(one.line, one.steps) for one in found]


def _by_beginnings(marks: Sequence[Mark], last_end: int) -> list[Mark]:
    starts: list[Mark] = []
    window = _Window(marks)
    first = current = _Beginning(window)
    origin, at = marks[0], 0
    #: entries that the ranks have written since the attempt began
    written: set[tuple[int, int]] = set()
    while at < len(marks):
        mark = marks[at]
        under_way = mark.steps > origin.steps or mark.ends > origin.ends
        again = mark.template in current.counts or mark.template in first.counts
        # A rank that had not written it begins later than others.
        if under_way and again and (mark.rank < 0 or (mark.template, mark.rank) in written):
            window.move(at)
            before = (first,) if current is first else (current, first)
            if (mark.ended and mark.line < last_end and first.fails_at_once(window)) or any(
                _recurs(window, one, origin) for one in before
            ):
                starts.append(mark)
                current, origin = _Beginning(window), mark
                written = {(one.template, one.rank) for one in window.marks}
                at += current.total
                continue
        written.add((mark.template, mark.rank))
        at += 1
    return starts


class _Window:
    """Counts the entries from one mark on until the training makes progress or fails.

    Attributes:
        counts: template -> how often, in no order.
    """

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks, self._begin, self._end = marks, 0, 0
        self.counts: Counter[int] = Counter()
        self.move(0)

    @property
    def marks(self) -> Sequence[Mark]:
        return self._marks[self._begin : self._end]

    @property
    def first(self) -> Mark:
        return self._marks[self._begin]

    def begins_with(self, templates: Sequence[int]) -> bool:
        """True if these are the first two templates in it."""
        begin = self._begin
        if self._marks[begin].template != templates[0]:
            return False
        others = (
            template
            for at in range(begin + 1, self._end)
            if (template := self._marks[at].template) != templates[0]
        )
        return next(others, None) == templates[1]

    def move(self, at: int) -> None:
        """Move its begin to the mark `at`, which is not before that of the last call."""
        marks, counts = self._marks, self.counts
        if self._end < at:
            self._begin = self._end = at
            counts.clear()
        for mark in marks[self._begin : at]:
            counts[mark.template] -= 1
            if not counts[mark.template]:
                del counts[mark.template]
        self._begin = at
        steps, ends = marks[at].steps + INTERLEAVED_STEPS, marks[at].ends
        while self._end < len(marks):
            mark = marks[self._end]
            if mark.steps > steps or mark.ends > ends:
                break
            counts[mark.template] += 1
            self._end += 1


class _Beginning:
    """The entries of a beginning.

    Attributes:
        counts: template -> how often.
        once: the first templates that were written once.
        total: number of entries.
    """

    def __init__(self, window: _Window) -> None:
        self.counts = Counter(mark.template for mark in window.marks)
        self.total = self.counts.total()
        self.once = [template for template, times in self.counts.items() if times == 1][:LEADING]
        self._begin = [mark.template for mark in window.marks[:LEADS]]

    def fails_at_once(self, window: _Window) -> bool:
        """True for a head of entries that are written once, as a script's is, and recur.

        A script writes its last lines too, such as the time: those are before no other failure.
        """
        leads = self._begin == self.once[:LEADS] and len(self._begin) == LEADS
        return leads and window.begins_with(self._begin)


def _recurs(window: _Window, before: _Beginning, origin: Mark) -> bool:
    """True if what a beginning has recurs in a window, after an attempt that began at `origin`."""
    again, counts, once, mark = window.counts, before.counts, before.once, window.first
    made_steps, leads = mark.steps > origin.steps, mark.template in once[:2]
    share = (MIN_SHARE if made_steps else MIN_WHOLE_SHARE) * len(counts)
    least = max(min(len(counts), MIN_ENTRIES) if made_steps else MIN_ENTRIES, share)
    if len(again) < least and not leads:
        return False  # as nearly all are
    shared = again.keys() & counts.keys()
    # What is written once is of a launcher; other ranks may begin after the first of them failed,
    # and an evaluation or an epoch repeats a part of the beginning.
    if len(shared) >= MIN_ENTRIES and leads:
        led = len(once) > 1 and window.begins_with(once)
        if led or len(shared & set(once)) >= max(2, LEADING_SHARE * len(once)):
            return True
    if len(shared) < least:
        return False
    if made_steps:
        whole = len(shared) >= max(MANY_ENTRIES, MIN_WHOLE_SHARE * len(counts))
        return whole or mark.ended
    times = sum(min(again[template], counts[template]) for template in shared)
    return times >= MIN_TIMES_SHARE * before.total
