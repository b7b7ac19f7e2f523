"""Known faults, and which of them is the likely consequence of which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rmetric.diagnosis.clock import Ordering, may_be_time_zone
from rmetric.diagnosis.facts.job import Match, Occurrence
from rmetric.diagnosis.signature import Signature

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
        return [(one.stream, fields) for one in self.matches for fields in one.named]

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(match.stream for match in self.matches)

    @property
    def events(self) -> set[int]:
        """Numbers of its events."""
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
        """True for a trait of `signature.TRAITS`."""
        return trait in self.signature.traits

    @property
    def is_sure(self) -> bool:
        """It states a cause or an end, more than any error line, and follows from no other."""
        return self.role in ("cause", "ending") and self.confidence >= GENERIC and not self.follows


#: Largest distance in seconds of a consequence: the usual timeout of collectives.
FOLLOWS_WITHIN = 1800.0
#: From this confidence on a symptom or an echo makes an ending that follows its consequence.
MIN_CONFIDENCE_OF_FAILURE = 0.4
#: Seconds between a broken device's record by the kernel and the communication that it broke,
#: whichever is logged first.
SAME_FAULT_SECONDS = 60.0


def relate(live: Sequence[Fault], ordering: Ordering) -> None:
    """Set `follows` of the faults of a job."""
    for one in live:
        earlier = (other for other in live if _explains(other, one, ordering))
        one.follows = next((other.signature.id for other in earlier), "")


def _explains(other: Fault, one: Fault, ordering: Ordering) -> bool:
    """True if `one` is a likely consequence of `other`."""
    reported = one.has("abort") or one.has("report")
    ended_by = one.role == "ending" or (other.role == "echo" and reported)
    if other is one or other.follows == one.signature.id or one.has("observed"):
        return False
    if not (ended_by or other.role in ("cause", "ending")):
        return False
    if other.confidence < (MIN_CONFIDENCE_OF_FAILURE if ended_by else GENERIC):
        return False
    if _is_broken(one) and other.has("connection"):
        return False
    return _comes_before(other, one, ordering) and _is_near(other, one, ordering)


def _comes_before(other: Fault, one: Fault, ordering: Ordering) -> bool:
    """True for the earlier one, or the one that is first whatever the clocks say."""
    return (
        ordering.after(one.first, other.first)
        or _broke(other, one, ordering)
        or _met_lost_gpu(one, other)
        or _is_reason(other, one, ordering)
    )


def _is_near(other: Fault, one: Fault, ordering: Ordering) -> bool:
    """True if `one` may be a consequence by the time between them, and by how sure they are."""
    apart = ordering.later_by(one.first, other.last) or 0.0
    # Of one file a scheduler's clock may be that of another zone.
    of_zones = one.first.file == other.last.file and one.role == "ending"
    if apart > FOLLOWS_WITHIN and not (of_zones and may_be_time_zone(apart)):
        return False
    # The same fault, logged again in more precise words?
    shared = not set(one.streams).isdisjoint(other.streams)
    return other.signature.rank >= min(one.signature.rank, 10) or not shared


def _is_reason(one: Fault, other: Fault, ordering: Ordering) -> bool:
    """True for an ending with its reason, about when another one states a signal only.

    Slurm may cancel the step first, and the job with its reason only after the time of grace. A
    checkpoint fails to be written because of what a later line tells of its disk. Nodes wait in
    vain for one that fails by itself.
    """
    apart = abs(ordering.later_by(one.first, other.first) or 0.0)
    if other.has("meeting"):
        others = not set(other.streams) <= set(one.streams)
        return one.role == "cause" and others and apart <= FOLLOWS_WITHIN
    if other.signature.reason_in:
        return one.signature.family in other.signature.reason_in and apart <= FOLLOWS_WITHIN
    ends = other.has("signalled") and not one.has("signalled") and one.role == "ending"
    return ends and (apart <= SAME_FAULT_SECONDS or may_be_time_zone(apart))


def _is_broken(one: Fault) -> bool:
    """True for the record of a kernel's kill or a broken device, but none of the network."""
    broke = one.signature.actor == "hardware" or one.has("machine broke")
    return broke and not one.has("connection")


def _met_lost_gpu(one: Fault, lost: Fault) -> bool:
    """True for an error of CUDA that says no more, where the kernel lost the GPU."""
    return lost.has("breaks the GPU") and one.has("unspecific")


def _broke(other: Fault, one: Fault, ordering: Ordering) -> bool:
    """True for a broken device or a kill about when a rank's communication failed.

    Of a link that went down the kernel's clock may be that of another zone.
    """
    if other.has("link down") and one.has("no answer"):
        latest = ordering.at_latest(one.first) or one.first
        apart = abs(ordering.later_by(latest, other.first) or 0.0)
        return apart <= SAME_FAULT_SECONDS or may_be_time_zone(apart)
    if not _is_broken(other) or not one.has("connection"):
        return False
    return abs(ordering.later_by(one.first, other.first) or 0.0) <= SAME_FAULT_SECONDS
