"""One benchmark job: its logs as the diagnosis reads them, and the ground truth.

The jobs with injected faults lie in FOLDER/<split>/<job>/logs, with manifest.json beside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from studies.diagnosis_benchmark.injected.plan import Settings

ROLES = ("cause", "symptom", "echo", "context")
#: What a job may have come to; a diagnosis may also say "unknown".
OUTCOMES = ("healthy", "failed", "terminated")


@dataclass(frozen=True, kw_only=True)
class Label:
    """A line that tells of the failure.

    Attributes:
        file: as in `Case.files`.
        line: from 1, of the file as the diagnosis sees it.
        role: of `ROLES`.
    """

    file: str
    line: int
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a label's role is {self.role!r}; {', '.join(ROLES)} are accepted")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job.

    Attributes:
        group: jobs of one group are not independent and are drawn together.
        kind: of the injected fault; "" for a healthy job and where nobody injected one.
        folder: holds the logs, in any depth.
        outcome: of `OUTCOMES`.
        published_outcome: as the publisher of the log counts it; "" where nobody did.
        stage, cause_class: as published; "" where not known.
        rank, node: the faulty one; None where not known.
        world_size: ranks of the job, None where not known.
        node_of_rank: rank -> node, as the launcher set it.
        healthy: folders of successful jobs of the same settings.
    """

    name: str
    group: str
    folder: Path
    outcome: str
    kind: str = ""
    published_outcome: str = ""
    stage: str = ""
    cause_class: str = ""
    rank: int | None = None
    node: str | None = None
    world_size: int | None = None
    node_of_rank: dict[int, str] = field(default_factory=dict)
    labels: tuple[Label, ...] = ()
    healthy: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome is {self.outcome!r}; {', '.join(OUTCOMES)} are accepted")

    @property
    def is_healthy(self) -> bool:
        """Nothing was wrong; a job with a slow rank may come to a good end and is not."""
        return self.outcome == "healthy" and not self.kind


def manifests(folder: Path) -> list[Path]:
    """FOLDER/JOB/manifest.json of each job. Raises ValueError where there is none."""
    paths = sorted(folder.glob("*/manifest.json"))
    if not paths:
        raise ValueError(f"{folder} holds no job: no */manifest.json is there")
    return paths


@contextmanager
def read_manifest(path: Path) -> Iterator[dict[str, Any]]:
    """Its content; whatever it lacks inside is a ValueError that names the file."""
    try:
        yield json.loads(path.read_text(encoding="utf-8"))
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def case_of(path: Path, told: dict[str, Any], **more: Any) -> Case:
    """The job of a manifest, whose logs are in logs/ beside it."""
    return Case(
        name=path.parent.name,
        group=told["group"],
        folder=path.parent / "logs",
        outcome=told["outcome"],
        kind="" if told["kind"] == "healthy" else told["kind"],
        stage=told["stage"],
        rank=told["rank"],
        node=told["node"],
        labels=tuple(
            Label(file=one["file"], line=int(one["line"]), role=one["role"])
            for one in told["labels"]
        ),
        **more,
    )


#: Our split -> its folder: kinds of fault that builders saw, those that they did not see at first,
#: and those that came after these were looked at.
FOLDERS = {"development": "development", "held_out": "test", "blind": "blind"}
JOBS = Path("runs", "injected_failures")


def injected_jobs(split: str, folder: Path) -> list[Case]:
    """The judged jobs of a split, each with the healthy siblings of its settings.

    Raises ValueError where there is none, and for a manifest that lacks something.
    """
    if split not in FOLDERS:
        raise ValueError(f"split is {split!r}; {', '.join(FOLDERS)} are accepted")
    cases = [_injected_case(path) for path in manifests(folder / FOLDERS[split])]
    return [case for case in cases if case is not None]


def _injected_case(path: Path) -> Case | None:
    """None for a job that is there as a sibling only."""
    with read_manifest(path) as told:
        if told["plan"]["part"] == "sibling":
            return None
        settings = Settings(**told["plan"]["settings"])
        return case_of(
            path,
            told,
            world_size=settings.world_size,
            node_of_rank={rank: settings.node(rank) for rank in range(settings.world_size)},
            healthy=tuple(path.parent.parent / name / "logs" for name in told["siblings"]),
        )
