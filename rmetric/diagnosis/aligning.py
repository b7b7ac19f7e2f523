"""Which parts of files are of one attempt of a job, by times or by numbers in the files' names.

Files are of different attempts if a number in their names ("train_41700_0.out", "run3/rank_0.log")
orders them in time, without an overlap, and if each attempt begins with lines of the same kind. A
log that is rotated goes on where the last file ended, and does not begin again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rmetric.diagnosis.clock import may_be_time_zone
from rmetric.diagnosis.facts.job import Occurrence, span_of, span_of_times
from rmetric.diagnosis.one_pass import Part, StreamPart
from rmetric.diagnosis.reading.file_names import ATTEMPT, is_kernel_log
from rmetric.diagnosis.reading.timestamps import NO_YEAR, names_zone, without_year

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

_NUMBER = re.compile(r"\d+")
_NODE = re.compile(r"(?i)(?:node|host|server|machine)[-_]?\d")
#: The scheduler's lines have its own clock, which may be of another zone.
_OF_SCHEDULER = re.compile(r"^slurmstepd\b|\bCANCELLED AT\b")

Group = Sequence[Part]


def attempts_by_name(files: Sequence[Group]) -> list[list[Part]]:
    """Parts of each attempt, the first one first; one list where the names tell of one attempt."""
    parts = [one for each in files for one in each]
    for groups, of_jobs in _groupings(parts):
        if 1 < len(groups) <= MAX_ATTEMPTS and _are_attempts(groups, of_jobs=of_jobs):
            grouped = {id(part) for group in groups for part in group}
            # Files without the number, such as a kernel's log, are with the last attempt.
            others = [part for part in parts if id(part) not in grouped]
            return [*map(list, groups[:-1]), [*groups[-1], *others]]
    return [parts]


def _groupings(parts: Group) -> Iterator[tuple[list[Group], bool]]:
    """Parts in the order of what may number attempts; whether that numbers the scheduler's jobs."""
    forms = [_NUMBER.sub("0", part.source.name) for part in parts]
    # A file without its like in another attempt is of none, whatever numbers its name has.
    common = {form for form, count in Counter(forms).items() if count > 1}
    numbers = [
        (part, [*map(int, _NUMBER.findall(part.source.name))])
        for part, form in zip(parts, forms, strict=True)
        if form in common
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
    forms = [{_NUMBER.sub("0", part.source.name) for part in group} for group in groups]
    nodes = {part.source.node for group in groups for part in group if _is_of_node(part)}
    # A step or a known fault, as programs write them.
    tells = (any(one.stream.steps or one.matches for one in _streams(group)) for group in groups)
    return (
        all(one == forms[0] for one in forms)
        and len(nodes) != len(groups)
        and all(tells)
        and _follow([_span(group) for group in groups])
        and (of_jobs or _begin_alike(groups))
    )


def _follow(spans: Sequence[tuple[float, float] | None]) -> bool:
    """True if each span is known and begins after the one before has ended."""
    known = [span for span in spans if span is not None]
    if len({span[0] >= NO_YEAR[1] for span in known}) > 1:
        # Only within a year are they in order.
        known = [(without_year(begin), without_year(end)) for begin, end in known]
    return len(known) == len(spans) and all(
        after[0] > max(before[1], before[0] + MIN_SECONDS_APART)
        for before, after in pairwise(known)
    )


def _begin_alike(groups: Sequence[Group]) -> bool:
    """True if each group's first entries are of kinds that the next one's have too."""
    # One that failed before its program began has other first lines.
    worked = [group for group in groups if any(one.stream.steps for one in _streams(group))]
    kinds = [_beginning(group) for group in (worked if len(worked) > 1 else groups)]
    return all(
        len(before & after) >= max(1.0, MIN_SHARED * min(len(before), len(after)))
        for before, after in pairwise(kinds)
    )


def _streams(group: Group) -> Iterator[StreamPart]:
    return (one for part in group for one in part.streams)


def _is_of_node(part: Part) -> bool:
    """True for a file that is named after its node, so that its number is of no attempt."""
    name, node = part.source.name, part.source.node
    return node is not None and (is_kernel_log(name) or _NODE.match(node) is not None)


def _span(group: Group) -> tuple[float, float] | None:
    """First and last time; where only some name their zone, of the others, of one clock."""
    every = [(one.time, one.text) for part in group for one in part.entries if one.time is not None]
    own = [one for one in every if not _OF_SCHEDULER.search(one[1])] or every
    last, own_last = (
        max((without_year(time) for time, _ in some), default=0.0) for some in (every, own)
    )
    timed = own if may_be_time_zone(last - own_last) else every
    local = [without_year(time) for time, text in timed if not names_zone(text)]
    if local and len(local) < len(timed):
        return min(local), max(local)
    if len(timed) < len(every):
        return span_of_times([time for time, _ in timed])
    return span_of(one.stream for one in _streams(group))


def _beginning(group: Group) -> set[str]:
    """Kinds of the first entries of each file; none of a file that begins with a step."""
    kinds: set[str] = set()
    for part in group:
        first = sorted(part.entries, key=lambda one: one.line)[:COMPARED_ENTRIES]
        if first and first[0].step is None:
            kinds |= {part.templates[one.event].text for one in first if one.step is None}
    return kinds


def aligned(files: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """Parts of each attempt of a job, from the attempts that each file has.

    torchelastic names the attempt in the path (``attempt_0/0/stdout.log``). Files with as many
    attempts as the one with most are aligned by their order, others by time, else from the end.
    """
    names = [ATTEMPT.search(parts[0].source.name) for parts in files]
    numbers = [int(name[1]) if name else None for name in names]
    if max(map(len, files)) == 1 and len({*numbers} - {None}) < 2:
        attempts = attempts_by_name(files)
    else:
        attempts = [parts for parts in _by_order(files, numbers) if parts]
    _leave_out_earlier(attempts)
    return attempts


def _by_order(files: Sequence[Sequence[Part]], numbers: Sequence[int | None]) -> list[list[Part]]:
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
            for at, part in enumerate(parts):
                same = len(parts) == most
                attempts[at if same else _place(part, begins, at - len(parts))].append(part)
    return attempts


def _place(part: Part, begins: Sequence[float | None], place: int) -> int:
    """The last attempt that begins before a part does, by its time; else `place`."""
    # A machine's log goes on through all attempts: it is of the last that it reaches.
    begin, end = _bounds(part)
    time = begin if shows_work(part) else end
    if time is None:
        return place
    limit = time + SAME_START_SECONDS
    return max(
        (at for at, one in enumerate(begins) if one is not None and one <= limit), default=place
    )


def _leave_out_earlier(attempts: Sequence[Sequence[Part]]) -> None:
    """Leave out what events and kernels logged of earlier attempts, where their clock is the job's.

    It is so where something of them comes at the moment in which an attempt begins or ends.
    """
    spans = [_span_of_work(parts) for parts in attempts]
    if len(attempts) < 2 or spans[-1] is None:
        return
    since = spans[-1][0] - SAME_START_SECONDS
    moments = [time for span in spans if span is not None for time in span]
    for part in attempts[-1]:
        stated = [without_year(one.time) for one in part.entries if one.time is not None]
        if not shows_work(part) and any(
            abs(time - at) <= SAME_START_SECONDS for at in moments for time in stated
        ):
            for stream in part.streams:
                last = [one for one in stream.matches if _is_since(one.last, since)]
                stream.matches = [
                    one if _is_since(one.first, since) else replace(one, first=one.last, count=1)
                    for one in last
                ]


def _is_since(entry: Occurrence, since: float) -> bool:
    return entry.time is None or without_year(entry.time) >= since


def _span_of_work(parts: Sequence[Part]) -> tuple[float, float] | None:
    """When the training of an attempt begins and ends."""
    own = [part for part in parts if shows_work(part)]
    # Another file may hold earlier attempts that were not told apart.
    own = [part for part in own if part.first_line > 1] or own
    bounds = [time for part in own for time in _bounds(part) if time is not None]
    return (without_year(min(bounds)), without_year(max(bounds))) if bounds else None


def shows_work(part: Part) -> bool:
    """True if a line of the part stated a step or a stage."""
    return any(one.stream.steps or one.stages for one in part.streams)


def _bounds(part: Part) -> tuple[float | None, float | None]:
    """First and last time of its streams."""
    firsts = [one.stream.first_time for one in part.streams if one.stream.first_time is not None]
    lasts = [one.stream.last_time for one in part.streams if one.stream.last_time is not None]
    return min(firsts, default=None), max(lasts, default=None)
