"""Reduce the output of each method on one job to its scores."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rmetric.diagnosis.result import SURE, Diagnosis
from studies.diagnosis_benchmark import baselines
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.classes import class_is_right, stages_of
from studies.diagnosis_benchmark.reading import Read
from studies.diagnosis_benchmark.scoring import Counts, Place, event_counts, faults, hits

ECHOES_TOO = ("cause", "symptom", "echo")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A method's answer on one job, scored; None for what it does not say or cannot be judged.

    Attributes:
        shown: number of events shown.
        events: against lines labelled cause or symptom; None of a healthy job.
        events_with_echoes: against lines labelled cause, symptom or echo.
        missed, wrong: a line of each such event, "file:line" of the file as it was laid out.
        ranks, nodes: hit among the first of `TOPS`.
        score, basis: the confidence before its calibration, and the kind of its evidence.
        line_right: the first event shown has a line labelled cause or symptom.
        sure: it names a cause or an end from outside with a confidence of at least `SURE`.
    """

    shown: int | None = None
    events: Counts | None = None
    events_with_echoes: Counts | None = None
    ranks: list[float] | None = None
    nodes: list[float] | None = None
    outcome: str | None = None
    cause: str | None = None
    family: str | None = None
    class_right: bool | None = None
    stage: str | None = None
    stage_right: bool | None = None
    confidence: float | None = None
    score: float | None = None
    basis: str | None = None
    line_right: bool | None = None
    sure: bool | None = None
    named: int | None = None
    missed: list[str] | None = None
    wrong: list[str] | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def from_json(entry: Mapping[str, Any]) -> Answer:
    counts = {key: Counts(*entry[key]) for key in ("events", "events_with_echoes") if key in entry}
    return Answer(**{**entry, **counts})


def of_diagnosis(case: Case, read: Read, said: Diagnosis) -> Answer:
    """The scores of a diagnosis."""
    stages = () if case.is_healthy else stages_of(case.stage)
    places = [(one.file, one.line) for one in said.events]
    missed, wrong = faults(case.labels, places, read.event_of)
    speaks = said.outcome in ("failed", "terminated") or said.cause is not None
    return Answer(
        **_events(case, read, places),
        ranks=None if case.rank is None else hits(ranks_of(case, said), case.rank),
        nodes=None if case.node is None else hits(nodes_of(case, said), case.node),
        outcome=said.outcome,
        cause=said.cause,
        family=said.family,
        class_right=class_is_right(case.cause_class, said.family) if case.cause_class else None,
        stage=said.stage,
        stage_right=said.stage in stages if stages else None,
        confidence=said.confidence,
        score=said.score,
        basis=said.basis,
        line_right=event_counts(case.labels, places[:1], read.event_of).found > 0
        if case.labels
        else None,
        sure=speaks and said.confidence >= SURE,
        named=len(said.nodes),
        missed=[f"{file}:{line}" for file, line in missed] or None,
        wrong=[f"{file}:{line}" for file, line in wrong] or None,
    )


def ranks_of(case: Case, said: Diagnosis) -> list[list[Hashable]]:
    """The ranks that a diagnosis names; a node stands for those of its ranks not named before."""
    out: list[list[Hashable]] = []
    seen: set[int] = set()
    for one in said.nodes:
        of_node = [rank for rank, its in case.node_of_rank.items() if its == one.node]
        new = [one.rank] if one.rank is not None else of_node
        new = [rank for rank in new if rank not in seen]
        seen |= set(new)
        out += [list(new)] if new else []
    return out


def nodes_of(case: Case, said: Diagnosis) -> list[list[Hashable]]:
    """The nodes that a diagnosis names, or whose ranks it names."""
    nodes = [one.node or case.node_of_rank.get(-1 if one.rank is None else one.rank)
             for one in said.nodes]  # fmt: skip
    return [[node] for node in dict.fromkeys(nodes) if node is not None]


def of_baselines(case: Case, read: Read) -> dict[str, Answer]:
    """Title -> scores of each answer that needs no method."""
    events = {
        title: Answer(**_events(case, read, find(read.lines)))
        for title, find in baselines.OF_EVENTS.items()
    }
    if case.rank is None:
        return events
    ranks = list(range(case.world_size)) if case.world_size else []
    nodes = list(dict.fromkeys(case.node_of_rank[rank] for rank in sorted(case.node_of_rank)))
    suspects = {
        title: Answer(
            ranks=hits(find(read.lines, ranks, "rank"), case.rank) if ranks else None,
            nodes=hits(find(read.lines, nodes, "node"), case.node) if case.node else None,
        )
        for title, find in baselines.OF_RANKS.items()
    }
    return events | suspects


def _events(case: Case, read: Read, places: Iterable[Place]) -> dict[str, Any]:
    places = list(places)
    out: dict[str, Any] = {"shown": len({read.event_of.get(one, one) for one in places})}
    if not case.is_healthy:
        out["events"] = event_counts(case.labels, places, read.event_of)
        out["events_with_echoes"] = event_counts(case.labels, places, read.event_of, ECHOES_TOO)
    return out
