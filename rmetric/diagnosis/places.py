"""Locate prefix, step and time in lines of one form, learnt from its first line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from math import floor
from typing import Generic, TypeVar

from rmetric.diagnosis.reading.prefixes import NO_PREFIX, PrefixParser
from rmetric.diagnosis.reading.steps import StepMatch, match_step, never_states_step
from rmetric.diagnosis.reading.timestamps import UNITS, may_state, stated
from rmetric.diagnosis.templates import (
    BoundedCache,
    Facts,
    LineAnalyser,
    plain_numbers,
    plain_pointers,
)

Stream = TypeVar("Stream")

_NUMBER = re.compile(rb"[0-9]+")
#: Lines with more numbers are parsed each time.
MOST_NUMBERS = 60
#: Minutes of a form's lines that are remembered.
MOST_MINUTES = 64
#: Prefixes of one form that are remembered, and different lengths of them.
MOST_HEADS = 4096
MOST_LENGTHS = 8
#: Lines of one form whose time is parsed before the place of the time is learnt.
PARSED_TIMES = 3


class LineShape:
    """What the lines of one form have in common, whatever their file.

    Attributes:
        heads: matches their prefix; None where they have none.
        step, time: find these; None before the first use.
        timed: number of times that were parsed.
    """

    __slots__ = ("facts", "heads", "step", "time", "timed")

    def __init__(self, facts: Facts, heads: re.Pattern[bytes] | None) -> None:
        self.facts, self.heads, self.timed = facts, heads, 0
        self.step: StepPlace | None = None
        self.time: TimePlace | None = None


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
        """Matches lines of the form up to where their prefix ends; its groups decide the stream.

        Lines with like prefixes share it.
        """
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
            plain = plain_numbers(line[start:]).decode("utf-8", "replace")
            shape.step = StepPlace(line, self._match_step, start, never=never_states_step(plain))
        return shape.step

    def time(self, line: bytes, shape: LineShape) -> float | None:
        """As `PrefixParser.time`, quicker for lines of shapes that recur."""
        if shape.time is None:
            if shape.timed < PARSED_TIMES:
                shape.timed += 1
                return self.prefixes.time(line)
            shape.time = TimePlace(line, self.prefixes)
        return shape.time.time(line)

    def _match_step(self, line: bytes) -> StepMatch | None:
        return match_step(line[self.prefixes.split(line)[1] :].decode("utf-8", "replace"))


def same_places(line: bytes, spans: Sequence[tuple[int, int]], text: int) -> re.Pattern[bytes]:
    """Finds the spans in lines that differ from this one in their digits, each as a group.

    The spans are in order; the place `text` between or behind them is the empty group "text".
    """

    def loose(text: bytes) -> bytes:
        return rb"[0-9]+".join(map(re.escape, _NUMBER.split(text)))

    groups = sorted([*((begin, end, b"(") for begin, end in spans), (text, text, b"(?P<text>")])
    parts, at = [], 0
    for begin, end, opening in groups:
        parts += [loose(line[at:begin]), opening, loose(line[begin:end]), b")"]
        at = end
    return re.compile(b"".join(parts))


class Heads(Generic[Stream]):
    """Look-up of the stream for lines with one form of prefix.

    A prefix that ends in no digit is looked up as it stands in `known`, by its `lengths`, unless
    there are so many that they contain times.
    """

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self._by_groups: BoundedCache[Stream] = BoundedCache(16 * MOST_HEADS)
        # A rank that is stated behind the prefix is no part of it.
        self._few = pattern.groupindex["text"] == pattern.groups
        self.lengths: tuple[int, ...] = ()
        self.known: dict[bytes, Stream] = {}

    def find(self, line: bytes) -> tuple[Stream | None, int]:
        """Return the stream of the line (None if unknown) and the offset of its text."""
        for length in self.lengths:
            stream = self.known.get(line[:length])
            if stream is not None:
                # No digit ends the prefix, so that it ends there in each line that begins so.
                return stream, length
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

    def learn(self, line: bytes, stream: Stream) -> None:
        found = self._pattern.match(line)
        if found is not None:
            self._by_groups.put(found.groups(), stream)


#: `StepMatch._make`, at a third of its cost.
_step_match = partial(tuple.__new__, StepMatch)


class StepPlace:
    """Reads the step of lines of one form.

    Each number of the first line, from `start` on, is changed in turn, to find those that the step
    depends on. If it is one alone, only that is read of further lines.

    Args:
        read: reads the step of any line.
        never: no line states a step that differs from this in its digits alone.
    """

    def __init__(
        self,
        line: bytes,
        read: Callable[[bytes], StepMatch | None],
        start: int = 0,
        *,
        never: bool = False,
    ) -> None:
        self._read = read
        # Lines that have numbers in the same places, and no others.
        self._never = same_places(line, [], len(line)) if never else None
        self._find: re.Pattern[bytes] | None = None
        first = None if never else read(line)
        numbers = list(_NUMBER.finditer(line, start))
        if first is None or len(numbers) > MOST_NUMBERS:
            return
        self._form, moved = first.form, []
        for number in numbers:
            following = str(int(number[0]) + 1).encode().rjust(len(number[0]), b"0")
            there = read(line[: number.start()] + following + line[number.end() :])
            moved += [(number, there)] if there != first else []
        if len(moved) == 1:
            number, there = moved[0]
            if int(number[0]) == first.step and there == (first.form, first.step + 1):
                self._find = same_places(line, [number.span()], number.end())

    def find(self, line: bytes) -> StepMatch | None:
        """Read the step of a line of the form."""
        if self._never is not None and self._never.fullmatch(line):
            return None
        found = self._find.match(line) if self._find else None
        if found is None or len(step := found[1]) > 12:
            return self._read(line)
        return _step_match((self._form, int(step)))


class TimePlace:
    """Reads the time of lines of one form.

    The text before the seconds and behind their fraction is looked up: most lines share it with
    one before.
    """

    def __init__(self, line: bytes, prefixes: PrefixParser) -> None:
        self._parse = prefixes.time
        self._find: re.Pattern[bytes] | None = None
        self._unit = 0.0
        self._minutes: BoundedCache[float] = BoundedCache(MOST_MINUTES)
        start, head = prefixes.head(line)
        match = stated(head) if head.isascii() else None
        plain = _NUMBER.sub(b"0", line[start:]).decode("utf-8", "replace")
        self._never = match is None and not may_state(plain)
        parts = match.groupdict(default="") if match is not None else {}
        if match is None or "." in parts.get("fraction", "") or prefixes.time(line) is None:
            return
        whole = next(name for name in ("second", "epoch", "boot", *UNITS) if name in parts)
        begin, point = match.span(whole)
        self._unit, self._digits = UNITS.get(whole, 0.0), point - begin
        fraction = match.span("fraction") if parts.get("fraction") else (point, point)
        spans = [(match.start(), begin), (begin, point), fraction, (fraction[1], match.end())]
        spans = [(one + start, end + start) for one, end in spans]
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
        if self._unit:
            return int(whole) / self._unit
        minute = self._minutes.get(before + behind)
        if minute is None:
            now = self._parse(line)
            if now is None:
                return None
            minute = float(floor(now) - int(whole))
            self._minutes.put(before + behind, minute)
        return minute + int(whole) + float(b"0." + fraction)
