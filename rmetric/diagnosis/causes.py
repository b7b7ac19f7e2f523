"""Select the known fault that explains the failure.

The log of a failed job contains many faults: the cause, the echoes on other ranks, the launcher's
reports, and faults that the training survived. The explanation is a cause that was not survived
and that does not follow from an earlier cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rmetric.diagnosis.job import HEAD, TAIL, Job, JobStream, Match, Occurrence, short
from rmetric.diagnosis.ordering import MOST_COMPARED, Ordering, may_be_time_zone
from rmetric.diagnosis.patterns.clocks import (
    MAX_AFTER_LOST_GPU_SECONDS,
    is_deadly,
    timed_on_its_node,
)
from rmetric.diagnosis.patterns.steps import planned_steps
from rmetric.diagnosis.reading.timestamps import NO_YEAR
from rmetric.diagnosis.signature import Signature

#: Factor on the score of a cause that is the likely consequence of an earlier one.
FOLLOWS = 0.55
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
#: Roles that explain a failure, and their weights.
EXPLAINS = {"cause": 1.0, "ending": 1.0, "echo": 0.6, "symptom": 0.45}
#: Ends of a process by an abort, as launchers write them.
_ABORTS = {"-6", "6", "SIGABRT", "Aborted"}
#: The end by SIGKILL, as programs write it.
_KILLS = {"9", "-9", "KILL", "KILLED"}
#: Below this confidence an entry is generic (any error line) and makes nothing a consequence.
GENERIC = 0.5
#: Up to this confidence an entry of a kind that trainings survive explains no certain failure.
WEAK = 0.6


@dataclass(kw_only=True)
class Cause:
    """A signature in all streams of the job.

    Attributes:
        matches: one a stream, the first in time first.
        last: the last of all its entries.
        survived: the training continued after each of its entries.
        follows: id of the earlier cause of which it is the likely consequence; "" without.
        score: 0 to 1.
    """

    signature: Signature
    matches: list[Match]
    last: Occurrence
    survived: bool = False
    follows: str = ""
    score: float = 0.0

    @property
    def first(self) -> Occurrence:
        return self.matches[0].first

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(match.stream for match in self.matches)

    @property
    def count(self) -> int:
        return sum(match.count for match in self.matches)


def collect(
    job: Job, signatures: dict[str, Signature], ordering: Ordering, alone: frozenset[str]
) -> list[Cause]:
    """The signatures found in a job, the first in time first; no success, nothing harmless.

    The planned ends of the streams in `alone` (`ended_alone`) are not the job's.
    """
    found: dict[str, list[Match]] = {}
    ends = [one for one in job.matches.values() if signatures[one.signature].role == "success"]
    for match in job.matches.values():
        if signatures[match.signature].role in EXPLAINS:
            found.setdefault(match.signature, []).append(match)
    causes = []
    for name, matches in found.items():
        matches.sort(key=lambda one: ordering.key(one.first))
        fatal = []
        for one in matches:
            own = ends
            if alone:
                own = [end for end in ends if end.stream not in alone or end.stream == one.stream]
            # Of a node's kernel and its rank, whose clocks may differ, either may be the last.
            # A tool lists the newest record first.
            apart = one.first.file != one.last.file or (one.first.time or 0) > (one.last.time or 0)
            apart = apart and signatures[name].role == "cause"
            if not _survived(job, one, signatures[name], own, ordering) or (
                apart and not _survived(job, _first_of(one), signatures[name], own, ordering)
            ):
                fatal.append(one)
        ended = {one.stream for one in fatal}
        files = {one.last.file for one in matches if one.stream not in ended}
        if (
            files
            and all(map(_at_the_beginning, matches))
            and not any(one.last.file in files for one in fatal)
        ):
            fatal = []  # who logs steps outlived it
        # What one node outlived is not what another one met later.
        kept = matches
        if fatal and signatures[name].actor in MACHINES:
            latest = fatal[-MOST_COMPARED:]
            late = [one for one in fatal if not _is_long_before_others(one, latest, ordering)]
            kept = late or fatal
        last = max((one.last for one in kept), key=ordering.key)
        causes.append(
            Cause(signature=signatures[name], matches=kept, last=last, survived=not fatal)
        )
    return sorted(causes, key=lambda one: ordering.key(one.first))


def _is_long_before_others(match: Match, others: Sequence[Match], ordering: Ordering) -> bool:
    """True if another node met the same so much later that the job cannot have ended by this."""
    return any(
        one is not match
        # A tool lists the newest record first.
        and all(
            (ordering.later_by(one.first, entry) or 0.0) > LONG_BEFORE
            for entry in (match.first, match.last)
        )
        for one in others
    )


def _at_the_beginning(match: Match) -> bool:
    """True for a line among the first ones of its file, as a script's complaints are."""
    return match.count == 1 and match.last.line <= HEAD


def _first_of(match: Match) -> Match:
    return replace(match, last=match.first)


def ended_alone(job: Job, signatures: Mapping[str, Signature]) -> frozenset[str]:
    """Ranks that log their planned end, where neither the first, the last nor most do."""
    matches = job.matches.values()
    ends = {one.stream for one in matches if signatures[one.signature].role == "success"}
    ranks = {one.name: one.rank for one in job.active_streams if one.rank is not None}
    for_all = {0, max(ranks.values(), default=0)}
    if len(ends) > len(ranks) / 2 or any(ranks.get(name, 0) in for_all for name in ends):
        return frozenset()
    return frozenset(ends)


def _survived(
    job: Job, match: Match, signature: Signature, ends: Sequence[Match], ordering: Ordering
) -> bool:
    """Return True if training continued, or ended as planned, after the last match."""
    own = job.streams[match.stream]
    if "node failure" in signature.traits and _is_elsewhere(job, match):
        return True
    if "not begun" in signature.traits and job.trained and ordering.seconds(match.last) is None:
        return True  # kubectl's list of events has ages only
    if (
        "outlasts success" in signature.traits
        and own.last_step is not None
        and match.last.step is not None
        and match.last.step >= own.last_step  # still logged at the last step
        and not (own.last_step_at and _much_later(own, match.last, ordering))
    ):
        return False
    if any(ordering.after(end.last, match.last) for end in ends) or _is_recorded(job):
        return True
    if "kernel kill" in match.traits and _is_reported(job, match):
        return False
    if is_deadly(job, match) and _ended_node(job, match, ordering):
        return False  # whatever the clocks of other nodes say
    if ends and not own.steps and _since_boot(match, ordering):
        return True  # a job that ended as planned
    for id in signature.taken_back_by:
        back = job.matches.get((id, match.stream))
        if back is not None and ordering.after(back.last, match.last):
            return True
    if "connection" in signature.traits and _completed(job, match, signature, ends, ordering):
        return True
    if signature.actor in MACHINES and not own.steps and _is_of_later(match, job, ends, ordering):
        return True
    if signature.role == "ending":
        # What is interrupted from the keyboard after the planned end is a server or a wait.
        after_end = any(ordering.after(match.first, end.first) for end in ends)
        if "ends a step" in signature.traits and not own.steps and ends and _made_all_steps(job):
            return True  # a step of servers that the job's script ends
        return after_end and "interrupted" in signature.traits
    # A file of errors without times, or by a clock since boot, beside a training that made all its
    # steps or ended as planned.
    if signature.survivable and not own.steps:
        furthest = job.furthest.last_step_at if job.furthest else None
        if (
            furthest is not None
            and furthest.file != match.last.file
            and (match.last.time is None or ordering.later_by(furthest, match.last) is None)
            and (job.succeeded is not None or _is_last_step(job, furthest))
        ):
            return True
    last = own.last_step_at
    # Steps without times cannot be compared with another file's lines.
    of_own_file = last is not None and last.file == match.last.file
    comparable = of_own_file or (last is not None and ordering.seconds(last) is not None)
    stepping = ordering.stepping
    if comparable and own.steps >= max(1.0, MIN_STEP_SHARE * job.most_steps):
        stepping = [own]
    if not stepping:
        return _losses_after(job, match, ordering) > IN_FLIGHT
    # What followed it in its stream must be kept, or the next time may be of much later.
    kept = own.tail and own.tail[0].order <= match.last.order
    at_latest = ordering.at_latest(match.last) if kept else match.last
    if at_latest is None and ordering.seconds(match.last) is None:
        at_latest = match.last  # of a log without times: by its step

    def is_later(one: Occurrence) -> bool:
        if one.file == match.last.file:
            return ordering.after(one, match.last)
        return at_latest is not None and ordering.after(one, at_latest)

    steps_at = [one.last_step_at for one in stepping if one.last_step_at is not None]
    continued = any(map(is_later, steps_at))
    if signature.survivable or not continued:
        return continued
    later = (entry for one in stepping for entry in one.tail if is_later(entry))
    # The last entries may all be of the end; but what came before all steps did not end the job.
    begun = next((at for stage, at in job.stages if stage == "train"), None)
    before_all = of_own_file and own.steps > IN_FLIGHT and match.last.step is None
    before_all |= (
        begun is not None and is_later(begun) and max(one.steps for one in stepping) > IN_FLIGHT
    )
    # Far more than the last entries, whatever they are of.
    long_before = of_own_file and _logged_since(own, match.last.step) > TAIL
    return before_all or long_before or len({entry.step for entry in later}) > IN_FLIGHT


def _is_reported(job: Job, kill: Match) -> bool:
    """True for the kill of a process whose end a launcher or a framework reports too."""
    pids = _pids(kill)
    others = (match for match in job.matches.values() if "kernel kill" not in match.traits)
    return any(not pids.isdisjoint(_pids(match)) for match in others)


def _pids(match: Match) -> set[str]:
    return {fields["pid"] for fields in match.named if fields.get("pid")}


def _is_recorded(job: Job) -> bool:
    """True for a training that made all its steps, and of which the scheduler knows a good end.

    Whatever else its files hold, in whatever order and by whatever clock, was outlived.
    """
    if "recorded" not in job.traits:
        return False
    return "completed" in job.traits or _made_all_steps(job)


def _made_all_steps(job: Job) -> bool:
    """True if an entry of the last step states that it is the last planned one."""
    furthest = job.furthest
    if furthest is None:
        return False
    last = [one for one in furthest.tail if one.step == furthest.last_step]
    last += [furthest.last_step_at] if furthest.last_step_at is not None else []
    return any(_is_last_step(job, one) for one in last)


def _ended_node(job: Job, match: Match, ordering: Ordering) -> bool:
    """True if what the ranks and launchers of its node log ends just behind it."""
    if job.node_of(job.streams[match.stream]) is None:
        return False
    later = [ordering.later_by(entry, match.first) for entry in timed_on_its_node(job, match)]
    known = [seconds for seconds in later if seconds is not None]
    return bool(known) and 0.0 <= max(known) <= MAX_AFTER_LOST_GPU_SECONDS


def _since_boot(match: Match, ordering: Ordering) -> bool:
    """True for a machine's clock since boot beside dates, which cannot be compared."""
    time = match.last.time
    return time is not None and ordering.span is not None and time < NO_YEAR[0] <= ordering.span[0]


def _is_of_later(match: Match, job: Job, ends: Sequence[Match], ordering: Ordering) -> bool:
    """True if a machine's fault is later than the planned end, and than all that training logged.

    Or its clock is of another zone: then the job outlived it.
    """
    trained = [one.last for one in job.streams.values() if one.steps and one.last is not None]
    return any(ordering.after(match.first, end.first) for end in ends) and not any(
        ordering.after(one, match.first) for one in trained
    )


def _is_elsewhere(job: Job, match: Match) -> bool:
    """True if the nodes that it names are others than those which the job's pods were given."""
    placed = {
        short(fields["placed"])
        for one in job.matches.values()
        for fields in (one.named if "placed" in one.traits else ())
        if "placed" in fields
    }
    named = {short(fields["node"]) for fields in match.named if fields.get("node")}
    own = placed | {short(one.node) for one in job.streams.values() if one.node}
    return bool(placed and named) and named.isdisjoint(own)


def _logged_since(own: JobStream, step: int | None) -> float:
    """About how many steps a stream logged after a step."""
    if step is None or not own.last_step:
        return 0.0
    return (own.last_step - step) * own.steps / own.last_step


def _much_later(own: JobStream, entry: Occurrence, ordering: Ordering) -> bool:
    """Return True if an evaluation's bar, which counts anew, made the last step a lower one."""
    last = own.last_step_at
    if last is None or not ordering.after(last, entry):
        return False
    later = {one.step for one in own.tail if one.step and ordering.after(one, entry)}
    return len(later) > IN_FLIGHT


def _completed(
    job: Job, match: Match, signature: Signature, ends: Sequence[Match], ordering: Ordering
) -> bool:
    """Return True if the job had ended as planned, or made all its steps, before the match."""
    if any(ordering.after(match.first, end.first) for end in ends):
        return True
    last = job.furthest.last_step_at if job.furthest else None
    if last is None or "waiting" in signature.traits or not ordering.after(match.first, last):
        return False
    return _is_last_step(job, last)


def _is_last_step(job: Job, entry: Occurrence) -> bool:
    """Return True if the entry of the job's last step states that it is the last planned one."""
    step = job.furthest.last_step if job.furthest else None
    return "(100%)" in entry.text or (step is not None and planned_steps(entry.text, step) == step)


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


def weigh(causes: Sequence[Cause], ordering: Ordering) -> list[Cause]:
    """Score the causes that were not survived; returns them, the best first."""
    live = [one for one in causes if not one.survived]
    killers = [one for one in live if "kill" in one.signature.traits]
    for one in live:
        one.score = one.signature.confidence * EXPLAINS[one.signature.role]
        before = _killer_of(one, killers) or _explained_by(one, live, ordering)
        if before is not None:
            one.follows = before.signature.id
            one.score *= FOLLOWS
    for one in live:
        if any(_is_of_long_before(one, other, ordering) for other in live):
            one.score *= FOLLOWS
    return sorted(live, key=lambda one: (-round(one.score, 3), ordering.key(one.first)))


def _is_of_long_before(one: Cause, other: Cause, ordering: Ordering) -> bool:
    """True if the job met another fault so much later that it cannot have ended by this one."""
    return (
        other is not one
        and not other.follows
        and other.signature.role == one.signature.role == "cause"
        and other.signature.confidence >= one.signature.confidence - 0.1
        and (ordering.later_by(other.first, one.last) or 0.0) > LONG_BEFORE
    )


def _killer_of(one: Cause, killers: Sequence[Cause]) -> Cause | None:
    """The record of the kernel or of the scheduler of the kill that an entry reports.

    Whichever is logged first: the clocks of a kernel and of a program differ.
    """
    kills = [fields for match in one.matches for fields in match.named if fields.get("signal")]
    by_kill = bool(kills) and all(
        fields["signal"].upper().removeprefix("SIG") in _KILLS for fields in kills
    )
    if one in killers:
        return None
    reported = set().union(*map(_pids, one.matches))
    same = (
        killer
        for killer in killers
        if any(not reported.isdisjoint(_pids(match)) for match in killer.matches)
    )
    return next(same, killers[0] if killers and by_kill else None)


def _aborted(one: Cause) -> bool:
    """True for processes ended by an abort, which is how a collective's watchdog ends its own."""
    if "abort" in one.signature.traits:
        return True
    codes = [
        fields.get("signal") or fields.get("code")
        for match in one.matches
        for fields in match.named
    ]
    return one.signature.role == "symptom" and bool(codes) and set(codes) <= _ABORTS


def _is_report(one: Cause) -> bool:
    """True for a framework's report that one of its processes has ended."""
    return "report" in one.signature.traits


def _explained_by(one: Cause, live: Iterable[Cause], ordering: Ordering) -> Cause | None:
    """An earlier cause of which this is the likely consequence."""
    for other in live if "observed" not in one.signature.traits else ():
        ended_by = (
            one.signature.role == "ending" and other.signature.role in ("symptom", "echo")
        ) or (other.signature.role == "echo" and (_aborted(one) or _is_report(one)))
        if (
            other is one
            or other.follows == one.signature.id
            or not (ended_by or other.signature.role in ("cause", "ending"))
        ):
            continue
        if other.signature.confidence < (MIN_CONFIDENCE_OF_FAILURE if ended_by else GENERIC):
            continue
        if _is_broken(one) and "connection" in other.signature.traits:
            continue
        if _met_lost_gpu(other, one, ordering):
            continue
        if _is_reason(one, other, ordering):
            continue
        before = ordering.after(one.first, other.first)
        before = before or (ended_by and _is_after_in_its_files(one, other))
        by_device = _broke(other, one, ordering) or _met_lost_gpu(one, other, ordering)
        if not (before or by_device or _is_reason(other, one, ordering)):
            continue
        apart = ordering.later_by(one.first, other.last) or 0.0
        if other.last.file != one.first.file == other.first.file:  # the clock of another file
            apart = min(apart, ordering.later_by(one.first, other.first) or 0.0)
        # Of one file a scheduler's clock may be that of another zone.
        of_zones = one.first.file == other.last.file and one.signature.role == "ending"
        of_zones = of_zones and not other.signature.survivable
        if apart > FOLLOWS_WITHIN and not (of_zones and may_be_time_zone(apart)):
            continue
        if other.signature.survivable and other.signature.confidence <= WEAK < one.score:
            continue  # a note of something harmless explains no failure that is certain
        shared = not set(one.streams).isdisjoint(other.streams)
        if other.signature.rank < min(one.signature.rank, 10) and shared:
            continue  # the same fault, logged again in more precise words
        return other
    return None


def _is_after_in_its_files(one: Cause, other: Cause) -> bool:
    """True if in each file that holds the first of both in a stream it comes after the other."""
    first = {(match.stream, match.first.file): match.first.order for match in other.matches}
    pairs = [
        (match.first.order, first[match.stream, match.first.file])
        for match in one.matches
        if (match.stream, match.first.file) in first
    ]
    return bool(pairs) and all(own > others for own, others in pairs)


def _is_reason(one: Cause, other: Cause, ordering: Ordering) -> bool:
    """True for an ending with its reason, about when another one states a signal only.

    Slurm may cancel the step first, and the job with its reason only after the time of grace. A
    checkpoint fails to be written because of what a later line tells of its disk. Nodes wait in
    vain for one that fails by itself.
    """
    apart = abs(ordering.later_by(one.first, other.first) or 0.0)
    if "meeting" in other.signature.traits:  # nodes that wait in vain for another one
        certain = one.signature.role == "cause" and one.signature.confidence >= GENERIC
        own = "connection" not in one.signature.traits or "unknown name" in one.signature.traits
        others = not set(other.streams) <= set(one.streams)
        return certain and own and others and apart <= FOLLOWS_WITHIN
    if other.signature.reason_in:
        return one.signature.family in other.signature.reason_in and apart <= FOLLOWS_WITHIN
    return (
        "signalled" in other.signature.traits
        and "signalled" not in one.signature.traits
        and one.signature.role == "ending"
        and (apart <= SAME_MOMENT or may_be_time_zone(apart))
    )


def _is_broken(one: Cause) -> bool:
    """True for the record of a broken device or of a kernel's kill.

    One of the network may be of a lost peer, too.
    """
    signature = one.signature
    return (
        signature.role == "cause"
        and (signature.actor == "hardware" or "machine broke" in signature.traits)
        and "connection" not in signature.traits
        and not (signature.survivable and signature.confidence <= WEAK)
    )


def _met_lost_gpu(one: Cause, lost: Cause, ordering: Ordering) -> bool:
    """True for an error of CUDA that says no more, about when the kernel lost the GPU.

    One that states no time came between those of its file that do.
    """
    if "breaks the GPU" not in lost.signature.traits or "unspecific" not in one.signature.traits:
        return False
    begin = ordering.later_by(one.first, lost.first) or 0.0
    end = ordering.later_by(ordering.at_latest(one.first) or one.first, lost.first) or 0.0
    return begin <= MAX_AFTER_LOST_GPU_SECONDS and end >= -MAX_AFTER_LOST_GPU_SECONDS


def _broke(other: Cause, one: Cause, ordering: Ordering) -> bool:
    """True for a broken device or a kill about when a rank's communication failed.

    Of a link that went down the kernel's clock may be that of another zone.
    """
    if "link down" in other.signature.traits and "no answer" in one.signature.traits:
        latest = ordering.at_latest(one.first) or one.first
        apart = abs(ordering.later_by(latest, other.first) or 0.0)
        return apart <= SAME_MOMENT or may_be_time_zone(apart)
    if not _is_broken(other) or "connection" not in one.signature.traits:
        return False
    return abs(ordering.later_by(one.first, other.first) or 0.0) <= SAME_MOMENT
