"""What is known of the lines of one file: their forms, the streams they are of, their templates."""

from __future__ import annotations

import re

from rmetric.diagnosis.facts.starts import StartMarks
from rmetric.diagnosis.log_stream import LogLineForm, LogStream, RawEntry
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix, PrefixParser
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.templates.events import OTHERS
from rmetric.diagnosis.templates.facts import (
    MAX_ENTRIES,
    SHORTEST_FORM,
    BoundedCache,
    LineAnalyser,
)
from rmetric.diagnosis.templates.places import Heads
from rmetric.diagnosis.templates.shapes import LineShape, shape_reader

#: Different masked texts of a file; further ones count as "<others>".
MAX_TEXTS = 20_000
#: Streams of a file that are kept apart.
MAX_STREAMS = 1 << 15
#: Forms of prefixes that a file is expected to have.
MAX_HEADS = 1000
DIGITS = b"0123456789"


class FileLines:
    """The forms, streams and templates of one file.

    Attributes:
        marks: where attempts may begin.
        own: the stream of lines without a prefix.
        number, lines: number of lines before the block, and its lines.
        block_forms: their forms, where these are known.
        template_of: (class, masked text) -> number of the template.
        first, last: of each template, within the attempt.
        unmatched: entries that were too different from all others.
    """

    def __init__(
        self, source: LogSource, analyser: LineAnalyser, prefixes: PrefixParser | None = None
    ) -> None:
        self.source, self.analyser = source, analyser
        prefixes = prefixes or PrefixParser.learn(source.sample())
        self.shapes = shape_reader(prefixes, analyser)
        self.prefixes = self.shapes.prefixes
        self.marks = StartMarks()
        #: by their key, or by the line itself where the key is too short
        self.forms: BoundedCache[LogLineForm] = BoundedCache()
        self.short: BoundedCache[LogLineForm] = BoundedCache()
        self.of_shape: dict[LineShape, LogLineForm] = {}
        self.streams: dict[Prefix, LogStream] = {}
        #: pattern of a form of prefix -> the streams of such prefixes
        self.heads: dict[re.Pattern[bytes], Heads[LogStream]] = {}
        self.own = self._stream_of(NO_PREFIX)
        self.template_of: dict[tuple[str, str], int] = {}
        self.number, self.lines = 0, list[bytes]()
        self.block_forms = list[LogLineForm | None]()
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.first: list[RawEntry | None] = [None] * len(self.template_of)
        self.last: list[RawEntry | None] = [None] * len(self.template_of)
        self.unmatched = 0
        for stream in self.streams.values():
            stream.begin_attempt()

    def _stream_of(self, prefix: Prefix) -> LogStream:
        stream = self.streams.get(prefix)
        if stream is None:
            if len(self.streams) > MAX_STREAMS:
                return self.own
            stream = self.streams[prefix] = LogStream(str(len(self.streams)), prefix)
        return stream

    def _stream(self, line: bytes, form: LogLineForm) -> tuple[LogStream, int]:
        """The stream of a line, and the offset of its text."""
        if form.heads is None:
            return self.own, self.prefixes.start(line)
        stream, start = form.heads.find(line)
        if stream is None:
            prefix, start = self.prefixes.split(line)
            stream = self._stream_of(prefix)
            form.heads.learn(line, stream)
        return stream, start

    def _form(self, line: bytes, key: bytes | None = None) -> LogLineForm:
        key = line.translate(None, DIGITS) if key is None else key
        forms, key = (self.forms, key) if len(key) >= SHORTEST_FORM else (self.short, line)
        form = forms.get(key)
        if form is None:
            shape = self.shapes.shape(line)
            form = self.of_shape.get(shape) or self._new_form(shape)
            forms.put(key, form)
        return form

    def _new_form(self, shape: LineShape) -> LogLineForm:
        if len(self.heads) >= MAX_HEADS:
            self.heads.clear()
        if len(self.of_shape) >= MAX_ENTRIES:
            self.of_shape.clear()
        heads = None
        if shape.heads is not None:
            heads = self.heads.setdefault(shape.heads, Heads(shape.heads))
        form = self.of_shape[shape] = LogLineForm(shape, heads)
        facts = shape.facts
        template = self.template_of.get((facts.cls, facts.template))
        if (
            facts.quiet
            and not (facts.told or facts.step or template is None)
            and self.first[template] is not None
        ):  # its first line need not go the slow way
            form.template, form.slow = template, False
            form.begin(self.marks.follows(template))
        return form

    def _template(self, text: str, cls: str) -> int:
        template = self.template_of.get((cls, text))
        if template is None:
            if len(self.template_of) >= MAX_TEXTS and text != OTHERS:
                self.unmatched += 1
                return self._template(OTHERS, cls)
            template = self.template_of[cls, text] = len(self.first)
            self.first.append(None)
            self.last.append(None)
        return template

    def time(self, line: bytes, form: LogLineForm | None) -> float | None:
        """Seconds that a line states, as `PrefixParser.time`."""
        if form is None:
            return self.prefixes.time(line)
        place = form.shape.time
        return self.shapes.time(line, form.shape) if place is None else place.time(line)

    def start(self, line: bytes, form: LogLineForm | None) -> int:
        """Offset of the text of a line."""
        heads = None if form is None else form.heads
        if heads is None:
            split = self.prefixes.split(line)[1] if form is None else self.prefixes.start(line)
            return split
        for start in heads.lengths:
            if line[:start] in heads.known:
                return start
        stream, start = heads.find(line)
        return self.prefixes.split(line)[1] if stream is None else start
