"""The single pass over a file to a `Part`: most lines are counted by their form only.

A block of lines is looked up by their keys, which are the lines without digits (`_take`). Lines of
a form that needs no action are appended to the pending entries of their stream, which `_settle`
counts at the end of the block. Of the others, `_look` records the steps; those that may be of an
entry of several lines, or match a signature, take the way of each by itself (entries.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from rmetric.diagnosis.entries import DIGITS, EntryPass
from rmetric.diagnosis.facts.job import Iteration, JobStream, Match, Occurrence
from rmetric.diagnosis.facts.layout import IdentityGraph
from rmetric.diagnosis.forms import LogLineForm, LogStream, RawEntry
from rmetric.diagnosis.reading.prefixes import Prefix
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.reading.text import MAX_TEXT, clean

#: Lines with which a file begins, where they all differ.
OPENING = 3


@dataclass
class StreamPart:
    """One stream within one file; its name is the key that the pass gave it.

    Attributes:
        counts: number of template -> number of entries.
        stages: the stages that it entered, each with the entry that announces it.
    """

    prefix: Prefix
    stream: JobStream
    counts: Mapping[int, int]
    stages: list[tuple[str, Occurrence]]
    matches: list[Match]
    odd_iteration: Iteration[Occurrence] | None


class Template(NamedTuple):
    """A masked text of one class (`Events.number`), as one file has it."""

    text: str
    cls: str
    first: Occurrence
    last: Occurrence


@dataclass(kw_only=True)
class Part:
    """Content of one attempt in one file.

    An `Occurrence` of it refers to its stream by the key that the pass gave it, to its event by the
    number of its template, and its order is its line.

    Attributes:
        templates: by their number in this file.
        job_ids: numbers of scheduler's jobs that it names -> line.
        unmatched: entries that were too different from all others to be kept apart.
        first_line, lines: of the attempt.
        entries: all of the above, each once.
    """

    source: LogSource
    streams: list[StreamPart]
    templates: dict[int, Template]
    graph: IdentityGraph
    job_ids: dict[str, int]
    succeeded: Occurrence | None
    unmatched: int
    first_line: int
    lines: int
    entries: list[Occurrence]


class FilePass(EntryPass):
    """Reads one file to the `Part` of each attempt in it."""

    def read_attempts(
        self,
        on_progress: Callable[[int], None] | None = None,
        starts: Sequence[int] | None = None,
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
            lines = _shortened(lines)
            keys = b"\n".join(lines).translate(None, DIGITS).split(b"\n") if lines else []
            before, begin, opening = self.number + 1, 0, opening or keys[:OPENING]
            known = [at - before for at in starts or () if 0 <= at - before < len(lines)]
            for at in _recurrences(opening, keys) if starts is None else known:
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
        return _PartBuilder(self).part()

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
        for stream in sorted(pending, key=lambda one: self._line(one.places[-1]), reverse=True):
            self._settle(stream)
        self.number += len(lines)
        self.line_before = lines[-1]

    def _look(self, at: int, form: LogLineForm, stream: LogStream, start: int) -> None:
        """Take a line that needs more than to be counted."""
        number, line = self.number + at + 1, self.lines[at]
        if form.slow or stream.slow or (form.stays is not None and stream.stage not in form.stays):
            self._slow(number, line, form, stream, start)
            return
        if form.told:
            self._tell(number, line[start or self.prefixes.start(line) :], stream, form.facts)
        if form.marked:
            form.marked = self.marks.add(number, form.template, stream.number)
        step = form.step.find(line) if form.step is not None else None
        if step is not None:
            self._record_step(stream, number, line, form, step)
        stream.templates.append(form.template)
        stream.places.append(at)
        if step is not None:
            stream.shown = len(stream.templates)


def _recurrences(opening: list[bytes], keys: list[bytes]) -> list[int]:
    """Places of the lines with which the file begins."""
    if len({*opening}) < OPENING:
        return []
    first = [at for at, key in enumerate(keys) if key == opening[0]]
    return [at for at in first if keys[at : at + OPENING] == opening]


def _shortened(lines: list[bytes]) -> list[bytes]:
    """Leave out the middle of long lines: `MAX_TEXT` bytes at either end are read."""
    if max(map(len, lines), default=0) <= 2 * MAX_TEXT:
        return lines
    return [
        line if len(line) <= 2 * MAX_TEXT else line[:MAX_TEXT] + b" ... " + line[-MAX_TEXT:]
        for line in lines
    ]


class _PartBuilder:
    def __init__(self, file: FilePass) -> None:
        self.file = file
        self.entries: dict[int, Occurrence] = {}
        self.streams = [one for one in file.streams.values() if one.tail]
        self.used = sorted({at for one in self.streams for at, n in one.counts.items() if n})
        self.number = {at: at for at in self.used}
        # A template that all its entries left when they had all their lines.
        for before, after in file.final_template.items():
            if before not in self.number and after in self.number:
                self.number[before] = self.number[after]

    def part(self) -> Part:
        file, odd = self.file, self.file.watch.first_odd()
        return Part(
            source=file.source,
            streams=[self._stream(one, odd.get(one.key)) for one in self.streams],
            templates=self._templates(),
            graph=file.graph,
            job_ids=file.job_ids,
            succeeded=None if file.succeeded is None else self._entry(file.succeeded),
            unmatched=file.unmatched,
            first_line=file.first_line,
            lines=file.number + 1 - file.first_line,
            entries=list(self.entries.values()),
        )

    def _entry(self, raw: RawEntry) -> Occurrence:
        # The file keeps it, so that no other has its id.
        entry = self.entries.get(id(raw))
        if entry is not None:
            return entry
        number, line, template, stream, step, stage, text, form = raw
        if text is None:
            text = clean(line[self.file.stream(line, form)[1] :])
        entry = self.entries[id(raw)] = Occurrence(
            file=self.file.source.name,
            line=self.file.source.line(number),
            stream=stream,
            time=self.file.shapes.time(line, form.shape),
            order=number,
            event=self.number[template],
            text=text[:MAX_TEXT],
            step=step,
            stage=stage,
        )
        return entry

    def _stream(self, one: LogStream, odd: Iteration[Any] | None) -> StreamPart:
        counts = {at: count for at, count in one.counts.items() if count}
        matches = [
            Match(
                signature=id,
                stream=one.key,
                traits=self.file.analyser.library[id].traits,
                count=found.count,
                first=self._entry(found.first),
                last=self._entry(found.last),
                events={self.number[at] for at in found.templates},
                named=found.named,
            )
            for id, found in one.found.items()
        ]
        usual = max(one.counters.values(), key=attrgetter("lines"), default=None)
        stream = JobStream(
            name=one.key,
            files={self.file.source.name},
            entries=sum(counts.values()),
            first_time=one.first_time,
            head=[self._entry(raw) for raw in one.head],
            steps=one.steps,
            last_step=one.step,
            counts_samples=self.file.watch.counts_samples(one.key),
            last_step_at=None if one.last_step_at is None else self._entry(one.last_step_at),
            longest_pause=usual.longest_pause if usual else 0.0,
            stage=one.stage,
            stacks=[self._entry(raw) for raw in one.stacks],
        )
        stream.tail.extend(map(self._entry, one.tail))
        late = [*stream.tail, *(match.last for match in matches), stream.last_step_at]
        times = [(entry.order, entry.time) for entry in late if entry and entry.time is not None]
        stream.last_time = max(times)[1] if times else one.first_time
        return StreamPart(
            prefix=one.prefix,
            stream=stream,
            counts=counts,
            stages=[(stage, self._entry(raw)) for stage, raw in one.stages],
            matches=matches,
            odd_iteration=odd and replace(odd, place=self._entry(odd.place)),
        )

    def _templates(self) -> dict[int, Template]:
        names = {at: name for name, at in self.file.template_of.items()}
        templates = {}
        for at in self.used:
            (cls, text), first, last = names[at], self.file.first[at], self.file.last[at]
            assert first is not None and last is not None  # noqa: PT018
            templates[at] = Template(text, cls, self._entry(first), self._entry(last))
        return templates
