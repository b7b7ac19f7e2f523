"""Load injected jobs as cases: FOLDER/<split>/<job>/logs and manifest.json beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from studies.diagnosis_benchmark.cases import OUTCOMES, ROLES, Case, Label
from studies.diagnosis_benchmark.injected.settings import Settings

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
    manifests = sorted((folder / FOLDERS[split]).glob("*/manifest.json"))
    if not manifests:
        raise ValueError(f"{folder / FOLDERS[split]} holds no job: no */manifest.json is there")
    cases = [_case(path, _read(path)) for path in manifests]
    return [case for case in cases if case is not None]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found a {type(content).__name__}; an object is accepted")
    return content


def _case(path: Path, told: dict[str, Any]) -> Case | None:
    """None for a job that is there as a sibling only."""
    try:
        if told["plan"]["part"] == "sibling":
            return None
        if told["outcome"] not in OUTCOMES:
            raise ValueError(f"outcome is {told['outcome']!r}; {', '.join(OUTCOMES)} are accepted")
        settings = Settings(**told["plan"]["settings"])
        return Case(
            name=path.parent.name,
            group=told["group"],
            folder=path.parent / "logs",
            outcome=told["outcome"],
            kind=told["kind"] if told["kind"] != "healthy" else "",
            stage=told["stage"],
            rank=told["rank"],
            node=told["node"],
            world_size=settings.world_size,
            node_of_rank={rank: settings.node(rank) for rank in range(settings.world_size)},
            labels=tuple(_label(one) for one in told["labels"]),
            healthy=tuple(path.parent.parent / name / "logs" for name in told["siblings"]),
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _label(told: dict[str, Any]) -> Label:
    if told["role"] not in ROLES:
        raise ValueError(f"a label's role is {told['role']!r}; {', '.join(ROLES)} are accepted")
    return Label(file=told["file"], line=int(told["line"]), role=told["role"])
