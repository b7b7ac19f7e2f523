"""Order log entries of a job: by line within one file, else by corrected clocks."""

from __future__ import annotations

from bisect import bisect_right
from calendar import isleap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, reduce
from math import inf
from operator import attrgetter

from rmetric.diagnosis.job import Job, JobStream, Occurrence, span_of
from rmetric.diagnosis.patterns.stages import ends_checkpoint, next_stage, stated_stage
from rmetric.diagnosis.reading.text import TRACEBACK
from rmetric.diagnosis.reading.timestamps import NO_YEAR

#: Largest difference of corrected times, in seconds, within one moment; entries of one file are
#: ordered exactly.
SAME_MOMENT = 2.0
#: Seconds between neighbours in one file that state none.
NEXT = 1e-6
#: A time within so many seconds of whole half hours may be a difference of time zones.
ZONE_SECONDS = 1800.0
ZONE_TOLERANCE = 90.0
MAX_ZONE_SECONDS = 14 * 3600.0
#: Of more streams or entries, those that are the last are compared with each other.
MOST_COMPARED = 64
#: Largest distance of a completed date from the job's other times, in seconds.
NEAR = 2 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """Orders entries of a job; `offsets`: file -> seconds that its clock is ahead."""

    job: Job
    offsets: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def span(self) -> tuple[float, float] | None:
        """First and last time with a year; without any, of all; None where nothing states one."""
        return span_of(self.job.streams.values())

    def seconds(self, one: Occurrence) -> float | None:
        """Corrected time, with the job's year; None where nothing states one.

        An entry without one, a traceback, takes the time of the entry before it in its file.
        """
        time = one.time if one.time is not None else self._before(one)
        if time is not None and self.span and time < NO_YEAR[1] <= self.span[0]:
            time = self._dated(time, *self.span) if time >= NO_YEAR[0] else None
        return None if time is None else time - self.offsets.get(one.file, 0.0)

    def _before(self, one: Occurrence) -> float | None:
        """Time of the last kept entry of the file, up to this one, that states a time.

        None where the entries before it were not kept, or may stand in another file.
        """
        stream = self.job.streams.get(one.stream)
        tail = stream.tail if stream is not None and len(stream.files) == 1 else ()
        if not any(entry.file == one.file and entry.order <= one.order for entry in tail):
            return None
        orders, entries = self._timed.get(one.file, ((), ()))
        at = bisect_right(orders, one.order)
        return entries[at - 1].time if at else None

    def at_latest(self, one: Occurrence) -> Occurrence | None:
        """The entry, or the next kept one of its file that states a time, if it states none itself.

        The entry before it only tells when it came at the earliest. None where nothing behind it
        states a time.
        """
        if one.time is not None:
            return one
        orders, entries = self._timed.get(one.file, ((), ()))
        at = bisect_right(orders, one.order)
        return entries[at] if at < len(entries) else None

    @cached_property
    def _timed(self) -> dict[str, tuple[Sequence[int], Sequence[Occurrence]]]:
        """File -> its last and its matched entries with a time: their orders, and they."""
        found: dict[str, list[Occurrence]] = defaultdict(list)
        last = [entry for stream in self.job.streams.values() for entry in stream.tail]
        matched = [entry for one in self.job.matches.values() for entry in (one.first, one.last)]
        for entry in {id(one): one for one in (*last, *matched)}.values():
            if entry.time is not None:
                found[entry.file].append(entry)
        for entries in found.values():
            entries.sort(key=attrgetter("order"))
        return {file: ([one.order for one in all_of], all_of) for file, all_of in found.items()}

    @cached_property
    def stepping(self) -> list[JobStream]:
        """Streams that log steps; of more than `MOST_COMPARED`, those that step last."""
        last = [(one.last_step_at, one) for one in self.job.stepping]
        timed = sorted((self.key(at) if at else (-inf, 0), n) for n, (at, _) in enumerate(last))
        return [last[n][1] for _, n in timed[-MOST_COMPARED:]]

    def dated(self, one: Occurrence) -> float | None:
        """The time that the entry states, with the job's year where it can be derived."""
        offset = self.offsets.get(one.file, 0.0)
        seconds = self.seconds(one)
        return one.time if seconds is None else seconds + offset

    @staticmethod
    def _dated(time: float, first: float, last: float) -> float | None:
        year = datetime.fromtimestamp(last, timezone.utc).year
        start = datetime(year, 1, 1, tzinfo=timezone.utc).timestamp()
        dated = start + time - NO_YEAR[0]
        # The first of March of a leap year is its sixty-first day, else the sixtieth.
        if not isleap(year) and dated - start >= 60 * 86400.0:
            dated -= 86400.0
        return dated if first - NEAR <= dated <= last + NEAR else None

    def later_by(self, one: Occurrence, other: Occurrence) -> float | None:
        """Seconds by which `one` is after `other`, negative before; None where unknown.

        Within one file the order decides, as the clocks of its streams may differ; a difference
        that the times contradict or do not state is `NEXT`.
        """
        mine, others = self.seconds(one), self.seconds(other)
        seconds = None
        if mine is not None and others is not None and _of_one_scale(mine, others):
            seconds = mine - others
        if one.file == other.file:
            sign = (one.order > other.order) - (one.order < other.order)
            return sign * max((seconds or 0.0) * sign, NEXT)
        if seconds is not None:
            return seconds
        if one.step is not None and other.step is not None and one.step != other.step:
            return float(one.step - other.step)
        return None

    def after(self, one: Occurrence, other: Occurrence) -> bool:
        """Return True for certainly after: by order in a file, else by more than `SAME_MOMENT`."""
        later = self.later_by(one, other)
        if later is None:
            return False
        return later > (0.0 if one.file == other.file else SAME_MOMENT)

    def key(self, one: Occurrence) -> tuple[float, int]:
        """Sorts entries, the first first; those without a time after those with one."""
        if len(self.job.files) == 1:
            return (0.0, one.order)
        seconds = self.seconds(one)
        return (inf if seconds is None else seconds, one.order)


def _of_one_scale(one: float, other: float) -> bool:
    """False for seconds since boot beside a date."""
    return (one < NO_YEAR[0]) == (other < NO_YEAR[0])


def may_be_time_zone(seconds: float) -> bool:
    """True if two times so far apart may be of one moment, by clocks of two time zones."""
    zones = round(seconds / ZONE_SECONDS)
    off = abs(seconds - zones * ZONE_SECONDS)
    return zones > 0 and seconds <= MAX_ZONE_SECONDS and off <= ZONE_TOLERANCE


#: Stages in which launchers and streams without stages remain, and those with few stage lines.
_LAUNCHING = ("", "launch")
_STARTING = (*_LAUNCHING, "initialise", "load data", "compile")
#: Least share of the most step lines of a stream whose own stages are valid.
_MIN_STEP_SHARE = 0.5


def stepping_streams(job: Job, share: float) -> list[JobStream]:
    """Streams that log steps, at least a share of the most step lines of a stream."""
    least = max(1.0, share * job.most_steps)
    return [one for one in job.stepping if one.steps >= least]


def stage_at(job: Job, place: Occurrence, ordering: Ordering) -> str:
    """Stage of the entry's stream, or of the streams that log steps; "" where none is known.

    Launchers, ranks that leave step lines to rank 0, and files of errors beside a rank's output
    stay in a stage of their first lines. A traceback after the lines of a tear-down that was not
    planned was raised before them: it passed through a `finally`.
    """
    stepping = stepping_streams(job, _MIN_STEP_SHARE)
    own = [one for one in stepping if one.name == place.stream]
    stage = stage_now(job, place)
    if stage in (_LAUNCHING if own else _STARTING):
        kept = [entry for one in own or stepping for entry in (*one.tail, one.last_step_at)]
        latest = ordering.at_latest(place) or place
        working = [
            entry
            for entry in kept
            if entry is not None
            and entry.stage not in _LAUNCHING
            and not ordering.after(entry, place if entry.file == place.file else latest)
        ]
        # Of another file, an entry without a time may as well have come later.
        placed = [one for one in working if one.time is not None or one.file == place.file]
        in_order = sorted(placed or working, key=ordering.key)
        stage = reduce(next_stage, (stage_now(job, one) for one in in_order), stage)
    left_early = stage == "tear-down" and job.succeeded is None and TRACEBACK in place.text
    if left_early or stage in _LAUNCHING:
        passed = ("tear-down", *_LAUNCHING) if left_early else _LAUNCHING
        before = [name for name, at in job.stages if not ordering.after(at, place)]
        return next((one for one in reversed(before) if one not in passed), stage)
    return stage


def stage_now(job: Job, entry: Occurrence) -> str:
    """Stage of an entry; behind a complete checkpoint the training goes on."""
    stream = job.streams.get(entry.stream)
    if entry.stage != "checkpoint" or stream is None:
        return entry.stage
    before = (
        one for one in reversed(stream.tail) if one.file == entry.file and one.order <= entry.order
    )
    last = next(
        (one for one in before if stated_stage(one.text) or ends_checkpoint(one.text)), None
    )
    return "train" if last is not None and ends_checkpoint(last.text) else entry.stage
