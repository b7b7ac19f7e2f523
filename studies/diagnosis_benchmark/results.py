"""Scores of every method on the jobs of a data set, stored as JSON; tables are made from them.

Logs are read once, and each variant of the diagnosis decides on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import msgspec

from rmetric.diagnosis.decide import decide
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


@dataclass(frozen=True, kw_only=True)
class JobScores:
    """One job and what each method scored on it; facts of one name are those of `Case`."""

    name: str
    group: str
    kind: str
    outcome: str
    published_outcome: str
    stage: str
    cause_class: str
    rank: int | None
    world_size: int | None
    with_healthy: int
    lines: int
    answers: dict[str, Answer]

    @property
    def is_healthy(self) -> bool:
        return self.outcome == "healthy" and not self.kind


@dataclass(frozen=True, kw_only=True)
class Results:
    """A data set, judged.

    Attributes:
        source: "real" or "injected". split: "development", "held_out" or, of injected
            jobs, "blind".
    """

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
    """Raises ValueError for a file that is no result of this command."""
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
        said = decide(seen.job, library, healthy, switches=switches)
        answers[title] = of_diagnosis(case, seen, said)
    facts = {one.name: getattr(case, one.name) for one in fields(JobScores)[:-3]}
    return JobScores(
        **facts,
        with_healthy=len(case.healthy),
        lines=seen.job.lines,
        answers=answers | of_baselines(case, seen),
    )


def score_all(cases: Sequence[Case], processes: int) -> list[JobScores]:
    """In the order of the cases. Those of a group come one after another: they share siblings."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    done = mapped(_score_group, groups.values(), processes=processes)
    by_name = {judged.name: judged for of_group in done for judged in of_group}
    return [by_name[case.name] for case in cases]


def _score_group(cases: Sequence[Case]) -> list[JobScores]:
    return [score_job(case) for case in cases]


@lru_cache(maxsize=1)
def _library() -> SignatureLibrary:
    return SignatureLibrary.shipped()


@lru_cache(maxsize=32)
def _healthy(folder: Path) -> Job:
    return ingest([folder], _library())
