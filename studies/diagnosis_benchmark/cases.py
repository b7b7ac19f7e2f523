"""The jobs of the benchmark: their logs as the diagnosis reads them, and the ground truth.

The public logs of data/failure_logs.csv belong to others and are read from a folder. Each job's
logs are copied to a folder of their own without anything that reveals the answer: the name of a
lone file (some are named for the fault) and the first line of the injector's crash logs.

Jobs with injected faults are small worlds of gloo processes that trained and really failed.
data/injected/SPLIT.tar.xz holds the logs of its jobs below JOB/, and jobs.csv has a row for each
job. data/injected/README.md states how they were made, and by what rules their lines are labelled.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from studies.common.csv_rows import read_dicts, read_rows
from studies.diagnosis_benchmark.cause_meanings import faulty_rank

ROLES = ("cause", "symptom", "echo", "context")
#: What a job may have come to; a diagnosis may also be "unknown".
OUTCOMES = ("healthy", "failed", "terminated")
DATA = Path(__file__).parent / "data"
#: Of real logs, which `LOGS` holds by default.
REAL = ("development", "held_out")
MANIFEST, LOGS = DATA / "failure_logs.csv", Path("failure_logs")
#: Crash logs of an injector, whose first line names what was injected.
INJECTOR_PREFIX = "inject__"
#: Kinds of injected faults that builders saw, those that they did not see at first, and those that
#: came after these had been looked at.
INJECTED = ("development", "held_out", "blind")
JOBS = DATA / "injected"


@dataclass(frozen=True, kw_only=True)
class Label:
    """A line about the failure, from 1, of a file as the diagnosis sees it."""

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
        folder: holds the logs, in any depth.
        kind: of the injected fault; "" for a healthy job and where none was injected.
        stage, cause_class: as published; "" where not known.
        rank, node: the faulty one.
        node_of_rank: rank -> node, as the launcher set it.
        healthy: folders of successful jobs of the same settings.
    """

    name: str
    group: str
    folder: Path
    outcome: str
    kind: str = ""
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


Row = dict[str, str]


def real_jobs(split: str, logs: Path, work: Path, manifest: Path = MANIFEST) -> list[Case]:
    """The jobs of a split, their logs laid out below `work`; labels lie beside the manifest.

    Raises ValueError for a split, a file or a role that is not known.
    """
    if split not in REAL:
        raise ValueError(f"split is {split!r}; {' and '.join(REAL)} are accepted")
    labels: dict[str, list[Row]] = defaultdict(list)
    for row in read_dicts(manifest.with_name(f"failure_labels_{split}.csv")):
        labels[row["file"]].append(row)
    of_job: dict[str, list[Row]] = defaultdict(list)
    for row in read_dicts(manifest):
        if row["split"] == split:
            of_job[row["job"]].append(row)
    cases = [
        _real_case(files, labels, logs, work / f"{number:03d}")
        for number, files in enumerate(of_job.values())
    ]
    # The healthy jobs of its group but itself are those of similar settings.
    groups: dict[str, list[Path]] = defaultdict(list)
    for case in cases:
        groups[case.group] += [case.folder] if case.is_healthy else []
    return [
        replace(case, healthy=tuple(other for other in groups[case.group] if other != case.folder))
        for case in cases
    ]


def _real_case(files: list[Row], labels: dict[str, list[Row]], logs: Path, folder: Path) -> Case:
    first, common = files[0], os.path.commonpath([row["file"] for row in files])
    found: list[Label] = []
    for row in files:
        file = PurePosixPath(row["file"])
        lone = f"job.log{'.gz' if file.suffix == '.gz' else ''}"
        name = lone if len(files) == 1 else file.relative_to(common).as_posix()
        names_fault = file.name.startswith(INJECTOR_PREFIX)
        _lay_out(row, logs / file, folder / name, names_fault)
        found += [
            Label(file=name, line=int(label["line"]) - names_fault, role=label["role"])
            for label in labels[row["file"]]
        ]
    return Case(
        name=first["job"], group=first["case"], folder=folder, outcome=first["outcome"],
        stage=first["stage"], cause_class=first["cause_class"], rank=faulty_rank(first["faulty"]),
        labels=tuple(found),
    )  # fmt: skip


def _lay_out(row: Row, source: Path, target: Path, names_fault: bool) -> None:
    """Copy a file, where `names_fault` without its first line, which states the answer."""
    if not source.is_file():
        raise ValueError(f"{source} of the manifest is not there; name the logs' folder by --logs")
    content = source.read_bytes()
    plain = gzip.decompress(content) if source.suffix == ".gz" else content
    if hashlib.sha256(plain).hexdigest() != row["sha256"]:
        raise ValueError(f"{source}: its sha256 is not that of the manifest, {row['sha256']}")
    if names_fault:
        plain = plain.partition(b"\n")[2]
        content = gzip.compress(plain, mtime=0) if source.suffix == ".gz" else plain
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


@dataclass(frozen=True, kw_only=True)
class InjectedJob:
    """A row of jobs.csv.

    Attributes:
        judged: the others are healthy, and given beside the judged ones of their group.
        group: jobs of the same settings.
        kind, variant, stage, step, rank: of the injected fault.
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
            for file, _, spans in (item.partition(":") for item in getattr(self, role).split(";")):
                for first, _, last in (span.partition("-") for span in spans.split(",") if span):
                    for line in range(int(first), int(last or first) + 1):
                        yield Label(file=file, line=line, role=role)


def injected_jobs(split: str, folder: Path, work: Path) -> list[Case]:
    """The judged jobs of a split, their logs unpacked below `work`.

    Raises ValueError for an unknown split or a row of no use, OSError where there is no archive.
    """
    if split not in INJECTED:
        raise ValueError(f"split is {split!r}; {', '.join(INJECTED)} are accepted")
    with tarfile.open(folder / f"{split}.tar.xz") as tar:
        tar.extractall(work, filter="data")
    rows = [row for row in read_rows(folder / "jobs.csv", InjectedJob) if row.split == split]
    try:
        return [_injected_case(row, rows, work) for row in rows if row.judged]
    except ValueError as error:
        raise ValueError(f"{folder / 'jobs.csv'}: {error}") from None


def _injected_case(row: InjectedJob, rows: list[InjectedJob], work: Path) -> Case:
    nodes = {rank: f"node-{rank // row.ranks_per_node:02d}" for rank in range(row.world_size)}
    shared = ("group", "outcome", "kind", "stage", "rank", "world_size")
    return Case(
        **{name: getattr(row, name) for name in shared},
        name=row.job,
        folder=work / row.job,
        node=None if row.rank is None else nodes[row.rank],
        node_of_rank=nodes,
        labels=tuple(sorted(row.labels(), key=lambda label: (label.file, label.line))),
        healthy=tuple(work / run.job for run in rows if run.group == row.group and not run.judged),
    )
