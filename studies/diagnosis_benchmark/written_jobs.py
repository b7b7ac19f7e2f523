"""Score the diagnosis on written jobs (`blind/`): whole jobs with all their attempts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.result import Diagnosis
from rmetric.logs import write_atomically
from studies.diagnosis_benchmark.answers import nodes_of, ranks_of
from studies.diagnosis_benchmark.blind.cases import WrittenCase, written_jobs
from studies.diagnosis_benchmark.blind.make import TITLES
from studies.diagnosis_benchmark.cause_meanings import Named, family_of, verdict
from studies.diagnosis_benchmark.scoring import hits

SPLITS = tuple(TITLES)
JOBS = Path("runs", "written_failures")
#: The named causes that are scored: the answer and further candidates.
TOP_CAUSES = 5


@dataclass(frozen=True, kw_only=True)
class WrittenScores:
    """A written job and the scores of its diagnosis.

    Attributes:
        kind: as it was made, of healthy jobs too.
        group: of its cause class.
        outcomes, causes: all that are right; the first is the label's.
        said: outcome, cause, family, stage, rank or node and confidence of the diagnosis.
        cause: of `cause_meanings.VERDICTS`; "" for a healthy job.
        cause_at: place from 1 of the first right cause among at most `TOP_CAUSES`; 0 for none.
        where: hits of the label's rank, or of its node without one, among the first of `TOPS`;
            None where the label has neither.
        stage_right: None where the label has no stage.
        attempts, attempts_found: their numbers.
        ends_right: attempts whose outcome is right; 0 where their number is wrong.
    """

    name: str
    kind: str
    variant: str
    group: str
    outcomes: tuple[str, ...]
    causes: tuple[str, ...]
    said: dict[str, Any]
    outcome_right: bool
    cause: str
    cause_at: int
    where: list[float] | None
    stage_right: bool | None
    attempts: int
    attempts_found: int
    ends_right: int
    lines: int

    @property
    def is_healthy(self) -> bool:
        return self.outcomes == ("healthy",)


def load(split: str, folder: Path) -> list[WrittenCase]:
    """The jobs of a split in FOLDER/SPLIT.

    Raises:
        ValueError: the split is not known, there is no job, or a manifest cannot be used.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; {', '.join(SPLITS)} are accepted")
    return written_jobs(folder / split)


def score(job: WrittenCase) -> WrittenScores:
    """Diagnose a job and score the answer."""
    return scored(job, diagnose([job.case.folder]))


def score_all(jobs: Sequence[WrittenCase], processes: int) -> list[WrittenScores]:
    """In the order of the jobs."""
    from joblib import Parallel

    from rmetric._util.workers import delayed

    return list(Parallel(n_jobs=processes)(delayed(score)(job) for job in jobs))


def scored(job: WrittenCase, said: Diagnosis) -> WrittenScores:
    """The scores of a diagnosis of a job."""
    case, told, library = job.case, job.told, SignatureLibrary.shipped()
    classes = () if case.is_healthy else tuple(told["causes"])
    named = [Named(said.cause, said.family, said.stage)]
    named += [
        Named(one.cause, family_of(one.cause, library), said.stage) for one in said.candidates
    ]
    verdicts = [verdict(one, classes) for one in named[:TOP_CAUSES]]
    where = None
    if case.rank is not None:
        where = hits(ranks_of(case, said), case.rank)
    elif case.node is not None:
        where = hits(nodes_of(case, said), case.node)
    stages = [one for one in told["stages"] if one]
    ends = [one.outcome for one in said.attempts] or [said.outcome]
    true_ends = [{one["outcome"]} for one in told["attempts"][:-1]] + [set(told["outcomes"])]
    first = said.nodes[0] if said.nodes else None
    return WrittenScores(
        name=case.name,
        kind=told["made_as"],
        variant=told["variant"],
        group=told["cause_group"],
        outcomes=tuple(told["outcomes"]),
        causes=classes,
        said={
            "outcome": said.outcome,
            "cause": said.cause,
            "family": said.family,
            "stage": said.stage,
            "who": first and first.name,
            "confidence": said.confidence,
            "score": said.score,
            "basis": said.basis,
        },
        outcome_right=said.outcome in told["outcomes"],
        cause=verdicts[0] if classes else "",
        cause_at=verdicts.index("right") + 1 if "right" in verdicts else 0,
        where=where,
        stage_right=said.stage in stages if stages else None,
        attempts=len(true_ends),
        attempts_found=len(ends),
        ends_right=sum(one in true for one, true in zip(ends, true_ends, strict=True))
        if len(ends) == len(true_ends)
        else 0,
        lines=told["lines"],
    )


@dataclass(frozen=True, kw_only=True)
class WrittenResults:
    """The scores of a split. made: by which code, from which inputs."""

    split: str
    jobs: list[WrittenScores]
    made: dict[str, Any]

    @property
    def name(self) -> str:
        return f"written_{self.split}"

    @property
    def title(self) -> str:
        return TITLES[self.split]

    def write(self, folder: Path) -> None:
        """Write the scores to FOLDER/NAME.json, one job a line."""
        about = {"source": "written", "split": self.split, "made": self.made}
        jobs = ",\n".join(json.dumps(asdict(job), allow_nan=False) for job in self.jobs)
        text = f'{json.dumps(about, allow_nan=False)[:-1]}, "jobs": [\n{jobs}\n]}}\n'
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.name}.json", [text.encode()])


def read_written(path: Path) -> WrittenResults:
    """Scores from their file.

    Raises:
        ValueError: the file is no result of this command.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        jobs = [
            WrittenScores(
                **{**one, "outcomes": tuple(one["outcomes"]), "causes": tuple(one["causes"])}
            )
            for one in content["jobs"]
        ]
        return WrittenResults(split=content["split"], jobs=jobs, made=content["made"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not written by this command: {error}") from None
