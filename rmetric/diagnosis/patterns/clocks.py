"""Estimate the clock offset of each file from events that ranks log simultaneously.

Files whose times are far apart belong to one job with skewed clocks, or to two jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from statistics import median, median_low

from rmetric.diagnosis.job import Job, JobStream, Match, Occurrence
from rmetric.diagnosis.reading.file_names import is_kernel_log
from rmetric.diagnosis.reading.timestamps import NO_YEAR, without_year

#: Anchors of a valid offset agree within this many seconds,
MAX_ANCHOR_SPREAD_SECONDS = 2.0
#: or within this share of the offset.
MAX_ANCHOR_SPREAD_SHARE = 0.2
#: Smaller offsets, in seconds, are ignored: ranks run at slightly different paces.
MIN_OFFSET_SECONDS = 0.5
#: Least offset, in seconds, from first entries alone: start times differ too.
MIN_START_OFFSET_SECONDS = 900.0
#: Times this many seconds apart have different zeros: boot time instead of 1970.
OTHER_EPOCH_SECONDS = 10 * 365 * 86400.0
#: Least offset, in seconds, that is reported.
MIN_REPORTED_OFFSET_SECONDS = 60.0
#: Files this many seconds apart may belong to different jobs.
MIN_JOB_GAP_SECONDS = 3600.0
#: Least number of common anchors of files of one job: a common step, a common first entry.
MIN_COMMON_ANCHORS = 2

#: Seconds in which the ranks of its node end.
MAX_AFTER_LOST_GPU_SECONDS = 120.0
_HOUR = 3600.0
MAX_ZONE_HOURS = 14

_Key = tuple[int, int]


def clock_offsets(job: Job) -> dict[str, float]:
    """Map each file to the seconds that its clock is ahead of the job's median; 0 is omitted.

    All ranks write the line of one step at about the same moment, since they wait for each other.
    The clocks of two files are compared by the step lines and last entries that both kept: by the
    median of the differences, if those agree. A file without common lines is compared by its
    first entry with files that begin alike, where only a difference of `MIN_START_OFFSET_SECONDS`
    counts. Files of two jobs are not compared, but for what no rank outlives.
    """
    anchors, starts = _anchors(job), {name: begin for name, (begin, _) in job.spans.items()}
    if len(starts) < 2:
        return {}
    if two_jobs(job, MIN_START_OFFSET_SECONDS) is not None:
        return _by_deaths(job)
    moments, kin = _moments(anchors), _of_one_program(job)
    found = {}
    alike: dict[int, list[float]] = defaultdict(list)
    for name, event in kin.items():
        if name in starts:
            alike[event].append(starts[name])
    usual = {event: median_low(times) for event, times in alike.items()}
    for name in starts:
        offset = _by_anchors(anchors.get(name, {}), moments)
        if offset is None:
            # A kernel's or a launcher's log begins at any time.
            offset = starts[name] - (usual[kin[name]] if name in kin else starts[name])
            if not MIN_START_OFFSET_SECONDS <= abs(offset) < OTHER_EPOCH_SECONDS:
                continue
        if abs(offset) >= MIN_OFFSET_SECONDS:
            found[name] = round(offset, 3)
    return found | _by_ends(job) | _by_deaths(job)


def _by_ends(job: Job) -> dict[str, float]:
    """Files in which a process is taken down hours before its last step in another file.

    Its errors are logged by the clock of another time zone, as PyTorch's are beside a program
    that logs UTC.
    """
    found = {}
    for (_, name), match in job.matches.items():
        last, end = job.streams[name].last_step_at, match.last
        if "takes down" not in match.traits or last is None or last.file == end.file:
            continue
        if last.time is None or end.time is None or min(last.time, end.time) < NO_YEAR[0]:
            continue
        hours = ceil((without_year(last.time) - without_year(end.time)) / _HOUR)
        if 0 < hours <= MAX_ZONE_HOURS:
            found[end.file] = -hours * _HOUR
    return found


def is_deadly(job: Job, match: Match) -> bool:
    """True for what no rank of its node outlives.

    A lost or broken GPU, a link whose other end has no answer, or the kill of one of the ranks.
    """
    if "breaks the GPU" in match.traits:
        return True
    if "link down" in match.traits:
        return "no answer" in job.traits
    if "kernel kill" not in match.traits:
        return False
    ranks = job.ranks_of_numbers
    killed = (fields.get("pid", "") for fields in match.named)
    return any(int(pid) in ranks for pid in killed if pid.isdigit())


def _by_deaths(job: Job) -> dict[str, float]:
    """Kernels' logs of what no rank outlives, whole hours from the end of its node."""
    found = {}
    ends: dict[str | None, list[tuple[float, str]]] = {}
    for match in job.matches.values():
        fault = match.first
        if not is_deadly(job, match) or fault.time is None or fault.time < NO_YEAR[0]:
            continue
        node = job.node_of(job.streams[match.stream])
        if node not in ends:
            times = ((one.time or 0.0, one.file) for one in _timed_on(job, node))
            dated = sorted((without_year(at), file) for at, file in times if at >= NO_YEAR[0])
            latest = {file: at for at, file in dated}
            ends[node] = sorted(((at, file) for file, at in latest.items()), reverse=True)[:2]
        own = without_year(fault.time)
        apart = next((at for at, file in ends[node] if file != fault.file), own) - own
        hours = round(apart / _HOUR)
        near = abs(apart - hours * _HOUR) <= MAX_AFTER_LOST_GPU_SECONDS
        if 0 < abs(hours) <= MAX_ZONE_HOURS and near:
            found[fault.file] = -hours * _HOUR
    return found


def timed_on_its_node(job: Job, match: Match) -> Iterator[Occurrence]:
    """The last entries with a time in other files about the node of a match."""
    entries = _timed_on(job, job.node_of(job.streams[match.stream]))
    return (entry for entry in entries if entry.file != match.first.file)


def _timed_on(job: Job, node: str | None) -> Iterator[Occurrence]:
    for of in {node, None}:  # a log of no node ends as the job does
        for one in job.of_node.get(of, ()):
            yield from (entry for entry in one.tail if entry.time is not None)


def _of_one_program(job: Job) -> dict[str, int]:
    """File -> the first kind of entry in it that another file begins with too; none of others.

    Only such files, as ranks write them, begin together. Machines' own logs do not.
    """
    begins: dict[str, list[int]] = defaultdict(list)
    for stream in job.streams.values():
        for one in stream.head:
            begins[one.file].append(one.event)
    often = Counter(event for events in begins.values() for event in set(events))
    return {
        name: next(event for event in events if often[event] > 1)
        for name, events in begins.items()
        if any(often[event] > 1 for event in events) and not is_kernel_log(name)
    }


def clock_notes(offsets: Mapping[str, float]) -> list[str]:
    """Notes on clock offsets, at most one sentence."""
    large = {
        name: by
        for name, by in offsets.items()
        if MIN_REPORTED_OFFSET_SECONDS <= abs(by) < OTHER_EPOCH_SECONDS
    }
    if not large:
        return []
    worst = max(large, key=lambda name: (abs(large[name]), name))
    way = "ahead of" if large[worst] > 0 else "behind"
    some = f"The clocks of {len(large)} files differ" if len(large) > 1 else "A clock differs"
    return [f"{some}: {worst} is {_span(abs(large[worst]))} {way} the others; corrected for."]


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def two_jobs(job: Job, apart: float = MIN_JOB_GAP_SECONDS) -> tuple[str, str] | None:
    """The files of two jobs, the last of the first and the first of the second; None of one job.

    There is time between them. They are of one job, with clocks that differ, only if different
    ranks or nodes write them, and if their entries of one moment agree.

    Args:
        job: the job.
        apart: least seconds without an entry.
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
    earlier, later = _first_times(before), _first_times(behind)
    shared = earlier.keys() & later.keys()
    # By common steps, or by common first entries where there are no steps.
    steps = {key for key in shared if key[1] is not None}
    by = [later[key] - earlier[key] for key in steps or shared]
    return len(by) >= MIN_COMMON_ANCHORS and _spread(by) <= MAX_ANCHOR_SPREAD_SECONDS


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(one - middle) for one in values)


def _first_times(streams: Sequence[JobStream]) -> dict[tuple[int, int | None], float]:
    """(event, step) -> the first time of such an entry among their first and last entries."""
    found: dict[tuple[int, int | None], float] = {}
    for one in (entry for stream in streams for entry in (*stream.head, *stream.tail)):
        if one.time is not None:
            key = (one.event, one.step)
            found[key] = min(one.time, found.get(key, one.time))
    return found


def _anchors(job: Job) -> dict[str, dict[_Key, float]]:
    """File -> (event, step) -> the last time of such an entry there."""
    found: dict[str, dict[_Key, float]] = defaultdict(dict)
    for stream in job.streams.values():
        for one in (*stream.head, *stream.tail, stream.last_step_at):
            if one is not None and one.time is not None and one.step is not None:
                found[one.file][one.event, one.step] = one.time
    return found


def _moments(anchors: Mapping[str, Mapping[_Key, float]]) -> dict[_Key, float]:
    """The time of each anchor of at least two files, by the clock in the middle."""
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
    most = max(MAX_ANCHOR_SPREAD_SECONDS, MAX_ANCHOR_SPREAD_SHARE * abs(offset))
    return offset if _spread(differences) <= most else None
