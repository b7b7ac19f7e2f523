"""A hang: the training had stopped making progress long before something ended it.

A time limit, a cancellation or a watchdog then explains the end of the job, not its failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rmetric.diagnosis.clock import SAME_MOMENT, ZONE_TOLERANCE, may_be_time_zone
from rmetric.diagnosis.evidence.row import Row, Scene
from rmetric.diagnosis.evidence.standing import (
    Timed,
    are_heartbeats,
    behind,
    elsewhere,
    heartbeats,
    last_step_time,
    says_no_progress,
    span,
    timed_entries,
)
from rmetric.diagnosis.facts.job import JobStream, Occurrence
from rmetric.diagnosis.faults import Fault
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
#: A shorter time is not stated.
MIN_SHOWN_SECONDS = 60.0


def hang(scene: Scene) -> list[Row]:
    """The row of a hang, and rows against the ranks that are behind; none without one."""
    endings = [one for one in scene.faults if one.role == "ending" and not one.follows]
    ending = max(endings, key=lambda one: one.confidence, default=None)
    end = None if ending is None else scene.ordering.dated(ending.first)
    return [] if ending is None or end is None else _Ended(scene, ending, end).rows()


@dataclass
class _Ended:
    """What is known of a job before `ending` ended it from outside, at `end`, in seconds."""

    scene: Scene
    ending: Fault
    end: float

    @cached_property
    def stepping(self) -> list[JobStream]:
        every = self.scene.job.streams.values()
        return [one for one in every if one.last_step_at is not None]

    @cached_property
    def last_step(self) -> float | None:
        return last_step_time(self.scene, self.stepping, self.end)

    @cached_property
    def entries(self) -> list[Timed]:
        """The last entries that are of the time before the end, with their times."""
        return timed_entries(self.scene, self.is_before)

    @cached_property
    def later(self) -> list[Timed]:
        """Those behind the last step that state a time themselves, if any does."""
        # A note or a stack that states no time is no sign of progress beside lines that do.
        own = [one for one in self.entries if one[1].time is not None] or self.entries
        return [one for one in own if self.last_step is None or one[0] > self.last_step]

    @cached_property
    def beats(self) -> set[int]:
        return heartbeats(self.later)

    @cached_property
    def elsewhere(self) -> list[Row]:
        def counts(one: Occurrence) -> bool:
            return self.is_before(one) and one.event not in self.beats

        return elsewhere(self.scene, counts)

    @cached_property
    def located(self) -> list[Row]:
        """Rows against the ranks at which it stands."""
        return behind(self.stepping) or self.elsewhere

    def is_before(self, entry: Occurrence) -> bool:
        """True for an entry of the time before the end, and not of its announcement."""
        ender = self.scene.job.streams[self.ending.first.stream]
        if entry.stream == ender.name and not ender.steps:
            time = self.scene.ordering.dated(entry)
            if time is not None and abs(self.end - time) <= SAME_MOMENT:
                return False
        # No training goes on for long after its end: the clock of that file is another.
        other = self.last_step is not None and self.last_step > self.end + MIN_SECONDS
        comparable = entry.file == self.ending.first.file or not other
        late = comparable and self.scene.ordering.after(entry, self.ending.first)
        known = entry.event in self.scene.matched_events
        return not (late or known or says_no_progress(entry.text))

    def ends_by_limit(self, last_entry: float, gap: float) -> bool:
        """True if the time limit that ended it, by its own clock, is far longer than its work."""
        timed = [entry for _, entry in self.entries if entry.time is not None]
        zones = {names_zone(entry.text) for entry in (*timed[-1:], self.ending.first)}
        if not self.ending.has("time limit") or len(zones) > 1:
            return False
        dated, streams = self.scene.ordering.dated, self.scene.job.streams.values()
        begins = [dated(one) for stream in streams for one in stream.head]
        begin = min(
            (at for at in begins if at is not None and at <= last_entry), default=last_entry
        )
        return last_entry - begin < MIN_SHARE_BEFORE_LIMIT * gap

    @cached_property
    def longest(self) -> float:
        """The longest pause between two steps; 0.0 where none is known."""
        return max((one.longest_pause for one in self.stepping), default=0.0)

    @property
    def least(self) -> float:
        """Seconds from which on a silence is a hang."""
        if not self.longest and not self.elsewhere:
            return MIN_SECONDS_WITHOUT_STEPS
        return max(MIN_SECONDS, MIN_RATIO * self.longest)

    def since_last_step(self, last_step: float | None, gap: float) -> tuple[float, str, float]:
        """Seconds of it to the last entry; the kind of a hang; from how many seconds it is one.

        The kind is "unsure hang" where monitors logged on or the pauses of steps are not known.
        """
        kind, least = "hang" if self.longest else "unsure hang", self.least
        if last_step is None or not self.later:
            return 0.0, kind, least
        last_entry = self.entries[-1][0]
        if are_heartbeats(self.later, self.stepping):
            before = last_entry - last_step
            return before, kind if before < gap else "unsure hang", least
        if self.beats:  # after a checkpoint or an evaluation, say, which may take its time
            quiet = [time for time, one in self.later if one.event not in self.beats]
            least = max(least, MIN_SECONDS_WITHOUT_STEPS)
            return last_entry - max(quiet, default=last_step), "unsure hang", least
        pauses = [after[0] - one[0] for one, after in pairwise(self.later)]
        return 0.0, kind, max(least, MIN_RATIO * max(pauses, default=0.0))

    def rows(self) -> list[Row]:
        """The row of the hang and those against ranks; none where the end was no hang's."""
        if not self.entries:
            return []
        last_entry, last_step = self.entries[-1][0], self.last_step
        # The steps may state no times. That a rank is elsewhere tells of a hang all the same.
        watched = last_step is not None and last_step > last_entry and bool(self.located)
        last_step = None if watched else last_step
        gap = self.end - max(last_entry, last_entry if last_step is None else last_step)
        before, kind, least = self.since_last_step(last_step, gap)
        of_zones = gap < 0 or (may_be_time_zone(gap) and not self.ends_by_limit(last_entry, gap))
        seconds = before + (_apart_from_zones(gap) if of_zones else gap)
        if seconds < least and not self.ending.has("watched"):
            return []
        kind = "unsure hang" if watched or seconds < least else kind
        furthest = self.scene.job.furthest
        step = furthest.last_step if furthest and not furthest.counts_samples else None
        later = f"{'at least ' if of_zones else ''}{span(seconds)} later"
        words = "before the first step" if step is None else f"after step {step}"
        words += f" and was ended {later if seconds >= MIN_SHOWN_SECONDS else 'later'}"
        place = furthest.last_step_at if furthest else None
        stage = self.located[0].stage if self.located else ""
        return [Row("", kind, words, 1.0, HUNG, place, stage), *self.located]


def _apart_from_zones(seconds: float) -> float:
    """Seconds of a silence that no difference of time zones explains."""
    left = seconds % QUARTER_SECONDS
    return left if left < QUARTER_SECONDS - ZONE_TOLERANCE else 0.0
