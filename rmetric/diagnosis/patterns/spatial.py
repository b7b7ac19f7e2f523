"""Spatial pattern: find ranks or nodes whose event counts deviate from their peers.

After L4 (arXiv 2503.20263, section 4.3), where a node is a vector of event counts and an Isolation
Forest scores it. Added here: silent ranks are zero vectors; each rank is first compared with the
same rank of healthy jobs, which cancels the duties of rank 0; and a robust threshold, so that a
healthy job has no outlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmetric.diagnosis.job import Job
from rmetric.diagnosis.patterns.baseline import MAD_TO_DEVIATION
from rmetric.diagnosis.patterns.peers import Counterparts, Peer, peers, same_events
from rmetric.diagnosis.result import MAX_NODES

#: Unit of differences: once against never, in log(1 + count).
MIN_LOG_DIFFERENCE = float(np.log(2.0))
#: Factor on events that no healthy job has.
UNKNOWN_WEIGHT = 3.0
#: Robust z (Iglewicz and Hoaglin) from which a distance is an outlier.
THRESHOLD = 3.5
#: Least unit of that robust z, in distances.
MIN_DISTANCE_SPREAD = 1.0
#: Robust z of the forest's score from which it agrees.
FOREST_THRESHOLD = 1.0
#: Least unit of that robust z, in scores.
MIN_FOREST_SPREAD = 0.02
#: Factor on events that leaders lack, where there is no healthy job to compare.
LEADER_WEIGHT = 0.5
#: Least number of peers to compare.
MIN_PEERS = 3
#: Least number of peers to grow a forest.
MIN_PEERS_FOR_FOREST = 8
#: Number of trees of the forest (the default of Liu et al., 2008).
NUM_TREES = 100
_MAX_EVENTS_NAMED = 5

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EventDeviation:
    """One event that makes a speaker odd.

    Attributes:
        count, usual: how often it said it, and how often its fellows did (median) or, with
            healthy jobs, how often it would have.
        weight: share of this event in the squared distance, 0 to 1.
    """

    event: int
    count: int
    usual: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class PeerOutlier:
    """A rank or node that is unlike its fellows.

    Attributes:
        score: robust z of its distance among its fellows'; `THRESHOLD` and more.
        distance: in units of "said once against never".
        forest: robust z of the Isolation Forest's score; nan below `MIN_PEERS_FOR_FOREST`.
        events: what makes it odd, the most first.
    """

    name: str
    rank: int | None
    node: str | None
    score: float
    distance: float
    forest: float
    events: tuple[EventDeviation, ...]


def peer_outliers(
    job: Job,
    *,
    rng: np.random.Generator,
    ordinary: AbstractSet[int] = frozenset(),
    siblings: Sequence[Job] = (),
    by: str = "rank",
) -> list[PeerOutlier]:
    """Find the outliers, the strongest first; at most `MAX_NODES`, often none.

    Each speaker's log(1 + count) of each event is set against the same rank's in the healthy
    siblings (their median), then against the median of its fellows. Its distance is the smaller
    of that from the median and that from its k-th neighbour, k a quarter of the others and at
    most `MAX_NODES`: what a larger group does alike is a duty and no fault. It stands out if the
    robust z of its distance is `THRESHOLD` or more and the forest, where there are enough
    speakers for one, agrees. Without siblings those who lead (rank 0, the last rank, the first
    of a node) are judged by what they lack only.

    Args:
        rng: seeds the forest.
        ordinary: events set aside.
        siblings: healthy jobs of similar settings.
        by: "rank" or "node", see `peers`.
    """
    who = peers(job, by)
    events = [one.number for one in job.events if one.number not in ordinary]
    if len(who) < MIN_PEERS or not events:
        return []
    counts = _matrix([one.counts for one in who], events)
    usual, known = _healthy(job, who, events, siblings, by)
    off, centre = _differences(counts, usual, who, apart=not siblings)
    off = off * np.where(known, 1.0, UNKNOWN_WEIGHT)
    distances = _distances(off)
    scores = _robust_z(distances, MIN_DISTANCE_SPREAD)
    forest = _forest(off, rng)
    agree = np.isnan(forest) | (forest >= FOREST_THRESHOLD)
    over = [row for row in range(len(who)) if scores[row] >= THRESHOLD and agree[row]]
    over.sort(key=lambda row: (-scores[row], row))
    expected = np.expm1(np.maximum(np.log1p(usual) + centre, 0.0))
    return [
        _odd(who[row], events, counts[row], expected[row], off[row], scores, distances, forest, row)
        for row in over[:MAX_NODES]
    ]


def _matrix(counts_of_peers: Iterable[Counter[int]], events: Sequence[int]) -> Matrix:
    """Speakers x events."""
    rows = [[one.get(event, 0) for event in events] for one in counts_of_peers]
    return np.array(rows, dtype=float).reshape(len(rows), len(events))


def _healthy(
    job: Job, who: Sequence[Peer], events: Sequence[int], siblings: Sequence[Job], by: str
) -> tuple[Matrix, NDArray[np.bool_]]:
    """Usual counts, speakers x events, and which events any sibling knows; without any, 0, all."""
    layers, known = [], np.zeros(len(events), dtype=bool)
    for other in (one for one in siblings if one.streams):
        number = same_events(job, other)
        theirs = Counterparts(other, by)
        rest = _matrix([_renumbered(one.counts, number) for one in theirs.all], events)
        known |= _matrix([_renumbered(_all_of(other), number)], events)[0] > 0
        middle = np.median(rest, axis=0) if len(rest) else np.zeros(len(events))
        layer = []
        for one in who:
            same = theirs.of(one)
            row = middle if same is None else _matrix([_renumbered(same, number)], events)[0]
            layer.append(row)
        layers.append(np.array(layer))
    if not layers:
        return np.zeros((len(who), len(events))), np.ones(len(events), dtype=bool)
    return np.median(np.array(layers), axis=0), known


def _all_of(job: Job) -> Counter[int]:
    return Counter({event.number: event.count for event in job.events})


def _renumbered(counts: Counter[int], number: dict[int, int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for event, count in counts.items():
        if event in number:
            found[number[event]] += count
    return found


def _differences(
    counts: Matrix, usual: Matrix, who: Sequence[Peer], *, apart: bool
) -> tuple[Matrix, Matrix]:
    """Scaled differences from the fellows, and the fellows' median before scaling."""
    logs = np.log1p(counts) - np.log1p(usual)
    followers = [row for row, one in enumerate(who) if not one.leads]
    base = logs[followers] if apart and len(followers) >= MIN_PEERS else logs
    centre = np.median(base, axis=0)
    spread = MAD_TO_DEVIATION * np.median(np.abs(base - centre), axis=0)
    off = (logs - centre) / np.maximum(spread, MIN_LOG_DIFFERENCE)
    if apart:
        leaders = [row for row, one in enumerate(who) if one.leads]
        off[leaders] = LEADER_WEIGHT * np.minimum(off[leaders], 0.0)
    return off, centre


def _distances(off: Matrix) -> Matrix:
    """Distance from the median, or from the k-th neighbour if that is nearer."""
    others = len(off) - 1
    k = max(1, min(MAX_NODES, others // 4))
    between = np.sqrt(
        np.maximum(
            (off**2).sum(axis=1)[:, None] + (off**2).sum(axis=1)[None, :] - 2.0 * off @ off.T, 0.0
        )
    )
    np.fill_diagonal(between, np.inf)
    neighbour = np.sort(between, axis=1)[:, k - 1]
    return np.minimum(np.sqrt((off**2).sum(axis=1)), neighbour)


def _robust_z(values: Matrix, least: float) -> Matrix:
    centre = np.median(values)
    spread = MAD_TO_DEVIATION * np.median(np.abs(values - centre))
    return (values - centre) / max(float(spread), least)


def _forest(off: Matrix, rng: np.random.Generator) -> Matrix:
    """Robust z of an Isolation Forest's scores; rows in an order that names have no part in."""
    seed = int(rng.integers(2**31))
    if len(off) < MIN_PEERS_FOR_FOREST:
        return np.full(len(off), np.nan)
    from sklearn.ensemble import IsolationForest

    order = np.lexsort(off.T[::-1])
    forest = IsolationForest(n_estimators=NUM_TREES, random_state=seed).fit(off[order])
    return _robust_z(-forest.score_samples(off), MIN_FOREST_SPREAD)


def _odd(
    one: Peer,
    events: Sequence[int],
    counts: Matrix,
    expected: Matrix,
    off: Matrix,
    scores: Matrix,
    distances: Matrix,
    forest: Matrix,
    row: int,
) -> PeerOutlier:
    squares = off**2
    most = sorted(range(len(events)), key=lambda column: (-squares[column], column))
    total = float(squares.sum()) or 1.0
    return PeerOutlier(
        name=one.name,
        rank=one.rank,
        node=one.node,
        score=round(float(scores[row]), 3),
        distance=round(float(distances[row]), 3),
        forest=round(float(forest[row]), 3),
        events=tuple(
            EventDeviation(
                event=events[column],
                count=int(counts[column]),
                usual=round(float(expected[column]), 2),
                weight=round(float(squares[column]) / total, 3),
            )
            for column in most[:_MAX_EVENTS_NAMED]
            if squares[column] > 0.0
        ),
    )
