"""Compare the ranks of a job, else its nodes or files; ranks without log lines too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from rmetric.diagnosis.facts.job import Job, JobStream

#: A normal distribution's standard deviation, of its median distance from the middle.
MAD_TO_DEVIATION = 1.4826


@dataclass(kw_only=True)
class Peer:
    """A rank, a node or a file, of which each is compared with the others.

    Attributes:
        name: as a stream's: "rank 3", "node gpu-07".
        stream: None for a silent rank.
        counts: event number -> number of entries.
        leads: it has duties that its peers lack: rank 0, the last rank, the first of a node.
    """

    name: str
    rank: int | None = None
    node: str | None = None
    stream: JobStream | None = None
    counts: Counter[int] = field(default_factory=Counter)
    leads: bool = False


def peers(job: Job) -> list[Peer]:
    """Ranks, silent ones too; nodes where no rank is known, else files.

    In the order of ranks, then of names.
    """
    found = [
        Peer(name=one.name, rank=one.rank, node=job.node_of(one), stream=one)
        for one in job.active_streams
    ]
    for rank in job.silent_ranks:
        found.append(Peer(name=f"rank {rank}", rank=rank, node=job.node_of_rank.get(rank)))
    found.sort(key=lambda one: (one.rank is None, one.rank or 0, one.name))
    by_name = {one.name: one for one in found}
    for event in job.events:
        for name, count in event.counts.items():
            if name in by_name:
                by_name[name].counts[event.number] += count
    ranked = [one for one in found if one.rank is not None]
    first_of_node = {one.node: one for one in reversed(ranked) if one.node is not None}
    for leader in (*first_of_node.values(), *ranked[-1:]):
        leader.leads = True
    for one in ranked[:1]:
        one.leads |= one.rank == 0
    return found


def robust_deviation(values: Iterable[float], middle: float) -> float:
    """Standard deviation from the median absolute deviation, robust to few outliers."""
    return MAD_TO_DEVIATION * median(abs(value - middle) for value in values)


def may_be_same(first: str, second: str) -> bool:
    """Two templates that may be one: equal word by word but where either has a wildcard.

    >>> may_be_same("step <*> loss nan", "step <NUM> loss <*>"), may_be_same("a b", "a c")
    (True, False)
    """
    ours, theirs = first.split(), second.split()
    if len(ours) != len(theirs):
        return False
    differ = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    return 2 * len(differ) <= len(ours) and all("<" in one or "<" in other for one, other in differ)


def same_events(job: Job, other: Job) -> dict[int, int]:
    """Number of each event in `other` -> its number in `job`, as far as it is known there.

    Both were read apart, so that the same lines may have templates that differ in wildcards.
    """
    exact = {event.template: event.number for event in job.events}
    by_length: dict[int, list[str]] = defaultdict(list)
    for template in exact:
        by_length[len(template.split())].append(template)
    found = {}
    for event in other.events:
        alike = by_length[len(event.template.split())] if event.template not in exact else ()
        same = next((one for one in alike if may_be_same(event.template, one)), event.template)
        if same in exact:
            found[event.number] = exact[same]
    return found
