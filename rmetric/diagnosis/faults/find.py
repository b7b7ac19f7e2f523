"""Find the known faults of a job: the matches of each signature, in all of its streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from rmetric.diagnosis.clock import MOST_COMPARED, Ordering
from rmetric.diagnosis.facts.job import Job, Match
from rmetric.diagnosis.faults.consequences import Fault, relate
from rmetric.diagnosis.faults.survival import survived
from rmetric.diagnosis.signature import Signature

#: Roles of the matches that are faults.
FAULT_ROLES = ("cause", "ending", "echo", "symptom")


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
        if role in FAULT_ROLES:
            found[match.signature].append(match)
        elif role == "success":
            ends[match.stream].append(match)
    shared = [end for stream, of in ends.items() if stream not in alone for end in of]
    shared.sort(key=lambda one: ordering.key(one.last))
    # A rule asks for one before or behind a match.
    shared = shared[:MOST_COMPARED] + shared[MOST_COMPARED:][-MOST_COMPARED:]

    def outlived(match: Match, signature: Signature) -> bool:
        own = [*ends.get(match.stream, ()), *shared]
        ways = _ways(match) if signature.role == "cause" else [match]
        return all(survived(job, way, signature, own, ordering) for way in ways)

    faults = []
    for name, matches in found.items():
        signature = signatures[name]
        if not all(outlived(match, signature) for match in matches):
            matches.sort(key=lambda one: ordering.key(one.first))
            last = max((one.last for one in matches), key=ordering.key)
            faults.append(Fault(signature=signature, matches=matches, last=last))
    faults.sort(key=lambda one: ordering.key(one.first))
    relate(faults, ordering)
    return faults


def _ways(one: Match) -> list[Match]:
    """The match, and that of its first entry alone where the last may not be the last.

    Of a node's kernel and its rank, whose clocks may differ, either may be. A tool lists the newest
    record first.
    """
    apart = one.first.file != one.last.file or (one.first.time or 0) > (one.last.time or 0)
    return [one, replace(one, last=one.first)] if apart else [one]


def ended_alone(job: Job, signatures: Mapping[str, Signature]) -> frozenset[str]:
    """Ranks that log their planned end, where neither the first, the last nor most do."""
    matches = job.matches.values()
    ends = {one.stream for one in matches if signatures[one.signature].role == "success"}
    ranks = {one.name: one.rank for one in job.active_streams if one.rank is not None}
    for_all = {0, max(ranks.values(), default=0)}
    if len(ends) > len(ranks) / 2 or any(ranks.get(name, 0) in for_all for name in ends):
        return frozenset()
    return frozenset(ends)
