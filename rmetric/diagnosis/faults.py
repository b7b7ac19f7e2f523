"""Known faults of a job: the matches of each signature, survived or not, and what follows what.

The log of a failed job contains many faults: the cause, the echoes on other ranks, the launcher's
reports, and faults that the training survived. The explanation is a cause that was not survived
and that does not follow from an earlier cause.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rmetric.diagnosis.clock import (
    MAX_AFTER_LOST_GPU_SECONDS,
    MOST_COMPARED,
    Ordering,
    is_deadly,
    may_be_time_zone,
    timed_on_its_node,
)
from rmetric.diagnosis.facts.job import TAIL, Job, JobStream, Match, Occurrence
from rmetric.diagnosis.signature import Signature
from rmetric.readers.step_forms import planned_steps

#: Below this confidence an entry is generic (any error line) and makes nothing a consequence.
GENERIC = 0.5


@dataclass(kw_only=True)
class Fault:
    """A signature in all streams of the job.

    Attributes:
        matches: one a stream, the first in time first.
        last: the last of all its entries.
        follows: id of the earlier fault of which it is the likely consequence; "" without.
    """

    signature: Signature
    matches: list[Match]
    last: Occurrence
    follows: str = ""

    @property
    def first(self) -> Occurrence:
        return self.matches[0].first

    @property
    def entries(self) -> list[tuple[str, dict[str, str]]]:
        """The stream and the named groups of its entries, each different one once."""
        return [(match.stream, fields) for match in self.matches for fields in match.named]

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(match.stream for match in self.matches)

    @property
    def events(self) -> set[int]:
        return set().union(*(match.events for match in self.matches))

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
        """True for a trait of library/vocabulary.yaml."""
        return trait in self.signature.traits


def find_faults(
    job: Job, signatures: Mapping[str, Signature], ordering: Ordering, alone: frozenset[str]
) -> list[Fault]:
    """The known faults of a job that it did not survive, the first in time first.

    The planned ends of the streams in `alone` (`ended_alone`) are not the job's.
    """
    found: dict[str, list[Match]] = defaultdict(list)
    ends: dict[str, list[Match]] = defaultdict(list)
    for match in job.matches.values():
        role = signatures[match.signature].role
        if role == "success":
            ends[match.stream].append(match)
        elif role != "harmless":
            found[match.signature].append(match)
    shared = [end for stream, of in ends.items() if stream not in alone for end in of]
    shared.sort(key=lambda match: ordering.key(match.last))
    # A rule asks for one before or behind a match.
    shared = shared[:MOST_COMPARED] + shared[MOST_COMPARED:][-MOST_COMPARED:]
    planned_end, faults = _planned_end(job), []
    for name, matches in found.items():
        signature = signatures[name]
        met = (
            _Met(job, way, signature, [*ends.get(match.stream, ()), *shared], planned_end, ordering)
            for match in matches
            for way in _ways(match, signature)
        )
        if not all(case.was_survived() for case in met):
            matches.sort(key=lambda match: ordering.key(match.first))
            last = max((match.last for match in matches), key=ordering.key)
            faults.append(Fault(signature=signature, matches=matches, last=last))
    faults.sort(key=lambda fault: ordering.key(fault.first))
    for fault in faults:
        earlier = (other for other in faults if _explains(other, fault, ordering))
        fault.follows = next((other.signature.id for other in earlier), "")
    return faults


def _ways(match: Match, signature: Signature) -> list[Match]:
    """The match, and that of a cause's first entry alone where the last may not be the last."""
    # A kernel's entry or its rank's, by two clocks, may be last. A tool lists the newest first.
    first, last = match.first, match.last
    two = first.file != last.file or (first.time or 0) > (last.time or 0)
    return [match, replace(match, last=first)] if two and signature.role == "cause" else [match]


def ended_alone(job: Job, signatures: Mapping[str, Signature]) -> frozenset[str]:
    """Ranks that log their planned end, where neither the first, the last nor most do."""
    matches = job.matches.values()
    ends = {match.stream for match in matches if signatures[match.signature].role == "success"}
    ranks = {stream.name: stream.rank for stream in job.active_streams if stream.rank is not None}
    for_all = {0, max(ranks.values(), default=0)}
    if len(ends) > len(ranks) / 2 or any(ranks.get(name, 0) in for_all for name in ends):
        return frozenset()
    return frozenset(ends)


# -- what follows what

#: Largest distance in seconds of a consequence: the usual timeout of collectives.
FOLLOWS_WITHIN = 1800.0
#: From this confidence on a symptom or an echo makes an ending that follows its consequence.
MIN_CONFIDENCE_OF_FAILURE = 0.4
#: Seconds between a broken device's record by the kernel and the communication that it broke,
#: whichever is logged first.
SAME_FAULT_SECONDS = 60.0


def _explains(other: Fault, fault: Fault, ordering: Ordering) -> bool:
    """True if `fault` is a likely consequence of `other`."""
    reported = fault.has("abort") or fault.has("report")
    ended_by = fault.role == "ending" or (other.role == "echo" and reported)
    if other is fault or other.follows == fault.signature.id or fault.has("observed"):
        return False
    if not (ended_by or other.role in ("cause", "ending")):
        return False
    if other.confidence < (MIN_CONFIDENCE_OF_FAILURE if ended_by else GENERIC):
        return False
    if _is_broken(fault) and other.has("connection"):
        return False
    first = ordering.after(fault.first, other.first) or _is_reason(other, fault, ordering)
    return first and _is_near(other, fault, ordering)


def _is_reason(other: Fault, fault: Fault, ordering: Ordering) -> bool:
    """True for what broke or ended the other about when it failed, whatever the clocks show."""
    if other.has("link down") and fault.has("no answer"):
        at = ordering.at_latest(fault.first) or fault.first
        return _at_once(abs(ordering.later_by(at, other.first) or 0.0))
    apart = abs(ordering.later_by(fault.first, other.first) or 0.0)
    if other.has("breaks the GPU") and fault.has("unspecific"):
        return True
    if apart <= SAME_FAULT_SECONDS and _is_broken(other) and fault.has("connection"):
        return True
    if fault.has("meeting"):  # nodes time out waiting for one that fails by itself
        others = not set(fault.streams) <= set(other.streams)
        return other.role == "cause" and others and apart <= FOLLOWS_WITHIN
    if fault.signature.reason_in:  # a later line may name the disk that was not written to
        return other.signature.family in fault.signature.reason_in and apart <= FOLLOWS_WITHIN
    # Slurm may cancel the step first, and the job with its reason after the time of grace.
    ends = fault.has("signalled") and not other.has("signalled") and other.role == "ending"
    return ends and _at_once(apart)


def _at_once(apart: float) -> bool:
    return apart <= SAME_FAULT_SECONDS or may_be_time_zone(apart)


def _is_near(other: Fault, fault: Fault, ordering: Ordering) -> bool:
    """True if `fault` may be a consequence by the time between them, and by how sure they are."""
    apart = ordering.later_by(fault.first, other.last) or 0.0
    # Of one file a scheduler's clock may be that of another zone.
    of_zones = fault.first.file == other.last.file and fault.role == "ending"
    if apart > FOLLOWS_WITHIN and not (of_zones and may_be_time_zone(apart)):
        return False
    # The same fault, logged again in more precise words?
    shared = not set(fault.streams).isdisjoint(other.streams)
    return other.signature.rank >= min(fault.signature.rank, 10) or not shared


def _is_broken(fault: Fault) -> bool:
    """True for the record of a kernel's kill or a broken device, but none of the network."""
    broke = fault.signature.actor == "hardware" or fault.has("machine broke")
    return broke and not fault.has("connection")


# -- what a training survived

#: Different steps that may be logged after a fatal fault: by ranks that have not yet met it, by a
#: progress bar that is drawn once more.
IN_FLIGHT = 2
#: Least share of the most step lines of a stream; below it a stream only names a step.
MIN_STEP_SHARE = 0.05
#: Lines of a training without a step.
LOSS = re.compile(r"(?i)\bloss\b\W{1,4}<")


def _planned_end(job: Job) -> list[Occurrence]:
    """Entries of the job's last step which state that it is the last planned one."""
    if job.furthest is None or (step := job.furthest.last_step) is None:
        return []
    entries = [entry for entry in (*job.furthest.tail, job.furthest.last_step_at) if entry]
    return [e for e in entries if planned_steps(e.text, step) == step or "(100%)" in e.text]


@dataclass(frozen=True)
class _Met:
    """A match, and all that decides if the training survived it; `ends` state a planned end."""

    job: Job
    match: Match
    signature: Signature
    ends: Sequence[Match]
    planned_end: Sequence[Occurrence]
    ordering: Ordering

    @property
    def own(self) -> JobStream:
        return self.job.streams[self.match.stream]

    @property
    def planned_last(self) -> Occurrence | None:
        """The entry that first states the job's last step, if that is the last planned one."""
        last = self.job.furthest.last_step_at if self.job.furthest else None
        return last if last in self.planned_end else None

    def was_survived(self) -> bool:
        """True if training continued, or ended as planned, after it; the first rule that fits."""
        has = self.signature.traits.__contains__
        if self._is_before_the_end():
            return True
        if self._killed_or_broke():
            return False
        # A machine's fault behind the planned end is of later.
        behind = any(self.ordering.after(self.match.first, end.first) for end in self.ends)
        of_machine = self.signature.actor in ("hardware", "platform") and not self.own.steps
        if behind and (of_machine or has("connection")):
            return True
        # Behind the last planned step nobody waits for a connection any more.
        last = self.planned_last
        closed = last is not None and self.ordering.after(self.match.first, last)
        if self._taken_back() or (closed and has("connection") and not has("waiting")):
            return True
        if self.signature.role == "ending":  # after the planned one it was of a server, or a wait
            of_server = has("ends a step") and bool(self.ends and self.planned_end)
            return of_server or (has("interrupted") and behind)
        return self._beside_a_training_that_ended_well() or self._went_on()

    def _is_before_the_end(self) -> bool:
        """The job ended as planned after it, or made all steps, and well by the scheduler."""
        if any(self.ordering.after(end.last, self.match.last) for end in self.ends):
            return True
        traits = self.job.traits
        return "recorded" in traits and ("completed" in traits or bool(self.planned_end))

    def _killed_or_broke(self) -> bool:
        """A kill that a launcher or a framework reports too; what no rank of its node outlives."""
        job, match = self.job, self.match
        if "kernel kill" in match.traits and match.pids & job.pids_named_by_programs:
            return True
        if not is_deadly(job, match) or job.node_of(self.own) is None:
            return False
        # Whatever the clocks of other nodes show.
        on_node = timed_on_its_node(job, match)
        later = [self.ordering.later_by(entry, match.first) for entry in on_node]
        known = [seconds for seconds in later if seconds is not None]
        return bool(known) and 0.0 <= max(known) <= MAX_AFTER_LOST_GPU_SECONDS

    def _taken_back(self) -> bool:
        own = (self.job.matches.get((id, self.match.stream)) for id in self.signature.taken_back_by)
        return any(
            match is not None and self.ordering.after(match.last, self.match.last) for match in own
        )

    def _beside_a_training_that_ended_well(self) -> bool:
        """In another file of errors, beside a training that made all its steps."""
        last = self.planned_last
        beside = last is not None and last.file != self.match.last.file and not self.own.steps
        return self.signature.survivable and beside

    def _went_on(self) -> bool:
        """More steps were logged after the last match than may be in flight."""
        job, last, own = self.job, self.match.last, self.own
        of_steps = own.last_step_at is not None and own.last_step_at.file == last.file
        many = own.steps >= max(1.0, MIN_STEP_SHARE * job.most_steps)
        stepping = [own] if of_steps and many else self.ordering.stepping
        is_later = self._is_later()
        if not stepping:
            return self._losses(is_later) > IN_FLIGHT
        steps_at = [stream.last_step_at for stream in stepping if stream.last_step_at is not None]
        continued = any(map(is_later, steps_at))
        if self.signature.survivable or not continued:
            return continued
        later = {entry.step for stream in stepping for entry in stream.tail if is_later(entry)}
        if len(later) > IN_FLIGHT:
            return True
        # The last entries may all be of the end. What came before all steps did not end the job.
        begun = next((at for stage, at in job.stages if stage == "train"), None)
        if begun is not None and is_later(begun):
            return max(stream.steps for stream in stepping) > IN_FLIGHT
        return of_steps and self._is_long_before_the_end()

    def _is_long_before_the_end(self) -> bool:
        """Far more steps than the last entries, whatever they are of, are of later."""
        step, steps, end = self.match.last.step, self.own.steps, self.own.last_step or 0
        return steps > IN_FLIGHT if step is None else (end - step) * steps > TAIL * end

    def _losses(self, is_later: Callable[[Occurrence], bool]) -> int:
        """Number of entries with a loss behind it, in a job whose lines state no steps."""
        losses = {event.number for event in self.job.events if LOSS.search(event.template)}
        tails = (entry for stream in self.job.streams.values() for entry in stream.tail)
        return sum(is_later(entry) and entry.event in losses - self.match.events for entry in tails)

    def _is_later(self) -> Callable[[Occurrence], bool]:
        """Whether an entry is later than the match."""
        own, last, ordering = self.own, self.match.last, self.ordering
        # What followed it in its stream must be kept, or the next time may be of much later.
        kept = own.tail and own.tail[0].order <= last.order
        latest = ordering.at_latest(last) if kept else last

        def is_later(entry: Occurrence) -> bool:
            if entry.file == last.file:
                return ordering.after(entry, last)
            return latest is not None and ordering.after(entry, latest)

        return is_later
