"""Load injected jobs as cases: FOLDER/<split>/<job>/logs and manifest.json beside it."""

from __future__ import annotations

from pathlib import Path

from studies.diagnosis_benchmark.cases import Case, case_of, manifests, read_manifest
from studies.diagnosis_benchmark.injected.plan import Settings

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
    cases = [_case(path) for path in manifests(folder / FOLDERS[split])]
    return [case for case in cases if case is not None]


def _case(path: Path) -> Case | None:
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
