"""Group the streams of a job into comparable peers: ranks, nodes or files; silent ones too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rmetric.diagnosis.job import Job, Stream


@dataclass(kw_only=True)
class Peer:
    """A rank, or a node with all its ranks, or a file where nothing says more.

    Attributes:
        name: as a stream's: "rank 3", "node gpu-07".
        streams: what it said; none of a rank that is silent.
        ranks: its global ranks, as far as known.
        counts: event number -> how often it said it.
        leads: it has duties that its fellows lack: rank 0, the last rank, the first of a node.
    """

    name: str
    rank: int | None = None
    node: str | None = None
    streams: list[Stream] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    leads: bool = False


def peers(job: Job, by: str = "rank") -> list[Peer]:
    """All that may be compared, in the order of ranks, then of names.

    Args:
        by: "rank": ranks, silent ones too; nodes where no rank is known, else files. "node":
            the ranks of a node summed up, none where no node is known.

    Raises:
        ValueError: for any other `by`.
    """
    if by not in ("rank", "node"):
        raise ValueError(f"by is {by!r}; it is 'rank' or 'node'")
    said = _counts(job)
    found = _ranks(job, said) if by == "rank" else _nodes(job, said)
    return sorted(found, key=lambda one: (one.rank is None, one.rank or 0, one.name))


def _counts(job: Job) -> dict[str, Counter[int]]:
    said: dict[str, Counter[int]] = defaultdict(Counter)
    for event in job.events:
        for stream, count in event.counts.items():
            said[stream][event.number] += count
    return said


def _ranks(job: Job, said: dict[str, Counter[int]]) -> list[Peer]:
    found = [
        Peer(
            name=one.name,
            rank=one.rank,
            node=job.node_of(one),
            streams=[one],
            ranks=[one.rank] if one.rank is not None else [],
            counts=said[one.name],
        )
        for one in job.active_streams
    ]
    for rank in job.silent_ranks:
        node = job.node_of_rank.get(rank)
        found.append(Peer(name=f"rank {rank}", rank=rank, node=node, ranks=[rank]))
    _mark_leaders(found)
    return found


def _mark_leaders(found: Iterable[Peer]) -> None:
    ranked = [one for one in found if one.rank is not None]
    if not ranked:
        return
    leaders = {0, max(one.rank or 0 for one in ranked)}
    first: dict[str, int] = {}
    for one in ranked:
        if one.node is not None and one.rank is not None:
            first[one.node] = min(one.rank, first.get(one.node, one.rank))
    for one in ranked:
        one.leads = one.rank in leaders | set(first.values())


def _nodes(job: Job, said: dict[str, Counter[int]]) -> list[Peer]:
    found: dict[str, Peer] = {}
    for stream in job.streams.values():
        node = job.node_of(stream)
        if node is not None:
            one = found.setdefault(node, Peer(name=f"node {node}", node=node))
            one.streams.append(stream)
            one.counts.update(said[stream.name])
            one.ranks += [] if stream.rank is None else [stream.rank]
    for rank in job.silent_ranks:
        node = job.node_of_rank.get(rank)
        if node is not None:
            found.setdefault(node, Peer(name=f"node {node}", node=node)).ranks.append(rank)
    last = (job.world_size or 0) - 1
    for one in found.values():
        one.leads = 0 in one.ranks or last in one.ranks
    return list(found.values())


class Counterparts:
    """Event counts of the same ranks in another job.

    Args:
        by: as for `peers`.
    """

    def __init__(self, job: Job, by: str = "rank") -> None:
        self.all = peers(job, by)
        self._ranks = {one.rank: one.counts for one in peers(job) if one.rank is not None}
        self._names = {one.name: one.counts for one in self.all}

    def of(self, one: Peer) -> Counter[int] | None:
        """Counts of the same rank, of all ranks of a node, or of the same name; None if absent."""
        if not one.ranks:
            return self._names.get(one.name)
        known = [self._ranks[rank] for rank in one.ranks if rank in self._ranks]
        if len(known) < len(one.ranks):
            return None
        total: Counter[int] = Counter()
        for counts in known:
            total.update(counts)
        return total


def alike(first: str, second: str) -> bool:
    """Two templates that may be one: equal word by word but where either has a wildcard.

    >>> alike("step <*> loss nan", "step <NUM> loss <*>"), alike("a b", "a c")
    (True, False)
    """
    ours, theirs = first.split(), second.split()
    if len(ours) != len(theirs):
        return False
    pairs = list(zip(ours, theirs, strict=True))
    same = sum(one == other for one, other in pairs)
    return 2 * same >= len(pairs) and all(
        one == other or "<" in one or "<" in other for one, other in pairs
    )


def same_events(job: Job, other: Job) -> dict[int, int]:
    """Number of each event in `other` -> its number in `job`, as far as it is known there.

    Both were read apart, so that the same lines may have templates that differ in wildcards.
    """
    exact = {event.template: event.number for event in job.events}
    by_length: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in job.events:
        by_length[len(event.template.split())].append((event.template, event.number))
    found = {}
    for event in other.events:
        number = exact.get(event.template)
        if number is None:
            for template, candidate in by_length[len(event.template.split())]:
                if alike(event.template, template):
                    number = candidate
                    break
        if number is not None:
            found[event.number] = number
    return found
