"""Properties of the lines of one form that no file changes, shared by all files of a process."""

from __future__ import annotations

import re

from rmetric.diagnosis.reading.prefixes import NO_PREFIX, PrefixParser
from rmetric.diagnosis.reading.steps import StepMatch, match_step, never_states_step
from rmetric.diagnosis.templates.facts import BoundedCache, Facts, LineAnalyser
from rmetric.diagnosis.templates.masks import plain_numbers, plain_pointers
from rmetric.diagnosis.templates.places import StepPlace, TimePlace, prefix_place

#: Lines of one form whose time is parsed before the place of the time is learnt.
PARSED_TIMES = 3
#: Forms of prefixes whose patterns are remembered.
MAX_PLACES = 4096


class LineShape:
    """What the lines of one form have in common.

    Attributes:
        heads: matches their prefix; None where they have none.
        step, time: find their step and time; None before the first use.
        timed: number of times that were parsed.
    """

    __slots__ = ("facts", "heads", "step", "time", "timed")

    def __init__(self, facts: Facts, heads: re.Pattern[bytes] | None) -> None:
        self.facts, self.heads, self.timed = facts, heads, 0
        self.step: StepPlace | None = None
        self.time: TimePlace | None = None


class ShapeReader:
    """Shapes of the lines of all files whose prefixes are alike.

    Attributes:
        prefixes: of their lines.
    """

    def __init__(self, prefixes: PrefixParser, analyser: LineAnalyser) -> None:
        self.prefixes, self._analyser = prefixes, analyser
        self._shapes: BoundedCache[LineShape] = BoundedCache()
        self._places: dict[object, re.Pattern[bytes]] = {}

    def shape(self, line: bytes) -> LineShape:
        """The shape of a line."""
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
        """As `prefix_place`, which lines with like prefixes share."""
        found = self.prefixes.pattern.match(line)
        assert found is not None
        ends = [end for _, end in found.regs]
        key = plain_numbers(line[: max(ends)]), *(end < 0 for end in ends), ends[0] == max(ends)
        if key not in self._places:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            self._places[key] = prefix_place(self.prefixes, line)
        return self._places[key]

    def step_place(self, shape: LineShape, line: bytes, start: int) -> StepPlace:
        """Finds the step in lines of the shape; the text of this one begins at `start`."""
        if shape.step is None:
            plain = plain_numbers(line[start:]).decode("utf-8", "replace")
            shape.step = StepPlace(line, self._match_step, start, never=never_states_step(plain))
        return shape.step

    def time_place(self, shape: LineShape, line: bytes) -> TimePlace:
        """Finds the time in lines of the shape, of which this is one."""
        if shape.time is None:
            shape.time = TimePlace(line, self.prefixes)
        return shape.time

    def time(self, line: bytes, shape: LineShape) -> float | None:
        """As `PrefixParser.time`, quicker for lines of shapes that recur."""
        if shape.time is None and shape.timed < PARSED_TIMES:
            shape.timed += 1
            return self.prefixes.time(line)
        return self.time_place(shape, line).time(line)

    def _match_step(self, line: bytes) -> StepMatch | None:
        return match_step(line[self.prefixes.split(line)[1] :].decode("utf-8", "replace"))


def shape_reader(prefixes: PrefixParser, analyser: LineAnalyser) -> ShapeReader:
    """The reader for files with these prefixes; those that are alike share it."""
    if prefixes.forms not in analyser.readers:
        analyser.readers[prefixes.forms] = ShapeReader(prefixes, analyser)
    reader: ShapeReader = analyser.readers[prefixes.forms]
    return reader
