"""Scores of every method on the jobs of a data set, stored as JSON; tables are made from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmetric.logs import write_atomically
from studies.diagnosis_benchmark.answers import Answer, from_json

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
    """One job and what each method scored on it; the facts are those of `Case`."""

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "answers": {title: answer.as_json() for title, answer in self.answers.items()}
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> JobScores:
        answers = {title: from_json(answer) for title, answer in entry["answers"].items()}
        return cls(**{**entry, "answers": answers})


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
        jobs = ",\n".join(json.dumps(job.as_json(), allow_nan=False) for job in self.jobs)
        # One job a line, so that a change shows which jobs it moved.
        text = f'{json.dumps(about, allow_nan=False)[:-1]}, "jobs": [\n{jobs}\n]}}\n'
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.name}.json", [text.encode()])


def read_results(path: Path) -> Results:
    """Raises ValueError for a file that is no result of this command."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        jobs = [JobScores.from_json(entry) for entry in content["jobs"]]
        return Results(source=content["source"], split=content["split"], jobs=jobs)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not written by this command: {error}") from None
