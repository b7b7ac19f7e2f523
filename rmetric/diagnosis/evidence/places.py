"""Where ranks stand, by flight recorders and stacks."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.auxiliary.recorder import culprits
from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.inferred import DIFFERENT, ELSEWHERE, NOT_ENTERED

#: Share of its strength that evidence of a recorder has where hardly any other waits.
LEAST_SHARE = 0.9


def recorders(scene: Scene) -> list[Row]:
    """Rows against the ranks that hold up others, the stronger the more wait for them."""
    beside = scene.job.beside
    blamed = culprits(beside.dumps) if beside is not None else {}
    most = max((len(one.others) for one in blamed.values()), default=1)
    share = {rank: (1 - LEAST_SHARE) * len(one.others) / most for rank, one in blamed.items()}
    return divided(
        Row(f"rank {rank}", "recorder", one.words, LEAST_SHARE + share[rank], NOT_ENTERED)
        for rank, one in blamed.items()
    )


def stacks(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks whose stack is not that of most."""
    odd = scene.odd_stacks.items()
    kind = "stack" if any(one.stays for _, one in odd) else "stack of one that moves"
    yield from divided(
        Row(name, kind, one.words, 1.0, ELSEWHERE, stage=one.awaits) for name, one in odd if name
    )
    for name, one in odd:
        if not name and one.awaits:  # of a process of which no more is known
            yield Row("", "stack", one.words, 1.0, ELSEWHERE, stage=one.awaits)
    yield from divided(
        Row(name, "stack in a collective", one.words, 1.0, DIFFERENT)
        for name, one in odd
        if one.collective
    )
