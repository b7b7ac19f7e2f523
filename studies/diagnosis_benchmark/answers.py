"""The answer of each method on one job, scored, and baselines: simple heuristics and chance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from rmetric.diagnosis.result import SURE, Diagnosis
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.cause_meanings import class_is_right, stages_of
from studies.diagnosis_benchmark.reading import LogLine, Read
from studies.diagnosis_benchmark.scoring import Counts, Place, event_counts, hits

#: What a person greps for.
ERROR = re.compile("error|exception|fail|fatal", re.IGNORECASE)
#: Lines of `tail`, by default.
LAST = 10
Ranking = list[list[Hashable]]


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method's answer on one job, scored; None for what it does not say or cannot be judged.

    Attributes:
        shown: number of events shown.
        events: against lines labelled cause or symptom; None of a healthy job.
        ranks, nodes: hit among the first of `TOPS`.
        score, basis: the confidence before its calibration, and the kind of its evidence.
        line_right: the first event shown has a line labelled cause or symptom.
        sure: it names a cause or an end from outside with a confidence of at least `SURE`.
        named: number of suspects.
    """

    shown: int | None = None
    events: Counts | None = None
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


def of_diagnosis(case: Case, read: Read, said: Diagnosis) -> Answer:
    """The scores of a diagnosis."""
    stages = () if case.is_healthy else stages_of(case.stage)
    places = [(one.file, one.line) for one in said.events]
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
        line_right=bool(event_counts(case.labels, places[:1], read.event_of).found)
        if case.labels
        else None,
        sure=speaks and said.confidence >= SURE,
        named=len(said.nodes),
    )


def ranks_of(case: Case, said: Diagnosis) -> Ranking:
    """The ranks that a diagnosis names; a node stands for those of its ranks not named before."""
    out: Ranking = []
    seen: set[int] = set()
    for one in said.nodes:
        of_node = [rank for rank, its in case.node_of_rank.items() if its == one.node]
        new = [one.rank] if one.rank is not None else of_node
        new = [rank for rank in new if rank not in seen]
        seen |= set(new)
        out += [list(new)] if new else []
    return out


def nodes_of(case: Case, said: Diagnosis) -> Ranking:
    """The nodes that a diagnosis names, or whose ranks it names."""
    nodes = [one.node or case.node_of_rank.get(-1 if one.rank is None else one.rank)
             for one in said.nodes]  # fmt: skip
    return [[node] for node in dict.fromkeys(nodes) if node is not None]


def grep(lines: Iterable[LogLine]) -> list[Place]:
    """Every line that a grep for errors finds."""
    return [line.place for line in lines if ERROR.search(line.text)]


def last_lines(lines: Iterable[LogLine]) -> list[Place]:
    """The last ten lines of each file that are not blank."""
    of_file: dict[str, list[Place]] = {}
    for line in lines:
        if line.text.strip():
            of_file.setdefault(line.place[0], []).append(line.place)
    return [place for places in of_file.values() for place in places[-LAST:]]


def error_time(lines: Sequence[LogLine], everyone: Sequence[Hashable], who: str) -> Ranking:
    """Error_time of L4: the sooner somebody's first error, the more suspect.

    By the time that lines state; by their number in the file where an error states none. Who
    wrote no error comes last.
    """
    errors = [line for line in lines if getattr(line, who) is not None and ERROR.search(line.text)]
    timed = all(line.time is not None for line in errors)
    first: dict[Hashable, float] = {}
    for line in errors:
        when = line.time if timed and line.time is not None else float(line.place[1])
        first[getattr(line, who)] = min(first.get(getattr(line, who), inf), when)
    return _by_score({one: -first.get(one, inf) for one in everyone})


def error_count(lines: Iterable[LogLine], everyone: Sequence[Hashable], who: str) -> Ranking:
    """Error_count of L4: the more lines of errors, the more suspect."""
    count = Counter(getattr(line, who) for line in lines if ERROR.search(line.text))
    return _by_score({one: float(count[one]) for one in everyone})


def _by_score(scores: Mapping[Hashable, float]) -> Ranking:
    """Who scores highest comes first, those of one score together."""
    groups: dict[float, list[Hashable]] = {}
    for who, score in scores.items():
        groups.setdefault(score, []).append(who)
    return [groups[score] for score in sorted(groups, reverse=True)]


#: Title -> which lines indicate the failure.
OF_EVENTS: dict[str, Callable[[Sequence[LogLine]], list[Place]]] = {
    "Grep for errors": grep,
    "Last ten lines": last_lines,
}
#: Title -> who of everybody is suspect, by "rank" or "node" of the lines. At random all come in any
#: order, and what that scores on average is exact; always rank 0 has the others after it in order.
OF_RANKS: dict[str, Callable[[Sequence[LogLine], Sequence[Hashable], str], Ranking]] = {
    "Error_time": error_time,
    "Error_count": error_count,
    "Random": lambda lines, everyone, who: [list(everyone)],
    "Always rank 0": lambda lines, everyone, who: [[one] for one in everyone],
}


def of_baselines(case: Case, read: Read) -> dict[str, Answer]:
    """Title -> scores of each answer that needs no method."""
    events = {
        title: Answer(**_events(case, read, find(read.lines))) for title, find in OF_EVENTS.items()
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
        for title, find in OF_RANKS.items()
    }
    return events | suspects


def _events(case: Case, read: Read, places: Sequence[Place]) -> dict[str, Any]:
    out: dict[str, Any] = {"shown": len({read.event_of.get(one, one) for one in places})}
    if not case.is_healthy:
        out["events"] = event_counts(case.labels, places, read.event_of)
    return out
