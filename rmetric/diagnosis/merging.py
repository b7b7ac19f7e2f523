"""Merge the parts of all files into one `Job`: streams by name, events by template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from rmetric.diagnosis.job import (
    HEAD,
    MAX_NAMED,
    TAIL,
    Event,
    Iteration,
    Job,
    Match,
    Occurrence,
    Stream,
)
from rmetric.diagnosis.part import Part, PartMatch, StreamPart
from rmetric.diagnosis.reading.layout import Placement, RankLayout
from rmetric.diagnosis.templates.events import Events

#: Odd iterations that are kept for a stream.
MAX_ODD = 10

Number = TypeVar("Number", int, float)
Placed = Callable[[Occurrence], Occurrence]


def merged(parts: Sequence[Part]) -> Job:
    """One job of the parts of its files, which are in the order of the files; without notes."""
    merging = _Merging(layout_of(parts))
    for part in parts:
        merging.add(part)
    return merging.finished()


def layout_of(parts: Sequence[Part]) -> RankLayout:
    """Resolve rank and node of all streams, from all files of a job."""
    return RankLayout(
        [(part.source, [one.prefix for one in part.streams], part.world) for part in parts]
    )


class _Merging:
    def __init__(self, layout: RankLayout) -> None:
        self.layout, self.events, self.job = layout, Events(), Job()
        self.told = (False, 0)
        self.tails: dict[str, list[Occurrence]] = {}

    def add(self, part: Part) -> None:
        seats = [self.layout.place(part.source, one.prefix) for one in part.streams]
        names = [_name(seat, part.source.name) for seat in seats]
        numbers = [self.events.number(one.text, one.cls) for one in part.templates]
        before = self.job.lines

        def placed(one: Occurrence) -> Occurrence:
            name = names[int(one.stream)]
            return replace(one, stream=name, order=one.order + before, event=numbers[one.event])

        for template, number in zip(part.templates, numbers, strict=True):
            self._event(number, placed(template.first), placed(template.last))
        for name, seat, one in zip(names, seats, part.streams, strict=True):
            self._stream(self._named(name, seat), part, one, placed)
            for at, count in one.counts.items():
                counts = self.job.events[numbers[at]].counts
                counts[name] = counts.get(name, 0) + count
            for found in one.found:
                self._match(name, found, placed)
            self._iterations(name, one.iterations, numbers, placed)
        self._stages(part, placed)
        if part.succeeded is not None:
            success = placed(part.succeeded)
            self.job.succeeded = _later(self.job.succeeded or success, success)
        self.job.files[part.source.name] = part.lines
        if (span := _span(part)) is not None:
            self.job.spans[part.source.name] = span
        if part.source.cut_off:
            self.job.cut_off.append(part.source.name)

    def finished(self) -> Job:
        for event in self.job.events:
            event.template = self.events.template(event.number)
        for name, tail in self.tails.items():
            self.job.streams[name].tail.extend(_in_order(tail)[-TAIL:])
        world = self.layout.world
        self.job.world_size = world.size
        self.job.node_of_rank = dict(world.node_of_rank)
        self.job.notes = list(world.notes())
        if self.events.full:
            self.job.notes.append(
                f"{self.events.full:,} texts are unlike all others of the "
                f"{len(self.events):,} events: they count as one, <others>"
            )
        return self.job

    def _named(self, name: str, seat: Placement) -> Stream:
        stream = self.job.streams.get(name)
        if stream is None:
            stream = self.job.streams[name] = Stream(name=name, rank=seat.rank)
            self.tails[name] = []
        if stream.node is None:
            stream.node = seat.node
        return stream

    def _stream(self, stream: Stream, part: Part, one: StreamPart, placed: Placed) -> None:
        stream.files.add(part.source.name)
        stream.entries += sum(one.counts.values())
        stream.head = _in_order([*stream.head, *map(placed, one.head)])[:HEAD]
        stream.first_time = _either(min, stream.first_time, one.first_time)
        stream.last_time = _either(max, stream.last_time, one.last_time)
        tail = self.tails[stream.name]
        tail += map(placed, one.tail)
        if len(tail) > 1000:  # speakers without end that share one name
            tail[:] = _in_order(tail)[-TAIL:]
        if one.stage and (not stream.stage or tail[-1] is _later(tail[0], tail[-1])):
            stream.stage = one.stage
        if one.last_step_at is not None:
            at = placed(one.last_step_at)
            if _later(stream.last_step_at or at, at) is at:
                stream.last_step, stream.last_step_at = one.last_step, at
            stream.first_step = _either(min, stream.first_step, one.first_step)
            stream.steps += one.steps

    def _event(self, number: int, first: Occurrence, last: Occurrence) -> None:
        if number == len(self.job.events):
            self.job.events.append(Event(number=number, template="", first=first, last=last))
        event = self.job.events[number]
        event.first = _earlier(event.first, first)
        event.last = _later(event.last, last)

    def _match(self, name: str, found: PartMatch, placed: Placed) -> None:
        first, last = placed(found.first), placed(found.last)
        match = self.job.matches.setdefault(
            (found.signature, name),
            Match(signature=found.signature, stream=name, count=0, first=first, last=last),
        )
        named = [match.named, found.named]
        if _earlier(match.first, first) is not match.first:
            match.first = first
            named.reverse()
        match.named = [*named[0], *(one for one in named[1] if one not in named[0])][:MAX_NAMED]
        match.last = _later(match.last, last)
        match.count += found.count
        for one in map(placed, found.templates.values()):
            match.events.add(one.event)

    def _iterations(
        self, name: str, odd: Sequence[Iteration], numbers: Sequence[int], placed: Placed
    ) -> None:
        for one in odd:
            kept = self.job.odd_iterations.setdefault(name, [])
            if len(kept) < MAX_ODD:
                events = [{numbers[at] for at in those} for those in (one.missing, one.extra)]
                kept.append(
                    replace(
                        one,
                        stream=name,
                        place=placed(one.place),
                        missing=tuple(sorted(events[0])),
                        extra=tuple(sorted(events[1])),
                    )
                )

    def _stages(self, part: Part, placed: Placed) -> None:
        """The job is where the speaker is that tells most of its stages: usually rank 0.

        One that trains knows more than a launcher.
        """
        for one in part.streams:
            told = (one.steps > 0, len(one.stages))
            if one.stages and told > self.told:
                self.told = told
                self.job.stages = [(stage, placed(place)) for stage, place in one.stages]


def _name(seat: Placement, file: str) -> str:
    if seat.rank is not None:
        return f"rank {seat.rank}"
    name = file if seat.node is None else f"node {seat.node}"
    return name if seat.local_rank is None else f"{name} local {seat.local_rank}"


def _span(part: Part) -> tuple[float, float] | None:
    begins = [one.first_time for one in part.streams if one.first_time is not None]
    ends = [one.last_time for one in part.streams if one.last_time is not None]
    return (min(begins), max(ends)) if begins and ends else None


def _timed(one: Occurrence, other: Occurrence) -> bool:
    return one.file != other.file and one.time is not None and other.time is not None


def _later(one: Occurrence, other: Occurrence) -> Occurrence:
    """Return the later of two entries: by line in one file, else by time; `one` on a tie."""
    if _timed(one, other):
        return other if (other.time or 0.0) > (one.time or 0.0) else one
    return other if other.order > one.order else one


def _earlier(one: Occurrence, other: Occurrence) -> Occurrence:
    return one if _later(one, other) is other or one == other else other


def _in_order(tail: list[Occurrence]) -> list[Occurrence]:
    """Sort by time if there are several files and all entries have one, else by order."""
    if len({one.file for one in tail}) > 1 and all(one.time is not None for one in tail):
        return sorted(tail, key=lambda one: (one.time, one.order))
    return sorted(tail, key=lambda one: one.order)


def _either(
    choose: Callable[[Number, Number], Number], one: Number | None, other: Number | None
) -> Number | None:
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)
