"""The evidence table: each extractor looks at a job and yields rows; none reads another's rows.

To add evidence, write a function of `Scene` that yields `Row`s, list it here, and fit the model
anew (`python -m studies.diagnosis_benchmark.fit`), which gives a weight to its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rmetric.diagnosis.evidence import accusations, hang, peers
from rmetric.diagnosis.evidence.scene import Row, Scene, Switches

#: Extractor -> the part of the method that it is of (`Switches`).
EXTRACTORS: dict[Callable[[Scene], Iterable[Row]], str] = {
    accusations.own_faults: "library",
    accusations.named_ranks: "library",
    accusations.processes: "library",
    accusations.links: "library",
    accusations.waited_for: "library",
    accusations.collectives: "library",
    accusations.lacking_echoes: "unfiltered",
    accusations.lost_hosts: "unfiltered",
    peers.absences: "unfiltered",
    peers.unlike_numbers: "spatial",
    peers.unlike_settings: "spatial",
    hang.hang: "temporal",
    peers.recorders: "places",
    peers.stacks: "places",
    peers.done_alone: "ends",
    peers.not_finite: "ends",
}


def evidence(scene: Scene) -> Iterator[Row]:
    """All rows of a job, but those of the parts that are switched off."""
    for extractor, part in EXTRACTORS.items():
        if getattr(scene.switches, part):
            yield from extractor(scene)


__all__ = ["EXTRACTORS", "Row", "Scene", "Switches", "evidence"]
