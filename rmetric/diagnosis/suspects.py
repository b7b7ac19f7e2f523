"""Rank the suspects: weigh and sum the evidence of all channels per stream.

Evidence against a rank is a cause in its own log, a report by others (an exit code, a message that
names it), an absence (it is silent, or lacks the timeout that its peers report), or a deviation
from its peers (spatial and temporal pattern).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import exp
from typing import NamedTuple

from rmetric.diagnosis.job import Job, JobStream
from rmetric.diagnosis.result import MAX_NODES, Suspect

#: Kind of evidence -> its weight at full strength. The score is 1 - exp(-sum / 3): one strong
#: piece gives 0.7 and more, two weak ones about a half.
WEIGHTS = {
    "own cause": 4.0,
    "first": 1.0,
    "confirmed": 1.0,
    "kernel": 6.0,
    "recorder": 7.0,
    "accused": 4.0,
    "stack": 3.5,
    "implicated": 2.5,
    "killed": 4.0,
    "failed first": 1.0,
    "waited for": 2.5,
    "done alone": 3.5,
    "behind": 3.5,
    "idle gpu": 3.5,
    "silent": 3.0,
    "ended early": 3.0,
    "no echo": 2.5,
    "not waiting": 2.5,
    "amid losses": 4.0,
    "other collective": 3.5,
    "last words": 1.0,
    "missing event": 1.0,
    "unlike": 1.9,
    "numbers": 2.5,
    "settings": 7.0,
    "slow": 2.0,
    "iteration differs": 1.0,
}
#: From this score on a node is named.
NAMED = 0.5


class RankEvidence(NamedTuple):
    """One piece of evidence against a stream; its kind is of `WEIGHTS`, its strength 0 to 1."""

    stream: str
    kind: str
    words: str
    strength: float = 1.0


def divided(
    streams: Collection[str], kind: str, words: str, strength: float = 1.0
) -> list[RankEvidence]:
    """The same evidence against several streams; the more there are, the weaker it is."""
    each = strength / max(1, len(streams)) ** 0.5
    return [RankEvidence(one, kind, words, each) for one in streams]


def suspects(job: Job, evidence: Iterable[RankEvidence]) -> tuple[Suspect, ...]:
    """Score all streams with evidence, the most suspect first; `named` selects from them."""
    by_stream: dict[str, dict[str, RankEvidence]] = {}
    for sign in evidence:
        kinds = by_stream.setdefault(sign.stream, {})
        if sign.kind not in kinds or sign.strength > kinds[sign.kind].strength:
            kinds[sign.kind] = sign
    found = [_suspect(job, name, list(kinds.values())) for name, kinds in by_stream.items()]
    found.sort(key=lambda one: (-one.score, -1 if one.rank is None else one.rank, one.name))
    return tuple(found)


def named(ranked: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """Those above the threshold, at most `MAX_NODES`; none where too many are as suspect.

    The only rank on the first node, if it is one of them, stands before it: it names both.
    """
    over = [one for one in ranked if one.score >= NAMED]
    if over and over[0].rank is None and over[0].node is not None:
        on_it = [one for one in over[1:] if one.rank is not None and one.node == over[0].node]
        if len(on_it) == 1:
            over.remove(on_it[0])
            over.insert(0, on_it[0])
    if len(over) > MAX_NODES and over[0].score - over[MAX_NODES].score < 0.05:
        return ()
    return tuple(over[:MAX_NODES])


def only_node(job: Job) -> str | None:
    """The node of a job whose ranks are all on one."""
    nodes = {one.node for one in job.streams.values()} - {None}
    one = len(nodes) == 1 and (job.world_size or 0) <= (job.ranks_per_node or 0)
    return nodes.pop() if one else None


def _suspect(job: Job, name: str, evidence: list[RankEvidence]) -> Suspect:
    evidence.sort(key=lambda one: -WEIGHTS[one.kind] * one.strength)
    total = sum(WEIGHTS[one.kind] * one.strength for one in evidence)
    stream = job.streams.get(name)
    if stream is None:  # a rank or node without log lines
        kind, _, rest = name.partition(" ")
        rank = int(rest) if kind == "rank" and rest.isdigit() else None
        stream = JobStream(name=name, rank=rank, node=rest if kind == "node" else None)
    return Suspect(
        name=name,
        rank=stream.rank,
        node=job.node_of(stream) or (None if stream.rank is None else only_node(job)),
        score=round(1.0 - exp(-total / 3.0), 3),
        why="; ".join(one.words for one in evidence[:3]),
    )
