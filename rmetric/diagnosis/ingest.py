"""Read log files, in parallel where they are large, and merge them into a `Job`.

Streams are merged by their names, events by their templates.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rmetric.diagnosis.aligning import aligned
from rmetric.diagnosis.clock import two_jobs
from rmetric.diagnosis.facts.job import (
    HEAD,
    MAX_NAMED,
    MAX_STACKS,
    STACKS_OF_RANK,
    TAIL,
    Event,
    Job,
    JobStream,
    Occurrence,
    short,
    span_of,
)
from rmetric.diagnosis.facts.layout import Files, RankLayout, RankPlacement
from rmetric.diagnosis.facts.starts import starts_of
from rmetric.diagnosis.input_files import find, read_auxiliary
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.one_pass import FilePass, Part, StreamPart
from rmetric.diagnosis.patterns.values import is_not_finite
from rmetric.diagnosis.reading.file_names import names_in
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.report.render import clock
from rmetric.diagnosis.templates import OTHERS, Events, LineAnalyser

#: Below so many bytes, processes cost more than they save.
WORTH_PROCESSES = 32 << 20
#: New objects after which Python seeks garbage while logs are read.
NEW_OBJECTS = 1_000_000


def ingest(paths: Sequence[str | Path], library: SignatureLibrary, **options: Any) -> Job:
    """The last attempt of a job; arguments as those of `ingest_attempts`."""
    return ingest_attempts(paths, library, **options)[-1]


def ingest_attempts(
    paths: Sequence[str | Path],
    library: SignatureLibrary,
    *,
    cores: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[Job]:
    """Read the logs of one job, each attempt by itself, the first one first.

    The same files give the same job, with any number of cores. Memory grows with the number of
    files, streams, templates and attempts, not with that of lines.

    Args:
        paths: files and folders.
        library: signatures of known faults.
        cores: processes that read files; one where there is little to read.
        on_progress: called with the number of bytes read since the last call.

    Raises:
        LogError: a path that cannot be read, or nothing to read.
    """
    found = find(paths)
    with _few_collections():
        files = list(_files(found.sources, library, cores, on_progress))
        jobs = [_job(parts, found.notes) for parts in (aligned(files) if files else [[]])]
    if found.beside:
        # A dump is written over by the next attempt's.
        last = jobs[-1]
        last.beside = read_auxiliary(found.beside)
        last.notes += last.beside.notes
        last.files |= dict.fromkeys((one.name for one in found.beside), 0)
    return jobs


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let Python seek garbage in cycles more rarely: a pass makes many objects, and few cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0] and max(thresholds[0], NEW_OBJECTS), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _files(
    sources: Sequence[LogSource],
    library: SignatureLibrary,
    cores: int,
    on_progress: Callable[[int], None] | None,
) -> Iterator[list[Part]]:
    """The attempts of each file, in the order of the files."""
    if cores == 1 or len(sources) == 1 or sum(one.size for one in sources) < WORTH_PROCESSES:
        analyser = LineAnalyser(library)
        for source in sources:
            yield _attempts_of(source, analyser, on_progress)
        return
    from joblib import Parallel

    from rmetric._util.workers import delayed

    # The largest first, so that no process is left with it at the end.
    order, number = sorted(sources, key=lambda one: -one.size), 4 * cores
    # A process uses its caches for several files.
    shares = [share for at in range(number) if (share := order[at::number])]
    read = Parallel(n_jobs=min(cores, len(shares)), return_as="generator_unordered")(
        delayed(_read)(share, library) for share in shares
    )
    by_name: dict[str, list[Part]] = {}
    for files in read:
        by_name |= {parts[0].source.name: parts for parts in files}
        if on_progress is not None:
            on_progress(sum(parts[0].source.size for parts in files))
    for source in sources:
        yield by_name[source.name]


def _attempts_of(
    source: LogSource, analyser: LineAnalyser, on_progress: Callable[[int], None] | None
) -> list[Part]:
    """Parts of a file's attempts; a second pass where the first expected them elsewhere."""
    first = FilePass(source, analyser)
    found = first.read_attempts(on_progress)
    # A launcher's line that it starts its ranks again may be the last.
    starts = [start for start in starts_of(first.marks) if start <= first.number]
    if starts == [part.first_line for part in found[1:]]:
        return found
    return FilePass(source, analyser, first.prefixes).read_attempts(starts=starts)


def _read(sources: Sequence[LogSource], library: SignatureLibrary) -> list[list[Part]]:
    return list(_files(sources, library, 1, None))


def _job(parts: Sequence[Part], notes: Sequence[str]) -> Job:
    """The job of its parts, with all notes; lost ends come first, signs of several jobs last."""
    job = merged(parts)
    found, of_files, numbers = list[str](), list[str](), dict[str, str]()
    for part in parts:
        name = part.source.name
        if part.source.cut_off:
            found.append(f"{name} does not reach its end: {part.source.cut_off}")
        of_files += part.source.notes
        if part.source.lines == 0:
            of_files.append(f"{name}: empty")
        if part.unmatched:
            entries = f"{part.unmatched:,} entries came after too many different ones"
            of_files.append(f"{name}: {entries} and are counted as one event, {OTHERS}")
        for number, line in part.job_ids.items():
            numbers.setdefault(number, f"{number} in {name}, line {line:,}")
    found += [*notes, *of_files, *job.notes]
    if len(numbers) > 1:
        few = "; ".join(list(numbers.values())[:4]) + ("; ..." if len(numbers) > 4 else "")
        jobs = f"there may be {len(numbers)} jobs in these logs"
        found.append(f"{jobs}, by the scheduler's numbers: {few}")
    if (both := two_jobs(job)) is not None:
        end, begin = map(clock, (job.spans[both[0]][1], job.spans[both[1]][0]))
        gap = f"{both[0]} ends at {end} and {both[1]} begins at {begin}, with nothing between"
        found.append(f"there may be two jobs in these logs, or one stood still: {gap}")
    job.notes = list(dict.fromkeys(found))
    return job


#: Entries of one stream that are collected before the last of them are selected.
MAX_COLLECTED = 1000
#: No node has so many ranks.
MOST_LOCAL_RANKS = 64


def merged(parts: Sequence[Part]) -> Job:
    """One job of the parts of its files, in the order of the files, whose entries it takes."""
    merging = _Merging(layout_of(parts))
    for part in parts:
        merging.add(part)
    return merging.finished()


def layout_of(parts: Sequence[Part]) -> RankLayout:
    """Resolve rank and node of all streams, from all files of a job."""
    files = [(part.source, [one.prefix for one in part.streams], part.graph) for part in parts]
    layout = RankLayout(files)
    if _name_nodes(files, layout):
        layout = RankLayout(files)
    wrong = [one for one, prefixes, _ in files if _is_host(one, prefixes, layout.world.size)]
    if not wrong:
        return layout
    for source in wrong:
        number = source.local_rank if source.rank is None else source.rank
        host = re.search(rf"[A-Za-z][A-Za-z_-]*0*{number}(?!\d)", source.name)
        source.rank = source.local_rank = None
        source.node = source.node or (host[0] if host else None)
    return RankLayout(files)


def _name_nodes(files: Files, layout: RankLayout) -> bool:
    """Give a file that states no writer the one node of the job that its name has in it."""
    nodes = {source.node for source, _, _ in files} | set(layout.world.nodes)
    nodes |= set(layout.world.node_of_rank.values())
    # Of several names of one node the whole one is the last.
    whole = sorted((node for node in nodes if node), key=lambda node: (len(node), node))
    names = {short(node): node for node in whole if any(map(str.isdigit, node))}
    found = False
    for source, prefixes, _ in files:
        known = (source.rank, source.local_rank, source.node) != (None, None, None)
        if known or any(prefix is not NO_PREFIX for prefix in prefixes):
            continue
        inside = names_in(source.name, names)
        if len(inside) == 1:
            source.node, found = names[inside[0]], True
    return found


def _is_host(source: LogSource, prefixes: Sequence[Prefix], size: int | None) -> bool:
    """Return True if the number in a file's name (gpu-116.log) is a host's and no rank."""
    number = source.local_rank if source.rank is None else source.rank
    ranks = {prefix.rank for prefix in prefixes if prefix.rank is not None}
    limits = [size] if size is not None else []
    limits += [MOST_LOCAL_RANKS] if source.local_rank is not None else []
    return number is not None and (len(ranks) > 1 or any(number >= limit for limit in limits))


class _Merging:
    def __init__(self, layout: RankLayout) -> None:
        self.layout, self.events, self.job = layout, Events(), Job()
        self.before = 0  # lines of the files before
        #: (it trains, number of stages) of the stream whose stages are the job's
        self.best_stages = (False, 0)
        self.tails: dict[str, list[Occurrence]] = {}

    def add(self, part: Part) -> None:
        job, file, before = self.job, part.source.name, self.before
        self.before += part.first_line - 1 + part.lines
        seats = [self.layout.place(part.source, one.prefix) for one in part.streams]
        placed = [*zip(part.streams, seats, strict=True)]
        names = {one.stream.name: _name(seat, file) for one, seat in placed}
        numbers = {at: self.events.number(one.text, one.cls) for at, one in part.templates.items()}

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
        for one, seat in placed:
            self._add_stream(names[one.stream.name], seat, one, numbers)
        if part.succeeded is not None:
            job.succeeded = _later(job.succeeded or part.succeeded, part.succeeded)
        job.files[file] = job.files.get(file, 0) + part.lines
        if (span := span_of(one.stream for one in part.streams)) is not None:
            job.spans[file] = span
        if part.source.cut_off:
            job.cut_off.append(file)

    def _add_stream(
        self, name: str, seat: RankPlacement, one: StreamPart, numbers: dict[int, int]
    ) -> None:
        job = self.job
        if one.prefix.pid is not None and seat.rank is not None:
            job.rank_of_pid[seat.node or one.prefix.node, one.prefix.pid] = seat.rank
        stream = job.streams.setdefault(name, JobStream(name=name, rank=seat.rank))
        stream.node = seat.node if stream.node is None else stream.node
        self._add_entries(stream, one.stream)
        for at, count in one.counts.items():
            counts = job.events[numbers[at]].counts
            counts[name] = counts.get(name, 0) + count
        for match in one.matches:
            events = {numbers[at] for at in match.events}
            known = job.matches.get((match.signature, name))
            if known is None:
                job.matches[match.signature, name] = replace(match, stream=name, events=events)
                continue
            named = [known.named, match.named]
            if _earlier(known.first, match.first) is not known.first:
                known.first = match.first
                named.reverse()
            first, more = named
            known.named = [*first, *(fields for fields in more if fields not in first)][:MAX_NAMED]
            known.last = _later(known.last, match.last)
            known.count += match.count
            known.events |= events
        if one.odd_iteration is not None:
            job.odd_iterations.setdefault(name, one.odd_iteration)
        # The job's stages are those of the stream that logs most of them: usually rank 0. One that
        # trains precedes a launcher.
        found = (one.stream.steps > 0, len(one.stages))
        if one.stages and found > self.best_stages:
            self.best_stages, job.stages = found, list(one.stages)

    def _add_entries(self, stream: JobStream, part: JobStream) -> None:
        stream.files |= part.files
        stream.entries += part.entries
        stream.head = _in_order([*stream.head, *part.head])[:HEAD]
        kept = STACKS_OF_RANK if stream.rank is not None else MAX_STACKS
        stream.stacks = _in_order([*stream.stacks, *part.stacks])[-kept:]
        ends = [stream.first_time, part.first_time, stream.last_time, part.last_time]
        stream.first_time = min((one for one in ends[:2] if one is not None), default=None)
        stream.last_time = max((one for one in ends[2:] if one is not None), default=None)
        tail = self.tails.setdefault(stream.name, [])
        tail += part.tail
        if len(tail) > MAX_COLLECTED:  # endless streams that share one name
            tail[:] = _in_order(tail)[-TAIL:]
        if part.stage and (not stream.stage or tail[-1] is _later(tail[0], tail[-1])):
            stream.stage = part.stage
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
        for name, tail in self.tails.items():
            job.streams[name].tail.extend(_in_order(tail)[-TAIL:])
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


def _later(one: Occurrence, other: Occurrence) -> Occurrence:
    """Return the later of two entries: by line in one file, else by time; `one` on a tie."""
    if one.file != other.file and one.time is not None and other.time is not None:
        return other if other.time > one.time else one
    return other if other.order > one.order else one


def _earlier(one: Occurrence, other: Occurrence) -> Occurrence:
    return one if _later(one, other) is other or one == other else other


def _in_order(tail: list[Occurrence]) -> list[Occurrence]:
    """Sort by time if there are several files and all entries have one, else by order."""
    if len({one.file for one in tail}) > 1 and all(one.time is not None for one in tail):
        return sorted(tail, key=lambda one: (one.time, one.order))
    return sorted(tail, key=lambda one: one.order)
