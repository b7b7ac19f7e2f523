"""Result of the pass over one file, before streams are named and events are numbered.

An `Occurrence` here refers to its stream by the key that the pass gave it, to its event by the
number of its template, and its order is its line. Only the kept entries are parsed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rmetric.diagnosis.facts.job import Iteration, JobStream, Match, Occurrence
from rmetric.diagnosis.facts.world import IdentityGraph
from rmetric.diagnosis.log_stream import LogStream, RawEntry
from rmetric.diagnosis.reading.joining import MAX_TEXT
from rmetric.diagnosis.reading.prefixes import Prefix
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.reading.text import clean

if TYPE_CHECKING:
    from rmetric.diagnosis.entries import EntryPass


@dataclass(kw_only=True)
class StreamPart:
    """One stream within one file.

    Attributes:
        stream: its name is the key that the pass gave it.
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
    """Content of one file.

    Attributes:
        templates: by their number in this file.
        job_ids: numbers of scheduler's jobs that it names -> line.
        unmatched: entries that were too different from all others to be kept apart.
        first_line, lines: of the attempt that was read; the whole file where there is one.
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


def part_of(file: EntryPass) -> Part:
    """Build the part of a file that has been read to its end."""
    return _PartBuilder(file).part()


class _PartBuilder:
    def __init__(self, file: EntryPass) -> None:
        self.file = file
        self.name, self.line, self.time = file.source.name, file.source.line, file.time
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
            text = clean(line[self.file.start(line, form) :])
        entry = self.entries[id(raw)] = Occurrence(
            file=self.name,
            line=self.line(number),
            stream=stream,
            time=self.time(line, form),
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
            longest_pause=max(one.counters.values(), key=attrgetter("lines")).longest_pause
            if one.counters
            else 0.0,
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
            cls, text = names[at]
            first, last = self.file.first[at], self.file.last[at]
            assert first is not None
            assert last is not None
            templates[at] = Template(text, cls, self._entry(first), self._entry(last))
        return templates
