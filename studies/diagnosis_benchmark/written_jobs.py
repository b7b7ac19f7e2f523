"""Score the diagnosis on written jobs (data/sets/): whole jobs with all their attempts.

The tables have the first look at each set beside the code of today.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rmetric._util.errors import LogError
from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.report.result import SURE, Diagnosis
from studies.common.table import Cell, Table
from studies.diagnosis_benchmark.answers import nodes_of, ranks_of
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.cause_meanings import CAUSES, Named, family_of, verdict
from studies.diagnosis_benchmark.scoring import TOPS, hits, mean
from studies.diagnosis_benchmark.written_sets import WrittenCase, written_sets

#: The named causes that are scored: the answer and further candidates.
TOP_CAUSES = 5
#: Logs that the diagnosis does not read; wrong in everything.
REFUSED = Diagnosis(outcome="refused")


@dataclass(frozen=True, kw_only=True)
class WrittenScores:
    """A written job and the scores of its diagnosis: a row of written.csv and first_looks.csv.

    Attributes:
        kind: as its author calls it.
        outcomes, causes: all that are right, the first is the label's; a healthy job has no cause.
        outcome, said, stage, who: the diagnosis' outcome, cause, stage and first rank or node.
        cause: as `cause_meanings.verdict` has it; "" for a healthy job.
        cause_at: place from 1 of the first right cause among at most `TOP_CAUSES`; 0 for none.
        first, among_five: hits of the label's rank, or of its node without one, among the first
            named one and five; None where the label has neither.
        stage_right: None where the label has no stage.
        attempts, attempts_found: their numbers.
        ends_right: attempts whose outcome is right; 0 where their number is wrong.
        score, basis: the confidence before its calibration, and the kind of its evidence.
    """

    set: str
    job: str
    kind: str
    outcomes: tuple[str, ...]
    causes: tuple[str, ...]
    outcome_right: bool
    cause: str
    cause_at: int
    first: float | None
    among_five: float | None
    stage_right: bool | None
    attempts: int
    attempts_found: int
    ends_right: int
    outcome: str
    said: str
    stage: str
    who: str
    confidence: float
    score: float
    basis: str

    @property
    def is_healthy(self) -> bool:
        return self.outcomes == ("healthy",)

    @property
    def group(self) -> str:
        """Group of its cause class."""
        return CAUSES[self.causes[0]][0] if self.causes else "healthy"

    @property
    def states(self) -> bool:
        """The answer states a cause or an outcome."""
        return bool(self.said) or self.outcome not in ("unknown", "refused")

    @property
    def right(self) -> bool:
        """True if the stated answer is right; a partly right cause is wrong."""
        return self.cause == "right" if self.said else self.outcome_right


def score(job: WrittenCase) -> WrittenScores:
    """Diagnose a job and score the answer."""
    try:
        return scored(job, diagnose([job.case.folder]))
    except LogError:
        return scored(job, REFUSED)


def _hits(case: Case, result: Diagnosis) -> Sequence[float] | None:
    """Hits of the label's rank, or of its node without one."""
    if case.rank is not None:
        return hits(ranks_of(case, result), case.rank)
    return None if case.node is None else hits(nodes_of(case, result), case.node)


def _verdicts(result: Diagnosis, classes: tuple[str, ...]) -> list[str]:
    """Verdict on each named cause, the likeliest first."""
    library = SignatureLibrary.shipped()
    others = [(other.cause, family_of(other.cause, library)) for other in result.candidates]
    named = [Named(*pair, result.stage) for pair in ((result.cause, result.family), *others)]
    return [verdict(answer, classes) for answer in named[:TOP_CAUSES]]


def scored(job: WrittenCase, result: Diagnosis) -> WrittenScores:
    """The scores of a diagnosis of a job."""
    case, truth = job.case, job.manifest
    classes = () if case.is_healthy else tuple(truth["causes"])
    verdicts = _verdicts(result, classes)
    where = _hits(case, result)
    stages = [stage for stage in truth["stages"] if stage]
    refused = result is REFUSED
    ends = [] if refused else [end.outcome for end in result.attempts] or [result.outcome]
    true_ends = [{end["outcome"]} for end in truth["attempts"][:-1]] + [set(truth["outcomes"])]
    pairs = zip(ends, true_ends, strict=True) if len(ends) == len(true_ends) else ()
    return WrittenScores(
        set=job.set,
        job=case.name,
        kind=truth["made_as"],
        outcomes=tuple(truth["outcomes"]),
        causes=classes,
        outcome_right=result.outcome in truth["outcomes"],
        cause=verdicts[0] if classes else "",
        cause_at=verdicts.index("right") + 1 if "right" in verdicts else 0,
        first=None if where is None else where[TOPS.index(1)],
        among_five=None if where is None else where[TOPS.index(5)],
        stage_right=result.stage in stages if stages else None,
        attempts=len(true_ends),
        attempts_found=len(ends),
        ends_right=sum(end in true for end, true in pairs),
        outcome=result.outcome,
        said=result.cause or "",
        stage=result.stage,
        who=result.nodes[0].name if result.nodes else "",
        confidence=result.confidence,
        score=result.score,
        basis="" if refused else result.basis,
    )


Rows = Sequence[WrittenScores]
#: The value of a job that has what is counted; None of another.
Value = Callable[[WrittenScores], float | None]


def _when(holds: Callable[[WrittenScores], bool], value: Value) -> Value:
    return lambda job: value(job) if holds(job) else None


_failed = partial(_when, lambda job: bool(job.causes))
#: Parts of an answer, with a column in the table of sets.
COUNTED: dict[str, Value] = {
    "Outcome": lambda job: job.outcome_right,
    "Cause first": _failed(lambda job: job.cause_at == 1),
    f"Cause among {TOP_CAUSES}": _failed(lambda job: job.cause_at > 0),
    "Rank or node first": _failed(lambda job: job.first),
    "Stage": _failed(lambda job: job.stage_right),
    "Number of attempts": lambda job: job.attempts_found == job.attempts,
    "Sure and right": _when(lambda job: job.states and job.confidence >= SURE,
                            lambda job: job.right),
}  # fmt: skip
#: Further parts.
PARTS: dict[str, Value] = {
    **COUNTED,
    "Cause partly right": _failed(lambda job: job.cause == "partly"),
    "No cause named": _failed(lambda job: job.cause == "unknown"),
    "Cause wrong": _failed(lambda job: job.cause == "wrong"),
    "Rank or node among five": _failed(lambda job: job.among_five),
    "Several attempts: found": _when(lambda job: job.attempts > 1,
                                     lambda job: job.attempts_found > 1),
    "Several attempts: ends right": _when(lambda job: job.attempts > 1,
                                          lambda job: job.ends_right / job.attempts),
    "Healthy: no cause named": _when(lambda job: job.is_healthy, lambda job: not job.said),
    "Healthy: accused surely": _when(lambda job: job.is_healthy,
                                     lambda job: job.confidence >= SURE and not job.outcome_right),
}  # fmt: skip


def written_tables(first: Rows, today: Rows) -> list[Table]:
    """The sets, the parts of the answers, and the misses by group of causes."""
    if not today:
        return []
    sets = {job.set for job in first}
    looks = (first, [job for job in today if job.set in sets])
    return [of_sets(first, today), of_parts(looks), of_groups(looks)]


def values(rows: Rows, value: Value) -> list[float]:
    return [float(number) for job in rows if (number := value(job)) is not None]


def _count(looks: Sequence[Rows], value: Value) -> str:
    """Right at each look, of how many; stated once where they are as many at both."""
    found = [values(rows, value) for rows in looks if rows]
    if len({len(look) for look in found}) == 1:
        return f"{' → '.join(f'{sum(look):.4g}' for look in found)} of {len(found[0])}"
    return " → ".join(f"{sum(look):.4g} of {len(look)}" for look in found)


def of_sets(first: Rows, today: Rows) -> Table:
    """A row for each set, and one for all that had a first look."""

    def row(known: tuple[Cell, ...], names: Sequence[str]) -> tuple[Cell, ...]:
        looks = [[job for job in rows if job.set in names] for rows in (first, today)]
        return *known, *(_count(looks, value) for value in COUNTED.values())

    judged = {job.set for job in today}
    sets = [entry for entry in written_sets().values() if entry.name in judged]
    rows = [
        row((entry.name, entry.authors, entry.jobs, entry.first_look, entry.commit), [entry.name])
        for entry in sets
    ]
    looked = [entry for entry in sets if entry.name in {job.set for job in first}]
    whole = sum(entry.jobs for entry in looked)
    rows.append(row(("all numbered", "", whole, "", ""), [entry.name for entry in looked]))
    return Table(
        "sets",
        "Whole answers to written jobs: first look → today",
        ("Set", "Authors", "Jobs", "First look", "Code", *COUNTED),
        rows,
    )


def of_parts(looks: Sequence[Rows]) -> Table:
    """Shares of all sets that had a first look."""
    rows: list[tuple[Cell, ...]] = []
    for words, value in PARTS.items():
        known = [values(jobs, value) for jobs in looks]
        counts = " → ".join(dict.fromkeys(str(len(look)) for look in known))
        rows.append((words, counts, *(mean(look, [*map(str, range(len(look)))]) for look in known)))
    return Table(
        "parts",
        "All numbered sets together",
        "Part of the answer | Jobs | First look | Today",
        rows,
        notes=["Brackets: 95 % intervals by bootstrap over jobs."],
    )


def of_groups(looks: Sequence[Rows]) -> Table:
    """Misses by group of the labelled cause."""
    rows: list[tuple[Cell, ...]] = []
    for group in sorted({job.group for job in looks[1]}):
        own = [[job for job in rows if job.group == group] for rows in looks]
        missed = [
            " → ".join(f"{sum(1 - number for number in values(jobs, value)):.4g}" for jobs in own)
            for value in list(COUNTED.values())[:-1]
        ]
        rows.append((group, len(own[1]), *missed))
    return Table(
        "misses",
        "Misses in the numbered sets, by group of the cause: first look → today",
        ("Group", "Jobs", *list(COUNTED)[:-1]),
        rows,
    )
