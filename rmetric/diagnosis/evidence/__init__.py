"""The evidence table: each extractor looks at a job and yields rows; none reads another's rows.

To add evidence, write a function of `Scene` that yields `Row`s, list it here, and fit the model
anew (`python -m studies.diagnosis_benchmark.fit`), which gives a weight to its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rmetric.diagnosis.evidence import accusations, hang, peers
from rmetric.diagnosis.evidence.scene import Row, Scene, Switches

#: Part of the method (`Switches`) -> its extractors.
EXTRACTORS: dict[str, tuple[Callable[[Scene], Iterable[Row]], ...]] = {
    "library": (
        accusations.own_faults, accusations.named_ranks, accusations.processes, accusations.links,
        accusations.waited_for, accusations.collectives,
    ),
    "unfiltered": (accusations.lacking_echoes, accusations.lost_hosts, peers.absences),
    "spatial": (peers.unlike_numbers, peers.unlike_settings),
    "temporal": (hang.hang,),
    "places": (peers.recorders, peers.stacks),
    "ends": (peers.finished_early, peers.not_finite),
}  # fmt: skip


def evidence(scene: Scene) -> Iterator[Row]:
    """All rows of a job, but those of the parts that are switched off."""
    for part, extractors in EXTRACTORS.items():
        if getattr(scene.switches, part):
            for extractor in extractors:
                yield from extractor(scene)


__all__ = ["EXTRACTORS", "Row", "Scene", "Switches", "evidence"]
