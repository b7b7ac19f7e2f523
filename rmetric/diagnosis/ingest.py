"""Read the logs of a job, in parallel where they are large, each of its attempts by itself.

Parts of files are of one attempt by times, or by numbers in the files' names. Files are of
different attempts if a number in their names ("train_41700_0.out", "run3/rank_0.log") orders them
in time, without an overlap, and if each attempt begins with lines of the same kind. A log that is
rotated goes on where the last file ended, and does not begin again.
"""

from __future__ import annotations

import gc
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from rmetric.diagnosis.clock import may_be_time_zone, two_jobs
from rmetric.diagnosis.facts.job import Job, Occurrence, span_of, span_of_times
from rmetric.diagnosis.facts.starts import starts_of
from rmetric.diagnosis.input_files import find, read_auxiliary
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.one_pass import FilePass
from rmetric.diagnosis.parts import Part, merged
from rmetric.diagnosis.reading.file_names import ATTEMPT, is_kernel_log
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.reading.timestamps import NO_YEAR, names_zone, without_year
from rmetric.diagnosis.report.render import clock
from rmetric.diagnosis.templates import OTHERS, LineAnalyser

#: Below so many bytes, processes cost more than they save.
WORTH_PROCESSES = 32 << 20
#: New objects after which Python seeks garbage while logs are read.
NEW_OBJECTS = 1_000_000
#: Entries of a file's beginning that are compared.
COMPARED_ENTRIES = 8
#: Least share of a beginning's kinds of entries that the next beginning has too.
MIN_SHARED = 0.4
#: Least seconds between the beginnings of two attempts; the ranks of one begin together.
MIN_SECONDS_APART = 10.0
#: Seconds by which the files of one attempt may begin before the file that has most attempts.
SAME_START_SECONDS = 60.0
#: Most attempts; more numbers are not of attempts.
MAX_ATTEMPTS = 1000
#: Numbers of a name that are looked at.
MAX_NUMBERS = 8

_DIGITS = re.compile(r"\d+")
_NODE = re.compile(r"(?i)(?:node|host|server|machine)[-_]?\d")
#: The scheduler's lines have its own clock, which may be of another zone.
_OF_SCHEDULER = re.compile(r"^slurmstepd\b|\bCANCELLED AT\b")

Group = Sequence[Part]
OnProgress = Callable[[int], None] | None


def ingest(paths: Sequence[str | Path], library: SignatureLibrary, **options: Any) -> Job:
    """The last attempt of a job; arguments as those of `ingest_attempts`."""
    return ingest_attempts(paths, library, **options)[-1]


def ingest_attempts(
    paths: Sequence[str | Path],
    library: SignatureLibrary,
    *,
    cores: int = 1,
    on_progress: OnProgress = None,
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
    found, thresholds = find(paths), gc.get_threshold()
    # Reading makes many objects, and few cycles of them.
    gc.set_threshold(thresholds[0] and max(thresholds[0], NEW_OBJECTS), *thresholds[1:])
    try:
        files = list(_files(found.sources, library, cores, on_progress))
        jobs = [_job(parts, found.notes) for parts in (aligned(files) if files else [[]])]
    finally:
        gc.set_threshold(*thresholds)
    if found.auxiliary:
        # A dump is written over by the next attempt's.
        last = jobs[-1]
        last.auxiliary = read_auxiliary(found.auxiliary)
        last.notes += last.auxiliary.notes
        last.files |= dict.fromkeys((source.name for source in found.auxiliary), 0)
    return jobs


def _files(
    sources: Sequence[LogSource], library: SignatureLibrary, cores: int, on_progress: OnProgress
) -> Iterator[list[Part]]:
    """The attempts of each file, in the order of the files."""
    if cores == 1 or len(sources) == 1 or sum(source.size for source in sources) < WORTH_PROCESSES:
        analyser = LineAnalyser(library)
        for source in sources:
            yield _attempts_of(source, analyser, on_progress)
        return
    from joblib import Parallel

    from rmetric._util.workers import delayed

    # The largest first, so that no process is left with it at the end.
    order, number = sorted(sources, key=lambda source: -source.size), 4 * cores
    # A process uses its caches for several files.
    shares = [order[at::number] for at in range(min(number, len(order)))]
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


def _attempts_of(source: LogSource, analyser: LineAnalyser, on_progress: OnProgress) -> list[Part]:
    """Parts of a file's attempts; a second pass where the first expected them elsewhere."""
    first = FilePass(source, analyser)
    found = first.read_attempts(on_progress)
    # A launcher's line that it starts its ranks again may be the last.
    starts = [start for start in starts_of(first.marks) if start <= first.number]
    if starts == [part.first_line for part in found[1:]]:
        return found
    return FilePass(source, analyser, first.prefixes).read_attempts(starts=starts)


def _read(sources: Sequence[LogSource], library: SignatureLibrary) -> list[list[Part]]:
    analyser = LineAnalyser(library)
    return [_attempts_of(source, analyser, None) for source in sources]


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


def attempts_by_name(files: Sequence[Group]) -> list[list[Part]]:
    """Parts of each attempt, the first one first; one list where the names show one attempt."""
    parts = [part for file in files for part in file]
    for groups, of_jobs in _groupings(parts):
        if 1 < len(groups) <= MAX_ATTEMPTS and _are_attempts(groups, of_jobs=of_jobs):
            grouped = {id(part) for group in groups for part in group}
            # Files without the number, such as a kernel's log, are with the last attempt.
            others = [part for part in parts if id(part) not in grouped]
            return [*map(list, groups[:-1]), [*groups[-1], *others]]
    return [parts]


def _groupings(parts: Group) -> Iterator[tuple[list[Group], bool]]:
    """Parts in the order of what may number attempts; whether that numbers the scheduler's jobs."""
    forms = [_DIGITS.sub("0", part.source.name) for part in parts]
    alike = Counter(forms)
    # A file without its like in another attempt is of none, whatever numbers its name has.
    numbers = [
        (part, [*map(int, _DIGITS.findall(part.source.name))])
        for part, form in zip(parts, forms, strict=True)
        if alike[form] > 1
    ]
    most = min(max((len(found) for _, found in numbers), default=0), MAX_NUMBERS)
    # A date and a time are two numbers; one alone is of an attempt, a rank or anything.
    alone = [slice(at, at + 1) for at in range(most)]
    several = [slice(0, end) for end in range(most, 1, -1)]
    for at, place in enumerate((*alone, *several, *alone)):
        groups: dict[tuple[int, ...], list[Part]] = defaultdict(list)
        for part, found in numbers:
            if len(found) >= place.stop:
                groups[tuple(found[place])].append(part)
        of_jobs = at < len(alone)
        if not of_jobs or all(
            any(str(number) in part.job_ids for part in group)
            for (number,), group in groups.items()
        ):
            yield [groups[number] for number in sorted(groups)], of_jobs


def _are_attempts(groups: Sequence[Group], *, of_jobs: bool) -> bool:
    """True if the groups follow one another, and begin alike where they are not `of_jobs`."""
    names = {frozenset(_DIGITS.sub("0", part.source.name) for part in group) for group in groups}
    nodes = {part.source.node for group in groups for part in group if _is_of_node(part)}
    # A step or a known fault, as programs write them.
    active = all(
        any(log.stream.steps or log.matches for part in group for log in part.streams)
        for group in groups
    )
    same = len(names) == 1 and len(nodes) != len(groups)
    return same and active and _follow(groups) and (of_jobs or _begin_alike(groups))


def _follow(groups: Sequence[Group]) -> bool:
    """True if the time of each group is known and begins after the one before has ended."""
    spans = [span for span in map(_span, groups) if span is not None]
    if len({span[0] >= NO_YEAR[1] for span in spans}) > 1:
        # Only within a year are they in order.
        spans = [(without_year(begin), without_year(end)) for begin, end in spans]
    return len(spans) == len(groups) and all(
        after[0] > max(before[1], before[0] + MIN_SECONDS_APART)
        for before, after in pairwise(spans)
    )


def _begin_alike(groups: Sequence[Group]) -> bool:
    """True if each group's first entries are of kinds that the next one's have too."""
    # One that failed before its program began has other first lines.
    steps = [sum(log.stream.steps for part in group for log in part.streams) for group in groups]
    worked = [group for group, some in zip(groups, steps, strict=True) if some]
    kinds = [_beginning(group) for group in (worked if len(worked) > 1 else groups)]
    return all(
        len(before & after) >= max(1.0, MIN_SHARED * min(len(before), len(after)))
        for before, after in pairwise(kinds)
    )


def _is_of_node(part: Part) -> bool:
    """True for a file that is named after its node, so that its number is of no attempt."""
    name, node = part.source.name, part.source.node
    return node is not None and (is_kernel_log(name) or _NODE.match(node) is not None)


def _span(group: Group) -> tuple[float, float] | None:
    """First and last time; where only some name their zone, of the others, of one clock."""
    every = [(row.time, row.text) for part in group for row in part.entries if row.time is not None]
    own = [pair for pair in every if not _OF_SCHEDULER.search(pair[1])] or every
    last, own_last = (
        max((without_year(time) for time, _ in some), default=0.0) for some in (every, own)
    )
    timed = own if may_be_time_zone(last - own_last) else every
    local = [without_year(time) for time, text in timed if not names_zone(text)]
    if local and len(local) < len(timed):
        return min(local), max(local)
    if len(timed) < len(every):
        return span_of_times([time for time, _ in timed])
    return span_of(log.stream for part in group for log in part.streams)


def _beginning(group: Group) -> set[str]:
    """Kinds of the first entries of each file; none of a file that begins with a step."""
    kinds: set[str] = set()
    for part in group:
        first = sorted(part.entries, key=lambda entry: entry.line)[:COMPARED_ENTRIES]
        if first and first[0].step is None:
            kinds |= {part.templates[entry.event].text for entry in first if entry.step is None}
    return kinds


def aligned(files: Sequence[Group]) -> list[list[Part]]:
    """Parts of each attempt of a job, from the attempts that each file has.

    torchelastic names the attempt in the path (``attempt_0/0/stdout.log``). Files with as many
    attempts as the one with most are aligned by their order, others by time, else from the end.
    """
    names = [ATTEMPT.search(parts[0].source.name) for parts in files]
    numbers = [int(name[1]) if name else None for name in names]
    by_name = max(map(len, files)) == 1 and len({*numbers} - {None}) < 2
    attempts = attempts_by_name(files) if by_name else _by_order(files, numbers)
    _leave_out_earlier(attempts)
    return attempts


def _by_order(files: Sequence[Group], numbers: Sequence[int | None]) -> list[list[Part]]:
    named = sorted({number for number in numbers if number is not None})
    working = [parts for parts in files if any(map(shows_work, parts))] or files
    most = len(named) or max(map(len, working))
    reference = next((parts for parts in files if len(parts) == most), files[0])
    begins = [] if named else [_bounds(part)[0] for part in reference]
    attempts: list[list[Part]] = [[] for _ in range(most)]
    for parts, number in zip(files, numbers, strict=True):
        if number is not None:
            attempts[named.index(number)].append(parts[-1])
        elif len(parts) > most:  # a tool's reports on one device after the other
            attempts[-1] += parts
        else:
            for at, part in enumerate(parts, -len(parts)):
                attempts[at if len(parts) == most else _place(part, begins, at)].append(part)
    return [parts for parts in attempts if parts]


def _place(part: Part, begins: Sequence[float | None], place: int) -> int:
    """The last attempt that begins before a part does, by its time; else `place`."""
    # A machine's log goes on through all attempts: it is of the last that it reaches.
    time = _bounds(part)[0 if shows_work(part) else 1]
    until = -inf if time is None else time + SAME_START_SECONDS
    begun = (at for at, begin in enumerate(begins) if begin is not None and begin <= until)
    return max(begun, default=place)


def _leave_out_earlier(attempts: Sequence[Sequence[Part]]) -> None:
    """Leave out what events and kernels logged of earlier attempts, where their clock is the job's.

    It is so where something of them comes at the moment in which an attempt begins or ends.
    """
    spans = [_span_of_work(parts) for parts in attempts]
    if len(attempts) < 2 or spans[-1] is None:
        return
    since = spans[-1][0] - SAME_START_SECONDS
    moments = [time for span in spans if span is not None for time in span]

    def is_since(entry: Occurrence) -> bool:
        return entry.time is None or without_year(entry.time) >= since

    for part in attempts[-1]:
        stated = [without_year(entry.time) for entry in part.entries if entry.time is not None]
        near = (abs(time - at) <= SAME_START_SECONDS for at in moments for time in stated)
        for stream in () if shows_work(part) or not any(near) else part.streams:
            stream.matches = [
                match if is_since(match.first) else replace(match, first=match.last, count=1)
                for match in stream.matches
                if is_since(match.last)
            ]


def _span_of_work(parts: Sequence[Part]) -> tuple[float, float] | None:
    """When the training of an attempt begins and ends."""
    own = [part for part in parts if shows_work(part)]
    # Another file may hold earlier attempts that were not distinguished.
    own = [part for part in own if part.first_line > 1] or own
    times = [time for part in own for time in _bounds(part) if time is not None]
    return (without_year(min(times)), without_year(max(times))) if times else None


def shows_work(part: Part) -> bool:
    """True if a line of the part stated a step or a stage."""
    return any(log.stream.steps or log.stages for log in part.streams)


def _bounds(part: Part) -> tuple[float | None, float | None]:
    """First and last time of its streams."""
    firsts = (log.stream.first_time for log in part.streams if log.stream.first_time is not None)
    lasts = (log.stream.last_time for log in part.streams if log.stream.last_time is not None)
    return min(firsts, default=None), max(lasts, default=None)
