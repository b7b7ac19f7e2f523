"""State of the pass over one file: forms of its lines, with the places of their parts; its streams.

Where prefix, step and time stand in the lines of one form is learnt from its first line.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any

from rmetric.diagnosis.facts.job import MAX_NAMED, MAX_STACKS, STACKS_OF_RANK, STAGES, TAIL
from rmetric.diagnosis.library.stages import next_stage
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix, PrefixParser
from rmetric.diagnosis.reading.text import clean
from rmetric.diagnosis.reading.timestamps import UNITS, may_state, stated
from rmetric.diagnosis.templates import (
    BoundedCache,
    Facts,
    LineAnalyser,
    plain_numbers,
    plain_pointers,
)
from rmetric.readers.step_forms import StepMatch, match_step

_DIGIT_BYTES = re.compile(rb"[0-9]+")
#: Lines with more numbers are parsed each time.
MOST_NUMBERS = 60
#: Minutes of a form's lines that are remembered.
MOST_MINUTES = 64
#: Prefixes of one form that are remembered, and different lengths of them.
MOST_HEADS = 4096
MOST_LENGTHS = 8
#: Lines of a form whose time is parsed before its place is learnt: the first and the last entry.
PARSED_TIMES = 2


@dataclass(eq=False, slots=True)
class LineShape:
    """What the lines of one form have in common, whatever their file.

    Attributes:
        heads: matches their prefix; None where they have none.
        step, time: find these; None before the first use.
        timed: number of times that were parsed.
    """

    facts: Facts
    heads: re.Pattern[bytes] | None
    step: StepPlace | None = None
    time: TimePlace | None = None
    timed: int = 0


class ShapeReader:
    """Shapes of the lines of all files whose prefixes are alike."""

    def __init__(self, prefixes: PrefixParser, analyser: LineAnalyser) -> None:
        self.prefixes, self._analyser = prefixes, analyser
        self._shapes: BoundedCache[LineShape] = BoundedCache()
        self._places: BoundedCache[re.Pattern[bytes]] = BoundedCache()

    def shape(self, line: bytes) -> LineShape:
        # Without its digits "0, a" would be ", a", and the first file would decide for all.
        key = plain_pointers(plain_numbers(line))
        shape = self._shapes.get(key)
        if shape is None:
            prefix, start = self.prefixes.split(line)
            heads = None if prefix is NO_PREFIX else self._place(line)
            shape = LineShape(self._analyser.facts(line[start:]), heads)
            self._shapes.put(key, shape)
        return shape

    def _place(self, line: bytes) -> re.Pattern[bytes]:
        """Matches lines of the form up to where their prefix ends; its groups decide the stream."""
        found = self.prefixes.pattern.match(line)
        assert found is not None
        ends = [end for _, end in found.regs]
        key = plain_numbers(line[: max(ends)]), *(end < 0 for end in ends), ends[0] == max(ends)
        place = self._places.get(key)
        if place is None:
            spans = [found.span(at) for at in range(1, found.re.groups + 1) if found[at]]
            place = same_places(line, spans, found.end())
            self._places.put(key, place)
        return place

    def step_place(self, shape: LineShape, line: bytes, start: int) -> StepPlace:
        """Finds the step in lines of the shape; the text of this one begins at `start`."""
        if shape.step is None:

            def read(line: bytes) -> StepMatch | None:
                text = line[self.prefixes.split(line)[1] :]
                return match_step(text.decode("utf-8", "replace"))

            shape.step = StepPlace(line, read, start)
        return shape.step

    def time(self, line: bytes, shape: LineShape) -> float | None:
        """As `PrefixParser.time`, quicker for lines of shapes that recur."""
        if shape.time is None:
            if shape.timed < PARSED_TIMES:
                shape.timed += 1
                return self.prefixes.time(line)
            shape.time = TimePlace(line, self.prefixes)
        return shape.time.time(line)


def same_places(line: bytes, spans: Sequence[tuple[int, int]], text: int) -> re.Pattern[bytes]:
    """Finds the spans in lines that differ from this one in their digits, each as a group.

    The spans are in order; the place `text` between or behind them is the empty group "text".
    """

    def loose(text: bytes) -> bytes:
        return rb"[0-9]+".join(map(re.escape, _DIGIT_BYTES.split(text)))

    groups = sorted([*((begin, end, b"(") for begin, end in spans), (text, text, b"(?P<text>")])
    parts, at = [], 0
    for begin, end, opening in groups:
        parts += [loose(line[at:begin]), opening, loose(line[begin:end]), b")"]
        at = end
    return re.compile(b"".join(parts))


class Heads:
    """Look-up of the stream for lines with one form of prefix.

    A prefix that ends in no digit, and so ends there in each line that begins so, is first looked
    up in `known`, by its `lengths`, unless there are so many that they contain times.
    """

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self._by_groups: BoundedCache[LogStream] = BoundedCache(16 * MOST_HEADS)
        # A rank that is stated behind the prefix is not part of it.
        self._few = pattern.groupindex["text"] == pattern.groups
        self.lengths: tuple[int, ...] = ()
        self.known: dict[bytes, LogStream] = {}

    def find(self, line: bytes) -> tuple[LogStream | None, int]:
        """Return the stream of the line (None if unknown) and the offset of its text."""
        found = self._pattern.match(line)
        stream = self._by_groups.get(found.groups()) if found else None
        if found is None or stream is None:
            return None, 0
        start = found.start("text")
        if self._few and not line[start - 1 : start].isdigit():
            if len(self.known) >= MOST_HEADS:
                self._few, self.lengths = False, ()
                self.known.clear()
            elif start in self.lengths or len(self.lengths) < MOST_LENGTHS:
                self.lengths = tuple({*self.lengths, start})
                self.known[line[:start]] = stream
        return stream, start

    def learn(self, line: bytes, stream: LogStream) -> None:
        found = self._pattern.match(line)
        if found is not None:
            self._by_groups.put(found.groups(), stream)


class StepPlace:
    """Reads the step of lines of one form.

    Each number of the first line, from `start` on, is changed in turn, to find those that the step
    depends on, as `read` reads any line. If it is one alone, only that is read of further lines.
    """

    def __init__(
        self, line: bytes, read: Callable[[bytes], StepMatch | None], start: int = 0
    ) -> None:
        self._read = read
        self._find: re.Pattern[bytes] | None = None
        first, numbers = read(line), list(_DIGIT_BYTES.finditer(line, start))
        if first is None or len(numbers) > MOST_NUMBERS:
            return
        self._form, moved = first.form, []
        for number in numbers:
            following = b"%0*d" % (len(number[0]), int(number[0]) + 1)
            there = read(line[: number.start()] + following + line[number.end() :])
            moved += [(number, there)] if there != first else []
        if len(moved) == 1:
            number, there = moved[0]
            if int(number[0]) == first.step and there == (first.form, first.step + 1):
                self._find = same_places(line, [number.span()], number.end())

    def find(self, line: bytes) -> StepMatch | None:
        """Read the step of a line of the form."""
        found = self._find.match(line) if self._find else None
        if found is None or len(step := found[1]) > 12:
            return self._read(line)
        return StepMatch(self._form, int(step))


class TimePlace:
    """Reads the time of lines of one form: the text around seconds and fraction is looked up."""

    def __init__(self, line: bytes, prefixes: PrefixParser) -> None:
        self._parse = prefixes.time
        self._find: re.Pattern[bytes] | None = None
        self._unit = 1.0
        self._minutes: BoundedCache[float] = BoundedCache(MOST_MINUTES)
        start, head = prefixes.head(line)
        match = stated(head) if head.isascii() else None
        plain = _DIGIT_BYTES.sub(b"0", line[start:]).decode("utf-8", "replace")
        self._never = match is None and not may_state(plain)
        parts = match.groupdict(default="") if match is not None else {}
        if match is None or "." in parts.get("fraction", "") or prefixes.time(line) is None:
            return
        whole = next(name for name in ("second", "epoch", "boot", *UNITS) if name in parts)
        begin, point = match.span(whole)
        self._unit, self._digits = UNITS.get(whole, 1.0), point - begin
        fraction = match.span("fraction") if parts.get("fraction") else (point, point)
        spans = [(match.start(), begin), (begin, point), fraction, (fraction[1], match.end())]
        spans = [(first + start, end + start) for first, end in spans]
        self._find = same_places(line, spans, start + match.end())

    def time(self, line: bytes) -> float | None:
        """Seconds that a line of the form states."""
        if self._never:
            return None
        found = self._find.match(line) if self._find else None
        if found is None:
            return self._parse(line)
        before, whole, fraction, behind = found.group(1, 2, 3, 4)
        if len(whole) != self._digits:
            return self._parse(line)
        seconds = int(whole) / self._unit
        minute = self._minutes.get(before + behind)
        if minute is None:
            now = self._parse(line)
            if now is None:
                return None
            minute = float(floor(now) - floor(seconds))
            self._minutes.put(before + behind, minute)
        return minute + seconds + float(b"0." + fraction)


#: Steps by which ranks that share a log may differ.
RANKS_APART = 2
#: stage that a line states -> stages that it does not change
_STAYS = {
    stated: {old for old in ("", *STAGES) if next_stage(old, stated) == old} for stated in STAGES
}

#: (number, line, template, stream's key, step, stage, text or None for the line's own, form): an
#: entry as it is kept during the pass; those that remain are parsed at its end.
RawEntry = tuple[int, bytes, int, str, "int | None", str, "str | None", "LogLineForm"]


@dataclass(eq=False, slots=True)
class LogLineForm:
    """Properties of the lines of one form in one file.

    Attributes:
        facts, shape: those that all files share.
        heads, step: find their stream and step; None where they have no prefix, state none.
        stays: the stages that they do not change; None where they state none.
        template: its number in the file; -1 before the first entry.
        slow: they need more than to be counted, and to have their step recorded.
        blank: they are nothing but a part of the entry before them.
        job_wide: they may state what holds for the whole job.
        marked: they are of the log's beginning, and each occurrence is recorded.
        plain: they need no more than to be recorded so, and counted, where they change no stage.
    """

    shape: LineShape
    heads: Heads | None
    facts: Facts = field(init=False)
    stays: set[str] | None = field(init=False)
    blank: bool = field(init=False)
    job_wide: bool = field(init=False)
    step: StepPlace | None = None
    template: int = -1
    slow: bool = True
    marked: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        facts = self.facts = self.shape.facts
        self.blank, self.job_wide = facts.kind == "blank", facts.job_wide
        self.stays = _STAYS[facts.stage] if facts.stage else None


class OpenEntry:
    """An entry that may have more lines.

    Attributes:
        facts, leading_facts: of its first line, and of its exception's line.
        look: a signature may match it.
        watched: the watch over iterations has counted it.
        steps_before: number of the file's step lines before it.
    """

    def __init__(self, raw: RawEntry, facts: Facts, text: bytes, *, states_step: bool) -> None:
        self.lines, self.raw, self.last_line = [clean(text)], raw, raw[0]
        self.facts, self.leading_facts, self.look = facts, facts, facts.look
        self.states_step = self.watched = states_step
        self.steps_before = 0


@dataclass(slots=True)
class StepCounter:
    """The step lines of one form in a stream: the last one, and seconds between two."""

    last: int
    time: float | None
    longest_pause: float = 0.0
    lines: int = 0


@dataclass(slots=True)
class MatchTally:
    """Running summary of one stream's entries that matched one signature."""

    first: RawEntry
    last: RawEntry
    count: int = 0
    named: list[dict[str, str]] = field(default_factory=list)
    templates: set[int] = field(default_factory=set)


class LogStream:
    """State of one stream while a file is read.

    Attributes:
        templates: of the pending entries, which are not counted yet.
        places: the same entries, each as a line of the block or as it is kept.
        shown: how many of them the watch over iterations has received.
        changes: (pending entry, step and stage of the stream from there on).
        number: the rank or task that the prefix states, -1 for none.
        counters: of its step lines, by their form.
        last_step_at, last_step_line: where the last step was first stated; its last line.
    """

    def __init__(self, key: str, prefix: Prefix) -> None:
        self.key, self.prefix = key, prefix
        numbers = (prefix.rank, prefix.local_rank, prefix.task)
        self.number = next((number for number in numbers if number is not None), -1)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forget all entries."""
        self.counters: dict[str, StepCounter] = {}
        self.counts: Counter[int] = Counter()
        self.templates, self.places, self.shown = list[int](), list[Any](), 0
        self.head, self.tail = list[RawEntry](), deque[RawEntry](maxlen=TAIL)
        self.state, self.slow = "", False
        self.open: OpenEntry | None = None
        self.stage, self.stages = "", list[tuple[str, RawEntry]]()
        self.step: int | None = None
        self.changes: list[tuple[int, int | None, str]] = [(-1, None, "")]
        self.steps = self.last_step_line = 0
        self.last_step_at: RawEntry | None = None
        self.found: dict[str, MatchTally] = {}
        self.stacks = deque[RawEntry](maxlen=STACKS_OF_RANK if self.number >= 0 else MAX_STACKS)

    def change(self) -> None:
        """Its entries from now on are of another step or stage."""
        self.changes.append((len(self.templates), self.step, self.stage))

    def time_step(self, step: StepMatch, time: float | None) -> None:
        """Measure the pause between two steps; there is none where the steps fall back."""
        form, now = step
        counter = self.counters.get(form)
        if counter is None:
            counter = self.counters[form] = StepCounter(now, time)
        counter.lines += 1
        if now == counter.last:  # a heartbeat, or another rank: no pause between two steps
            return
        if now >= counter.last - RANKS_APART and time is not None and counter.time is not None:
            counter.longest_pause = max(counter.longest_pause, time - counter.time)
        counter.last, counter.time = now, time

    def match(self, id: str, raw: RawEntry, fields: dict[str, str]) -> None:
        """Take an entry that a signature matched, and what its pattern's groups caught."""
        found = self.found.setdefault(id, MatchTally(raw, raw))
        found.count += 1
        found.last = raw
        found.templates.add(raw[2])
        if fields and len(found.named) < MAX_NAMED and fields not in found.named:
            found.named.append(fields)
