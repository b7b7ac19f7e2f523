"""Scores of every method on the jobs of a data set, stored as JSON; tables are made from them.

Logs are read once, and each variant of the diagnosis decides on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from rmetric.diagnosis.decide import gathered
from rmetric.diagnosis.evidence import Switches
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.logs import write_atomically
from studies.common.processes import mapped
from studies.diagnosis_benchmark.answers import Answer, of_baselines, of_diagnosis
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.reading import read

WHOLE = "Diagnosis"
ALONE = "Logs alone (without cross-job)"
#: Title of a variant of the diagnosis -> its `Switches` that are off. With `cross_job` off it
#: is not shown the healthy jobs of the same settings.
VARIANTS: dict[str, tuple[str, ...]] = {
    WHOLE: (),
    ALONE: ("cross_job",),
    "Without spatial": ("spatial",),
    "Without temporal": ("temporal",),
    "Without unfiltered": ("unfiltered",),
    "Without library": ("library",),
    "Library alone": ("cross_job", "spatial", "temporal", "unfiltered"),
}
#: Source -> the variant that is judged by the goals. A real log comes alone; an injected job
#: with the healthy jobs of its settings.
HEADLINES = {"real": ALONE, "injected": WHOLE}
TITLES = {
    ("real", "development"): "real, development",
    ("real", "held_out"): "real, held out",
    ("injected", "development"): "injected, seen kinds",
    ("injected", "held_out"): "injected, four kinds held out",
    ("injected", "blind"): "injected, six later kinds",
}


@dataclass(frozen=True)
class JobScores:
    """One job and what each method scored on it."""

    name: str
    group: str
    kind: str
    outcome: str
    lines: int
    answers: dict[str, Answer]

    @property
    def is_healthy(self) -> bool:
        return self.outcome == "healthy" and not self.kind


@dataclass(frozen=True, kw_only=True)
class Results:
    """A data set, judged: its source, "real" or "injected", and its split."""

    source: str
    split: str
    jobs: list[JobScores]

    @property
    def name(self) -> str:
        return f"{self.source}_{self.split}"

    @property
    def title(self) -> str:
        return TITLES[self.source, self.split]

    @property
    def headline(self) -> str:
        return HEADLINES[self.source]

    def drawn_with(self, job: JobScores) -> str:
        """Jobs of one such name are resampled together."""
        return job.group if self.source == "real" else job.name

    def write(self, folder: Path) -> None:
        about = {"source": self.source, "split": self.split}
        entries = map(msgspec.to_builtins, self.jobs)
        jobs = ",\n".join(json.dumps(entry, allow_nan=False) for entry in entries)
        # One job a line, so that a change shows which jobs it moved.
        text = f'{json.dumps(about, allow_nan=False)[:-1]}, "jobs": [\n{jobs}\n]}}\n'
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.name}.json", [text.encode()])


def read_results(path: Path) -> Results:
    """Raises ValueError for a file that is not a result of this command."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: not written by this command: {error}") from None


def score_job(case: Case) -> JobScores:
    """All methods on one job."""
    library, seen = _library(), read(case.folder, _library())
    healthy = [_healthy(folder) for folder in case.healthy]
    answers = {}
    for title, off in VARIANTS.items():
        switches = Switches(**dict.fromkeys(off, False))
        diagnosis = gathered(seen.job, library, healthy, switches=switches).diagnosis()
        answers[title] = of_diagnosis(case, seen, diagnosis)
    answers |= of_baselines(case, seen)
    return JobScores(case.name, case.group, case.kind, case.outcome, seen.job.lines, answers)


def score_all(cases: Sequence[Case], processes: int) -> list[JobScores]:
    """Scores in the order of the cases; a group's are computed in a row, as they share siblings."""
    ordered = sorted(cases, key=lambda case: case.group)
    by_name = {scores.name: scores for scores in mapped(score_job, ordered, processes=processes)}
    return [by_name[case.name] for case in cases]


@lru_cache(maxsize=1)
def _library() -> SignatureLibrary:
    return SignatureLibrary.shipped()


@lru_cache(maxsize=32)
def _healthy(folder: Path) -> Job:
    return ingest([folder], _library())
