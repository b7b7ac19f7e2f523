"""Where ranks stand, by flight recorders and stacks; the last words of a text."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.inferred import DIFFERENT, ELSEWHERE, NOT_ENTERED

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


#: Characters that are quoted of an entry.
MAX_QUOTED = 60


def end_of(text: str) -> str:
    """The last words of a text."""
    if len(text) <= MAX_QUOTED:
        return text
    end = text[-MAX_QUOTED:]
    return "…" + (end.partition(" ")[2] or end)
