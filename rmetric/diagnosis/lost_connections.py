"""Infer the unreachable rank from the order in which its ring neighbours lose connections."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from rmetric.diagnosis.causes import Cause
from rmetric.diagnosis.job import Job, Occurrence, short
from rmetric.diagnosis.rank_evidence import numbers_in
from rmetric.diagnosis.suspects import RankEvidence

#: Least number of ranks that form a ring, and of losses that form an order.
MIN_RANKS = 4
#: Weight of a neighbour at a distance of a power of two, relative to a ring neighbour.
POWER_OF_TWO_WEIGHT = 0.4
#: Least strength of evidence.
MIN_STRENGTH = 0.3
#: Least share of the ranks that lost a connection to a host, for it to be the one.
MIN_NAMING_SHARE = 0.75
#: What the name of a host's network card has behind that of the host.
_INTERFACE = re.compile(r"[-_.]?(?:ib|eth|hsn|bond|roce|opa)\d*$")
#: NCCL's lines begin with the host, whatever its folder or file is called.
_SPEAKER = re.compile(r"(?:^|\s)([A-Za-z][\w.-]*\d[\w.-]*):\d+:\d+ \[\d+\]")
_POD = re.compile(r"(?P<address>\d+-\d+-\d+-\d+)\.(?P<of>[a-z][\w-]*)\.")
#: Losses are in an order, or of few, if the best place is so many times better than the usual.
MIN_BEST_TO_MEAN_RATIO = 1.2
#: Losses run round the ring from a rank if at least this much of their order agrees with it; and
#: another rank is as good a centre as it agrees, down to none at so much less.
MIN_WAVE_AGREEMENT = 0.8
CENTRE_TOLERANCE = 0.2
#: Of an order so many are compared, of so many orders; waves are sought in so large a world.
MAX_COMPARED_LOSSES = 12
MAX_COMPARED_ORDERS = 64
MAX_WAVE_WORLD_SIZE = 2048


def evidence_from_lost_connections(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against ranks whose ring neighbours lost a connection, or lost it first.

    Ranks pass their data round a ring, or to those a power of two away. So the first to notice
    that one is cut off are its neighbours, and it loses them at the same moment; then theirs, and
    so on round the ring. Where all report a loss, the first is found by the order of their exits,
    or of the entries in a log that they share.
    """
    orders = _orders(job, causes)
    lost = {rank for order in orders for rank in order}
    ranks = {one.rank for one in job.active_streams if one.rank is not None} | set(job.silent_ranks)
    if len(lost) < 2 or len(ranks) < MIN_RANKS:
        return []
    size = max(ranks) + 1
    wave = _wave_centres(orders, size) if len(lost) > len(ranks) / 2 else {}
    found = wave or _nearest_to_losses(orders, sorted(ranks), size)
    words = "its ring neighbours lost a connection first"
    return [
        RankEvidence(f"rank {rank}", "amid losses", words, strength)
        for rank, strength in found.items()
        if strength > MIN_STRENGTH
    ]


def evidence_from_remote_hosts(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against the one node to which most lost connections led, by its name.

    Of two nodes each names the other, so a node is named only where its own ranks name none; what
    is lost to the others is a consequence. An address that is not known to be a node's may be that
    of one of its network cards: it counts where no name does, and only where not all ranks are
    heard, as theirs tell more.
    """
    nodes = {short(node): node for one in job.streams.values() if (node := job.node_of(one))}
    named: dict[str, set[str]] = defaultdict(set)
    addressed: dict[str, set[str]] = defaultdict(set)
    connections: dict[str, set[tuple[str, str]]] = defaultdict(set)
    reporting: set[str] = set()
    losing: set[str] = set()
    for cause in causes:
        if "connection" in cause.signature.traits:
            losing |= {job.node_of(job.streams[name]) or "" for name in cause.streams}
        for match in cause.matches if cause.signature.role == "echo" else ():
            stated = [fields for fields in match.named if fields.get("remote_host")]
            own = job.node_of(job.streams[match.stream])
            reporting |= {short(own)} if own and stated else set()
            if speaker := _SPEAKER.search(match.first.text):
                reporting.add(short(speaker[1]))
            for fields in stated:
                host = _node_of(job, fields["remote_host"])
                if host[:1].isdigit() and not _POD.match(fields["remote_host"]):
                    addressed[host].add(match.stream)
                    continue
                host = _INTERFACE.sub("", short(host))
                named[host].add(match.stream)
                connections[host].add((match.stream, fields.get("port", "")))
    heard = {one.rank for one in job.streams.values() if one.rank is not None}
    if not heard or len(heard) < (job.world_size or 0):
        named = named or addressed
    lost = {host: streams for host, streams in named.items() if host not in reporting}
    every = set().union(*lost.values()) if lost else set()
    host, streams = max(lost.items(), key=lambda one: len(one[1]), default=("", set()))
    # Of one log of a node, the connections are those of its ranks.
    of_one = len(lost) == 1 and len(connections[host]) >= 2 and host not in map(short, losing)
    if (len(streams) < 2 and not of_one) or len(streams) < MIN_NAMING_SHARE * len(every):
        return []
    words = (
        f"{len(streams)} others lost their connection to it"
        if len(streams) > 1
        else f"{len(connections[host])} connections to it were lost, and none to another node"
    )
    return [RankEvidence(f"node {nodes.get(host, host)}", "accused", words)]


def _node_of(job: Job, host: str) -> str:
    """A node by its address, or by the name that Kubernetes gives to a pod's address.

    A service of many pods tells nothing.

    >>> _node_of(Job(), "10-244-6-37.gpt-worker-1.train.svc.cluster.local")
    'gpt-worker-1'
    >>> _node_of(Job(), "10-42-3-18.gpt.train.svc.cluster.local")
    '10.42.3.18'
    """
    pod = _POD.match(host)
    if pod and (pod["of"][-1:].isdigit() or pod["of"] in job.node_of_rank.values()):
        return pod["of"]
    address = pod["address"].replace("-", ".") if pod else host
    return job.node_of_address.get(address, address)


def _orders(job: Job, causes: Sequence[Cause]) -> list[list[int]]:
    """Ranks that lost a connection, in the order of each log, and of their exits."""
    by_file: dict[str, list[int]] = defaultdict(list)
    for name, first in sorted(_first_losses(causes).items(), key=lambda one: one[1].order):
        if (rank := job.streams[name].rank) is not None:
            by_file[first.file].append(rank)
    lost = {rank for order in by_file.values() for rank in order}
    exits = [rank for rank in ([] if job.tasks_launch else _exits(causes)) if rank in lost]
    return [*by_file.values(), *([exits] if exits else [])]


def _wave_centres(orders: Sequence[Sequence[int]], size: int) -> dict[int, float]:
    """Rank -> agreement of the losses' order with a wave from it; empty where there is no wave.

    By the pairs of an order: the nearer of the two reports it first, or not (Kendall).
    """
    compared = [order[:MAX_COMPARED_LOSSES] for order in orders if len(order) > MIN_RANKS][
        :MAX_COMPARED_ORDERS
    ]
    if not compared or size > MAX_WAVE_WORLD_SIZE:
        return {}
    agrees = {rank: _agreement(rank, compared, size) for rank in range(size)}
    best = max(agrees.values())
    if best < MIN_WAVE_AGREEMENT:
        return {}
    # Centres on the far side agree as well, but nothing began next to them.
    begun = {rank for order in compared for rank in order[:2]}
    return {
        rank: 1.0 - (best - one) / CENTRE_TOLERANCE
        for rank, one in agrees.items()
        if any(_ring_distance(rank, other, size) <= 1 for other in begun)
    }


def _agreement(centre: int, orders: Sequence[Sequence[int]], size: int) -> float:
    agreed = pairs = 0
    for order in orders:
        # The centre itself loses its neighbours at any moment.
        far = [_ring_distance(centre, rank, size) for rank in order if rank != centre]
        for one, other in combinations(far, 2):
            agreed += (one < other) - (one > other)
            pairs += 1
    return agreed / pairs if pairs else 0.0


def _nearest_to_losses(
    orders: Sequence[Sequence[int]], ranks: Sequence[int], size: int
) -> dict[int, float]:
    """Rank -> excess of losses next to it over the mean of all ranks, 1 at best."""
    weights: dict[int, float] = defaultdict(float)
    for order in orders:
        for place, rank in enumerate(order, 1):
            weights[rank] += 1.0 / place
    near = {rank: _weight_near(rank, weights, size) for rank in ranks}
    usual = sum(near.values()) / len(near)
    best = sorted(weights.values(), reverse=True)
    most = sum(best[:3]) + POWER_OF_TWO_WEIGHT * sum(best[3 : 2 * size.bit_length() - 1])
    if most < MIN_BEST_TO_MEAN_RATIO * usual:
        return {}  # all lost one, in no order
    return {rank: (one - usual) / (most - usual) for rank, one in near.items()}


def _first_losses(causes: Sequence[Cause]) -> dict[str, Occurrence]:
    """First lost-connection entry of each stream that reports one."""
    return {
        match.stream: match.first
        for cause in causes
        if cause.signature.role == "echo"
        for match in reversed(cause.matches)
        if any("remote_host" in fields for fields in match.named)
    }


def _exits(causes: Sequence[Cause]) -> list[int]:
    """Ranks in the order of their ends in a launcher's reports."""
    exits = [
        rank
        for cause in causes
        for match in cause.matches
        for fields in match.named
        for rank in numbers_in(fields.get("tasks", ""))
    ]
    return list(dict.fromkeys(exits))


def _weight_near(rank: int, weights: Mapping[int, float], size: int) -> float:
    """Sum of the weights next to it, or a power of two away."""
    near = {(rank + apart) % size: 1.0 for apart in (-1, 0, 1)}
    for apart in (1 << power for power in range(1, (size // 2).bit_length())):
        near |= dict.fromkeys(((rank - apart) % size, (rank + apart) % size), POWER_OF_TWO_WEIGHT)
    return sum(share * weights.get(other, 0.0) for other, share in near.items())


def _ring_distance(one: int, other: int, size: int) -> int:
    """Steps between two ranks of a ring."""
    return min((one - other) % size, (other - one) % size)
