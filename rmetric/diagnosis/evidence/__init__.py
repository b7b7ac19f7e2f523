"""The evidence table: each extractor looks at a job and yields rows; none reads another's rows.

To add evidence, write a function of `Scene` that yields `Row`s, list it here, and fit the model
anew (`python -m studies.diagnosis_benchmark.fit`), which gives a weight to its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rmetric.diagnosis.evidence.absences import absences
from rmetric.diagnosis.evidence.hang import hang
from rmetric.diagnosis.evidence.named_ranks import named_ranks, own_faults, processes
from rmetric.diagnosis.evidence.peers import (
    done_alone,
    not_finite,
    recorders,
    stacks,
    unlike_numbers,
    unlike_settings,
)
from rmetric.diagnosis.evidence.scene import Row, Scene, Switches
from rmetric.diagnosis.evidence.waits import (
    collectives,
    lacking_echoes,
    links,
    lost_hosts,
    waited_for,
)

#: Extractor -> the part of the method that it is of (`Switches`).
EXTRACTORS: dict[Callable[[Scene], Iterable[Row]], str] = {
    own_faults: "library",
    named_ranks: "library",
    processes: "library",
    links: "library",
    waited_for: "library",
    collectives: "library",
    lacking_echoes: "unfiltered",
    lost_hosts: "unfiltered",
    absences: "unfiltered",
    unlike_numbers: "spatial",
    unlike_settings: "spatial",
    hang: "temporal",
    recorders: "places",
    stacks: "places",
    done_alone: "ends",
    not_finite: "ends",
}


def evidence(scene: Scene) -> Iterator[Row]:
    """All rows of a job, but those of the parts that are switched off."""
    for extractor, part in EXTRACTORS.items():
        if getattr(scene.switches, part):
            yield from extractor(scene)


__all__ = ["EXTRACTORS", "Row", "Scene", "Switches", "evidence"]
