"""Whether a training survived a fault: it went on, or ended as planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rmetric.diagnosis.clock import (
    MAX_AFTER_LOST_GPU_SECONDS,
    Ordering,
    is_deadly,
    timed_on_its_node,
)
from rmetric.diagnosis.job import TAIL, Job, JobStream, Match, Occurrence, short
from rmetric.diagnosis.patterns.steps import planned_steps
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

    def has(self, trait: str) -> bool:
        return trait in self.signature.traits

    def comes_after(self, entries: Iterable[Occurrence]) -> bool:
        return any(self.ordering.after(self.match.first, one) for one in entries)


def survived(
    job: Job, match: Match, signature: Signature, ends: Sequence[Match], ordering: Ordering
) -> bool:
    """Return True if training continued, or ended as planned, after the last match.

    The first rule that applies decides.
    """
    met = _Met(job, match, signature, ends, ordering)
    for rule in _RULES:
        said = rule(met)
        if said is not None:
            return said
    return _went_on(met)


def _of_another_node(met: _Met) -> bool | None:
    """The nodes that it names are others than those which the job's pods were given."""
    placed = met.job.nodes_of_pods
    if not placed or not met.has("node failure"):
        return None
    named = {short(fields["node"]) for fields in met.match.named if fields.get("node")}
    own = placed | {short(one.node) for one in met.job.streams.values() if one.node}
    return True if named and named.isdisjoint(own) else None


def _did_begin(met: _Met) -> bool | None:
    """A list of events has ages only: what kept a pod from its start was mended."""
    undated = met.ordering.seconds(met.match.last) is None
    return True if met.has("not begun") and met.job.trained and undated else None


def _still_at_the_last_step(met: _Met) -> bool | None:
    """A loss that is not finite at the last step is excused by no planned end."""
    own, last = met.own, met.match.last
    if not met.has("outlasts success") or own.last_step is None or last.step is None:
        return None
    if last.step < own.last_step:
        return None
    # An evaluation's bar, which counts anew, made the last step a lower one.
    steps_at = own.last_step_at
    anew = steps_at is not None and met.ordering.after(steps_at, last)
    later = {one.step for one in own.tail if one.step and met.ordering.after(one, last)}
    return None if anew and len(later) > IN_FLIGHT else False


def _before_the_end(met: _Met) -> bool | None:
    """The job ended as planned after it.

    Or the training made all its steps, and the scheduler knows of a good end: whatever else its
    files hold, in whatever order and by whatever clock, was outlived.
    """
    if any(met.ordering.after(end.last, met.match.last) for end in met.ends):
        return True
    traits = met.job.traits
    done = "recorded" in traits and ("completed" in traits or _made_all_steps(met.job))
    return True if done else None


def _killed_or_broke(met: _Met) -> bool | None:
    """A kill that a launcher or a framework reports too; what no rank of its node outlives."""
    job, match = met.job, met.match
    if "kernel kill" in match.traits and match.pids & job.pids_named_by_programs:
        return False
    if not is_deadly(job, match) or job.node_of(met.own) is None:
        return None
    # Whatever the clocks of other nodes say.
    later = [met.ordering.later_by(entry, match.first) for entry in timed_on_its_node(job, match)]
    known = [seconds for seconds in later if seconds is not None]
    return False if known and 0.0 <= max(known) <= MAX_AFTER_LOST_GPU_SECONDS else None


def _taken_back(met: _Met) -> bool | None:
    for id in met.signature.taken_back_by:
        back = met.job.matches.get((id, met.match.stream))
        if back is not None and met.ordering.after(back.last, met.match.last):
            return True
    return None


def _closed_at_the_end(met: _Met) -> bool | None:
    """A connection closed after the planned end or the last step; nobody waits any more."""
    if not met.has("connection"):
        return None
    if met.comes_after(end.first for end in met.ends):
        return True
    last = met.job.furthest.last_step_at if met.job.furthest else None
    if last is None or met.has("waiting") or not met.comes_after([last]):
        return None
    return True if _is_last_step(met.job, last) else None


def _of_a_later_machine(met: _Met) -> bool | None:
    """A machine's fault behind the planned end, and behind all that training logged.

    Or its clock is of another zone: then the job outlived it.
    """
    if met.signature.actor not in MACHINES or met.own.steps:
        return None
    if not met.comes_after(end.first for end in met.ends):
        return None
    trained = (one.last for one in met.job.stepping if one.last is not None)
    return None if any(met.ordering.after(one, met.match.first) for one in trained) else True


def _ending(met: _Met) -> bool | None:
    """An end from outside; after the planned one it was of a server, or of a wait."""
    if met.signature.role != "ending":
        return None
    if met.has("ends a step") and not met.own.steps and met.ends and _made_all_steps(met.job):
        return True
    return met.has("interrupted") and met.comes_after(end.first for end in met.ends)


def _beside_a_training_that_ended_well(met: _Met) -> bool | None:
    """A file of errors without times, or since boot, beside a training that made all its steps."""
    furthest = met.job.furthest.last_step_at if met.job.furthest else None
    last = met.match.last
    if not met.signature.survivable or met.own.steps or furthest is None:
        return None
    apart = last.time is None or met.ordering.later_by(furthest, last) is None
    ended = met.job.succeeded is not None or _is_last_step(met.job, furthest)
    return True if furthest.file != last.file and apart and ended else None


_RULES: tuple[Callable[[_Met], bool | None], ...] = (
    _of_another_node,
    _did_begin,
    _still_at_the_last_step,
    _before_the_end,
    _killed_or_broke,
    _taken_back,
    _closed_at_the_end,
    _of_a_later_machine,
    _ending,
    _beside_a_training_that_ended_well,
)


def _went_on(met: _Met) -> bool:
    """True if more steps were logged after the last match than may be in flight."""
    job, match, own = met.job, met.match, met.own
    stepping = [own] if _steps_by_itself(met) else met.ordering.stepping
    if not stepping:
        return _losses_after(job, match, met.ordering) > IN_FLIGHT
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
    if not _is_of_own_file(met):
        return False
    before_all = own.steps > IN_FLIGHT and match.last.step is None
    # Far more than the last entries, whatever they are of.
    return before_all or _logged_since(own, match.last.step) > TAIL


def _is_of_own_file(met: _Met) -> bool:
    """True if its stream logs steps in the file of the match."""
    at = met.own.last_step_at
    return at is not None and at.file == met.match.last.file


def _steps_by_itself(met: _Met) -> bool:
    """True if the steps of its stream alone tell: they are many, and can be compared in time."""
    at = met.own.last_step_at
    # Steps without times cannot be compared with another file's lines.
    comparable = at is not None and (
        at.file == met.match.last.file or met.ordering.seconds(at) is not None
    )
    return comparable and met.own.steps >= max(1.0, MIN_STEP_SHARE * met.job.most_steps)


def _after_the_match(met: _Met) -> Callable[[Occurrence], bool]:
    """Whether an entry is later than the match."""
    own, last, ordering = met.own, met.match.last, met.ordering
    # What followed it in its stream must be kept, or the next time may be of much later.
    kept = own.tail and own.tail[0].order <= last.order
    latest = ordering.at_latest(last) if kept else last
    if latest is None and ordering.seconds(last) is None:
        latest = last  # of a log without times: by its step

    def is_later(one: Occurrence) -> bool:
        if one.file == last.file:
            return ordering.after(one, last)
        return latest is not None and ordering.after(one, latest)

    return is_later


def _made_all_steps(job: Job) -> bool:
    """True if an entry of the last step states that it is the last planned one."""
    furthest = job.furthest
    if furthest is None:
        return False
    last = [one for one in furthest.tail if one.step == furthest.last_step]
    last += [furthest.last_step_at] if furthest.last_step_at is not None else []
    return any(_is_last_step(job, one) for one in last)


def _is_last_step(job: Job, entry: Occurrence) -> bool:
    """Return True if the entry of the job's last step states that it is the last planned one."""
    step = job.furthest.last_step if job.furthest else None
    return "(100%)" in entry.text or (step is not None and planned_steps(entry.text, step) == step)


def _logged_since(own: JobStream, step: int | None) -> float:
    """About how many steps a stream logged after a step."""
    if step is None or not own.last_step:
        return 0.0
    return (own.last_step - step) * own.steps / own.last_step


def _losses_after(job: Job, match: Match, ordering: Ordering) -> int:
    """Number of entries with a loss after the last match, in a job whose lines state no steps."""
    losses = {
        event.number
        for event in job.events
        if event.count > IN_FLIGHT
        and event.number not in match.events
        and LOSS.search(event.template)
    }
    entries = (one for stream in job.streams.values() for one in stream.tail)
    return sum(one.event in losses and ordering.after(one, match.last) for one in entries)
