"""The single pass over a file: most lines are counted by their form only.

A block of lines is looked up by their keys, which are the lines without digits (`_take`). Lines of
a form that needs no action are appended to the pending entries of their stream, which `_settle`
counts at the end of the block. Of the others, `_look` records the steps; those that may be of an
entry of several lines, or match a signature, take `_slow`, which opens an entry and closes it when
the next one of its stream begins.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from rmetric.diagnosis.attempts import (
    KERNEL_LINE,
    MIN_PAUSE_RATIO,
    MIN_PAUSE_SECONDS,
    Opening,
    StartMarks,
)
from rmetric.diagnosis.job import HEAD, MAX_TEXT, TAIL
from rmetric.diagnosis.log_stream import (
    LogLineForm,
    LogStream,
    MatchTally,
    OpenEntry,
    RawEntry,
    StepCounter,
)
from rmetric.diagnosis.part import Part, part_of
from rmetric.diagnosis.patterns.iterations import IterationWatch
from rmetric.diagnosis.patterns.stages import next_stage
from rmetric.diagnosis.patterns.steps import StepMatch, planned_steps
from rmetric.diagnosis.reading.joining import NEXT, Kind
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix, PrefixParser
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.reading.text import clean, unescaped
from rmetric.diagnosis.reading.world import World
from rmetric.diagnosis.signature import Signature
from rmetric.diagnosis.stack_dumps import states_stack
from rmetric.diagnosis.templates.events import OTHERS
from rmetric.diagnosis.templates.facts import (
    JOB_ID,
    MAX_ENTRIES,
    SHORTEST_FORM,
    BoundedCache,
    Facts,
    LineAnalyser,
)
from rmetric.diagnosis.templates.places import Heads
from rmetric.diagnosis.templates.shapes import LineShape, shape_reader

#: Different masked texts of a file; further ones count as "<others>".
MAX_TEXTS = 20_000
#: Bytes of a line that are read, at its beginning and at its end.
HALF_LINE = MAX_TEXT
#: Changes of stage that are kept of a stream, job numbers of a file.
MAX_STAGES = 200
MAX_JOB_IDS = 1000
#: Lines of an attempt's beginning in which its time is sought.
START_LINES = 20
#: Streams of a file that are kept apart.
MAX_STREAMS = 1 << 15
#: Forms of prefixes that a file is expected to have.
MAX_HEADS = 1000
#: Steps by which ranks that share a log may differ.
RANKS_APART = 2
#: Characters by which a command is known; its last settings may differ.
MAX_COMMAND = 60
#: Roles and least confidence of entries that end an attempt.
_ENDS = ("success", "ending", "cause", "echo", "symptom")
MIN_END_CONFIDENCE = 0.5
#: A program that ends does not write its last words at these levels.
_NOTED = ("info", "warning")
#: Lines that continue what stands before them.
_SET_IN = (Kind.PART, Kind.FRAME)
#: A bar of tqdm, and one that is complete.
_BAR, _WHOLE_BAR = b"%|", b"100%|"
#: The head of faulthandler's stacks; whose they are, the line above may say.
_TIMED_OUT = re.compile(rb"Timeout \([\d:.]+\)!\s*$")
_NUMBERS, _DIGITS, _PLACE = re.compile(r"\d+"), b"0123456789", itemgetter(0)


class FilePass:
    """Reads one file to the `Part` of each attempt in it.

    Args:
        source: the file.
        analyser: with caches that several files share.
        prefixes: of its lines; None to learn them from a sample.

    Attributes:
        marks: where attempts may begin.
        first_line, first_lines: number of the attempt's first line; it and those behind it.
    """

    def __init__(
        self, source: LogSource, analyser: LineAnalyser, prefixes: PrefixParser | None = None
    ) -> None:
        self.source, self.analyser = source, analyser
        prefixes = prefixes or PrefixParser.learn(source.sample(), analyser.heads)
        self.shapes = shape_reader(prefixes, analyser)
        self.prefixes = self.shapes.prefixes
        self.marks = StartMarks()
        #: by their key, or by the line itself where the key is too short
        self.forms: BoundedCache[LogLineForm] = BoundedCache()
        self.short: BoundedCache[LogLineForm] = BoundedCache()
        self.of_shape: dict[LineShape, LogLineForm] = {}
        #: number of lines before the block, its lines, and their forms where these are known
        self.number, self.lines, self.block_forms = 0, list[bytes](), list[LogLineForm | None]()
        self.streams: dict[Prefix, LogStream] = {}
        #: pattern of a form of prefix -> the streams of such prefixes
        self.heads: dict[re.Pattern[bytes], Heads[LogStream]] = {}
        self.own = self._stream_of(NO_PREFIX)
        self.template_of: dict[tuple[str, str], int] = {}
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.marks.begin_attempt()
        self.first_line, self.first_lines = self.number + 1, list[bytes]()
        self.line_before = b""  # the last one before the block
        self.watch, self.world = IterationWatch[RawEntry](self.analyser.similarities), World()
        #: of each template
        self.first: list[RawEntry | None] = [None] * len(self.template_of)
        self.last: list[RawEntry | None] = [None] * len(self.template_of)
        #: template of an entry's first line -> that of the whole entry
        self.final_template: dict[int, int] = {}
        self.unmatched = 0
        #: the last line that continued one of another stream, and that stream
        self.continued: tuple[int, LogStream] = (0, self.own)
        self.succeeded: RawEntry | None = None
        self.job_ids: dict[str, int] = {}
        for stream in self.streams.values():
            stream.begin_attempt()

    def read(self) -> Part:
        """Read the whole file as one attempt."""
        (part,) = self.read_attempts(starts=())
        return part

    def read_attempts(
        self,
        on_progress: Callable[[int], None] | None = None,
        starts: Sequence[int] | None = None,
    ) -> list[Part]:
        """Read the whole file.

        Args:
            on_progress: receives the number of bytes of each block.
            starts: first lines of the later attempts; None where its `Opening` recurs after
                progress or a failure, which `starts_of(self.marks)` confirms or not.
        """
        found, opening = list[Part](), Opening()
        for lines in self.source.chunks():
            if on_progress is not None:
                on_progress(sum(map(len, lines)) + len(lines))
            lines = _shortened(lines)
            keys = b"\n".join(lines).translate(None, _DIGITS).split(b"\n") if lines else []
            before, begin = self.number + 1, 0
            known = [at - before for at in starts or () if 0 <= at - before < len(lines)]
            for at in opening.places(keys) if starts is None else known:
                self._take(lines[begin:at], keys[begin:at])
                begin = at
                if starts is not None or self.marks.under_way:
                    found.append(self._finish())
                    self._begin_attempt()
            self._take(lines[begin:], keys[begin:])
        return [*found, self._finish()]

    def _finish(self) -> Part:
        for stream in self.streams.values():
            if stream.open is not None:
                self._close(stream)
            self._settle(stream)
        return part_of(self)

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

    def _take(self, lines: list[bytes], keys: list[bytes]) -> None:
        """Read the next lines; their keys are they without their digits."""
        if not lines:
            return
        if len(self.first_lines) < START_LINES:
            self.first_lines += lines[: START_LINES - len(self.first_lines)]
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
                    stream, start = self._stream(line, form)
            if (
                form.plain
                and not stream.slow
                and ((stays := form.stays) is None or stream.stage in stays)
            ):
                if form.marked:
                    self._mark(number + at, form, stream)
                stream.templates.append(form.template)
                stream.places.append(at)
            elif not form.blank:  # which changes nothing
                self._look(at, form, stream, start)
        # Those that end last come first: so few entries are the last of their template for now.
        pending = [stream for stream in self.streams.values() if stream.places]
        for stream in sorted(pending, key=lambda one: self._line(one.places[-1]), reverse=True):
            self._settle(stream)
        self.number += len(lines)
        self.line_before = lines[-1]

    def _mark(self, number: int, form: LogLineForm, stream: LogStream) -> None:
        form.marked = self.marks.add(number, form.template, stream.number)
        if form.stays is not None:
            self.marks.add_stage(number, form.facts.stage)

    def _line(self, place: Any) -> int:
        number: int = place[0] if place.__class__ is tuple else self.number + 1 + place
        return number

    def _look(self, at: int, form: LogLineForm, stream: LogStream, start: int) -> None:
        """Take a line that needs more than to be counted."""
        number, line = self.number + at + 1, self.lines[at]
        if form.slow or stream.slow or (form.stays is not None and stream.stage not in form.stays):
            self._slow(number, line, form, stream, start)
            return
        if form.told:
            self._tell(number, line[start or self.prefixes.start(line) :], stream, form.facts)
        if form.marked:
            self._mark(number, form, stream)
        step = form.step.find(line) if form.step is not None else None
        if step is not None:
            self._record_step(stream, number, line, form, step)
        stream.templates.append(form.template)
        stream.places.append(at)
        if step is not None:
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
            _, step, stage = changes[bisect_right(changes, order, key=_PLACE) - 1]
            places[order] = made = (
                before + at, lines[at], templates[order], key, step, stage, None, forms[at],
            )  # fmt: skip
            return made

        if len(stream.head) < HEAD:
            stream.head += map(raw, range(min(HEAD - len(stream.head), number)))
        for order in range(min(stream.fresh, number)):
            if stream.first_time is not None:
                break
            entry = raw(order)
            stream.first_time = self.time(entry[1], entry[7])
        stream.fresh = max(0, stream.fresh - number)
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

    def _slow(
        self, number: int, line: bytes, form: LogLineForm, stream: LogStream, start: int
    ) -> None:
        """Take a line that may be of an entry of several lines, or match a signature.

        Its text begins at `start`; that is 0 too where the line has no prefix.
        """
        text, facts = line[start or self.prefixes.start(line) :], form.facts
        if stream is self.own and facts.kind in _SET_IN and len(self.streams) > 1:
            stream = self._stream_before(number)
        joined, stream.state = NEXT[stream.state][facts.kind]
        if form.told:
            self._tell(number, text, stream, facts)
        if facts.kind != Kind.BLANK and not (joined and self._joined(stream, number, text, facts)):
            if stream.open is not None:
                self._close(stream)
            self._begin(stream, number, line, text, form)
        stream.slow = bool(stream.open or stream.state)

    def _stream_before(self, number: int) -> LogStream:
        """The stream of what a set-in line without a prefix continues: the line before it.

        A program that writes several lines at once puts its prefix before the first only.
        """

        def text(at: int) -> bytes:
            return self.lines[at][self.prefixes.split(self.lines[at])[1] :]

        at = number - self.number - 2
        if at > 0 and not text(at).strip():  # between the threads of a process
            at -= 1
        if self.continued[0] == self.number + 1 + at:
            stream = self.continued[1]
        else:
            if at > 0 and _TIMED_OUT.match(text(at)):
                at -= 1
            before = self.lines[at] if at >= 0 else self.line_before
            stream = self._stream_of(self.prefixes.split(before)[0])
        self.continued = number, stream
        return stream

    def _tell(self, number: int, text: bytes, stream: LogStream, facts: Facts) -> None:
        """Take what a line states of the whole job."""
        said = clean(text)
        if facts.world:
            name = self.source.name + ("" if stream is self.own else f" {stream.key}")
            self.world.take(said, stream.prefix, name, facts.world)
        for groups in JOB_ID.findall(said) if facts.job_id else ():
            if len(self.job_ids) < MAX_JOB_IDS:
                self.job_ids.setdefault("".join(groups), number)

    def _form(self, line: bytes, key: bytes | None = None) -> LogLineForm:
        key = line.translate(None, _DIGITS) if key is None else key
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

    def _joined(self, stream: LogStream, number: int, text: bytes, facts: Facts) -> bool:
        """Add a line to the stream's open entry; return False if it does not belong there."""
        entry = stream.open or self._reopened(stream)
        if entry is None or entry.entry.full:
            return False
        if facts.kind == Kind.EXCEPTION:
            entry.leading_facts = facts
        elif facts.exception:
            if entry.leading_facts.exception or entry.leading_facts is not entry.facts:
                return False  # of another rank that writes to the same file
            entry.leading_facts = facts
        entry.entry.add(clean(text))
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
        stream.open = OpenEntry(raw, self._form(raw[1]).facts, text)
        stream.open.states_step = stream.last_step_line == raw[0]
        stream.open.watched = True
        return stream.open

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
            form.begin(not facts.step and self.marks.follows(form.template))
        if form.marked:
            form.marked = self.marks.add(number, form.template, stream.number)
        step = form.step.find(line) if form.step is not None else None
        if step is not None:
            self._record_step(stream, number, line, form, step)
        if facts.stage:
            self.marks.add_stage(number, facts.stage)
        stage = next_stage(stream.stage, facts.stage)
        raw: RawEntry = (
            number, line, form.template, stream.key, stream.step, stage, None, form,
        )  # fmt: skip
        if stage != stream.stage:
            self._show(stream)
            self.watch.enter(stream.key, stage)
            stream.enter(stage)
            if len(stream.stages) < MAX_STAGES:
                stream.stages.append((stage, raw))
        if stream.state or facts.alone:
            stream.open = OpenEntry(raw, facts, text)
            stream.open.states_step = stream.open.watched = step is not None
            stream.open.steps_before = self.marks.steps
        else:
            self._count(stream, raw, step is not None)

    def _record_step(
        self, stream: LogStream, number: int, line: bytes, form: LogLineForm, step: StepMatch
    ) -> None:
        self._show(stream)
        if form.time is None:
            form.time = self.shapes.time_place(form.shape, line)
        raw: RawEntry = (
            number, line, form.template, stream.key, step[1], stream.stage, None, form,
        )  # fmt: skip
        time = form.time.time(line)
        self.marks.add_step(number)
        self._compare_step(stream, number, step, time, line)
        before = stream.step
        stream.reach(self.watch.add_step(stream.key, step, form.template, raw, time))
        stream.steps += 1
        stream.last_step_line = number
        # A heartbeat that repeats the step is no progress.
        if stream.last_step_at is None or stream.step != before:
            stream.last_step_at = raw

    def _compare_step(
        self, stream: LogStream, number: int, step: StepMatch, time: float | None, line: bytes
    ) -> None:
        """Record a step that falls back, which may be of a new attempt."""
        form, now = step
        counter = stream.counters.get(form)
        own = counter is not None
        if counter is None:
            stream.counters[form] = StepCounter(now, time)
            counter = stream.earlier.get(form)
            if counter is None:
                return
        counter.lines += 1
        fell_back = now < counter.last - RANKS_APART
        stream.fell_back |= fell_back and own
        if now == counter.last:  # a heartbeat, or another rank: no pause between two steps
            return
        pause = 0.0 if time is None or counter.time is None else time - counter.time
        if fell_back and not _counts_other(line, now, stream.last_step_at, counter.last):
            longest = MIN_PAUSE_RATIO * counter.longest_pause
            self.marks.add_back(number, counter.last, now, pause > max(MIN_PAUSE_SECONDS, longest))
        elif pause > counter.longest_pause:
            counter.longest_pause = pause
        counter.last, counter.time = now, time

    def _close(self, stream: LogStream) -> None:
        entry = stream.open
        assert entry is not None
        stream.open, whole_line = None, entry.entry.whole_line
        said, level = entry.entry.text(), entry.facts.level
        text = unescaped(said)
        may = entry.facts.alone if whole_line and text is said else None
        found = self.analyser.find(text, level, may) if entry.look else []
        template = entry.raw[2]
        if not entry.states_step:  # a step's line stays one event, whatever follows it
            leading = entry.leading_facts
            template = self._template(leading.template, found[0][0].id if found else leading.cls)
            self.final_template[entry.raw[2]] = template
        raw = (*entry.raw[:2], template, *entry.raw[3:6], text, entry.raw[7])
        self._count(stream, raw, entry.watched)
        if not whole_line and states_stack(said):
            stream.stacks.append(raw)
        if found:
            signature, fields = found[0]
            stream.found.setdefault(signature.id, MatchTally(raw)).add(raw, fields)
            if signature.role == "success":
                self.succeeded = raw
            self._mark_match(stream, entry, signature, said)

    def _mark_match(
        self, stream: LogStream, entry: OpenEntry, signature: Signature, said: str
    ) -> None:
        """Record what a match tells of the bounds of attempts."""
        marks, traits, line = self.marks, signature.traits, entry.raw[0]
        noted = entry.facts.level in _NOTED and signature.role in ("cause", "echo")
        sure = signature.confidence >= MIN_END_CONFIDENCE or "last words" in traits
        if signature.role in _ENDS and sure and not noted:
            marks.add_end(entry.last_line, stream.number)
        if "restarts ranks" in traits or ("starts ranks" in traits and marks.under_way):
            writer = stream.prefix.node or (str(stream.number) if stream.number >= 0 else "")
            marks.add_restart(line, entry.steps_before, writer)
        if "command" in traits:
            command = stream.key, _NUMBERS.sub("", said)[:MAX_COMMAND]
            again = marks.under_way or line == self.first_line
            marks.add_command(line, entry.steps_before, command, again)

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

    def _show(self, stream: LogStream) -> None:
        """Hand the events since the last step to the watch over iterations."""
        if stream.shown < len(stream.templates):
            self.watch.add_events(stream.key, stream.templates[stream.shown :])
            stream.shown = len(stream.templates)


def _shortened(lines: list[bytes]) -> list[bytes]:
    """Leave out the middle of long lines."""
    if max(map(len, lines), default=0) <= 2 * HALF_LINE:
        return lines
    return [
        line if len(line) <= 2 * HALF_LINE else line[:HALF_LINE] + b" ... " + line[-HALF_LINE:]
        for line in lines
    ]


def _counts_other(line: bytes, step: int, before: RawEntry | None, last: int) -> bool:
    """Return True for two bars of different lengths: training's, and that of an evaluation.

    Or for one that begins behind a complete one, as each epoch's does.
    """
    if before is None:
        return False
    if _WHOLE_BAR in before[1] and _BAR in line:
        return True
    planned = planned_steps(clean(line), step)
    return planned is not None and planned_steps(clean(before[1]), last) not in (None, planned)
