"""A rank's or a node's own log holds a fault."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import MAX_COMMON_SHARE, Row, Scene
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.job import Match


def own_faults(scene: Scene) -> Iterator[Row]:
    """Rows against the streams that logged a cause, the first of them, and their neighbours."""
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
    kind = "own consequence" if fault.follows else "own cause"
    words = f"logged: {fault.signature.title}"
    if fault.signature.of_two:
        yield from _both_neighbours(scene, own, fault, words)
        return
    node = index.only_node_of(own) if fault.signature.actor == "hardware" and not few else None
    if node:
        yield Row(f"node {node}", "own cause", words, fault.confidence)
    elif few:
        for match in own:
            yield Row(match.stream, kind, words, fault.confidence, entry=match.first)
    if len(own) == 1 or scene.ordering.after(own[1].first, own[0].first):
        yield Row(own[0].stream, "first", "was the first to log it", fault.confidence)
        if fault.follows and fault.signature.reason_in:  # its reason was seen by others
            yield Row(own[0].stream, "own cause", words)


def _both_neighbours(scene: Scene, own: list[Match], fault: Fault, words: str) -> Iterator[Row]:
    """Rows against the reporting ranks and, as strong, their neighbours in a ring."""
    index, reporting = scene.index, [match.stream for match in own]
    size = max(index.ranks.values(), default=0) + 1
    for one in reporting:
        yield Row(one, "of two", words, fault.confidence)
        for step in (-1, 1) if one in index.ranks else ():
            name = f"rank {(index.ranks[one] + step) % size}"
            if name in index.active and name not in reporting:
                by = f"its ring neighbour {one} {words}"
                yield Row(name, "neighbour of two", by, fault.confidence)


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
