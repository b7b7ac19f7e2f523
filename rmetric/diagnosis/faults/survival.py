"""Whether a training survived a fault: it went on, or ended as planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rmetric.diagnosis.clock import (
    MAX_AFTER_LOST_GPU_SECONDS,
    Ordering,
    is_deadly,
    timed_on_its_node,
)
from rmetric.diagnosis.facts.job import TAIL, Job, JobStream, Match, Occurrence
from rmetric.diagnosis.reading.steps import planned_steps
from rmetric.diagnosis.signature import Signature

#: Different steps that may be logged after a fatal fault: by ranks that have not yet met it, by a
#: progress bar that is drawn once more.
IN_FLIGHT = 2
#: Least share of the most step lines of a stream; below it a stream only names a step.
MIN_STEP_SHARE = 0.05
#: Actors whose faults are of one machine.
MACHINES = ("hardware", "platform")
#: Lines of a training without a step.
LOSS = re.compile(r"(?i)\bloss\b\W{1,4}<")


@dataclass(frozen=True)
class _Met:
    """A match, and all that decides whether the training survived it.

    Attributes:
        own: its stream.
        ends: matches that state the planned end of the job.
    """

    job: Job
    match: Match
    signature: Signature
    ends: Sequence[Match]
    ordering: Ordering

    @property
    def own(self) -> JobStream:
        return self.job.streams[self.match.stream]

    @property
    def furthest(self) -> Occurrence | None:
        """The entry of the job's last step."""
        return self.job.furthest.last_step_at if self.job.furthest else None

    @property
    def is_behind_the_end(self) -> bool:
        """True if it began after a planned end."""
        return any(self.ordering.after(self.match.first, one.first) for one in self.ends)

    def has(self, trait: str) -> bool:
        return trait in self.signature.traits

    @property
    def is_of_steps(self) -> bool:
        """True if its stream logs steps in the file of the match."""
        at = self.own.last_step_at
        return at is not None and at.file == self.match.last.file

    @property
    def steps_by_itself(self) -> bool:
        """True if the steps of its stream alone tell: they are many, and in one file."""
        least = max(1.0, MIN_STEP_SHARE * self.job.most_steps)
        return self.is_of_steps and self.own.steps >= least

    @property
    def made_all_steps(self) -> bool:
        """True if an entry of the last step states that it is the last planned one."""
        tail = self.job.furthest.tail if self.job.furthest else ()
        return any(map(self.is_last_step, [*tail, self.furthest]))

    def is_last_step(self, entry: Occurrence | None) -> bool:
        step = self.job.furthest.last_step if self.job.furthest else None
        if entry is None or step is None:
            return False
        return planned_steps(entry.text, step) == step or "(100%)" in entry.text


def survived(
    job: Job, match: Match, signature: Signature, ends: Sequence[Match], ordering: Ordering
) -> bool:
    """Return True if training continued, or ended as planned, after the last match.

    The first rule that applies decides.
    """
    met = _Met(job, match, signature, ends, ordering)
    if _before_the_end(met):
        return True
    if _killed_or_broke(met):
        return False
    # A machine's fault behind the planned end is of later.
    later_machine = signature.actor in MACHINES and not met.own.steps and met.is_behind_the_end
    if later_machine or _taken_back(met) or _closed_at_the_end(met):
        return True
    if signature.role == "ending":  # after the planned one it was of a server, or of a wait
        of_servers = met.has("ends a step") and ends and met.made_all_steps
        return bool(of_servers) or (met.has("interrupted") and met.is_behind_the_end)
    return _beside_a_training_that_ended_well(met) or _went_on(met)


def _before_the_end(met: _Met) -> bool:
    """The job ended as planned after it.

    Or the training made all its steps, and the scheduler knows of a good end: whatever else its
    files hold, in whatever order and by whatever clock, was outlived.
    """
    traits = met.job.traits
    if any(met.ordering.after(end.last, met.match.last) for end in met.ends):
        return True
    return "recorded" in traits and ("completed" in traits or met.made_all_steps)


def _killed_or_broke(met: _Met) -> bool:
    """A kill that a launcher or a framework reports too; what no rank of its node outlives."""
    job, match = met.job, met.match
    if "kernel kill" in match.traits and match.pids & job.pids_named_by_programs:
        return True
    if not is_deadly(job, match) or job.node_of(met.own) is None:
        return False
    # Whatever the clocks of other nodes say.
    later = [met.ordering.later_by(entry, match.first) for entry in timed_on_its_node(job, match)]
    known = [seconds for seconds in later if seconds is not None]
    return bool(known) and 0.0 <= max(known) <= MAX_AFTER_LOST_GPU_SECONDS


def _taken_back(met: _Met) -> bool:
    own = (met.job.matches.get((id, met.match.stream)) for id in met.signature.taken_back_by)
    return any(one is not None and met.ordering.after(one.last, met.match.last) for one in own)


def _closed_at_the_end(met: _Met) -> bool:
    """A connection closed after the planned end or the last step; nobody waits any more."""
    if not met.has("connection") or met.is_behind_the_end:
        return met.has("connection")
    last = met.furthest
    if last is None or met.has("waiting") or not met.ordering.after(met.match.first, last):
        return False
    return met.is_last_step(last)


def _beside_a_training_that_ended_well(met: _Met) -> bool:
    """Another file of errors beside a training that made all its steps."""
    furthest, last = met.furthest, met.match.last
    if not met.signature.survivable or met.own.steps or furthest is None:
        return False
    return furthest.file != last.file and met.is_last_step(furthest)


def _went_on(met: _Met) -> bool:
    """True if more steps were logged after the last match than may be in flight."""
    job, match, own = met.job, met.match, met.own
    stepping = [own] if met.steps_by_itself else met.ordering.stepping
    if not stepping:
        return _losses_after(met) > IN_FLIGHT
    is_later = _after_the_match(met)
    steps_at = [one.last_step_at for one in stepping if one.last_step_at is not None]
    continued = any(map(is_later, steps_at))
    if met.signature.survivable or not continued:
        return continued
    later = {entry.step for one in stepping for entry in one.tail if is_later(entry)}
    if len(later) > IN_FLIGHT:
        return True
    # The last entries may all be of the end; but what came before all steps did not end the job.
    begun = next((at for stage, at in job.stages if stage == "train"), None)
    most = max(one.steps for one in stepping)
    if begun is not None and is_later(begun) and most > IN_FLIGHT:
        return True
    return met.is_of_steps and _is_long_before_the_end(own, match.last.step)


def _losses_after(met: _Met) -> int:
    """Number of entries with a loss behind the match, in a job whose lines state no steps."""
    losses = {one.number for one in met.job.events if LOSS.search(one.template)}
    tails = (entry for one in met.job.streams.values() for entry in one.tail)
    behind = (one for one in tails if met.ordering.after(one, met.match.last))
    return sum(one.event in losses - met.match.events for one in behind)


def _is_long_before_the_end(own: JobStream, step: int | None) -> bool:
    """True if far more steps than the last entries, whatever they are of, are of later."""
    last = own.last_step or 0
    return own.steps > IN_FLIGHT if step is None else (last - step) * own.steps > TAIL * last


def _after_the_match(met: _Met) -> Callable[[Occurrence], bool]:
    """Whether an entry is later than the match."""
    own, last, ordering = met.own, met.match.last, met.ordering
    # What followed it in its stream must be kept, or the next time may be of much later.
    kept = own.tail and own.tail[0].order <= last.order
    latest = ordering.at_latest(last) if kept else last

    def is_later(one: Occurrence) -> bool:
        if one.file == last.file:
            return ordering.after(one, last)
        return latest is not None and ordering.after(one, latest)

    return is_later
