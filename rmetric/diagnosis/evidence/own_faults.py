"""A rank's or a node's own log holds a fault."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.ranks import MAX_COMMON_SHARE
from rmetric.diagnosis.evidence.row import Row, Scene
from rmetric.diagnosis.facts.job import Match
from rmetric.diagnosis.faults import Fault


def own_faults(scene: Scene) -> Iterator[Row]:
    """Rows against the streams that logged a cause."""
    for fault in scene.faults:
        # A traceback without its exception may be of any rank.
        if fault.role == "cause" and fault.signature.rank:
            yield from _of(scene, fault)
    yield from _confirmed(scene)


def _of(scene: Scene, fault: Fault) -> Iterator[Row]:
    own = _own_matches(scene, fault)
    if not own:
        return
    active = scene.index.active
    few = len(own) <= MAX_COMMON_SHARE * len(active) or len(own) == len(active) == 1
    words = f"logged: {fault.signature.title}"
    if few or fault.signature.of_two:
        kind = "own consequence" if fault.follows else "own cause"
        kind = "of two" if fault.signature.of_two else kind
        for match in own:
            yield Row(match.stream, kind, words, fault.confidence, entry=match.first)
    first = len(own) == 1 or scene.ordering.after(own[1].first, own[0].first)
    if first and fault.follows and fault.signature.reason_in:  # its reason was seen by others
        yield Row(own[0].stream, "own cause", words)


def _own_matches(scene: Scene, fault: Fault) -> list[Match]:
    """Those of streams of which a rank or a node can be told; none where they tell of another."""
    index = scene.index
    if fault.has("stopped process"):
        return []
    own = [match for match in fault.matches if match.stream in index.active]
    nodes = [match for match in fault.matches if match.stream.startswith("node ")]
    if nodes and (fault.signature.actor == "hardware" or fault.has("kernel record")):
        return own or nodes  # even where only ranks have logs
    # Of one log that may be of the whole job nobody can be told; one of rank 3 has peers.
    alone = len(index.active) == 1 and not any(index.ranks.values())
    return [] if alone else own


def _confirmed(scene: Scene) -> Iterator[Row]:
    """Rows against the only rank that logged a fault of the kind that its node logged."""
    broken = [one for one in scene.faults if one.signature.actor == "hardware"]
    for of_node in broken:
        family = {
            name
            for one in broken
            if one.signature.family == of_node.signature.family
            for name in one.streams
        }
        for node in of_node.streams:
            ranks = family & scene.index.on_node(node) if node.startswith("node ") else set()
            if len(ranks) == 1:
                yield Row(ranks.pop(), "confirmed", f"its node logged: {of_node.signature.title}")
