"""Known faults of a job: the matches of each signature, survived or not, and what follows what.

The log of a failed job contains many faults: the cause, the echoes on other ranks, the launcher's
reports, and faults that the training survived. The explanation is a cause that was not survived
and that does not follow from an earlier cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rmetric.diagnosis.job import HEAD, TAIL, Job, JobStream, Match, Occurrence
from rmetric.diagnosis.ordering import Ordering, may_be_time_zone
from rmetric.diagnosis.patterns.clocks import (
    MAX_AFTER_LOST_GPU_SECONDS,
    is_deadly,
    timed_on_its_node,
)
from rmetric.diagnosis.patterns.steps import planned_steps
from rmetric.diagnosis.signature import Signature

#: Roles of the matches that are faults.
ROLES = ("cause", "ending", "echo", "symptom")
#: Largest distance in seconds of a consequence: the usual timeout of collectives.
FOLLOWS_WITHIN = 1800.0
#: A fault so many seconds before another one, which is as certain, did not end the job.
LONG_BEFORE = 6 * 3600.0
#: Different steps that may be logged after a fatal fault: by ranks that have not yet met it, by a
#: progress bar that is drawn once more.
IN_FLIGHT = 2
#: Least share of the most step lines of a stream; below it a stream only names a step.
MIN_STEP_SHARE = 0.05
#: From this confidence on a symptom or an echo makes an ending that follows its consequence.
MIN_CONFIDENCE_OF_FAILURE = 0.4
#: Actors whose faults are of one machine.
MACHINES = ("hardware", "platform")
#: Lines of a training without a step.
LOSS = re.compile(r"(?i)\bloss\b\W{1,4}<")
#: Seconds between a broken device's record by the kernel and the communication that it broke,
#: whichever is logged first.
SAME_MOMENT = 60.0
#: Ends of a process by an abort, as launchers write them.
_ABORTS = {"-6", "6", "SIGABRT", "Aborted"}
#: The end by SIGKILL, as programs write it.
_KILLS = {"9", "-9", "KILL", "KILLED"}
#: Below this confidence an entry is generic (any error line) and makes nothing a consequence.
GENERIC = 0.5
#: Up to this confidence an entry of a kind that trainings survive explains no certain failure.
WEAK = 0.6


@dataclass(kw_only=True)
class Fault:
    """A signature in all streams of the job.

    Attributes:
        matches: one a stream, the first in time first.
        last: the last of all its entries.
        survived: the training continued after each of its entries.
        follows: id of the earlier fault of which it is the likely consequence; "" without.
    """

    signature: Signature
    matches: list[Match]
    last: Occurrence
    survived: bool = False
    follows: str = ""

    @property
    def first(self) -> Occurrence:
        return self.matches[0].first

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(match.stream for match in self.matches)

    @property
    def count(self) -> int:
        return sum(match.count for match in self.matches)

    @property
    def role(self) -> str:
        return self.signature.role

    @property
    def confidence(self) -> float:
        return self.signature.confidence

    def has(self, trait: str) -> bool:
        """True for a trait of `signature.TRAITS`."""
        return trait in self.signature.traits

    @property
    def is_sure(self) -> bool:
        """It states a cause or an end, more than any error line, and follows from no other."""
        return self.role in ("cause", "ending") and self.confidence >= GENERIC and not self.follows


def find_faults(
    job: Job, signatures: Mapping[str, Signature], ordering: Ordering, alone: frozenset[str]
) -> list[Fault]:
    """The known faults of a job, the first in time first; no success, nothing harmless.

    The planned ends of the streams in `alone` (`ended_alone`) are not the job's.
    """
    found: dict[str, list[Match]] = {}
    for match in job.matches.values():
        if signatures[match.signature].role in ROLES:
            found.setdefault(match.signature, []).append(match)
    ends = [one for one in job.matches.values() if signatures[one.signature].role == "success"]
    faults = [
        _fault(job, signatures[name], matches, ends, ordering, alone)
        for name, matches in found.items()
    ]
    faults.sort(key=lambda one: ordering.key(one.first))
    _relate([one for one in faults if not one.survived], ordering)
    return faults


def _fault(
    job: Job,
    signature: Signature,
    matches: list[Match],
    ends: Sequence[Match],
    ordering: Ordering,
    alone: frozenset[str],
) -> Fault:
    matches.sort(key=lambda one: ordering.key(one.first))
    fatal = []
    for one in matches:
        own = ends
        if alone:
            own = [end for end in ends if end.stream not in alone or end.stream == one.stream]
        # Of a node's kernel and its rank, whose clocks may differ, either may be the last.
        # A tool lists the newest record first.
        apart = one.first.file != one.last.file or (one.first.time or 0) > (one.last.time or 0)
        ways = [one, replace(one, last=one.first)] if apart and signature.role == "cause" else [one]
        if not all(_survived(job, way, signature, own, ordering) for way in ways):
            fatal.append(one)
    ended = {one.stream for one in fatal}
    files = {one.last.file for one in matches if one.stream not in ended}
    if (
        files
        and all(map(_at_the_beginning, matches))
        and files.isdisjoint(one.last.file for one in fatal)
    ):
        fatal = []  # who logs steps outlived it
    last = max((one.last for one in matches), key=ordering.key)
    return Fault(signature=signature, matches=matches, last=last, survived=not fatal)


def _at_the_beginning(match: Match) -> bool:
    """True for a line among the first ones of its file, as a script's complaints are."""
    return match.count == 1 and match.last.line <= HEAD


def ended_alone(job: Job, signatures: Mapping[str, Signature]) -> frozenset[str]:
    """Ranks that log their planned end, where neither the first, the last nor most do."""
    matches = job.matches.values()
    ends = {one.stream for one in matches if signatures[one.signature].role == "success"}
    ranks = {one.name: one.rank for one in job.active_streams if one.rank is not None}
    for_all = {0, max(ranks.values(), default=0)}
    if len(ends) > len(ranks) / 2 or any(ranks.get(name, 0) in for_all for name in ends):
        return frozenset()
    return frozenset(ends)


# -- what a training survived


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


def _survived(
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
    if "kernel kill" in match.traits:
        pids = _pids(match)
        others = (one for one in job.matches.values() if "kernel kill" not in one.traits)
        if any(not pids.isdisjoint(_pids(one)) for one in others):
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
    trained = [one.last for one in met.job.streams.values() if one.steps and one.last is not None]
    late = met.comes_after(end.first for end in met.ends)
    return True if late and not any(met.ordering.after(one, met.match.first) for one in trained) \
        else None  # fmt: skip


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
    job, match, ordering, own = met.job, met.match, met.ordering, met.own
    at = own.last_step_at
    # Steps without times cannot be compared with another file's lines.
    of_own_file = at is not None and at.file == match.last.file
    comparable = of_own_file or (at is not None and ordering.seconds(at) is not None)
    stepping = ordering.stepping
    if comparable and own.steps >= max(1.0, MIN_STEP_SHARE * job.most_steps):
        stepping = [own]
    if not stepping:
        return _losses_after(job, match, ordering) > IN_FLIGHT
    # What followed it in its stream must be kept, or the next time may be of much later.
    kept = own.tail and own.tail[0].order <= match.last.order
    latest = ordering.at_latest(match.last) if kept else match.last
    if latest is None and ordering.seconds(match.last) is None:
        latest = match.last  # of a log without times: by its step

    def is_later(one: Occurrence) -> bool:
        if one.file == match.last.file:
            return ordering.after(one, match.last)
        return latest is not None and ordering.after(one, latest)

    steps_at = [one.last_step_at for one in stepping if one.last_step_at is not None]
    continued = any(map(is_later, steps_at))
    if met.signature.survivable or not continued:
        return continued
    later = {entry.step for one in stepping for entry in one.tail if is_later(entry)}
    # The last entries may all be of the end; but what came before all steps did not end the job.
    begun = next((at for stage, at in job.stages if stage == "train"), None)
    before_all = of_own_file and own.steps > IN_FLIGHT and match.last.step is None
    before_all |= (
        begun is not None and is_later(begun) and max(one.steps for one in stepping) > IN_FLIGHT
    )
    # Far more than the last entries, whatever they are of.
    long_before = of_own_file and _logged_since(own, match.last.step) > TAIL
    return before_all or long_before or len(later) > IN_FLIGHT


def _pids(match: Match) -> set[str]:
    return {fields["pid"] for fields in match.named if fields.get("pid")}


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


# -- what follows what


def _relate(live: Sequence[Fault], ordering: Ordering) -> None:
    """Set `follows` of the faults that were not survived."""
    killers = [one for one in live if one.has("kill")]
    for one in live:
        before = _killer_of(one, killers) or _explained_by(one, live, ordering)
        one.follows = before.signature.id if before is not None else ""
    long_before = [
        (one, other) for one in live for other in live if _is_of_long_before(one, other, ordering)
    ]
    for one, other in long_before:
        one.follows = one.follows or other.signature.id


def _is_of_long_before(one: Fault, other: Fault, ordering: Ordering) -> bool:
    """True if the job met another fault so much later that it cannot have ended by this one."""
    return (
        other is not one
        and not other.follows
        and other.role == one.role == "cause"
        and other.confidence >= one.confidence - 0.1
        and (ordering.later_by(other.first, one.last) or 0.0) > LONG_BEFORE
    )


def _killer_of(one: Fault, killers: Sequence[Fault]) -> Fault | None:
    """The record of the kernel or of the scheduler of the kill that an entry reports.

    Whichever is logged first: the clocks of a kernel and of a program differ.
    """
    if one in killers:
        return None
    kills = [fields for match in one.matches for fields in match.named if fields.get("signal")]
    by_kill = bool(kills) and all(
        fields["signal"].upper().removeprefix("SIG") in _KILLS for fields in kills
    )
    reported = set().union(*map(_pids, one.matches))
    same = (
        killer
        for killer in killers
        if any(not reported.isdisjoint(_pids(match)) for match in killer.matches)
    )
    return next(same, killers[0] if killers and by_kill else None)


def _aborted(one: Fault) -> bool:
    """True for processes ended by an abort, which is how a collective's watchdog ends its own."""
    codes = [
        fields.get("signal") or fields.get("code")
        for match in one.matches
        for fields in match.named
    ]
    return one.has("abort") or (one.role == "symptom" and bool(codes) and set(codes) <= _ABORTS)


def _explained_by(one: Fault, live: Iterable[Fault], ordering: Ordering) -> Fault | None:
    """An earlier fault of which this is the likely consequence."""
    if one.has("observed"):
        return None
    return next((other for other in live if _explains(other, one, ordering)), None)


def _explains(other: Fault, one: Fault, ordering: Ordering) -> bool:
    """True if `one` is a likely consequence of `other`."""
    ended_by = (one.role == "ending" and other.role in ("symptom", "echo")) or (
        other.role == "echo" and (_aborted(one) or one.has("report"))
    )
    if other is one or other.follows == one.signature.id:
        return False
    if not (ended_by or other.role in ("cause", "ending")):
        return False
    if other.confidence < (MIN_CONFIDENCE_OF_FAILURE if ended_by else GENERIC):
        return False
    if _is_broken(one) and other.has("connection"):
        return False
    if _met_lost_gpu(other, one, ordering) or _is_reason(one, other, ordering):
        return False
    return _comes_before(other, one, ordering, ended_by) and _is_near(other, one, ordering)


def _comes_before(other: Fault, one: Fault, ordering: Ordering, ended_by: bool) -> bool:
    """True for the earlier one, or the one that is first whatever the clocks say."""
    return (
        ordering.after(one.first, other.first)
        or (ended_by and _is_after_in_its_files(one, other))
        or _broke(other, one, ordering)
        or _met_lost_gpu(one, other, ordering)
        or _is_reason(other, one, ordering)
    )


def _is_near(other: Fault, one: Fault, ordering: Ordering) -> bool:
    """True if `one` may be a consequence by the time between them, and by how sure they are."""
    apart = ordering.later_by(one.first, other.last) or 0.0
    if other.last.file != one.first.file == other.first.file:  # the clock of another file
        apart = min(apart, ordering.later_by(one.first, other.first) or 0.0)
    # Of one file a scheduler's clock may be that of another zone.
    of_zones = one.first.file == other.last.file and one.role == "ending"
    of_zones = of_zones and not other.signature.survivable
    if apart > FOLLOWS_WITHIN and not (of_zones and may_be_time_zone(apart)):
        return False
    if other.signature.survivable and other.confidence <= WEAK < one.confidence:
        return False  # a note of something harmless explains no failure that is certain
    # The same fault, logged again in more precise words?
    shared = not set(one.streams).isdisjoint(other.streams)
    return other.signature.rank >= min(one.signature.rank, 10) or not shared


def _is_after_in_its_files(one: Fault, other: Fault) -> bool:
    """True if in each file that holds the first of both in a stream it comes after the other."""
    first = {(match.stream, match.first.file): match.first.order for match in other.matches}
    pairs = [
        (match.first.order, first[match.stream, match.first.file])
        for match in one.matches
        if (match.stream, match.first.file) in first
    ]
    return bool(pairs) and all(own > others for own, others in pairs)


def _is_reason(one: Fault, other: Fault, ordering: Ordering) -> bool:
    """True for an ending with its reason, about when another one states a signal only.

    Slurm may cancel the step first, and the job with its reason only after the time of grace. A
    checkpoint fails to be written because of what a later line tells of its disk. Nodes wait in
    vain for one that fails by itself.
    """
    apart = abs(ordering.later_by(one.first, other.first) or 0.0)
    if other.has("meeting"):
        certain = one.role == "cause" and one.confidence >= GENERIC
        own = not one.has("connection") or one.has("unknown name")
        others = not set(other.streams) <= set(one.streams)
        return certain and own and others and apart <= FOLLOWS_WITHIN
    if other.signature.reason_in:
        return one.signature.family in other.signature.reason_in and apart <= FOLLOWS_WITHIN
    return (
        other.has("signalled")
        and not one.has("signalled")
        and one.role == "ending"
        and (apart <= SAME_MOMENT or may_be_time_zone(apart))
    )


def _is_broken(one: Fault) -> bool:
    """True for the record of a broken device or of a kernel's kill.

    One of the network may be of a lost peer, too.
    """
    return (
        one.role == "cause"
        and (one.signature.actor == "hardware" or one.has("machine broke"))
        and not one.has("connection")
        and not (one.signature.survivable and one.confidence <= WEAK)
    )


def _met_lost_gpu(one: Fault, lost: Fault, ordering: Ordering) -> bool:
    """True for an error of CUDA that says no more, about when the kernel lost the GPU.

    One that states no time came between those of its file that do.
    """
    if not lost.has("breaks the GPU") or not one.has("unspecific"):
        return False
    begin = ordering.later_by(one.first, lost.first) or 0.0
    end = ordering.later_by(ordering.at_latest(one.first) or one.first, lost.first) or 0.0
    return begin <= MAX_AFTER_LOST_GPU_SECONDS and end >= -MAX_AFTER_LOST_GPU_SECONDS


def _broke(other: Fault, one: Fault, ordering: Ordering) -> bool:
    """True for a broken device or a kill about when a rank's communication failed.

    Of a link that went down the kernel's clock may be that of another zone.
    """
    if other.has("link down") and one.has("no answer"):
        latest = ordering.at_latest(one.first) or one.first
        apart = abs(ordering.later_by(latest, other.first) or 0.0)
        return apart <= SAME_MOMENT or may_be_time_zone(apart)
    if not _is_broken(other) or not one.has("connection"):
        return False
    return abs(ordering.later_by(one.first, other.first) or 0.0) <= SAME_MOMENT
