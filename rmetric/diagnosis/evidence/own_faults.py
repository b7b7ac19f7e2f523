"""A rank's or a node's own log holds a fault."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import MAX_COMMON_SHARE, Row, Scene
from rmetric.diagnosis.faults import Fault


def own_faults(scene: Scene) -> Iterator[Row]:
    """Rows against the streams that logged a cause."""
    for fault in scene.faults:
        # A traceback without its exception may be of any rank.
        if fault.role == "cause" and fault.signature.rank:
            yield from _of(scene, fault)
    yield from _confirmed(scene)


def _of(scene: Scene, fault: Fault) -> Iterator[Row]:
    active, index = scene.index.active, scene.index
    # Of one log that may be of the whole job nobody can be told; one of rank 3 has peers.
    alone = len(active) == 1 and not any(index.ranks.values())
    own = [match for match in fault.matches if match.stream in active]
    named = any(fields.get("node") for match in fault.matches for fields in match.named)
    placed = any(name in index.ranks or name.startswith("node ") for name in fault.streams)
    elsewhere = named and (fault.has("node failure") or not placed)
    if elsewhere or fault.has("stopped process"):
        return  # who tells of it is another one
    of_machine = fault.signature.actor == "hardware" or fault.has("kernel record")
    if of_machine:  # even where only ranks have logs
        nodes = [match for match in fault.matches if match.stream.startswith("node ")]
        alone = alone and not nodes
        own = own or nodes
    if not own or alone:
        return
    few = len(own) <= MAX_COMMON_SHARE * len(active) or len(own) == len(active) == 1
    words = f"logged: {fault.signature.title}"
    node = index.only_node_of(own) if fault.signature.actor == "hardware" and not few else None
    if node:
        yield Row(f"node {node}", "own cause", words, fault.confidence)
    elif few or fault.signature.of_two:
        kind = "own consequence" if fault.follows else "own cause"
        kind = "of two" if fault.signature.of_two else kind
        for match in own:
            yield Row(match.stream, kind, words, fault.confidence, entry=match.first)
    first = len(own) == 1 or scene.ordering.after(own[1].first, own[0].first)
    if first and fault.follows and fault.signature.reason_in:  # its reason was seen by others
        yield Row(own[0].stream, "own cause", words)


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
