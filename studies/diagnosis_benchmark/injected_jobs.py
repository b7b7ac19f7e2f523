"""Jobs with injected faults: small worlds of gloo processes that trained and really failed.

data/injected/SPLIT.tar.xz holds the logs of its jobs below JOB/, and jobs.csv has a row for each
job. data/injected/README.md says how they were made, and by what rules their lines are labelled.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from studies.diagnosis_benchmark.cases import ROLES, Case, Label
from studies.diagnosis_benchmark.csv_rows import read_rows

JOBS = Path(__file__).parent / "data" / "injected"
#: Kinds of fault that builders saw, those that they did not see at first, and those that came
#: after these had been looked at.
SPLITS = ("development", "held_out", "blind")


@dataclass(frozen=True, kw_only=True)
class InjectedJob:
    """A row of jobs.csv.

    Attributes:
        judged: the others are healthy, and given beside the judged ones of their group.
        group: jobs of the same settings.
        kind, variant: of the injected fault; "" where there is none.
        stage, step, rank: where it was injected.
        ranks_per_node: the nodes are node-00, node-01...
        cause, symptom, echo, context: the lines of that role, "FILE:4-6,9;FILE:2".
    """

    split: str
    job: str
    judged: bool
    group: str
    outcome: str
    kind: str
    variant: str
    stage: str
    step: int | None
    rank: int | None
    world_size: int
    ranks_per_node: int
    cause: str
    symptom: str
    echo: str
    context: str

    def labels(self) -> Iterator[Label]:
        """One for each line, role by role."""
        for role in ROLES:
            for file, _, spans in (one.partition(":") for one in getattr(self, role).split(";")):
                for first, _, last in (span.partition("-") for span in spans.split(",") if span):
                    for line in range(int(first), int(last or first) + 1):
                        yield Label(file=file, line=line, role=role)


def injected_jobs(split: str, folder: Path, work: Path) -> list[Case]:
    """The judged jobs of a split, their logs unpacked below `work`.

    Raises:
        ValueError: the split is not known, or a row cannot be used.
        OSError: there is no such archive.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; {', '.join(SPLITS)} are accepted")
    with tarfile.open(folder / f"{split}.tar.xz") as tar:
        tar.extractall(work, filter="data")
    rows = [row for row in read_rows(folder / "jobs.csv", InjectedJob) if row.split == split]
    try:
        return [_case(row, rows, work) for row in rows if row.judged]
    except ValueError as error:
        raise ValueError(f"{folder / 'jobs.csv'}: {error}") from None


def _case(row: InjectedJob, rows: list[InjectedJob], work: Path) -> Case:
    nodes = {rank: f"node-{rank // row.ranks_per_node:02d}" for rank in range(row.world_size)}
    return Case(
        name=row.job,
        group=row.group,
        folder=work / row.job,
        outcome=row.outcome,
        kind=row.kind,
        stage=row.stage,
        rank=row.rank,
        node=None if row.rank is None else nodes[row.rank],
        world_size=row.world_size,
        node_of_rank=nodes,
        labels=tuple(sorted(row.labels(), key=lambda label: (label.file, label.line))),
        healthy=tuple(work / one.job for one in rows if one.group == row.group and not one.judged),
    )
