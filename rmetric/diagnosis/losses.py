"""Amid whom those stand who lost a connection: who was cut off, where all say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rmetric.diagnosis.accusers import numbers_in
from rmetric.diagnosis.causes import Cause
from rmetric.diagnosis.job import Job, Occurrence
from rmetric.diagnosis.suspects import Sign

#: A neighbour by a power of two counts so much of one in the ring.
FAR = 0.4
#: Of what can stand amid the losses, what counts.
LEAST_AMID = 0.3
#: Losses are in an order, or of few, if the best place is so many times better than the usual.
ORDERED = 1.2


def signs_of_losses(job: Job, causes: Sequence[Cause]) -> list[Sign]:
    """Amid whom those stand who lost a connection, or who lost it first.

    Ranks pass their data round a ring, or to those a power of two away. So the first to notice
    that one is cut off are its neighbours, and it loses them at the same moment. Where all come
    to say so, the order tells who was first: of their exits, or of the entries in a log that they
    share.
    """
    said = _losses(causes)
    weights: dict[int, float] = {}
    shared: Counter[str] = Counter()
    for name, first in sorted(said.items(), key=lambda one: one[1].order):
        shared[first.file] += 1
        if (rank := job.streams[name].rank) is not None:
            weights[rank] = 1.0 / shared[first.file]
    for place, rank in enumerate((one for one in _exits(causes) if one in weights), 1):
        weights[rank] += 1.0 / place
    ranks = {one.rank for one in job.speaking if one.rank is not None} | set(job.silent_ranks)
    if len(weights) < 2 or len(ranks) < 4:
        return []
    size = max(ranks) + 1
    near = {rank: _near(rank, weights, size) for rank in sorted(ranks)}
    usual = sum(near.values()) / len(near)
    best = sorted(weights.values(), reverse=True)
    most = sum(best[:3]) + FAR * sum(best[3 : 2 * size.bit_length() - 1])
    if most < ORDERED * usual:
        return []  # all lost one, and nothing tells who did first
    words = "stands amid those who lost a connection first"
    return [
        Sign(stream=f"rank {rank}", kind="amid losses", words=words, strength=strength)
        for rank, one in near.items()
        if (strength := (one - usual) / (most - usual)) > LEAST_AMID
    ]


def _losses(causes: Sequence[Cause]) -> dict[str, Occurrence]:
    """Who says that it lost another's connection, and where first."""
    return {
        match.stream: match.first
        for cause in causes
        if cause.signature.role == "echo"
        for match in reversed(cause.matches)
        if any("remote_host" in fields for fields in match.named)
    }


def _exits(causes: Sequence[Cause]) -> list[int]:
    """Ranks in the order in which a launcher that tells of each saw them end."""
    told = [
        rank
        for cause in causes
        for match in cause.matches
        for fields in match.named
        for rank in numbers_in(fields.get("tasks", ""))
    ]
    return list(dict.fromkeys(told))


def _near(rank: int, weights: Mapping[int, float], size: int) -> float:
    """How much of the weights stands next to it, or a power of two away."""
    total = 0.0
    for other, weight in weights.items():
        apart = min((rank - other) % size, (other - rank) % size)
        if apart <= 1:
            total += weight
        elif apart & (apart - 1) == 0:
            total += FAR * weight
    return total
