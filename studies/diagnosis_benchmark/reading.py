"""Read a job's logs with the diagnosis pass, and keep rank, time and event of each line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.facts.layout import RankLayout, RankPlacement
from rmetric.diagnosis.forms import LogStream, RawEntry
from rmetric.diagnosis.input_files import find
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.one_pass import FilePass
from rmetric.diagnosis.parts import Part, layout_of, merged
from rmetric.diagnosis.reading.prefixes import Prefix
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.templates import Events, LineAnalyser
from studies.diagnosis_benchmark.scoring import Place


class LogLine(NamedTuple):
    """A line of the logs; its time is that of the entry it belongs to."""

    place: Place
    rank: int | None
    time: float | None
    text: str


@dataclass(kw_only=True)
class Read:
    """A job and its lines.

    Attributes:
        event_of: line -> number of its event in `job`; blank lines have none.
        lines: in the order of files and lines, blank ones too.
    """

    job: Job
    event_of: dict[Place, int] = field(default_factory=dict)
    lines: list[LogLine] = field(default_factory=list)


def read(folder: Path, library: SignatureLibrary) -> Read:
    """The logs in a folder as `ingest` reads them, with each of their lines."""
    analyser = LineAnalyser(library)
    passes = [_Recording(source, analyser) for source in find([folder]).sources]
    parts = [part for recording in passes for part in recording.read_attempts(starts=())]
    out, layout, events_of = Read(job=merged(parts)), layout_of(parts), Events()
    numbers = {  # class and text of a template -> its event, numbered as `merged` numbers them
        (template.cls, template.text): events_of.number(template.text, template.cls)
        for part in parts
        for template in part.templates.values()
    }
    for recording, part in zip(passes, parts, strict=True):
        events = {at: numbers[key] for key, at in recording.template_of.items() if key in numbers}
        for line, raw in recording.entry_of.items():
            out.event_of[part.source.name, line] = events[recording.entries[raw][2]]
        out.lines += recording.located_lines(part, layout)
    return out


class _Recording(FilePass):
    """Goes the slow way with every line, which comes to the same, and keeps its entry.

    Attributes:
        entry_of: line -> first line of its entry.
        entries: first line of an entry -> the entry, as it was counted.
    """

    def __init__(self, source: LogSource, analyser: LineAnalyser) -> None:
        super().__init__(source, analyser)
        self.entry_of: dict[int, int] = {}
        self.entries: dict[int, RawEntry] = {}
        self.written: list[tuple[Prefix, bytes]] = []

    def located_lines(self, part: Part, layout: RankLayout) -> Iterator[LogLine]:
        seats = {stream.prefix: layout.place(part.source, stream.prefix) for stream in part.streams}
        for number, (who, line) in enumerate(self.written, 1):
            entry = self.entries.get(self.entry_of.get(number, 0))
            seat = seats.get(who, RankPlacement())
            yield LogLine(
                place=(part.source.name, number),
                rank=seat.rank,
                time=None if entry is None else self.prefixes.time(entry[1]),
                text=line.decode(errors="replace"),
            )

    def _take(self, lines: list[bytes], keys: list[bytes]) -> None:
        for line in lines:
            self.number += 1
            who, _ = self.prefixes.split(line)
            self.written.append((who, line))
            form = self._form(line)
            stream, start = self.stream(line, form)
            self._slow(self.number, line, form, stream, start)
            self._settle(stream)
            entry = stream.open.raw if stream.open else stream.tail[-1] if stream.tail else None
            if line.strip() and entry is not None:
                self.entry_of[self.number] = entry[0]

    def _count(self, stream: LogStream, raw: RawEntry, watched: bool) -> None:
        super()._count(stream, raw, watched)
        self.entries[raw[0]] = raw
