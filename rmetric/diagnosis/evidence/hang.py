"""A hang: the training had stopped making progress long before something ended it.

A time limit, a cancellation or a watchdog then explains the end of the job, not its failure.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

from rmetric.diagnosis.clock import (
    CLOCK_TOLERANCE_SECONDS,
    ZONE_TOLERANCE,
    may_be_time_zone,
    time_span,
)
from rmetric.diagnosis.evidence.scene import Row, Scene, divided
from rmetric.diagnosis.facts.job import JobStream, Occurrence
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.library.stages import awaited, stated_stage
from rmetric.diagnosis.patterns.spatial import peers
from rmetric.diagnosis.reading.timestamps import names_zone
from rmetric.diagnosis.signature import HUNG

#: A hang is at least so many seconds, and so many times the longest pause between two steps.
MIN_SECONDS = 120.0
MIN_RATIO = 5.0
#: Least seconds where no two steps were logged, so that their pauses are not known.
MIN_SECONDS_WITHOUT_STEPS = 1800.0
#: All zones are whole quarters of an hour apart, so what is left of a silence is real.
QUARTER_SECONDS = 900.0
#: But no time limit is so much shorter than a difference of zones.
MIN_SHARE_BEFORE_LIMIT = 0.125
#: A shorter time is not stated; characters that are quoted of an entry.
MIN_SHOWN_SECONDS = 60.0
MAX_QUOTED = 60
#: So many different entries may recur during a hang, at least so often: heartbeats, monitors.
MAX_HEARTBEATS = 2
MIN_HEARTBEATS = 3
#: Stages in which nothing may be logged for long.
QUIET_STAGES = {"load data", "compile", "evaluate", "checkpoint", "tear-down"}
#: Least share of the ranks that made the last step, for the others to be behind.
MIN_SHARE_AT_TOP = 0.5
#: So many ranks must end at the same line, for the only other one to stand elsewhere.
MIN_RANKS_ALIKE = 3
#: Words of an evaluation, which may take its time.
_WORK = re.compile(r"(?i)\b(?:eval|valid)")
#: Lines of monitors that found nothing new in a log.
_NO_PROGRESS = re.compile(
    r"(?i)\bunchanged for \d"
    r"|\bno (?:new )?(?:progress|steps?|lines?|output)\b.{0,20}\b(?:for|since)\b"
)
_DIGITS = re.compile(r"\d+")


def hang(scene: Scene) -> list[Row]:
    """The row of a hang, and rows against the ranks that are behind; none without one."""
    endings = [fault for fault in scene.faults if fault.role == "ending" and not fault.follows]
    ending = max(endings, key=lambda fault: fault.confidence, default=None)
    end = None if ending is None else scene.ordering.dated(ending.first)
    return [] if ending is None or end is None else _Ended(scene, ending, end).rows()


@dataclass
class _Ended:
    """What is known of a job before `ending` ended it from outside, at `end`, in seconds."""

    scene: Scene
    ending: Fault
    end: float

    @cached_property
    def stepping(self) -> list[tuple[JobStream, Occurrence]]:
        streams = self.scene.job.stepping
        return [(log, log.last_step_at) for log in streams if log.last_step_at is not None]

    @cached_property
    def last_step(self) -> float | None:
        """When the last step was logged at the latest, by the next line with a time or the end."""
        timed = [log.last_step or 0 for log, at in self.stepping if at.time is not None]
        times = []
        for log, at in self.stepping:
            # Without a time, another entry of the same step is not progress.
            if at.time is not None or (log.last_step or 0) > max(timed, default=-1):
                known = self.scene.ordering.at_latest(at)
                times.append(self.end if known is None else self.scene.ordering.dated(known))
        return max((time for time in times if time is not None), default=None)

    @cached_property
    def entries(self) -> list[tuple[float, Occurrence]]:
        """The last entries that are of the time before the end, with their times."""
        tails = (entry for log in self.scene.job.streams.values() for entry in log.tail)
        dated = ((self.scene.ordering.dated(last), last) for last in tails if self.is_before(last))
        return sorted(((at, entry) for at, entry in dated if at is not None), key=itemgetter(0))

    @cached_property
    def later(self) -> list[tuple[float, Occurrence]]:
        """Those behind the last step that state a time themselves, if any does."""
        # A note or a stack without a time is not a sign of progress beside lines with one.
        own = [pair for pair in self.entries if pair[1].time is not None] or self.entries
        return [pair for pair in own if self.last_step is None or pair[0] > self.last_step]

    @cached_property
    def beats(self) -> set[int]:
        """Events that recur after the last step, to the end; none if they are many or of work."""
        times = Counter((entry.stream, entry.event) for _, entry in self.later)
        beats = {event for (_, event), count in times.items() if count >= MIN_HEARTBEATS}
        quiet = max((time for time, entry in self.later if entry.event not in beats), default=0.0)
        of_beats = [(time, entry) for time, entry in self.later if entry.event in beats]
        since = sum(time > quiet for time, _ in of_beats)
        at_work = any(_WORK.search(entry.text) for _, entry in of_beats)
        few = len(beats) <= MAX_HEARTBEATS and since >= MIN_HEARTBEATS
        return beats if few and not at_work else set()

    def are_heartbeats(self) -> bool:
        """True if what follows the last step is little that recurs, and no work."""
        names = {log.name for log, _ in self.stepping}
        stages = {entry.stage for _, entry in self.later if entry.stream in names}
        few = len({entry.event for _, entry in self.later}) <= MAX_HEARTBEATS
        at_work = any(_WORK.search(entry.text) for _, entry in self.later)
        return few and not at_work and not stages & QUIET_STAGES

    def behind(self) -> list[Row]:
        """Rows against the few ranks whose last step is below that of the others."""
        ranks = {log.name: log.last_step or 0 for log, _ in self.stepping if log.rank is not None}
        top = max(ranks.values(), default=0)
        late = {name: step for name, step in ranks.items() if step < top}
        at_top = len(ranks) - len(late)
        if not late or at_top < MIN_SHARE_AT_TOP * len(ranks):
            return []
        words = f"its last step is {min(late.values())}, that of {at_top} others {top}"
        return divided(Row(name, "behind", words) for name in late)

    @cached_property
    def elsewhere(self) -> list[Row]:
        """The row against the one rank whose last entry before the end is not that of most."""
        job, lasts = self.scene.job, self.last_entries()
        if len(lasts) < MIN_RANKS_ALIKE + 1:
            return []
        at = {name: job.events[last.event].template for name, last in lasts.items()}
        if len(set(at.values())) == 1:  # a template of wildcards may have taken in all lines
            at = {name: _DIGITS.sub("<N>", last.text) for name, last in lasts.items()}
        ((usual, times),) = Counter(at.values()).most_common(1)
        if times != len(lasts) - 1:
            return []
        (other,) = (name for name, where in at.items() if where != usual)
        text = lasts[other].text
        words = f"it stands at {_end_of(text)!r}, {times} others at {_end_of(usual)!r}"
        # What it has not done locates it, too.
        both = f"{text}\n{usual}"
        return [Row(other, "elsewhere", words, stage=awaited(both) or stated_stage(both))]

    def last_entries(self) -> dict[str, Occurrence]:
        """Rank, or node, -> its last entry before the end that is not a heartbeat."""
        job, lasts = self.scene.job, dict[str, Occurrence]()
        present = [(peer, peer.stream) for peer in peers(job) if peer.stream is not None]
        many = MIN_SHARE_AT_TOP * len(present)
        for peer, stream in present:
            before = [at for at in stream.tail if self.is_before(at) and at.event not in self.beats]
            # Ranks that lead have lines of their own, which are not evidence.
            if before and not (peer.leads and len(job.events[before[-1].event].counts) < many):
                lasts[peer.name] = before[-1]
        return lasts

    def is_before(self, entry: Occurrence) -> bool:
        """True for an entry of the time before the end, and not of its announcement."""
        ender = self.scene.job.streams[self.ending.first.stream]
        if entry.stream == ender.name and not ender.steps:
            time = self.scene.ordering.dated(entry)
            if time is not None and abs(self.end - time) <= CLOCK_TOLERANCE_SECONDS:
                return False
        if entry.event in self.scene.matched_events or _NO_PROGRESS.search(entry.text):
            return False
        # No training goes on for long after its end: the clock of that file is another.
        other = self.last_step is not None and self.last_step > self.end + MIN_SECONDS
        if other and entry.file != self.ending.first.file:
            return True
        return not self.scene.ordering.after(entry, self.ending.first)

    def ends_by_limit(self, last_entry: float, gap: float) -> bool:
        """True if the time limit that ended it, by its own clock, is far longer than its work."""
        timed = [entry for _, entry in self.entries if entry.time is not None]
        zones = {names_zone(entry.text) for entry in (*timed[-1:], self.ending.first)}
        if not self.ending.has("time limit") or len(zones) > 1:
            return False
        streams = self.scene.job.streams.values()
        begins = [self.scene.ordering.dated(entry) for log in streams for entry in log.head]
        begin = min((at for at in begins if at is not None), default=last_entry)
        return last_entry - min(begin, last_entry) < MIN_SHARE_BEFORE_LIMIT * gap

    def since_last_step(self, last_step: float | None, gap: float) -> tuple[float, str, float]:
        """Seconds without a step, the kind of a hang, and the threshold in seconds."""
        # It is unsure where monitors logged on or the pauses of steps are not known.
        longest = max((log.longest_pause for log, _ in self.stepping), default=0.0)
        kind, least = "hang" if longest else "unsure hang", max(MIN_SECONDS, MIN_RATIO * longest)
        if not longest and not self.elsewhere:
            least = MIN_SECONDS_WITHOUT_STEPS
        if last_step is None or not self.later:
            return 0.0, kind, least
        last_entry = self.entries[-1][0]
        if self.are_heartbeats():
            before = last_entry - last_step
            return before, kind if before < gap else "unsure hang", least
        if self.beats:  # after a checkpoint or an evaluation, which may take its time
            quiet = [time for time, entry in self.later if entry.event not in self.beats]
            least = max(least, MIN_SECONDS_WITHOUT_STEPS)
            return last_entry - max(quiet, default=last_step), "unsure hang", least
        pauses = [later[0] - earlier[0] for earlier, later in pairwise(self.later)]
        return 0.0, kind, max(least, MIN_RATIO * max(pauses, default=0.0))

    def rows(self) -> list[Row]:
        """The row of the hang and those against ranks; none where the end was not a hang's."""
        if not self.entries:
            return []
        last_entry, last_step = self.entries[-1][0], self.last_step
        # The steps may state no times. A rank that is elsewhere is evidence of a hang all the same.
        located = self.behind() or self.elsewhere
        watched = last_step is not None and last_step > last_entry and bool(located)
        last_step = None if watched else last_step
        gap = self.end - max(last_entry, last_entry if last_step is None else last_step)
        before, kind, least = self.since_last_step(last_step, gap)
        of_zones = gap < 0 or (may_be_time_zone(gap) and not self.ends_by_limit(last_entry, gap))
        seconds = before + (_without_zones(gap) if of_zones else gap)
        if seconds < least and not self.ending.has("watched"):
            return []
        kind = "unsure hang" if watched or seconds < least else kind
        furthest = self.scene.job.furthest
        step = furthest.last_step if furthest and not furthest.counts_samples else None
        place = furthest.last_step_at if furthest else None
        stage = located[0].stage if located else ""
        reached = "before the first step" if step is None else f"after step {step}"
        at_least = "at least " if of_zones else ""
        words = f"{reached} and was ended {_later(seconds, at_least)}"
        return [Row("", kind, words, 1.0, HUNG, place, stage), *located]


def _without_zones(gap: float) -> float:
    """Seconds of the gap that no difference of time zones explains."""
    left = gap % QUARTER_SECONDS
    return 0.0 if left >= QUARTER_SECONDS - ZONE_TOLERANCE else left


def _later(seconds: float, at_least: str) -> str:
    return f"{at_least}{time_span(seconds)} later" if seconds >= MIN_SHOWN_SECONDS else "later"


def _end_of(text: str) -> str:
    if len(text) <= MAX_QUOTED:
        return text
    end = text[-MAX_QUOTED:]
    return "…" + (end.partition(" ")[2] or end)
