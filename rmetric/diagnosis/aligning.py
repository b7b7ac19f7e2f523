"""Which parts of files are of one attempt of a job."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from rmetric.diagnosis.attempt_files import attempts_by_name
from rmetric.diagnosis.facts.job import JobStream, Match, Occurrence
from rmetric.diagnosis.one_pass import Part
from rmetric.diagnosis.reading.file_names import ATTEMPT
from rmetric.diagnosis.reading.timestamps import without_year

#: Seconds by which the files of one attempt may begin before the file that has most attempts.
SAME_START_SECONDS = 60.0


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

    It is where something of them comes at the moment in which an attempt begins or ends.
    """
    if len(attempts) < 2:
        return
    at_work = {part.source.name for parts in attempts for part in parts if shows_work(part)}
    spans = [_span_of_work(parts, at_work) for parts in attempts]
    moments = [time for span in spans if span is not None for time in span]
    if spans[-1] is not None:
        for part in attempts[-1]:
            if not shows_work(part):
                _leave_out_before(part, spans[-1][0] - SAME_START_SECONDS, moments)


def _leave_out_before(part: Part, since: float, moments: Sequence[float]) -> None:
    times = [(one.line, one.time) for one in part.entries if one.time is not None]
    stated = sorted((line, without_year(time)) for line, time in times)
    if any(abs(time - at) <= SAME_START_SECONDS for at in moments for _, time in stated):
        for stream in part.streams:
            last = [one for one in stream.matches if _is_since(one.last, since, stated)]
            stream.matches = [_since(one, stream.stream, since, stated) for one in last]


def _since(
    match: Match, stream: JobStream, since: float, stated: Sequence[tuple[int, float]]
) -> Match:
    """The match without the entries that are known to be of before."""
    if _is_since(match.first, since, stated):
        return match
    later = {
        one.order: one
        for one in (*stream.head, *stream.tail, match.last)
        if one.event in match.events and _is_since(one, since, stated)
    }
    first = later[min(later)] if later else match.last
    return replace(match, first=first, count=max(1, len(later)))


def _is_since(entry: Occurrence, since: float, stated: Sequence[tuple[int, float]]) -> bool:
    """False for an entry of before; one without a time has that of the last line that states one.

    `stated` are lines and times of its file, in order.
    """
    if entry.time is not None:
        return without_year(entry.time) >= since
    before = bisect_right(stated, (entry.line, inf))
    return not before or stated[before - 1][1] >= since


def _span_of_work(parts: Sequence[Part], at_work: Collection[str]) -> tuple[float, float] | None:
    """When an attempt begins and ends: its training, else the files that log another one's."""
    own = [part for part in parts if shows_work(part)]
    own = own or [part for part in parts if part.source.name in at_work]
    # Another file may hold earlier attempts that were not told apart.
    own = [part for part in own if part.first_line > 1] or own
    times = [
        without_year(time)
        for part in own
        for one in part.streams
        for time in (one.stream.first_time, one.stream.last_time)
        if time is not None
    ]
    return (min(times), max(times)) if times else None


def shows_work(part: Part) -> bool:
    """True if a line of the part stated a step or a stage."""
    return any(one.stream.steps or one.stages for one in part.streams)


def _bounds(part: Part) -> tuple[float | None, float | None]:
    """First and last time of its streams."""
    firsts = [one.stream.first_time for one in part.streams if one.stream.first_time is not None]
    lasts = [one.stream.last_time for one in part.streams if one.stream.last_time is not None]
    return min(firsts, default=None), max(lasts, default=None)
