"""Where ranks stand, by flight recorders, stacks and the last words of their logs."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.ranks import MAX_COMMON_SHARE
from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.faults import IN_FLIGHT
from rmetric.diagnosis.inferred import DIFFERENT, ELSEWHERE, KEPT_WAITING, NOT_ENTERED
from rmetric.diagnosis.library.stages import awaited

#: Share of its strength that evidence of a recorder has where hardly any other waits.
LEAST_SHARE = 0.9


def recorders(scene: Scene) -> list[Row]:
    """Rows against the ranks that hold up others, the stronger the more wait for them."""
    return divided(
        Row(name, "recorder", words, LEAST_SHARE + (1 - LEAST_SHARE) * share, NOT_ENTERED)
        for name, (words, share) in scene.beside.recorded.items()
    )


def stacks(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks whose stack is not that of most."""
    beside = scene.beside
    kind = "stack" if beside.stays else "stack of one that moves"
    yield from divided(
        Row(name, kind, words, 1.0, ELSEWHERE, stage=beside.awaited.get(name, ""))
        for name, words in beside.stood.items()
    )
    if "" in beside.awaited:  # of a process of which no more is known
        yield Row("", "stack", beside.unnamed.words, 1.0, ELSEWHERE, stage=beside.awaited[""])
    yield from divided(
        Row(name, "stack in a collective", words, 1.0, DIFFERENT)
        for name, words in beside.collectives.items()
    )


def last_waits(scene: Scene) -> list[Row]:
    """Rows against the few ranks that logged last that they wait for data or a checkpoint.

    Where the others ran into a timeout: they waited for it.
    """
    first = min(
        (one.first for one in scene.faults if one.has("timeout")),
        key=scene.ordering.key,
        default=None,
    )
    if first is None:
        return []
    furthest = scene.job.furthest
    found = {}
    for stream in scene.job.active_streams:
        last = scene.last_own(stream, first)
        if last is None or "\n" in last.text or not (stage := awaited(last.text)):
            continue
        if furthest is not None and furthest.last_step_at is not None:
            near = last.step is not None and last.step >= (furthest.last_step or 0) - IN_FLIGHT
            if not near and not scene.ordering.after(last, furthest.last_step_at):
                continue  # it has logged nothing since
        found[stream.name] = last, stage
    if len(found) > MAX_COMMON_SHARE * len(scene.job.active_streams):
        return []
    return divided(
        Row(name, "last wait", repr(end_of(last.text)), 1.0, KEPT_WAITING, last, stage)
        for name, (last, stage) in found.items()
    )


#: Stages for which a process waits in the kernel.
BLOCKED_IN = {"blocked in a write": "checkpoint", "blocked in a read": "load data"}


def blocked(scene: Scene) -> list[Row]:
    """Rows against the nodes whose kernel found a process that waits in a read or a write."""
    nodes = {
        match.stream for one in scene.faults if one.has("blocked process") for match in one.matches
    }
    found = {
        match.stream: BLOCKED_IN[trait]
        for match in scene.job.matches.values()
        if match.stream in nodes
        for trait in BLOCKED_IN.keys() & match.traits
    }
    if len(set(found.values())) != 1:
        return []
    return divided(
        Row(name, "blocked", "its process waits in the kernel", 1.0, KEPT_WAITING, stage=stage)
        for name, stage in found.items()
    )


#: Characters that are quoted of an entry.
MAX_QUOTED = 60


def end_of(text: str) -> str:
    """The last words of a text."""
    if len(text) <= MAX_QUOTED:
        return text
    end = text[-MAX_QUOTED:]
    return "…" + (end.partition(" ")[2] or end)
