"""The single pass over a file to a `Part`: most lines are counted by their form only.

A block of lines is looked up by their keys, which are the lines without digits (`_take`). Lines of
a form that needs no action are appended to the pending entries of their stream, which `_settle`
counts at the end of the block. Of the others, `_look` records the steps; those that may be of an
entry of several lines, or match a signature, go the slow way (`_slow`), on which alone a file could
be read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from rmetric.diagnosis.facts.job import HEAD, TAIL
from rmetric.diagnosis.facts.layout import IdentityGraph
from rmetric.diagnosis.facts.starts import KERNEL_LINE, StartMarks
from rmetric.diagnosis.forms import (
    Heads,
    LineShape,
    LogLineForm,
    LogStream,
    OpenEntry,
    RawEntry,
    ShapeReader,
)
from rmetric.diagnosis.library.stages import next_stage
from rmetric.diagnosis.parts import Part, PartBuilder
from rmetric.diagnosis.patterns.iterations import IterationWatch
from rmetric.diagnosis.patterns.stacks import states_stack
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix, PrefixParser
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.reading.text import (
    MAX_LINES,
    MAX_TEXT,
    TRANSITIONS,
    clean,
    shortened,
    unescaped,
)
from rmetric.diagnosis.signature import Signature
from rmetric.diagnosis.templates import (
    JOB_ID,
    MAX_ENTRIES,
    OTHERS,
    SHORTEST_FORM,
    BoundedCache,
    Facts,
    LineAnalyser,
)
from rmetric.readers.step_forms import StepMatch

#: Lines with which a file begins, where they all differ.
OPENING = 3
#: Different masked texts of a file; further ones count as "<others>".
MAX_TEXTS = 20_000
#: Streams of a file that are kept apart, and forms of prefixes.
MAX_STREAMS, MAX_HEADS = 1 << 15, 1000
#: Changes of stage that are kept of a stream, job numbers of a file.
MAX_STAGES, MAX_JOB_IDS = 200, 1000
#: Roles and least confidence of entries that end an attempt.
_ENDING_ROLES = ("success", "ending", "cause", "echo", "symptom")
MIN_END_CONFIDENCE = 0.5
#: A program that ends does not write its last words at these levels.
_NOTED = ("info", "warning")
#: Lines that continue what stands before them.
_SET_IN = ("part", "frame")
#: Lines between them and what they continue: empty ones, and the head of faulthandler's stacks.
_BETWEEN = re.compile(rb"(?:Timeout \([\d:.]+\)!)?\s*$")
DIGITS = b"0123456789"


class FilePass:
    """Reads one file to the `Part` of each attempt in it.

    Attributes:
        own: the stream of lines without a prefix.
        forms: by their key, or by "0" and the line where the key is too short.
        number, line_before, lines: number of lines before the block, the last of them; its lines.
        block_forms: their forms, where these are known.
        template_of: (class, masked text) -> number of the template.
        first, last: of each template, within the attempt.
        final_template: template of an entry's first line -> that of the whole entry.
        continued: the last line that continued one of another stream, and that stream.
    """

    def __init__(
        self, source: LogSource, analyser: LineAnalyser, prefixes: PrefixParser | None = None
    ) -> None:
        self.source, self.analyser = source, analyser
        prefixes = prefixes or PrefixParser.learn(source.sample())
        # Files whose prefixes are alike share it.
        self.shapes: ShapeReader = analyser.readers.setdefault(
            prefixes.forms, ShapeReader(prefixes, analyser)
        )
        self.prefixes = self.shapes.prefixes
        self.marks = StartMarks()
        self.forms: BoundedCache[LogLineForm] = BoundedCache()
        self.of_shape: dict[LineShape, LogLineForm] = {}
        self.streams: dict[Prefix, LogStream] = {}
        self.heads: dict[re.Pattern[bytes], Heads] = {}
        self.own = self._stream_of(NO_PREFIX)
        self.template_of: dict[tuple[str, str], int] = {}
        self.number, self.lines = 0, list[bytes]()
        self.block_forms = list[LogLineForm | None]()
        self._begin_attempt()

    def read_attempts(
        self, on_progress: Callable[[int], None] | None = None, starts: Sequence[int] | None = None
    ) -> list[Part]:
        """Read the whole file.

        Args:
            on_progress: receives the number of bytes of each block.
            starts: first lines of the later attempts; None for where the file's own recur.
        """
        found, opening, begun = list[Part](), list[bytes](), 0
        for lines in self.source.chunks():
            if on_progress is not None:
                on_progress(sum(map(len, lines)) + len(lines))
            if max(map(len, lines), default=0) > 2 * MAX_TEXT:  # the middle is left out
                most = 2 * MAX_TEXT
                lines = [
                    line
                    if len(line) <= most
                    else b" ... ".join((line[:MAX_TEXT], line[-MAX_TEXT:]))
                    for line in lines
                ]
            keys = b"\n".join(lines).translate(None, DIGITS).split(b"\n") if lines else []
            before, begin, opening = self.number + 1, 0, opening or keys[:OPENING]
            if starts is not None:
                places = [at - before for at in starts if 0 <= at - before < len(lines)]
            else:  # where the first lines recur, if they differ
                first = opening[0] if len({*opening}) == OPENING else None
                places = [at for at, key in enumerate(keys) if key == first]
                places = [at for at in places if keys[at : at + OPENING] == opening]
            for at in places:
                self._take(lines[begin:at], keys[begin:at])
                begin = at
                if starts is not None or self.marks.progress > begun:
                    found.append(self._finish())
                    self._begin_attempt()
                    begun = self.marks.progress
            self._take(lines[begin:], keys[begin:])
        return [*found, self._finish()]

    def _finish(self) -> Part:
        for stream in self.streams.values():
            if stream.open is not None:
                self._close(stream)
            self._settle(stream)
        return PartBuilder(self).part()

    def _take(self, lines: list[bytes], keys: list[bytes]) -> None:
        """Read the next lines; their keys are they without their digits."""
        if not lines:
            return
        known, own, number = self.forms.get, self.own, self.number + 1
        self.lines, forms = lines, list(map(known, keys))
        self.block_forms = forms
        for at, form in enumerate(forms):
            if form is None:
                form = forms[at] = known(keys[at]) or self._form(lines[at], keys[at])
            stream, heads, start = own, form.heads, 0
            if heads is not None:
                line = lines[at]
                for start in heads.lengths:
                    found = heads.known.get(line[:start])
                    if found is not None:
                        stream = found
                        break
                else:
                    stream, start = self.stream(line, form)
            if (
                form.plain
                and not stream.slow
                and ((stays := form.stays) is None or stream.stage in stays)
            ):
                if form.marked:
                    form.marked = self.marks.add(number + at, form.template, stream.number)
                stream.templates.append(form.template)
                stream.places.append(at)
            elif not form.blank:  # which changes nothing
                self._look(at, form, stream, start)
        # Those that end last come first: so few entries are the last of their template for now.
        pending = [stream for stream in self.streams.values() if stream.places]
        for stream in sorted(pending, key=lambda log: self._line(log.places[-1]), reverse=True):
            self._settle(stream)
        self.number += len(lines)
        self.line_before = lines[-1]

    def _look(self, at: int, form: LogLineForm, stream: LogStream, start: int) -> None:
        """Take a line that needs more than to be counted."""
        number, line = self.number + at + 1, self.lines[at]
        if form.slow or stream.slow or (form.stays is not None and stream.stage not in form.stays):
            self._slow(number, line, form, stream, start)
            return
        if form.job_wide:
            self._job_facts(number, line[start or self.prefixes.start(line) :], stream, form.facts)
        if form.marked:
            form.marked = self.marks.add(number, form.template, stream.number)
        step = form.step.find(line) if form.step is not None else None
        if step is not None:
            self._record_step(stream, number, line, form, step)
        stream.templates.append(form.template)
        stream.places.append(at)
        if step is not None:
            stream.shown = len(stream.templates)

    def _begin_attempt(self) -> None:
        self.first: list[RawEntry | None] = [None] * len(self.template_of)
        self.last: list[RawEntry | None] = [None] * len(self.template_of)
        self.unmatched = 0
        for stream in self.streams.values():
            stream.begin_attempt()
        self.first_line, self.line_before = self.number + 1, b""
        self.watch, self.graph = IterationWatch[RawEntry](), IdentityGraph(self.source.name)
        self.final_template: dict[int, int] = {}
        self.continued: tuple[int, LogStream] = (0, self.own)
        self.succeeded: RawEntry | None = None
        self.job_ids: dict[str, int] = {}

    def _stream_of(self, prefix: Prefix) -> LogStream:
        stream = self.streams.get(prefix)
        if stream is None:
            if len(self.streams) > MAX_STREAMS:
                return self.own
            stream = self.streams[prefix] = LogStream(str(len(self.streams)), prefix)
        return stream

    def stream(self, line: bytes, form: LogLineForm) -> tuple[LogStream, int]:
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
        if len(key) < SHORTEST_FORM:
            key = b"0" + line
        form = self.forms.get(key)
        if form is None:
            shape = self.shapes.shape(line)
            form = self.of_shape.get(shape)
            if form is None:
                for full, most in ((self.heads, MAX_HEADS), (self.of_shape, MAX_ENTRIES)):
                    if len(full) >= most:
                        full.clear()
                of = shape.heads
                heads = None if of is None else self.heads.setdefault(of, Heads(of))
                form = self.of_shape[shape] = LogLineForm(shape, heads)
            self.forms.put(key, form)
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

    def _slow(
        self, number: int, line: bytes, form: LogLineForm, stream: LogStream, start: int
    ) -> None:
        """Take a line that may be of an entry of several lines, or match a signature."""
        text, facts = line[start or self.prefixes.start(line) :], form.facts
        if stream is self.own and facts.kind in _SET_IN and len(self.streams) > 1:
            stream = self._stream_before(number)
        joined, stream.state = TRANSITIONS[stream.state][facts.kind]
        if form.job_wide:
            self._job_facts(number, text, stream, facts)
        if facts.kind != "blank" and not (joined and self._joined(stream, number, text, facts)):
            if stream.open is not None:
                self._close(stream)
            self._begin(stream, number, line, text, form)
        stream.slow = bool(stream.open or stream.state)

    def _stream_before(self, number: int) -> LogStream:
        """The stream of what a set-in line without a prefix continues: the line before it."""
        at = number - self.number - 2
        while at > 0 and _BETWEEN.match(self.lines[at], self.prefixes.split(self.lines[at])[1]):
            at -= 1
        stream = self.continued[1]
        if self.continued[0] != self.number + 1 + at:
            before = self.lines[at] if at >= 0 else self.line_before
            stream = self._stream_of(self.prefixes.split(before)[0])
        self.continued = number, stream
        return stream

    def _job_facts(self, number: int, text: bytes, stream: LogStream, facts: Facts) -> None:
        """Take what a line states of the whole job."""
        cleaned = clean(text)
        if facts.world:
            self.graph.take(cleaned, stream.prefix, facts.world)
        for groups in JOB_ID.findall(cleaned) if facts.job_id else ():
            if len(self.job_ids) < MAX_JOB_IDS:
                self.job_ids.setdefault("".join(groups), number)

    def _joined(self, stream: LogStream, number: int, text: bytes, facts: Facts) -> bool:
        """Add a line to the stream's open entry; return False if it does not belong there."""
        entry = stream.open or self._reopened(stream)
        if entry is None or len(entry.lines) >= MAX_LINES:
            return False
        if facts.kind == "exception":
            entry.leading_facts = facts
        elif facts.exception:
            if entry.leading_facts.exception or entry.leading_facts is not entry.facts:
                return False  # of another rank that writes to the same file
            entry.leading_facts = facts
        entry.lines.append(clean(text))
        entry.last_line = number
        entry.look |= facts.look
        return True

    def _reopened(self, stream: LogStream) -> OpenEntry | None:
        """The last entry, counted already, which has more lines."""
        self._settle(stream)
        if not stream.tail or stream.tail[-1][6] is not None:
            return None
        raw = stream.tail.pop()
        stream.counts[raw[2]] -= 1
        if stream.head[-1] is raw:
            stream.head.pop()
        text = raw[1][self.prefixes.split(raw[1])[1] :]
        step = stream.last_step_line == raw[0]
        entry = stream.open = OpenEntry(raw, self._form(raw[1]).facts, text, states_step=step)
        entry.watched = True
        return entry

    def _begin(
        self, stream: LogStream, number: int, line: bytes, text: bytes, form: LogLineForm
    ) -> None:
        """Begin an entry; one of which no line can follow is counted at once."""
        facts = form.facts
        if form.template < 0:
            form.template = self._template(facts.template, facts.cls)
            if KERNEL_LINE.match(line):
                self.marks.leave_out(form.template)
            form.slow = not facts.quiet
            if facts.step:
                form.step = self.shapes.step_place(form.shape, line, len(line) - len(text))
            form.marked = not facts.step and self.marks.follows(form.template)
            form.plain = facts.quiet and not (form.job_wide or form.step)
        if form.marked:
            form.marked = self.marks.add(number, form.template, stream.number)
        step = form.step.find(line) if form.step is not None else None
        if step is not None:
            self._record_step(stream, number, line, form, step)
        stage = next_stage(stream.stage, facts.stage)
        raw: RawEntry = (
            number, line, form.template, stream.key, stream.step, stage, None, form,
        )  # fmt: skip
        if stage != stream.stage:
            self._show(stream)
            self.watch.enter(stream.key, stage)
            stream.stage = stage
            stream.change()
            if len(stream.stages) < MAX_STAGES:
                stream.stages.append((stage, raw))
        if stream.state or facts.alone:
            stream.open = OpenEntry(raw, facts, text, states_step=step is not None)
            stream.open.steps_before = self.marks.steps
        else:
            self._count(stream, raw, step is not None)

    def _record_step(
        self, stream: LogStream, number: int, line: bytes, form: LogLineForm, step: StepMatch
    ) -> None:
        self._show(stream)
        raw: RawEntry = (
            number, line, form.template, stream.key, step[1], stream.stage, None, form,
        )  # fmt: skip
        time = self.shapes.time(line, form.shape)
        self.marks.add_step(number)
        stream.time_step(step, time)
        before = stream.step
        stream.step = self.watch.add_step(stream.key, step, form.template, raw, time)
        stream.change()
        stream.steps += 1
        stream.last_step_line = number
        # A heartbeat that repeats the step is not progress.
        if stream.last_step_at is None or stream.step != before:
            stream.last_step_at = raw

    def _close(self, stream: LogStream) -> None:
        entry = stream.open
        assert entry is not None
        stream.open, whole = None, "\n".join(entry.lines)
        short, level = shortened(whole), entry.facts.level
        whole_line = len(entry.lines) == 1 and short is whole
        text = unescaped(short)
        look = entry.facts.alone if whole_line and text is short else entry.look
        found = self.analyser.find(text, level) if look else []
        template = entry.raw[2]
        if not entry.states_step:  # a step's line stays one event, whatever follows it
            leading = entry.leading_facts
            template = self._template(leading.template, found[0][0].id if found else leading.cls)
            self.final_template[entry.raw[2]] = template
        raw = (*entry.raw[:2], template, *entry.raw[3:6], text, entry.raw[7])
        self._count(stream, raw, entry.watched)
        if not whole_line and states_stack(short):
            stream.stacks.append(raw)
        if not found:
            return
        signature, fields = found[0]
        stream.match(signature.id, raw, fields)
        if signature.role == "success":
            self.succeeded = raw
        self._mark(stream, entry, signature)

    def _mark(self, stream: LogStream, entry: OpenEntry, signature: Signature) -> None:
        """Record what a match states about the bounds of attempts."""
        role, traits = signature.role, signature.traits
        noted = entry.facts.level in _NOTED and role in ("cause", "echo")
        sure = signature.confidence >= MIN_END_CONFIDENCE or "last words" in traits
        if role in _ENDING_ROLES and sure and not noted:
            self.marks.add_end(entry.last_line)
        if "restarts ranks" in traits or ("starts ranks" in traits and self.marks.progress):
            writer = stream.prefix.node or (str(stream.number) if stream.number >= 0 else "")
            self.marks.add_restart(entry.raw[0], entry.steps_before, writer)

    def _count(self, stream: LogStream, raw: RawEntry, watched: bool) -> None:
        template = raw[2]
        if self.first[template] is None:
            self.first[template] = raw
        # An entry that goes on after a line of another rank ends after an entry that began later.
        last = self.last[template]
        if last is None or last[0] <= raw[0]:
            self.last[template] = raw
        stream.templates.append(template)
        stream.places.append(raw)
        if watched:
            stream.shown = len(stream.templates)

    def _show(self, stream: LogStream) -> None:
        """Hand the events since the last step to the watch over iterations."""
        if stream.shown < len(stream.templates):
            self.watch.add_events(stream.key, stream.templates[stream.shown :])
            stream.shown = len(stream.templates)

    def _settle(self, stream: LogStream) -> None:
        """Count the pending entries of a stream, and keep the first and the last of them."""
        templates, places = stream.templates, stream.places
        if not templates:
            return
        self._show(stream)
        stream.counts.update(templates)
        number, before, lines = len(templates), self.number + 1, self.lines
        key, changes, forms = stream.key, stream.changes, self.block_forms

        def raw(order: int) -> RawEntry:
            at = places[order]
            if at.__class__ is tuple:
                return at
            _, step, stage = changes[bisect_right(changes, order, key=itemgetter(0)) - 1]
            places[order] = made = (
                before + at, lines[at], templates[order], key, step, stage, None, forms[at],
            )  # fmt: skip
            return made

        if len(stream.head) < HEAD:
            stream.head += map(raw, range(min(HEAD - len(stream.head), number)))
        stream.tail.extend(map(raw, range(max(0, number - TAIL), number)))
        first, last = self.first, self.last
        for template, order in dict(zip(templates, range(number), strict=True)).items():
            if first[template] is None:
                first[template] = raw(templates.index(template))
            latest = last[template]
            if latest is None or latest[0] < self._line(places[order]):
                last[template] = raw(order)
        templates.clear()
        places.clear()
        stream.shown, stream.changes = 0, [(-1, stream.step, stream.stage)]

    def _line(self, place: Any) -> int:
        number: int = place[0] if place.__class__ is tuple else self.number + 1 + place
        return number
