"""The answer of each method on one job, scored, and baselines: simple heuristics and chance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import groupby
from math import inf

import msgspec

from rmetric.diagnosis.report.result import SURE, Diagnosis
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.cause_meanings import class_is_right, stages_of
from studies.diagnosis_benchmark.reading import LogLine, Read
from studies.diagnosis_benchmark.scoring import Counts, Place, event_counts, hits

#: What a person greps for.
ERROR = re.compile("error|exception|fail|fatal", re.IGNORECASE)
#: Lines of `tail`, by default.
LAST = 10
Ranking = Sequence[Collection[Hashable]]


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method's answer on one job, scored; None for what it does not say or cannot be judged.

    Attributes:
        events: against lines labelled cause or symptom; None of a healthy job.
        ranks: hit among the first of `TOPS`.
        score, basis: the confidence before its calibration, and the kind of its evidence.
        line_right: the first event shown has a line labelled cause or symptom.
        sure: it names a cause or an end from outside with a confidence of at least `SURE`.
    """

    events: Counts | None = None
    ranks: list[float] | None = None
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


def of_diagnosis(case: Case, read: Read, result: Diagnosis) -> Answer:
    """The scores of a diagnosis."""
    stages = () if case.is_healthy else stages_of(case.stage)
    places = [(event.file, event.line) for event in result.events]
    speaks = result.outcome in ("failed", "terminated") or result.cause is not None
    return Answer(
        events=_events(case, read, places),
        ranks=None if case.rank is None else hits(ranks_of(case, result), case.rank),
        outcome=result.outcome,
        cause=result.cause,
        family=result.family,
        class_right=class_is_right(case.cause_class, result.family) if case.cause_class else None,
        stage=result.stage,
        stage_right=result.stage in stages if stages else None,
        confidence=result.confidence,
        score=result.score,
        basis=result.basis,
        line_right=bool(event_counts(case.labels, places[:1], read.event_of).found)
        if case.labels
        else None,
        sure=speaks and result.confidence >= SURE,
    )


def ranks_of(case: Case, result: Diagnosis) -> Ranking:
    """The ranks that a diagnosis names; a node stands for those of its ranks not named before."""
    out: list[list[int]] = []
    seen: set[int] = set()
    for suspect in result.nodes:
        of_node = [rank for rank, node in case.node_of_rank.items() if node == suspect.node]
        new = [suspect.rank] if suspect.rank is not None else of_node
        new = [rank for rank in new if rank not in seen]
        seen |= set(new)
        out += [list(new)] if new else []
    return out


def nodes_of(case: Case, result: Diagnosis) -> Ranking:
    """The nodes that a diagnosis names, or whose ranks it names."""
    nodes = [suspect.node or case.node_of_rank.get(-1 if suspect.rank is None else suspect.rank)
             for suspect in result.nodes]  # fmt: skip
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


def error_time(lines: Sequence[LogLine], ranks: Sequence[int]) -> Ranking:
    """Error_time of L4: the sooner a rank's first error, the more suspect.

    By the time that lines state; by their number in the file where an error states none. A rank
    without an error comes last.
    """
    errors = [line for line in lines if line.rank is not None and ERROR.search(line.text)]
    timed = all(line.time is not None for line in errors)
    first: dict[int | None, float] = {}
    for line in errors:
        when = line.time if timed and line.time is not None else float(line.place[1])
        first[line.rank] = min(first.get(line.rank, inf), when)
    return _by_score(lambda rank: -first.get(rank, inf), ranks)


def error_count(lines: Iterable[LogLine], ranks: Sequence[int]) -> Ranking:
    """Error_count of L4: the more lines of errors, the more suspect."""
    count = Counter(line.rank for line in lines if ERROR.search(line.text))
    return _by_score(lambda rank: count[rank], ranks)


def _by_score(score: Callable[[int], float], ranks: Iterable[int]) -> Ranking:
    """Ranks by score, highest first; equal scores share a place."""
    return [list(some) for _, some in groupby(sorted(ranks, key=score, reverse=True), key=score)]


#: Title -> which lines indicate the failure.
OF_EVENTS: dict[str, Callable[[Sequence[LogLine]], list[Place]]] = {
    "Grep for errors": grep,
    "Last ten lines": last_lines,
}
#: Title -> which ranks are suspect. At random all come in any order, which scores exactly what it
#: does on average; always rank 0 has the others after it in order.
OF_RANKS: dict[str, Callable[[Sequence[LogLine], Sequence[int]], Ranking]] = {
    "Error_time": error_time,
    "Error_count": error_count,
    "Random": lambda lines, ranks: [list(ranks)],
    "Always rank 0": lambda lines, ranks: [[rank] for rank in ranks],
}


def of_baselines(case: Case, read: Read) -> dict[str, Answer]:
    """Title -> scores of each answer that needs no method."""
    found = {
        title: Answer(events=_events(case, read, find(read.lines)))
        for title, find in OF_EVENTS.items()
    }
    if case.rank is not None and case.world_size:
        ranks = range(case.world_size)
        for title, of_ranks in OF_RANKS.items():
            found[title] = Answer(ranks=hits(of_ranks(read.lines, ranks), case.rank))
    return found


def _events(case: Case, read: Read, places: Sequence[Place]) -> Counts | None:
    return None if case.is_healthy else event_counts(case.labels, places, read.event_of)
