"""Clocks: when an entry was logged, what came before what, and by how much a file's clock is off.

Within one file the order of its lines decides, between files the times that they state, corrected
by one offset for each file. Ranks wait for each other, so that they write the line of one step at
about the same moment: where such moments disagree, the clocks do.
"""

from __future__ import annotations

from bisect import bisect_right
from calendar import timegm
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil, inf
from operator import attrgetter
from statistics import median, median_low
from time import gmtime

from rmetric.diagnosis.facts.job import Job, JobStream, Match, Occurrence, span_of
from rmetric.diagnosis.reading.timestamps import NO_YEAR, names_zone, without_year

#: Largest difference of corrected times, in seconds, within one moment in several files.
CLOCK_TOLERANCE_SECONDS = 2.0
#: Seconds between neighbours in one file that state none.
NEXT = 1e-6
#: At most so many streams, the last ones, are compared; and the first and last planned ends.
MOST_COMPARED = 64
#: Largest distance of a completed date from the job's other times, in seconds.
NEAR = 2 * 86400.0
#: A time within so many seconds of whole half hours may be a difference of time zones.
ZONE_SECONDS = 1800.0
ZONE_TOLERANCE = 90.0
MAX_ZONE_SECONDS = 14 * 3600.0
#: Common moments of two clocks agree within this many seconds, or this share of the offset.
MAX_SPREAD_SECONDS = 2.0
MAX_SPREAD_SHARE = 0.2
#: Smaller offsets, in seconds, are ignored: ranks run at slightly different paces.
MIN_OFFSET_SECONDS = 0.5
#: Files of the same ranks that are so many seconds apart have no common clock.
MIN_OFFSET_OF_JOBS_SECONDS = 900.0
#: Least offset, in seconds, that is reported.
MIN_REPORTED_OFFSET_SECONDS = 60.0
#: Times this many seconds apart have different zeros: boot time instead of 1970.
OTHER_EPOCH_SECONDS = 10 * 365 * 86400.0
#: Files this many seconds apart may belong to different jobs.
MIN_JOB_GAP_SECONDS = 3600.0
#: Seconds in which the ranks of its node end.
MAX_AFTER_LOST_GPU_SECONDS = 120.0
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """Orders entries of a job; `offsets`: file -> seconds that its clock is ahead."""

    job: Job
    offsets: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def span(self) -> tuple[float, float] | None:
        """First and last time with a year; without any, of all; None where nothing states one."""
        return span_of(self.job.streams.values())

    def dated(self, entry: Occurrence) -> float | None:
        """The time that the entry states, with the job's year where it can be derived."""
        seconds = self.seconds(entry)
        return entry.time if seconds is None else seconds + self.offsets.get(entry.file, 0.0)

    def seconds(self, entry: Occurrence) -> float | None:
        """Corrected time, with the job's year; None where nothing states one."""
        if entry.time is None:  # a traceback takes that of the entry before it, if it is kept
            stream = self.job.streams.get(entry.stream)
            tail = stream.tail if stream is not None and len(stream.files) == 1 else ()
            if any(kept.file == entry.file and kept.order <= entry.order for kept in tail):
                entries, at = self._place(entry)
                entry = entries[at - 1] if at else entry
        time = entry.time
        if time is not None and self.span and time < NO_YEAR[1] <= self.span[0]:
            time = _with_year(time, *self.span)
        if time is not None and entry.file in self._zones and names_zone(entry.text):
            time += self._zones[entry.file]
        return None if time is None else time - self.offsets.get(entry.file, 0.0)

    def at_latest(self, entry: Occurrence) -> Occurrence | None:
        """The entry, or the next kept one of its file with a time if it has none; None without."""
        if entry.time is not None:
            return entry
        entries, at = self._place(entry)
        return entries[at] if at < len(entries) else None

    def _place(self, entry: Occurrence) -> tuple[Sequence[Occurrence], int]:
        """Entries with a time of its file, and how many of them stand before it."""
        entries = self._timed.get(entry.file, ())
        return entries, bisect_right(entries, entry.order, key=attrgetter("order"))

    @cached_property
    def _timed(self) -> dict[str, list[Occurrence]]:
        """File -> its last and its matched entries with a time, in order."""
        last = [entry for stream in self.job.streams.values() for entry in stream.tail]
        ends = [entry for match in self.job.matches.values() for entry in (match.first, match.last)]
        found: dict[str, list[Occurrence]] = defaultdict(list)
        for entry in sorted((*last, *ends), key=attrgetter("order")):
            if entry.time is not None:
                found[entry.file].append(entry)
        return dict(found)

    @cached_property
    def _zones(self) -> dict[str, float]:
        """File -> the only shift of its times with a zone with which they rise as its lines do."""
        found = dict[str, float]()
        for file, entries in self._timed.items():
            rises = [(b.time or 0.0) - (a.time or 0.0) for a, b in pairwise(entries)]
            if -MAX_ZONE_SECONDS <= min(rises, default=0.0) < ZONE_TOLERANCE - ZONE_SECONDS:
                named = [names_zone(entry.text) for entry in entries]
                pairs = zip(rises, pairwise(named), strict=True)
                ways = [(rise + ZONE_TOLERANCE, b - a) for rise, (a, b) in pairs if a != b]
                most = round(MAX_ZONE_SECONDS / ZONE_SECONDS)
                zones = [ZONE_SECONDS * half for half in range(-most, most + 1)]
                fits = [zone for zone in zones if all(rise + way * zone > 0 for rise, way in ways)]
                found |= {file: fits[0]} if len(fits) == 1 else {}
        return found

    @cached_property
    def stepping(self) -> list[JobStream]:
        """Streams that log steps; of more than `MOST_COMPARED`, those that step last."""
        lasts = [(stream.last_step_at, stream) for stream in self.job.stepping]
        lasts.sort(key=lambda pair: self.key(pair[0]) if pair[0] else (-inf, 0))
        return [stream for _, stream in lasts[-MOST_COMPARED:]]

    def later_by(self, entry: Occurrence, other: Occurrence) -> float | None:
        """Seconds by which `entry` is after `other`, negative before; None where unknown.

        Within one file the order decides; a difference that the times do not state is `NEXT`.
        """
        mine, others = self.seconds(entry), self.seconds(other)
        seconds = None
        # Seconds since boot cannot be compared with a date.
        if mine is not None and others is not None and _since_boot(mine) == _since_boot(others):
            seconds = mine - others
        if entry.file == other.file:
            sign = (entry.order > other.order) - (entry.order < other.order)
            return sign * max((seconds or 0.0) * sign, NEXT)
        if seconds is not None:
            return seconds
        if entry.step is not None and other.step is not None and entry.step != other.step:
            return float(entry.step - other.step)
        return None

    def after(self, entry: Occurrence, other: Occurrence) -> bool:
        """True for certainly after: by order in a file, else beyond the clocks' tolerance."""
        later = self.later_by(entry, other)
        tolerance = 0.0 if entry.file == other.file else CLOCK_TOLERANCE_SECONDS
        return later is not None and later > tolerance

    def key(self, entry: Occurrence) -> tuple[float, int]:
        """Sorts entries, the first first; those without a time after those with one."""
        if len(self.job.files) == 1:
            return (0.0, entry.order)
        seconds = self.seconds(entry)
        return (inf if seconds is None else seconds, entry.order)


def _with_year(time: float, first: float, last: float) -> float | None:
    """A time without a year in that of a job; None for one far from its span, or since boot."""
    dated = timegm((gmtime(last).tm_year, *gmtime(time)[1:6])) + time % 1.0
    return dated if first - NEAR <= dated <= last + NEAR and not _since_boot(time) else None


def _since_boot(time: float) -> bool:
    return time < NO_YEAR[0]


def may_be_time_zone(seconds: float) -> bool:
    """True if two times so far apart may be of one moment, by clocks of two time zones."""
    zones = round(seconds / ZONE_SECONDS)
    off = abs(seconds - zones * ZONE_SECONDS)
    return zones > 0 and seconds <= MAX_ZONE_SECONDS and off <= ZONE_TOLERANCE


def clock_offsets(job: Job) -> dict[str, float]:
    """Map each file to the seconds that its clock is ahead of the job's median; 0 is omitted.

    By the median of its differences from the middle clock at entries of the same steps, if they
    agree; of two jobs, only by evidence of time zones.
    """
    found = {}
    if two_jobs(job, MIN_OFFSET_OF_JOBS_SECONDS) is None:
        for name, differences in _apart_at_steps(job).items():
            offset = median(differences)
            most = max(MAX_SPREAD_SECONDS, MAX_SPREAD_SHARE * abs(offset))
            agreed = median(abs(apart - offset) for apart in differences) <= most
            if agreed and abs(offset) >= MIN_OFFSET_SECONDS:
                found[name] = round(offset, 3)
    return found | dict(_by_zones(job))


def _apart_at_steps(job: Job) -> dict[str, list[float]]:
    """File -> seconds by which its clock is ahead of the one in the middle at each moment."""
    # A moment is the first entry of a kind at a step.
    moments: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for stream in job.streams.values():
        for entry in (*stream.head, *stream.tail, stream.last_step_at):
            if entry is not None and entry.step is not None and entry.time is not None:
                times = moments[entry.event, entry.step]
                times[entry.file] = min(entry.time, times.get(entry.file, entry.time))
    found: dict[str, list[float]] = defaultdict(list)
    for times in moments.values():
        usual = median_low(times.values())
        for name, time in times.items() if len(times) > 1 else ():
            found[name].append(time - usual)
    return found


def _by_zones(job: Job) -> Iterator[tuple[str, float]]:
    """Files that are whole hours apart from others about the same process or node."""
    # No process is taken down before its last step, and no rank outlives what is deadly.
    ends: dict[str | None, dict[str, float]] = {}
    for match in job.matches.values():
        own, hours, last = match.last, 0, job.streams[match.stream].last_step_at
        if is_deadly(job, match):
            own, node = match.first, job.node_of(job.streams[match.stream])
            if node not in ends:
                ends[node] = _last_times(_timed_on(job, node))
            apart = _later(ends[node], own)
            near = abs(apart - _HOUR * round(apart / _HOUR)) <= MAX_AFTER_LOST_GPU_SECONDS
            hours = round(apart / _HOUR) if near else 0
        elif "takes down" in match.traits and last is not None:
            hours = max(0, ceil(_later(_last_times([last]), own) / _HOUR))
        if 0 < abs(hours) * _HOUR <= MAX_ZONE_SECONDS:
            yield own.file, -hours * _HOUR


def _last_times(entries: Iterable[Occurrence]) -> dict[str, float]:
    """File -> its last time, whatever the year, of the two files that end last."""
    latest: dict[str, float] = {}
    for entry in entries:
        if entry.time and not _since_boot(entry.time):
            latest[entry.file] = max(without_year(entry.time), latest.get(entry.file, 0.0))
    return dict(sorted(latest.items(), key=lambda item: (-item[1], item[0]))[:2])


def _later(latest: Mapping[str, float], than: Occurrence) -> float:
    """Seconds from an entry to the last time of other files; 0.0 where not known."""
    times = [time for file, time in latest.items() if file != than.file]
    known = times and than.time and not _since_boot(than.time)
    return max(times) - without_year(than.time) if known and than.time else 0.0


def is_deadly(job: Job, match: Match) -> bool:
    """True for what no rank of its node outlives: a lost GPU or link, the kill of a rank."""
    if "breaks the GPU" in match.traits:
        return True
    if "link down" in match.traits:
        return "no answer" in job.traits
    killed = [fields.get("pid", "") for fields in match.named]
    ranks = job.ranks_of_numbers if "kernel kill" in match.traits else {}
    return any(int(pid) in ranks for pid in killed if pid.isdigit())


def timed_on_its_node(job: Job, match: Match) -> Iterator[Occurrence]:
    """The last entries with a time in other files about the node of a match."""
    entries = _timed_on(job, job.node_of(job.streams[match.stream]))
    return (entry for entry in entries if entry.file != match.first.file)


def _timed_on(job: Job, node: str | None) -> Iterator[Occurrence]:
    for name in {node, None}:  # a log of no node ends as the job does
        for stream in job.of_node.get(name, ()):
            yield from (entry for entry in stream.tail if entry.time is not None)


def clock_notes(offsets: Mapping[str, float]) -> list[str]:
    """Notes on clock offsets, at most one sentence."""
    least, most = MIN_REPORTED_OFFSET_SECONDS, OTHER_EPOCH_SECONDS
    large = sorted((abs(by), name) for name, by in offsets.items() if least <= abs(by) < most)
    if not large:
        return []
    seconds, worst = large[-1]
    way = "ahead of" if offsets[worst] > 0 else "behind"
    some = f"The clocks of {len(large)} files differ" if len(large) > 1 else "A clock differs"
    return [f"{some}: {worst} is {time_span(seconds)} {way} the others; corrected for."]


def time_span(seconds: float) -> str:
    """A span of time for people: "7.5 h", "12 min"."""
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def two_jobs(job: Job, apart: float = MIN_JOB_GAP_SECONDS) -> tuple[str, str] | None:
    """The last file of a first job and the first of a second, after a gap; None of one job."""
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
    """True if different ranks or nodes, no more than the job has, write early and late files."""
    seated = [log for log in job.streams.values() if log.rank is not None or log.node is not None]
    before = {log.name for log in seated if log.files & early}
    behind = {log.name for log in seated if log.files & late}
    ranks = {log.rank for log in seated} - {None}
    fit = len(ranks) <= (job.world_size or len(ranks))
    return bool(before and behind) and before.isdisjoint(behind) and fit
