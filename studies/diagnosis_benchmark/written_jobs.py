"""Score the diagnosis on written jobs (data/sets/): whole jobs with all their attempts."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric._util.errors import LogError
from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.result import Diagnosis
from studies.diagnosis_benchmark.answers import nodes_of, ranks_of
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.cause_meanings import Named, family_of, verdict
from studies.diagnosis_benchmark.causes import CAUSES
from studies.diagnosis_benchmark.scoring import TOPS, hits
from studies.diagnosis_benchmark.written_sets import WrittenCase

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
        """Of its cause class."""
        return CAUSES[self.causes[0]][0] if self.causes else "healthy"

    @property
    def states(self) -> bool:
        """The answer states a cause or an outcome."""
        return bool(self.said) or self.outcome not in ("unknown", "refused")

    @property
    def right(self) -> bool:
        """What is stated is right; a cause that is right in part is wrong."""
        return self.cause == "right" if self.said else self.outcome_right


def score(job: WrittenCase) -> WrittenScores:
    """Diagnose a job and score the answer."""
    try:
        return scored(job, diagnose([job.case.folder]))
    except LogError:
        return scored(job, REFUSED)


def _place_hits(case: Case, said: Diagnosis) -> list[float] | None:
    """Hits of the label's rank, or of its node without one; None where it has neither."""
    if case.rank is not None:
        return hits(ranks_of(case, said), case.rank)
    return None if case.node is None else hits(nodes_of(case, said), case.node)


def scored(job: WrittenCase, said: Diagnosis) -> WrittenScores:
    """The scores of a diagnosis of a job."""
    case, told, library = job.case, job.told, SignatureLibrary.shipped()
    classes = () if case.is_healthy else tuple(told["causes"])
    named = [Named(said.cause, said.family, said.stage)]
    named += [
        Named(one.cause, family_of(one.cause, library), said.stage) for one in said.candidates
    ]
    verdicts = [verdict(one, classes) for one in named[:TOP_CAUSES]]
    where = _place_hits(case, said)
    stages = [one for one in told["stages"] if one]
    refused = said is REFUSED
    ends = [] if refused else [one.outcome for one in said.attempts] or [said.outcome]
    true_ends = [{one["outcome"]} for one in told["attempts"][:-1]] + [set(told["outcomes"])]
    pairs = zip(ends, true_ends, strict=True) if len(ends) == len(true_ends) else ()
    return WrittenScores(
        set=job.set,
        job=case.name,
        kind=told["made_as"],
        outcomes=tuple(told["outcomes"]),
        causes=classes,
        outcome_right=said.outcome in told["outcomes"],
        cause=verdicts[0] if classes else "",
        cause_at=verdicts.index("right") + 1 if "right" in verdicts else 0,
        first=None if where is None else where[TOPS.index(1)],
        among_five=None if where is None else where[TOPS.index(5)],
        stage_right=said.stage in stages if stages else None,
        attempts=len(true_ends),
        attempts_found=len(ends),
        ends_right=sum(end in true for end, true in pairs),
        outcome=said.outcome,
        said=said.cause or "",
        stage=said.stage,
        who=said.nodes[0].name if said.nodes else "",
        confidence=said.confidence,
        score=said.score,
        basis="" if refused else said.basis,
    )
