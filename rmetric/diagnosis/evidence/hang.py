"""A hang: the training had stopped making progress long before something ended it.

A time limit, a cancellation or a watchdog then explains the end of the job, not its failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rmetric.diagnosis.clock import SAME_MOMENT, ZONE_TOLERANCE, may_be_time_zone
from rmetric.diagnosis.evidence import progress, standing
from rmetric.diagnosis.evidence.progress import QUIET_STAGES, Rate, Timed, heartbeats
from rmetric.diagnosis.evidence.row import Row, Scene
from rmetric.diagnosis.evidence.standing import span
from rmetric.diagnosis.facts.job import JobStream, Occurrence
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.inferred import HUNG
from rmetric.diagnosis.reading.timestamps import names_zone

#: A hang is at least so many seconds, and so many times the longest pause between two steps.
MIN_SECONDS = 120.0
MIN_RATIO = 5.0
#: Least seconds where no two steps were logged, so that their pauses are not known.
MIN_SECONDS_WITHOUT_STEPS = 1800.0
#: All zones are whole quarters of an hour apart, so what is left of a silence is real.
QUARTER_SECONDS = 900.0
#: Without years December is later than the January behind it, by so many seconds at least.
HALF_YEAR_SECONDS, YEAR_SECONDS = 183 * 86400.0, 366 * 86400.0
#: But no time limit is so much shorter than a difference of zones.
MIN_SHARE_BEFORE_LIMIT = 0.125
#: A shorter time is not stated.
MIN_SHOWN_SECONDS = 60.0


@dataclass(frozen=True)
class Hang:
    """A training that had stopped before it was ended.

    Attributes:
        kind: "hang" where nothing was logged any more, "hang with heartbeats" where monitors
            logged on, "hang without steps" where the pauses of steps are not known, "hang that
            was watched" where only who ended the training says so.
        seconds: from the last sign of progress to the end; 0.0 where nothing states a time.
        least: no more is known than that it was so long: clocks of two zones may be compared.
        ended: something ended it; else the logs stop.
        rows: evidence against ranks that are behind the others.
        stage: at which the job stands, where its last words are known.
    """

    kind: str
    seconds: float = 0.0
    least: bool = True
    ended: bool = True
    rows: Sequence[Row] = ()
    stage: str = ""

    def words(self, step: int | None) -> str:
        """When it stopped, and for how long."""
        after = "before the first step" if step is None else f"after step {step}"
        if self.seconds < MIN_SHOWN_SECONDS:
            return f"{after} and was ended later"
        later = f"at least {span(self.seconds)}" if self.least else span(self.seconds)
        return f"{after} and was ended {later} later" if self.ended else f"{after}, for {later}"


def hang(scene: Scene) -> list[Row]:
    """The row of a hang, and rows against the ranks that are behind; none without one."""
    found = find_hang(scene)
    if found is None:
        return []
    furthest = scene.job.furthest
    step = furthest.last_step if furthest and not furthest.counts_samples else None
    place = furthest.last_step_at if furthest else None
    return [Row("", found.kind, found.words(step), 1.0, HUNG, place, found.stage), *found.rows]


def find_hang(scene: Scene) -> Hang | None:
    """The hang that an end from outside ended, or none, while monitors logged on; None without."""
    if not scene.faults:
        return _unended(scene) if scene.job.succeeded is None else None
    endings = [one for one in scene.faults if one.role == "ending" and not one.follows]
    ending = max(endings, key=lambda one: one.confidence, default=None)
    if ending is None:
        return None
    end = scene.ordering.dated(ending.first)
    return None if end is None else _Ended(scene, ending, end).hang()


def _stepping(scene: Scene) -> list[JobStream]:
    return [one for one in scene.job.streams.values() if one.last_step_at is not None]


@dataclass
class _Ended:
    """What is known of a job before it was ended from outside.

    Attributes:
        ending: what ended it.
        end: when, in seconds.
        kind: of the hang, if it was one.
        least: seconds from which on a silence is one.
    """

    scene: Scene
    ending: Fault
    end: float
    kind: str = ""
    least: float = 0.0

    @cached_property
    def stepping(self) -> list[JobStream]:
        return _stepping(self.scene)

    @cached_property
    def last_step(self) -> float | None:
        return progress.last_step_time(self.scene, self.stepping, self.end)

    @cached_property
    def entries(self) -> list[Timed]:
        """The last entries that state a time and are of the time before the end."""
        return progress.timed_entries(self.scene, self.is_before)

    @cached_property
    def own_times(self) -> list[Timed]:
        # A note or a stack that states no time is no sign of progress beside lines that do.
        return [one for one in self.entries if one[1].time is not None] or self.entries

    @cached_property
    def later(self) -> list[Timed]:
        """Those behind the last step."""
        last = self.last_step
        return [one for one in self.own_times if last is not None and one[0] > last]

    @cached_property
    def beats(self) -> set[int]:
        return heartbeats(self.own_times if self.last_step is None else self.later)

    @cached_property
    def rates(self) -> list[Rate]:
        found = (progress.rate_of(self.scene, one) for one in self.stepping)
        return [rate for rate in found if rate is not None]

    @cached_property
    def behind(self) -> list[Row]:
        return standing.behind(self.stepping)

    @cached_property
    def elsewhere(self) -> list[Row]:
        return standing.elsewhere(
            self.scene, lambda one: self.is_before(one) and one.event not in self.beats
        )

    def is_before(self, entry: Occurrence) -> bool:
        """True for an entry of the time before the end, and not of its announcement."""
        # No training goes on for long after its end: the clock of that file is another.
        other = self.last_step is not None and self.last_step > self.end + MIN_SECONDS
        comparable = entry.file == self.ending.first.file or not other
        if progress.says_no_progress(entry.text) or self._announces_end(entry):
            return False
        late = comparable and self.scene.ordering.after(entry, self.ending.first)
        return entry.event not in self.scene.matched_events and not late

    def _announces_end(self, entry: Occurrence) -> bool:
        """Of the moment in which a launcher that logs no steps ends the job."""
        ender = self.scene.job.streams[self.ending.first.stream]
        if ender.steps or entry.stream != ender.name:
            return False
        time = self.scene.ordering.dated(entry)
        return time is not None and abs(self.end - time) <= SAME_MOMENT

    def hang(self) -> Hang | None:
        times = [time for time, _ in self.entries]
        last_entry = max(times, default=self.last_step if self.rates else None)
        silence = None if last_entry is None else self._silence(last_entry)
        return None if silence is None else self._located(*silence)

    def _silence(self, last_entry: float) -> tuple[float, bool] | None:
        """Seconds without progress, and whether they are the least; None for no hang."""
        self._set_least()
        last_step = self.last_step
        if last_step is not None and last_step > last_entry and (self.behind or self.elsewhere):
            # The steps state no times. That a rank is elsewhere tells of a hang all the same.
            last_step, self.kind = None, "hang that was watched"
        gap = self.end - (last_entry if last_step is None else max(last_entry, last_step))
        gap += YEAR_SECONDS if gap < -HALF_YEAR_SECONDS else 0.0
        other_clock = self._may_be_of_clocks(gap, last_entry)
        before = self._since_last_progress(last_step, last_entry, gap)
        apart = other_clock or not self._is_of_one_clock()
        known = before + (_apart_from_zones(gap) if apart else gap)
        if known < self.least and not other_clock:
            known = before + gap
        if known < self.least:
            if not self.ending.has("watched"):
                return None
            self.kind = "hang that was watched"
        return known, other_clock or known < before + gap

    def _set_least(self) -> None:
        longest = _longest_pause(self.stepping)
        self.kind = "hang" if longest else "hang without steps"
        if longest:
            self.least = max(MIN_SECONDS, MIN_RATIO * longest)
        elif self.rates:
            pause = max(rate.pause for rate in self.rates)
            self.least = max(MIN_SECONDS_WITHOUT_STEPS, MIN_RATIO * pause)
        else:
            self.least = MIN_SECONDS if self.elsewhere else MIN_SECONDS_WITHOUT_STEPS

    def _is_of_one_clock(self) -> bool:
        timed = [entry for _, entry in self.entries if entry.time is not None]
        return not timed or names_zone(timed[-1].text) == names_zone(self.ending.first.text)

    def _may_be_of_clocks(self, gap: float, last_entry: float) -> bool:
        """True if the gap may be one between two clocks: an entry before keeps its own."""
        if gap < 0 or not may_be_time_zone(gap):
            return gap < 0
        limit = self.ending.has("time limit") and self._is_of_one_clock()
        dated, streams = self.scene.ordering.dated, self.scene.job.streams.values()
        heads = [dated(one) for stream in streams for one in stream.head]
        begin = min((at for at in heads if at is not None and at <= last_entry), default=last_entry)
        return not (limit and last_entry - begin < MIN_SHARE_BEFORE_LIMIT * gap)

    def _since_last_progress(self, last_step: float | None, last_entry: float, gap: float) -> float:
        """Seconds from the last sign of progress to the last entry; sets `kind` and `least`."""
        if last_step is None or not self.later:
            return 0.0
        if progress.are_heartbeats(self.later, self.stepping):
            before = last_entry - last_step
            self.kind = self.kind if before < gap else "hang with heartbeats"
            return before
        if self.beats:  # after a checkpoint or an evaluation, say, which may take its time
            quiet = [time for time, one in self.later if one.event not in self.beats]
            self.kind = "hang with heartbeats"
            self.least = max(self.least, MIN_SECONDS_WITHOUT_STEPS)
            return last_entry - max(quiet, default=last_step)
        pauses = [after[0] - before[0] for before, after in pairwise(self.later)]
        self.least = max(self.least, MIN_RATIO * max(pauses, default=0.0))
        return 0.0

    def _located(self, seconds: float, least: bool) -> Hang:
        """The hang, with the ranks at which it stands."""
        located = self.behind or self.elsewhere
        stage = located[0].stage if located else ""
        return Hang(self.kind, seconds, least, rows=located, stage=stage)


def _longest_pause(stepping: Sequence[JobStream]) -> float:
    """The longest pause between two steps; 0.0 where none is known."""
    return max((one.longest_pause for one in stepping), default=0.0)


def _apart_from_zones(seconds: float) -> float:
    """Seconds of a silence that no difference of time zones explains."""
    left = seconds % QUARTER_SECONDS
    return left if left < QUARTER_SECONDS - ZONE_TOLERANCE else 0.0


def _unended(scene: Scene) -> Hang | None:
    """A training without steps to the end of logs in which nothing but heartbeats goes on."""
    stepping, entries = _stepping(scene), progress.timed_entries(scene)
    longest = _longest_pause(stepping)
    end = entries[-1][0] if entries else 0.0
    last_step = progress.last_step_time(scene, stepping, end) if entries and longest else None
    if last_step is None:
        return None
    later = [one for one in entries if one[0] > last_step]
    least = max(MIN_SECONDS, MIN_RATIO * longest)
    if end - last_step < least:
        return None
    only_beats = len(later) >= progress.MIN_HEARTBEATS and progress.are_heartbeats(later, stepping)
    if not only_beats and not _is_quiet(later, last_step, end, least):
        return None
    rows = standing.behind(stepping)
    return Hang("hang with heartbeats", end - last_step, ended=False, rows=rows)


def _is_quiet(later: Sequence[Timed], last_step: float, end: float, least: float) -> bool:
    """True if nothing but heartbeats was logged for long."""
    beats = heartbeats(later, of_all=False)
    quiet = [one for one in later if one[1].event not in beats]
    at_work = any(one.stage in QUIET_STAGES for _, one in quiet)
    seconds = max(least, MIN_SECONDS_WITHOUT_STEPS if at_work else 0.0)
    since = end - max((time for time, _ in quiet), default=last_step)
    return bool(beats) and since >= seconds
