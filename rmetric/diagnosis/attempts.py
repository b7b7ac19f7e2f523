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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

#: Different entries of a log's beginning that are followed.
MAX_TEMPLATES = 64
#: An entry that recurs at so many different steps belongs to the training, not to a start.
MAX_STEPS_OF_TEMPLATE = 200
#: Occurrences that are kept of one entry; failures and planned ends of a file.
MAX_OCCURRENCES = 4000
MAX_ENDS = 100_000
#: Least share of a beginning's entries that recur at the next one.
MIN_SHARE = 0.4
#: Least number of them; fewer count where the step falls back too.
MIN_ENTRIES = 3
#: Where no step was made, so many of the first entries that were written once must recur,
LEADING = 4
LEADING_SHARE = 0.75
#: or this share of the beginning's entries, and of their number.
MIN_SHARE_WITHOUT_STEPS = 0.6
MIN_TIMES_WITHOUT_STEPS = 0.8
#: Behind a failure so many of the very first entries are enough, if they were written once.
LEADS = 2
#: So many entries, and this share, are a start whatever the steps are.
MANY_ENTRIES = 8
MIN_WHOLE_SHARE = 0.6
#: Lines that are searched for so many different ones with which the log begins.
MAX_OPENING = 20
#: Steps that other ranks may log between the first lines of a beginning.
INTERLEAVED_STEPS = 2
#: Least seconds, and least multiple of the longest step, of a pause after which a step that falls
#: back is of a new attempt.
MIN_PAUSE_SECONDS = 60.0
MIN_PAUSE_RATIO = 5.0

#: A line of a kernel's log, which repeats itself and begins nothing.
KERNEL_LINE = re.compile(
    rb"(?:<\d+>)?\[ *\d+\.\d{6}\] "
    rb"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) \S+ kernel: "
)


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


class StepBack(NamedTuple):
    """A step line whose step is not above that of the line before it.

    Attributes:
        line: from 1.
        before: step of the line before.
        step: of this line.
        ends: number of failures and planned ends before it.
        paused: the pause before it is far longer than a step.
        steps: number of step lines before it.
    """

    line: int
    before: int
    step: int
    ends: int
    paused: bool
    steps: int = -1


class StartMarks:
    """Records the entries of a log's beginning whenever they recur.

    Attributes:
        restarts: (line, steps before it, its node, rank or task) of a launcher's lines that it
            starts its ranks again.
        commands: (line, steps before it) of a shell's lines that start the program again.
        worked: line of the first step or announcement of training.
        steps: number of step lines so far.
    """

    def __init__(self) -> None:
        self.restarts: list[tuple[int, int, str]] = []
        self.commands: list[tuple[int, int]] = []
        self._given: set[tuple[str, str]] = set()
        self.worked: int | None = None
        #: (line, template, step lines before it, the last of them, rank) of each mark
        self._marks: list[tuple[int, int, int, int, int]] = []
        #: (line, step before, step, whether paused) of step lines that fall back
        self._backs: list[tuple[int, int, int, bool, int]] = []
        #: lines of a launcher before the first step
        self._launches: list[int] = []
        #: lines of failures and planned ends, and those of them that no rank wrote
        self._ends: list[int] = []
        self._ends_of_job: list[int] = []
        self.steps = self._last_step = 0
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
        if template in self._seen:
            return True
        begins = not self.steps and len(self._seen) < MAX_TEMPLATES
        if begins and template not in self._dropped:
            self._seen[template] = [0, -1, 0]
            return True
        return False

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

    def add_stage(self, line: int, stage: str) -> None:
        """Record the entry of a launcher, or the first that announces training."""
        if stage == "launch" and self.worked is None and len(self._launches) < MAX_OCCURRENCES:
            self._launches.append(line)
        elif stage == "train" and self.worked is None:
            self.worked = line

    def add_step(self, line: int) -> None:
        """Count a step line."""
        if self.worked is None:
            self.worked = line
        self.steps += 1
        self._last_step = line

    def add_end(self, line: int, rank: int = -1) -> None:
        """Record a failure or a planned end, of a rank or of all; the lines come in any order."""
        if len(self._ends) < MAX_ENDS:
            self._ends.append(line)
            if rank < 0:
                self._ends_of_job.append(line)

    def add_restart(self, line: int, steps: int, writer: str = "") -> None:
        """Record that a launcher starts its ranks again, after so many step lines."""
        if len(self.restarts) < MAX_OCCURRENCES:
            self.restarts.append((line, steps, writer))

    def add_command(self, line: int, steps: int, command: tuple[str, str], again: bool) -> None:
        """Record a command of a stream, at most `MAX_OCCURRENCES`.

        It may start the program `again` if it was given before.
        """
        if again and command in self._given and len(self.commands) < MAX_OCCURRENCES:
            self.commands.append((line, steps))
        if len(self._given) < MAX_OCCURRENCES:
            self._given.add(command)

    def add_back(self, line: int, before: int, step: int, paused: bool) -> None:
        """Record a step line that falls back; at most `MAX_OCCURRENCES` are kept."""
        if len(self._backs) < MAX_OCCURRENCES:
            self._backs.append((line, before, step, paused, self.steps - 1))

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

    def backs(self) -> list[StepBack]:
        """Step lines that fall back, in their order."""
        ends = self.ends()
        return [
            StepBack(line, before, step, bisect_left(ends, line), paused, steps)
            for line, before, step, paused, steps in self._backs
        ]

    def relaunch(self) -> int | None:
        """First line of the launcher behind the job's last failure before the first work."""
        ends = sorted(self._ends_of_job)
        failed = [(bisect_left(ends, line), line) for line in self._launches]
        last = failed[-1][0] if failed else 0
        return next(line for before, line in failed if before == last) if last else None


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
        different: set[bytes] = set()
        for at, key in enumerate(few, 1):
            different.add(key)
            if len(different) == MIN_ENTRIES:
                self._keys = list(few[:at])
                return


def starts_of(found: StartMarks) -> tuple[int, ...]:
    """First lines of the second and later attempts in a file; empty for one attempt."""
    marks = found.marks()
    ends = found.ends()
    backs = found.backs()
    starts = attempt_starts(marks, backs, last_end=ends[-1] if ends else 0)
    # A launcher that failed, as a check before the job may, and after which the job began.
    again = found.relaunch()
    if again is not None and found.worked is not None and (not starts or starts[0] > found.worked):
        starts = (again, *starts)
    steps = {one.line: one.steps for one in marks} | {one.line: one.steps for one in backs}
    starts = _with_restarts(starts, steps, _of_launchers(found.restarts), ends)
    commands = (
        line
        for line, before in found.commands
        if not any(_is_same(start, line, before, steps, ends) for start in starts)
    )
    return tuple(sorted({*starts, *commands}))


def _is_same(
    start: int, line: int, before: int, steps: Mapping[int, int], ends: Sequence[int]
) -> bool:
    """True if nothing was made, and nothing failed, between a start and a line."""
    made = steps.get(start, before) != before
    return not made and bisect_left(ends, start) == bisect_left(ends, line)


def _of_launchers(restarts: Sequence[tuple[int, int, str]]) -> list[tuple[int, int]]:
    """Restarts with the steps before them; where the launcher of each node states one, the last.

    >>> _of_launchers([(9, 40, "a"), (12, 40, "b"), (30, 40, "a"), (50, 60, ""), (51, 60, "")])
    [(12, 40), (30, 40), (50, 60), (51, 60)]
    """
    found: list[tuple[int, int]] = []
    stated: set[str] = set()
    for line, steps, writer in restarts:
        if found and writer and writer not in stated and steps == found[-1][1]:
            found.pop()
        else:
            stated.clear()
        found.append((line, steps))
        stated.add(writer)
    return found


def _with_restarts(
    starts: Sequence[int],
    steps: Mapping[int, int],
    restarts: Sequence[tuple[int, int]],
    ends: Sequence[int],
) -> tuple[int, ...]:
    """Starts by the lines of launchers too; what begins behind such a line is the same one.

    So is what begins shortly before it, with nothing made and nothing failed in between.
    """
    stated = {
        line + 1: before
        for line, before in restarts
        if not any(
            start <= line and start in steps and _is_same(start, line, before, steps, ends)
            for start in starts
        )
    }
    found = {
        start
        for start in starts
        if not any(line <= start and steps.get(start, -1) == at for line, at in stated.items())
    }
    return tuple(sorted(found | set(stated)))


def attempt_starts(
    marks: Sequence[Mark], backs: Sequence[StepBack] = (), *, last_end: int = 0
) -> tuple[int, ...]:
    """First lines of the second and later attempts in a file; empty for one attempt.

    Args:
        marks: occurrences of the entries of the beginning, by line.
        backs: step lines that fall back, by line.
        last_end: line of the file's last failure or planned end.

    >>> first = [Mark(line, line, 0, 0) for line in (1, 2, 3)]
    >>> attempt_starts([*first, *(Mark(50 + one.line, one.template, 40, 1) for one in first)])
    (51,)
    """
    starts = _by_beginnings(marks, backs, last_end) if marks else []
    return tuple(sorted({*starts, *_by_steps(backs, starts)}))


def _by_beginnings(marks: Sequence[Mark], backs: Sequence[StepBack], last_end: int) -> list[int]:
    starts: list[int] = []
    window = _Window(marks)
    window.move(0)
    first = current = _Beginning(window)
    origin, at = marks[0], 0
    while at < len(marks):
        mark = marks[at]
        under_way = mark.steps > origin.steps or mark.ends > origin.ends
        if under_way and (mark.template in current.counts or mark.template in first.counts):
            window.move(at)
            before = (first,) if current is first else (current, first)
            if window.repeats() and (
                _failed_at_once(window, first, mark, last_end)
                or any(_recurs(window, one, mark, origin, backs) for one in before)
            ):
                starts.append(mark.line)
                current, origin = _Beginning(window), mark
                window.begin_attempt()
                at += current.total
                continue
        window.write(mark)
        at += 1
    return starts


class _Beginning:
    """The entries of a beginning.

    Attributes:
        counts: template -> how often.
        once: the first templates that were written once.
        total: number of entries.
        leads: its first two entries are written once, as a script's header is.
        least, least_without_steps: shared templates of one that recurs, with the first of `once`
            not among them.
    """

    def __init__(self, window: _Window) -> None:
        self.counts = Counter(mark.template for mark in window.marks)
        self.total = self.counts.total()
        self.once = [template for template, times in self.counts.items() if times == 1][:LEADING]
        different = len(self.counts)
        begin = [mark.template for mark in window.marks[:LEADS]]
        self.leads = len(begin) == LEADS and begin == self.once[:LEADS]
        self.least = max(min(different, MIN_ENTRIES), MIN_SHARE * different)
        self.least_without_steps = max(MIN_ENTRIES, MIN_SHARE_WITHOUT_STEPS * different)


class _Window:
    """Counts the entries from one mark on until the training makes progress or fails.

    Attributes:
        counts: template -> how often, in no order.
    """

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks, self._begin, self._end = marks, 0, 0
        self.counts: dict[int, int] = {}
        #: (template, rank) of entries of ranks -> how often
        self._ranked: Counter[tuple[int, int]] = Counter()
        #: how many these are; how many of them the attempt wrote before; all that it wrote
        self._of_ranks = self._again = 0
        self._written: set[tuple[int, int]] = set()

    @property
    def marks(self) -> Sequence[Mark]:
        return self._marks[self._begin : self._end]

    def begins_with(self, first: int, second: int) -> bool:
        """True if these are the first two templates in it."""
        if self._marks[self._begin].template != first:
            return False
        for at in range(self._begin + 1, self._end):
            if self._marks[at].template != first:
                return self._marks[at].template == second
        return False

    def begin_attempt(self) -> None:
        """Take the window's entries for all that the attempt wrote."""
        self._written = {(one.template, one.rank) for one in self.marks if one.rank >= 0}
        self._again = self._of_ranks

    def write(self, mark: Mark) -> None:
        """Add an entry to those that the attempt wrote."""
        if mark.rank < 0:
            return  # only ranks are told from one another
        key = mark.template, mark.rank
        if key not in self._written:
            self._written.add(key)
            self._again += self._ranked.get(key, 0)

    def repeats(self) -> bool:
        """False if most entries are of ranks that had written none of them: they begin later."""
        return 2 * self._of_ranks < self._end - self._begin or self._again > 0

    def _count_rank(self, mark: Mark, times: int) -> None:
        if mark.rank >= 0:
            key = mark.template, mark.rank
            self._ranked[key] += times
            self._of_ranks += times
            self._again += times * (key in self._written)

    def move(self, at: int) -> None:
        """Move its begin to the mark `at`, which is not before that of the last call."""
        marks, counts = self._marks, self.counts
        if self._end < at:
            self._begin = self._end = at
            self._of_ranks = self._again = 0
            self._ranked.clear()
            counts.clear()
        for mark in marks[self._begin : at]:
            self._count_rank(mark, -1)
            counts[mark.template] -= 1
            if not counts[mark.template]:
                del counts[mark.template]
        self._begin = at
        steps, ends = marks[at].steps + INTERLEAVED_STEPS, marks[at].ends
        while self._end < len(marks):
            mark = marks[self._end]
            if mark.steps > steps or mark.ends > ends:
                break
            counts[mark.template] = counts.get(mark.template, 0) + 1
            self._count_rank(mark, 1)
            self._end += 1


def _failed_at_once(window: _Window, first: _Beginning, mark: Mark, last_end: int) -> bool:
    """True for the head of the log behind a failure, and before another one.

    A script writes its last lines too, such as the time.
    """
    if not (mark.ended and first.leads and mark.line < last_end):
        return False
    return window.begins_with(*first.once[:LEADS])


def _recurs(
    window: _Window,
    before: _Beginning,
    mark: Mark,
    origin: Mark,
    backs: Sequence[StepBack],
) -> bool:
    again, counts, once = window.counts, before.counts, before.once
    made_steps = mark.steps > origin.steps
    least = before.least if made_steps else before.least_without_steps
    if len(again) < least and mark.template not in once[:2]:
        return False  # as nearly all are
    shared = again.keys() & counts.keys()
    # What is written once is of a launcher; other ranks may begin after the first of them failed,
    # and an evaluation or an epoch repeats a part of the beginning.
    if len(shared) >= MIN_ENTRIES and mark.template in once[:2]:
        led = len(once) > 1 and window.begins_with(once[0], once[1])
        if led or len(shared & set(once)) >= max(2, LEADING_SHARE * len(once)):
            return True
    if len(shared) < least:
        return False
    if made_steps:
        whole = len(shared) >= max(MANY_ENTRIES, MIN_WHOLE_SHARE * len(counts))
        return whole or mark.ended or _falls_back(mark, backs)
    times = sum(min(again[template], counts[template]) for template in shared)
    return times >= MIN_TIMES_WITHOUT_STEPS * before.total


def _falls_back(mark: Mark, backs: Sequence[StepBack]) -> bool:
    """True if the first steps after a beginning are below those before it."""
    return any(back.line > mark.line and back.ends == mark.ends for back in backs)


def _by_steps(backs: Sequence[StepBack], starts: Sequence[int]) -> list[int]:
    """Step lines that fall back after a failure or a pause, in logs without a beginning."""
    if starts:
        return []
    found: list[int] = []
    ends = 0
    for back in backs:
        if back.step < back.before and (back.paused or back.ends > ends):
            found.append(back.line)
        ends = back.ends
    return found
