"""The content of one attempt in one file, as a pass leaves it, and the job that such parts make.

Streams are merged by their names, events by their templates.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rmetric.diagnosis.facts.job import (
    HEAD,
    MAX_NAMED,
    MAX_STACKS,
    STACKS_OF_RANK,
    TAIL,
    Event,
    Iteration,
    Job,
    JobStream,
    Match,
    Occurrence,
    short,
    span_of,
)
from rmetric.diagnosis.facts.layout import Files, IdentityGraph, RankLayout, RankPlacement
from rmetric.diagnosis.forms import LogStream, RawEntry
from rmetric.diagnosis.patterns.values import is_not_finite
from rmetric.diagnosis.reading.file_names import names_in
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.reading.text import MAX_TEXT, clean
from rmetric.diagnosis.templates import OTHERS, Events

if TYPE_CHECKING:
    from rmetric.diagnosis.one_pass import FilePass

#: No node has so many ranks.
MOST_LOCAL_RANKS = 64


@dataclass
class StreamPart:
    """One stream within one file; its name is the key that the pass gave it."""

    prefix: Prefix
    stream: JobStream
    counts: Mapping[int, int]  # number of template -> number of entries
    stages: list[tuple[str, Occurrence]]  # that it entered, each with the entry that announces it
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

    In its `Occurrence`s `stream` is the pass's key, `event` a template's number, `order` a line.
    """

    source: LogSource
    streams: list[StreamPart]
    templates: dict[int, Template]  # by their number in this file
    graph: IdentityGraph
    job_ids: dict[str, int]  # number of a scheduler's job that it names -> line
    succeeded: Occurrence | None
    unmatched: int  # entries that were too different from all others to be kept apart
    first_line: int  # of the attempt
    lines: int
    entries: list[Occurrence]  # all of the above, each once


class PartBuilder:
    """Makes the part of what a pass has kept."""

    def __init__(self, file: FilePass) -> None:
        self.file = file
        self.entries: dict[int, Occurrence] = {}
        self.streams = [log for log in file.streams.values() if log.tail]
        self.number = {at: at for log in self.streams for at, n in log.counts.items() if n}
        # A template that all its entries left when they had all their lines.
        for before, after in file.final_template.items():
            if before not in self.number and after in self.number:
                self.number[before] = self.number[after]

    def part(self) -> Part:
        file, entry, odd = self.file, self._entry, self.file.watch.first_odd()
        streams = [self._stream(log, odd.get(log.key)) for log in self.streams]
        templates = {
            at: Template(text, cls, entry(file.first[at]), entry(file.last[at]))
            for (cls, text), at in file.template_of.items()
            if self.number.get(at) == at
        }
        times: dict[str, list[float]] = defaultdict(list)
        for occurrence in sorted(self.entries.values(), key=attrgetter("order")):
            times[occurrence.stream] += [] if occurrence.time is None else [occurrence.time]
        for part in streams:
            if stated := times[part.stream.name]:
                part.stream.first_time, part.stream.last_time = stated[0], stated[-1]
        return Part(
            source=file.source,
            streams=streams,
            templates=templates,
            graph=file.graph,
            job_ids=file.job_ids,
            succeeded=file.succeeded and entry(file.succeeded),
            unmatched=file.unmatched,
            first_line=file.first_line,
            lines=file.number + 1 - file.first_line,
            entries=list(self.entries.values()),
        )

    def _entry(self, raw: RawEntry | None) -> Occurrence:
        assert raw is not None
        # The file keeps it, so that no other has its id.
        entry = self.entries.get(id(raw))
        if entry is None:
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

    def _stream(self, log: LogStream, odd: Iteration[Any] | None) -> StreamPart:
        entry = self._entry
        counts = {at: count for at, count in log.counts.items() if count}
        matches = [
            Match(
                signature=id,
                stream=log.key,
                traits=self.file.analyser.library[id].traits,
                count=found.count,
                first=entry(found.first),
                last=entry(found.last),
                events={self.number[at] for at in found.templates},
                named=found.named,
            )
            for id, found in log.found.items()
        ]
        usual = max(log.counters.values(), key=attrgetter("lines"), default=None)
        stream = JobStream(
            name=log.key,
            files={self.file.source.name},
            entries=sum(counts.values()),
            head=[entry(raw) for raw in log.head],
            steps=log.steps,
            last_step=log.step,
            counts_samples=self.file.watch.counts_samples(log.key),
            last_step_at=log.last_step_at and entry(log.last_step_at),
            longest_pause=usual.longest_pause if usual else 0.0,
            stage=log.stage,
            stacks=[entry(raw) for raw in log.stacks],
            tail=deque(map(entry, log.tail), maxlen=TAIL),
        )
        return StreamPart(
            prefix=log.prefix,
            stream=stream,
            counts=counts,
            stages=[(stage, entry(raw)) for stage, raw in log.stages],
            matches=matches,
            odd_iteration=odd and replace(odd, place=entry(odd.place)),
        )


def merged(parts: Sequence[Part]) -> Job:
    """One job of the parts of its files, in the order of the files, whose entries it takes."""
    merging = _Merging(layout_of(parts))
    for part in parts:
        merging.add(part)
    return merging.finished()


def layout_of(parts: Sequence[Part]) -> RankLayout:
    """Resolve rank and node of all streams, from all files of a job."""
    files = [(part.source, [log.prefix for log in part.streams], part.graph) for part in parts]
    world = RankLayout(files).world
    _name_nodes(files, {*world.nodes, *world.node_of_rank.values()})
    _name_hosts(files, world.size)
    return RankLayout(files)


def _name_nodes(files: Files, nodes: set[str]) -> None:
    """Give a file that states no writer the one node of the job that its name has in it."""
    nodes |= {source.node for source, _, _ in files if source.node}
    # Of several names of one node the whole one is the last.
    whole = sorted(nodes, key=lambda node: (len(node), node))
    names = {short(node): node for node in whole if any(map(str.isdigit, node))}
    for source, prefixes, _ in files:
        known = (source.rank, source.local_rank, source.node) != (None, None, None)
        if known or any(prefix is not NO_PREFIX for prefix in prefixes):
            continue
        inside = names_in(source.name, names)
        if len(inside) == 1:
            source.node = names[inside[0]]


def _name_hosts(files: Files, size: int | None) -> None:
    """Make the number in a file's name (gpu-116.log) that of a host where it cannot be a rank."""
    for source, prefixes, _ in files:
        number = source.local_rank if source.rank is None else source.rank
        most = min(size or inf, inf if source.local_rank is None else MOST_LOCAL_RANKS)
        several = len({prefix.rank for prefix in prefixes} - {None}) > 1
        if number is not None and (several or number >= most):
            host = re.search(rf"[A-Za-z][A-Za-z_-]*0*{number}(?!\d)", source.name)
            source.rank = source.local_rank = None
            source.node = source.node or (host[0] if host else None)


class _Merging:
    def __init__(self, layout: RankLayout) -> None:
        self.layout, self.events, self.job = layout, Events(), Job()
        self.before = 0  # lines of the files before
        #: (it trains, number of stages) of the stream whose stages are the job's
        self.best_stages = (False, 0)

    def add(self, part: Part) -> None:
        job, file, before = self.job, part.source.name, self.before
        self.before += part.first_line - 1 + part.lines
        placed = [(log, self.layout.place(part.source, log.prefix)) for log in part.streams]
        names = {log.stream.name: _name(seat, file) for log, seat in placed}
        numbers = {
            at: self.events.number(template.text, template.cls)
            for at, template in part.templates.items()
        }
        # In place, and let go: of many files, two sets of entries would not fit into memory.
        for entry in part.entries:
            entry.stream, entry.event = names[entry.stream], numbers[entry.event]
            entry.order += before
        part.entries.clear()
        for at, template in part.templates.items():
            number, first, last = numbers[at], template.first, template.last
            if number == len(job.events):
                job.events.append(Event(number=number, template="", first=first, last=last))
            event = job.events[number]
            event.first, event.last = _earlier(event.first, first), _later(event.last, last)
            if is_not_finite(template.text):
                job.not_finite = _earlier(job.not_finite or first, first)
        for log, seat in placed:
            self._add_stream(names[log.stream.name], seat, log, numbers)
        if part.succeeded is not None:
            job.succeeded = _later(job.succeeded or part.succeeded, part.succeeded)
        job.files[file] = job.files.get(file, 0) + part.lines
        if (span := span_of(log.stream for log in part.streams)) is not None:
            job.spans[file] = span
        if part.source.cut_off:
            job.cut_off.append(file)

    def _add_stream(
        self, name: str, seat: RankPlacement, log: StreamPart, numbers: dict[int, int]
    ) -> None:
        job = self.job
        if log.prefix.pid is not None and seat.rank is not None:
            job.rank_of_pid[seat.node or log.prefix.node, log.prefix.pid] = seat.rank
        stream = job.streams.setdefault(name, JobStream(name=name, rank=seat.rank))
        stream.node = seat.node if stream.node is None else stream.node
        self._add_entries(stream, log.stream)
        for at, count in log.counts.items():
            counts = job.events[numbers[at]].counts
            counts[name] = counts.get(name, 0) + count
        for match in log.matches:
            match.stream, match.events = name, {numbers[at] for at in match.events}
            known = job.matches.setdefault((match.signature, name), match)
            if known is match:
                continue
            first, more = known.named, match.named
            if _earlier(known.first, match.first) is not known.first:
                known.first, first, more = match.first, more, first
            known.named = [*first, *(fields for fields in more if fields not in first)][:MAX_NAMED]
            known.last = _later(known.last, match.last)
            known.count += match.count
            known.events |= match.events
        if log.odd_iteration is not None:
            job.odd_iterations.setdefault(name, log.odd_iteration)
        # The job's stages are those of the stream with most, usually rank 0; a launcher comes last.
        found = (log.stream.steps > 0, len(log.stages))
        if log.stages and found > self.best_stages:
            self.best_stages, job.stages = found, list(log.stages)

    def _add_entries(self, stream: JobStream, part: JobStream) -> None:
        stream.files |= part.files
        stream.entries += part.entries
        stream.head = _in_order([*stream.head, *part.head])[:HEAD]
        kept = STACKS_OF_RANK if stream.rank is not None else MAX_STACKS
        stream.stacks = _in_order([*stream.stacks, *part.stacks])[-kept:]
        ends = [stream.first_time, part.first_time, stream.last_time, part.last_time]
        stream.first_time = min((time for time in ends[:2] if time is not None), default=None)
        stream.last_time = max((time for time in ends[2:] if time is not None), default=None)
        first, last = (stream.tail or part.tail)[0], part.tail[-1]
        if part.stage and (not stream.stage or last is _later(first, last)):
            stream.stage = part.stage
        stream.tail = deque(_in_order([*stream.tail, *part.tail]), maxlen=TAIL)
        if part.last_step_at is not None:
            at = part.last_step_at
            if _later(stream.last_step_at or at, at) is at:
                stream.last_step, stream.last_step_at = part.last_step, at
                stream.counts_samples = part.counts_samples
            stream.steps += part.steps
            stream.longest_pause = max(stream.longest_pause, part.longest_pause)

    def finished(self) -> Job:
        job, world, events = self.job, self.layout.world, self.events
        for event in job.events:
            event.template = events.template(event.number)
        job.world_size, job.ranks_per_node = world.size, world.per_node
        job.tasks_launch, job.node_of_rank = world.tasks_launch, dict(world.node_of_rank)
        job.nodes, job.rank_of_gpu = list(world.nodes), world.rank_of_gpu
        job.rank_of_pid |= world.rank_of_pid
        job.notes = list(world.notes())
        if events.full:
            texts = f"{events.full:,} texts are unlike all others of the {len(events):,} events"
            job.notes.append(f"{texts}: they count as one, {OTHERS}")
        return job


def _name(seat: RankPlacement, file: str) -> str:
    if seat.rank is not None:
        return f"rank {seat.rank}"
    name = file if seat.node is None else f"node {seat.node}"
    return name if seat.local_rank is None else f"{name} local {seat.local_rank}"


def _later(entry: Occurrence, other: Occurrence) -> Occurrence:
    """Return the later of two entries: by line in one file, else by time; `entry` on a tie."""
    if entry.file != other.file and entry.time is not None and other.time is not None:
        return other if other.time > entry.time else entry
    return other if other.order > entry.order else entry


def _earlier(entry: Occurrence, other: Occurrence) -> Occurrence:
    return entry if _later(entry, other) is other or entry == other else other


def _in_order(tail: list[Occurrence]) -> list[Occurrence]:
    """Sort by time if there are several files and all entries have one, else by order."""
    if len({entry.file for entry in tail}) > 1 and all(entry.time is not None for entry in tail):
        return sorted(tail, key=lambda entry: (entry.time, entry.order))
    return sorted(tail, key=lambda entry: entry.order)
