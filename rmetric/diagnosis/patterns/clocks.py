"""Estimate the clock offset of each file from events that ranks log simultaneously.

Files whose times are far apart belong to one job with skewed clocks, or to two jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_low

from rmetric.diagnosis.job import Job, Occurrence, Stream
from rmetric.diagnosis.reading.timestamps import NO_YEAR

#: An offset is believed if its anchors agree within so many seconds, or that share of it.
AGREE, AGREE_SHARE = 2.0, 0.2
#: Smaller offsets are left alone: they are the ranks' own pace.
LEAST = 0.5
#: By first entries alone an offset is believed from so many seconds on: starts differ too.
LEAST_BY_START = 900.0
#: Times farther apart have another zero: seconds since boot, not since 1970.
OTHER_ZERO = 10 * 365 * 86400.0
#: Offsets from here on are told to the reader.
WORTH_TELLING = 60.0
#: Files with so many seconds and nothing else between them may be of different jobs.
APART = 3600.0
#: Ordering that files of one job share, at least: a step told by both, a first entry of both.
SHARED = 2

_Key = tuple[int, int]


def clock_offsets(job: Job) -> dict[str, float]:
    """File -> seconds that its clock is ahead of the job's (the median file's); 0 is left out.

    A step line of one step is written by all ranks at about the same moment, for they wait for
    each other; so are two files' clocks compared by the step lines and last words that both
    have kept, by the median of the differences where those agree. A file that shares none is
    compared by its first entry, and only a difference of `LEAST_BY_START` counts then. Those of
    two jobs are not compared.
    """
    anchors, starts = _anchors(job), {name: begin for name, (begin, _) in job.spans.items()}
    if len(starts) < 2 or two_jobs(job, LEAST_BY_START) is not None:
        return {}
    moments = _moments(anchors)
    begin = median_low(starts.values())
    found = {}
    for name, start in starts.items():
        offset = _by_anchors(anchors.get(name, {}), moments)
        if offset is None:
            offset = start - begin
            if not LEAST_BY_START <= abs(offset) < OTHER_ZERO:
                continue
        if abs(offset) >= LEAST:
            found[name] = round(offset, 3)
    return found


def clock_notes(offsets: Mapping[str, float]) -> list[str]:
    """Notes on clock offsets, at most one sentence."""
    large = {name: by for name, by in offsets.items() if WORTH_TELLING <= abs(by) < OTHER_ZERO}
    if not large:
        return []
    worst = max(large, key=lambda name: (abs(large[name]), name))
    way = "ahead of" if large[worst] > 0 else "behind"
    some = f"The clocks of {len(large)} files differ" if len(large) > 1 else "A clock differs"
    return [f"{some}: {worst} is {_span(abs(large[worst]))} {way} the others; corrected for."]


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def two_jobs(job: Job, apart: float = APART) -> tuple[str, str] | None:
    """The files of two jobs, the last of the first and the first of the second; None of one job.

    There is time between them. Of one job, with clocks that differ, they are only if different
    ranks or nodes speak in them, and what these say at one moment agrees.

    Args:
        apart: seconds without an entry that it takes.
    """
    # Seconds since boot, and times without a year, cannot be compared with others.
    dated = {name: span for name, span in job.spans.items() if min(span) >= NO_YEAR[1]}
    spans = sorted((begin, end, name) for name, (begin, end) in dated.items())
    until, last = spans[0][1:] if spans else (0.0, "")
    early: set[str] = set()
    for begin, end, name in spans:
        if begin - until > apart and not _one_job(job, early, dated.keys() - early):
            return last, name
        early.add(name)
        if end > until:
            until, last = end, name
    return None


def _one_job(job: Job, early: set[str], late: set[str]) -> bool:
    """Return True if early and late files belong to one job."""
    seated = [one for one in job.streams.values() if one.rank is not None or one.node is not None]
    before = [one for one in seated if one.files & early]
    behind = [one for one in seated if one.files & late]
    ranks = {one.rank for one in seated if one.rank is not None}
    same = {one.name for one in before} & {one.name for one in behind}
    if same or len(ranks) > (job.world_size or len(ranks)):
        return False
    return _agree(_moments_of(before), _moments_of(behind))


def _moments_of(streams: Sequence[Stream]) -> dict[tuple[int, int | None], float]:
    """Event and step -> when the first of them said it, of what they said first and last."""
    found: dict[tuple[int, int | None], float] = {}
    for one in (entry for stream in streams for entry in (*stream.head, *stream.tail)):
        if one.time is not None:
            key = (one.event, one.step)
            found[key] = min(one.time, found.get(key, one.time))
    return found


def _agree(
    before: Mapping[tuple[int, int | None], float], behind: Mapping[tuple[int, int | None], float]
) -> bool:
    """Compare by common steps, or by first entries without steps."""
    shared = before.keys() & behind.keys()
    steps = {key for key in shared if key[1] is not None}
    by = [behind[key] - before[key] for key in steps or shared]
    if len(by) < SHARED:
        return False
    middle = median(by)
    return median(abs(one - middle) for one in by) <= AGREE


def _kept(stream: Stream) -> Iterator[Occurrence]:
    yield from stream.head
    yield from stream.tail
    if stream.last_step_at is not None:
        yield stream.last_step_at


def _anchors(job: Job) -> dict[str, dict[_Key, float]]:
    """File -> (event, step) -> the time at which it was last said there."""
    found: dict[str, dict[_Key, float]] = defaultdict(dict)
    for stream in job.streams.values():
        for one in _kept(stream):
            if one.time is not None and one.step is not None:
                found[one.file][one.event, one.step] = one.time
    return found


def _moments(anchors: Mapping[str, Mapping[_Key, float]]) -> dict[_Key, float]:
    """When the job did it, by the middle one of the clocks of at least two files."""
    times: dict[_Key, list[float]] = defaultdict(list)
    for kept in anchors.values():
        for key, time in kept.items():
            times[key].append(time)
    return {key: median_low(all_of) for key, all_of in times.items() if len(all_of) >= 2}


def _by_anchors(kept: Mapping[_Key, float], moments: Mapping[_Key, float]) -> float | None:
    differences = [time - moments[key] for key, time in kept.items() if key in moments]
    if not differences:
        return None
    offset = median(differences)
    spread = median(abs(one - offset) for one in differences)
    return offset if spread <= max(AGREE, AGREE_SHARE * abs(offset)) else None
