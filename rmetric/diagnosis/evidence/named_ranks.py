"""An entry names a rank or a node: a launcher's report, a message of another rank."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from rmetric.diagnosis.evidence.ranks import RankIndex, signal_of
from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.faults import Fault

#: Entries of an error in a log without ranks that are of all ranks rather than of one.
BY_ALL = 4


def named_ranks(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks that entries name."""
    index = _with_innocent(scene)
    own = [one for one in scene.faults if one.role == "cause"]
    none_logged = not any(
        name in index.ranks or name.startswith("node ") for one in own for name in one.streams
    ) and all(one.count == 1 or one.follows for one in own)  # several may be of all ranks
    for fault in scene.faults:
        if fault.role != "ending" and not _of_many(scene, fault, index):
            yield from _implicated(fault, index, none_logged)


def _with_innocent(scene: Scene) -> RankIndex:
    """The ranks, of which those that waited for another or lost it did not end of themselves.

    Whatever a launcher reports. Nor did the first of all ranks that fail in the same way.
    """
    stated = (
        one
        for one in scene.faults
        if one.role == "echo"
        or (one.role == "cause" and one.follows and one.has("connection"))
        or (one.role == "cause" and not scene.index.is_minority(len(one.streams)))
    )
    return RankIndex(scene.job, innocent={name for one in stated for name in one.streams})


def _of_many(scene: Scene, exits: Fault, index: RankIndex) -> bool:
    """Return True for plain exits of which others may have been the first.

    They stand behind the report of a lost peer, or behind an error of the program that was logged
    many times, by ranks that cannot be told.
    """
    if exits.role != "symptom":
        return False
    if exits.has("task exit") and _behind_a_loss(scene, exits):
        return True  # whoever loses another one ends, the first as well as the last
    if index.ranks or any(signal_of(one) for match in exits.matches for one in match.named):
        return False
    return any(
        scene.ordering.after(exits.first, one.first) and _is_of_all(one) for one in scene.faults
    )


def _behind_a_loss(scene: Scene, exits: Fault) -> bool:
    """Connections were lost before, and no other cause is sure."""
    lost = [one for one in scene.faults if one.has("lost connection")]
    sure = (one for one in scene.faults if one.role == "cause" and one.is_sure)
    undated, after = exits.first.time is None, scene.ordering.after
    behind = any(undated or after(exits.first, one.first) for one in lost)
    return behind and all(one in lost for one in sure)


def _is_of_all(one: Fault) -> bool:
    # The launcher that ends the others is an echo too, and says which was the first.
    lost = one.role == "echo" and one.has("connection")
    return lost or (one.signature.actor == "user" and one.count >= BY_ALL and not one.follows)


def _implicated(fault: Fault, index: RankIndex, none_logged: bool) -> Iterator[Row]:
    """Rows against the ranks named in the entries; stronger where they are fewer.

    Args:
        fault: whose entries they are.
        index: of the job.
        none_logged: no rank or node is known to have logged a cause.
    """
    is_symptom, words = fault.role == "symptom", f"named in: {fault.signature.title}"
    implicated: list[str] = []
    aborted = False
    agreed = _agreed(fault)
    for stream, fields in ((one.stream, each) for one in fault.matches for each in one.named):
        for name in index.implicated_ranks(fields, stream):
            if not is_symptom or name not in index.innocent or name in agreed:
                implicated.append(name)
                aborted |= signal_of(fields) == signal.SIGABRT
    # A node may have left no log.
    implicated = [*filter(index.is_known, implicated)] or implicated
    implicated = list(dict.fromkeys(implicated))
    whole = index.node_of_all(implicated)
    if whole is not None:  # of which no rank is more to blame than another
        implicated = [f"node {whole}"]
    if not index.is_minority(len(implicated)):
        return
    # A launcher reports consequences too, and watchdogs end processes by an abort. But the only
    # exit that no loss and no log of a rank explains is strong evidence.
    alone = is_symptom and len(implicated) == 1 and (index.innocent or none_logged)
    states = not fault.follows and not aborted
    kind = "accused" if states else "only exit" if alone else "implicated"
    yield from divided(Row(name, kind, words) for name in implicated)


def _agreed(fault: Fault) -> frozenset[str]:
    """The rank that several ranks name alike, as those that hear of a failed checkpoint do."""
    told = [
        (one.stream, each["rank"]) for one in fault.matches for each in one.named if "rank" in each
    ]
    ranks = {f"rank {rank}" for _, rank in told}
    by_ranks = {stream for stream, _ in told if stream.startswith("rank ")} - ranks
    return frozenset(ranks if len(ranks) == 1 and len(by_ranks) > 1 else ())
