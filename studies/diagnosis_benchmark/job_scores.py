"""Scores of every method on one job; the names of the methods."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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
