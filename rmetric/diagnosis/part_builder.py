"""Build the `Part` of a file after its pass; only the kept entries are parsed again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rmetric.diagnosis.job import MAX_TEXT, Iteration, Occurrence
from rmetric.diagnosis.log_stream import LogStream, MatchTally, RawEntry
from rmetric.diagnosis.part import Part, PartMatch, StreamPart, Template
from rmetric.diagnosis.reading.source import Source
from rmetric.diagnosis.reading.text import clean

if TYPE_CHECKING:
    from rmetric.diagnosis.one_pass import FilePass


def occurrence(file: FilePass, raw: RawEntry) -> Occurrence:
    """An entry with its time and text; its event is the template as the pass numbers it."""
    line, text = raw[1], raw[6]
    if text is None:
        text = clean(line[file.prefixes.split(line)[1] :])
    return occurrence_of(file.source, raw, text, file.prefixes.time(line))


def occurrence_of(source: Source, raw: RawEntry, text: str, time: float | None) -> Occurrence:
    number, _, template, stream, step, stage, _ = raw
    return Occurrence(
        file=source.name,
        line=number,
        stream=stream.key,
        time=time,
        order=number,
        event=template,
        text=text[:MAX_TEXT],
        step=step,
        stage=stage,
    )


def part_of(file: FilePass) -> Part:
    """All that is kept of a file that has been read to its end."""
    return _PartBuilder(file).part()


class _PartBuilder:
    def __init__(self, file: FilePass) -> None:
        self.file = file
        used_templates = sorted(
            {at for one in self._streams() for at, n in one.counts.items() if n}
        )
        self.index = {at: place for place, at in enumerate(used_templates)}
        # A template that all its entries left when they had all their lines.
        for before, after in file.final_template.items():
            if before not in self.index and after in self.index:
                self.index[before] = self.index[after]
        self.used_templates = used_templates

    def part(self) -> Part:
        file = self.file
        streams = self._streams()
        keys = {one.key: str(place) for place, one in enumerate(streams)}
        self.keys = keys
        last = {one.key: occurrence(file, one.tail[-1]) for one in streams}
        odd = file.watch.finish(last)
        return Part(
            source=file.source,
            lines=file.number,
            streams=[self._stream_part(one, odd.get(one.key, [])) for one in streams],
            templates=self._templates(),
            world=file.world,
            job_ids=file.job_ids,
            succeeded=None if file.succeeded is None else self._at(file.succeeded),
            unmatched=file.unmatched,
            notes=list(file.source.notes),
        )

    def _streams(self) -> list[LogStream]:
        """Those that said anything."""
        return [one for one in self.file.streams.values() if one.tail]

    def _at(self, raw: RawEntry) -> Occurrence:
        return self._placed(occurrence(self.file, raw))

    def _placed(self, one: Occurrence) -> Occurrence:
        return replace(one, stream=self.keys[one.stream], event=self.index[one.event])

    def _stream_part(self, one: LogStream, iterations: list[Iteration]) -> StreamPart:
        tail = [self._at(raw) for raw in one.tail]
        step_at = None if one.last_step_at is None else self._at(one.last_step_at)
        found = [self._found(name, so_far) for name, so_far in one.found.items()]
        late = [*tail, *(match.last for match in found), *([step_at] if step_at else [])]
        times = [(place.order, place.time) for place in late if place.time is not None]
        return StreamPart(
            prefix=one.prefix,
            counts={self.index[at]: count for at, count in one.counts.items() if count},
            head=[self._at(raw) for raw in one.head],
            tail=tail,
            first_time=one.first_time,
            last_time=max(times)[1] if times else one.first_time,
            steps=one.steps,
            first_step=one.first_step,
            last_step=one.step,
            last_step_at=step_at,
            stage=one.stage,
            stages=[(stage, self._at(raw)) for stage, raw in one.stages],
            found=found,
            iterations=[self._iteration(odd) for odd in iterations],
        )

    def _iteration(self, one: Iteration) -> Iteration:
        missing, extra = (
            tuple(sorted({self.index[at] for at in those if at in self.index}))
            for those in (one.missing, one.extra)
        )
        place = self._placed(one.place)
        return replace(one, stream=place.stream, place=place, missing=missing, extra=extra)

    def _found(self, name: str, so_far: MatchTally) -> PartMatch:
        return PartMatch(
            signature=name,
            count=so_far.count,
            first=self._at(so_far.first),
            last=self._at(so_far.last),
            named=so_far.named,
            templates={self.index[at]: self._at(raw) for at, raw in so_far.templates.items()},
        )

    def _templates(self) -> list[Template]:
        names = {at: name for name, at in self.file.template_of.items()}
        templates = []
        for at in self.used_templates:
            cls, text = names[at]
            first, last = self.file.first[at], self.file.last[at]
            assert first is not None
            assert last is not None
            templates.append(
                Template(text=text, cls=cls, first=self._at(first), last=self._at(last))
            )
        return templates
