"""Spatial pattern: find ranks or nodes whose event counts deviate from their peers.

After L4 (arXiv 2503.20263, section 4.3), where a node is a vector of event counts and an Isolation
Forest scores it. Added here: silent ranks are zero vectors, the duties of rank 0 are its own, and a
robust threshold, so that a healthy job has no outlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmetric.diagnosis.facts.job import Job, JobStream
from rmetric.diagnosis.report.result import MAX_NODES

#: A normal distribution's standard deviation, of its median distance from the middle.
MAD_TO_DEVIATION = 1.4826


@dataclass(kw_only=True)
class Peer:
    """A rank, a node or a file, by its stream's name, of which each is compared with the others."""

    name: str
    rank: int | None = None
    node: str | None = None
    stream: JobStream | None = None  # None for a silent rank
    counts: Counter[int] = field(default_factory=Counter)  # event number -> number of entries
    leads: bool = False  # it has duties that its peers lack: rank 0, the last, the first of a node


def peers(job: Job) -> list[Peer]:
    """Ranks, silent ones too, in their order; nodes where no rank is known, else files."""
    found = [
        Peer(name=stream.name, rank=stream.rank, node=job.node_of(stream), stream=stream)
        for stream in job.active_streams
    ]
    for rank in job.silent_ranks:
        found.append(Peer(name=f"rank {rank}", rank=rank, node=job.node_of_rank.get(rank)))
    found.sort(key=lambda peer: (peer.rank is None, peer.rank or 0, peer.name))
    by_name = {peer.name: peer for peer in found}
    for event in job.events:
        for name, count in event.counts.items():
            if name in by_name:
                by_name[name].counts[event.number] += count
    ranked = [peer for peer in found if peer.rank is not None]
    first_of_node = {peer.node: peer for peer in reversed(ranked) if peer.node is not None}
    first = [peer for peer in ranked[:1] if peer.rank == 0]
    for leader in (*first, *first_of_node.values(), *ranked[-1:]):
        leader.leads = True
    return found


def robust_deviation(values: Iterable[float], middle: float) -> float:
    """Standard deviation from the median absolute deviation, robust to few outliers."""
    return MAD_TO_DEVIATION * median(abs(value - middle) for value in values)


#: Unit of differences: once against never, in log(1 + count).
MIN_LOG_DIFFERENCE = float(np.log(2.0))
#: Robust z (Iglewicz and Hoaglin) from which a distance is an outlier, and its least unit.
THRESHOLD = 3.5
MIN_DISTANCE_SPREAD = 1.0
#: Robust z of the forest's score from which it agrees, and its least unit.
FOREST_THRESHOLD = 1.0
MIN_FOREST_SPREAD = 0.02
#: Factor on events that leaders lack.
LEADER_WEIGHT = 0.5
#: Least number of peers to compare, and to grow a forest.
MIN_PEERS = 3
MIN_PEERS_FOR_FOREST = 8
#: Number of trees of the forest (the default of Liu et al., 2008).
NUM_TREES = 100
_MAX_EVENTS_NAMED = 5

Matrix = NDArray[np.float64]


class PeerOutlier(NamedTuple):
    """A rank or node that differs from its peers."""

    name: str
    score: float  # robust z of its distance among those of its peers; `THRESHOLD` and more
    events: tuple[int, ...]  # numbers of those in which it differs, the most first


def peer_outliers(
    job: Job, *, rng: np.random.Generator, ordinary: AbstractSet[int] = frozenset()
) -> list[PeerOutlier]:
    """Find the outliers, the strongest first; at most `MAX_NODES`, often none.

    Each peer's log(1 + count) of each event is set against the median of the peers. It is an
    outlier if the robust z of its distance from the median is `THRESHOLD` or more and the forest,
    where there are enough peers for one, agrees; but not if more than a quarter of the others, or
    than `MAX_NODES`, are: so many have a duty and no fault. Leaders (rank 0, the last rank, the
    first of a node) are judged by the events that they lack only.

    `rng` seeds the forest, which is grown only where a distance reaches `THRESHOLD`; events of
    `ordinary` are set aside.
    """
    every = peers(job)
    events = [event.number for event in job.events if event.number not in ordinary]
    if len(every) < MIN_PEERS or not events:
        return []
    logs = np.log1p([[peer.counts.get(event, 0) for event in events] for peer in every])
    leaders = np.array([peer.leads for peer in every])
    base = logs[~leaders] if (~leaders).sum() >= MIN_PEERS else logs
    centre = np.median(base, axis=0)
    spread = MAD_TO_DEVIATION * np.median(np.abs(base - centre), axis=0)
    off = (logs - centre) / np.maximum(spread, MIN_LOG_DIFFERENCE)
    off[leaders] = LEADER_WEIGHT * np.minimum(off[leaders], 0.0)
    scores = _robust_z(np.linalg.norm(off, axis=1), MIN_DISTANCE_SPREAD)
    over = scores >= THRESHOLD
    if not 0 < over.sum() <= max(1, min(MAX_NODES, (len(every) - 1) // 4)):
        return []
    if len(every) >= MIN_PEERS_FOR_FOREST:
        over &= _forest(off, int(rng.integers(2**31))) >= FOREST_THRESHOLD
    found = []
    for row in sorted(np.flatnonzero(over).tolist(), key=lambda row: (-scores[row], row)):
        most = np.argsort(-np.abs(off[row]), kind="stable")[:_MAX_EVENTS_NAMED]
        differing = tuple(events[column] for column in most if off[row, column])
        found.append(PeerOutlier(every[row].name, round(float(scores[row]), 3), differing))
    return found


def _robust_z(values: Matrix, least: float) -> Matrix:
    centre = float(np.median(values))
    return (values - centre) / max(robust_deviation(values, centre), least)


def _forest(off: Matrix, seed: int) -> Matrix:
    """Robust z of an Isolation Forest's scores; rows in an order that is independent of names."""
    from sklearn.ensemble import IsolationForest

    order = np.lexsort(off.T[::-1])
    forest = IsolationForest(n_estimators=NUM_TREES, random_state=seed).fit(off[order])
    return _robust_z(-forest.score_samples(off), MIN_FOREST_SPREAD)
