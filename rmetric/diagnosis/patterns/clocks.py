"""By how much the clocks of a job's files differ, from what their ranks do at one moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

from rmetric.diagnosis.job import Job, Occurrence, Stream

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

_Key = tuple[int, int]


def clock_offsets(job: Job) -> dict[str, float]:
    """File -> seconds that its clock is ahead of the job's (the median file's); 0 is left out.

    A step line of one step is written by all ranks at about the same moment, for they wait for
    each other; so are two files' clocks compared by the step lines and last words that both
    have kept, by the median of the differences where those agree. A file that shares none is
    compared by its first entry, and only a difference of `LEAST_BY_START` counts then.
    """
    anchors, starts = _anchors(job), _starts(job)
    if len(starts) < 2:
        return {}
    moments = _moments(anchors)
    begin = median(starts.values())
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
    """What a reader must know of the clocks: at most one sentence."""
    large = {name: by for name, by in offsets.items() if abs(by) >= WORTH_TELLING}
    if not large:
        return []
    worst = max(large, key=lambda name: (abs(large[name]), name))
    way = "ahead of" if large[worst] > 0 else "behind"
    some = f"The clocks of {len(large)} files differ" if len(large) > 1 else "A clock differs"
    return [f"{some}: {worst} is {_span(abs(large[worst]))} {way} the others; corrected for."]


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def _starts(job: Job) -> dict[str, float]:
    starts: dict[str, float] = {}
    for stream in job.streams.values():
        if stream.first is not None and stream.first.time is not None:
            name = stream.first.file
            starts[name] = min(stream.first.time, starts.get(name, stream.first.time))
    return starts


def _kept(stream: Stream) -> Iterator[Occurrence]:
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
    """When the job did it, by the middle of the clocks of at least two files."""
    times: dict[_Key, list[float]] = defaultdict(list)
    for kept in anchors.values():
        for key, time in kept.items():
            times[key].append(time)
    return {key: median(all_of) for key, all_of in times.items() if len(all_of) >= 2}


def _by_anchors(kept: Mapping[_Key, float], moments: Mapping[_Key, float]) -> float | None:
    differences = [time - moments[key] for key, time in kept.items() if key in moments]
    if not differences:
        return None
    offset = median(differences)
    spread = median(abs(one - offset) for one in differences)
    return offset if spread <= max(AGREE, AGREE_SHARE * abs(offset)) else None
