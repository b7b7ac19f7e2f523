"""Load the failure logs of data/failure_logs.csv as cases, with labelled lines.

The logs belong to others and are read from a folder. Each job's logs are copied to a folder of
their own without anything that reveals the answer: the name of a lone file (some are named for the
fault) and the first line of the injector's crash logs, which names the class of the crash.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path, PurePosixPath

from studies.diagnosis_benchmark.cases import Case, Label
from studies.diagnosis_benchmark.classes import faulty_rank

SPLITS = ("development", "held_out")
MANIFEST = Path(__file__).parent / "data" / "failure_logs.csv"
LOGS = Path("failure_logs")
#: Crash logs of an injector, whose first line names what was injected.
TOLD = "inject__"

Row = dict[str, str]


def real_jobs(split: str, logs: Path, work: Path, manifest: Path = MANIFEST) -> list[Case]:
    """The jobs of a split, their logs laid out below `work`; labels lie beside the manifest.

    Raises ValueError for a split, a file or a role that is not known.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; {' and '.join(SPLITS)} are accepted")
    rows = [row for row in _rows(manifest) if row["split"] == split]
    labels: dict[str, list[Row]] = defaultdict(list)
    for row in _rows(manifest.with_name(f"failure_labels_{split}.csv")):
        labels[row["file"]].append(row)
    of_job: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_job[row["job"]].append(row)
    cases = [
        _case(files, labels, logs, work / f"{number:03d}")
        for number, files in enumerate(of_job.values())
    ]
    return [_with_healthy(case, cases) for case in cases]


def _rows(path: Path) -> list[Row]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _case(files: list[Row], labels: dict[str, list[Row]], logs: Path, folder: Path) -> Case:
    names = _names([row["file"] for row in files])
    found: list[Label] = []
    for row in files:
        name = names[row["file"]]
        _lay_out(row, logs / row["file"], folder / name)
        skipped = int(_is_told(row["file"]))
        found += [
            Label(file=name, line=int(label["line"]) - skipped, role=label["role"])
            for label in labels[row["file"]]
        ]
    first = files[0]
    return Case(
        name=first["job"],
        group=first["case"],
        folder=folder,
        outcome=first["outcome"],
        published_outcome=first["published_outcome"],
        stage=first["stage"],
        cause_class=first["cause_class"],
        rank=faulty_rank(first["faulty"]),
        labels=tuple(found),
    )


def _names(files: list[str]) -> dict[str, str]:
    """Target path of each file, relative to the common folder; a lone file becomes job.log."""
    if len(files) == 1:
        return {files[0]: f"job.log{'.gz' if files[0].endswith('.gz') else ''}"}
    common = os.path.commonpath(files)
    return {name: PurePosixPath(name).relative_to(common).as_posix() for name in files}


def _is_told(file: str) -> bool:
    return PurePosixPath(file).name.startswith(TOLD)


def _lay_out(row: Row, source: Path, target: Path) -> None:
    """Copy a file; what tells the answer is cut off."""
    if not source.is_file():
        raise ValueError(f"{source} of the manifest is not there; name the logs' folder by --logs")
    content = source.read_bytes()
    plain = gzip.decompress(content) if source.suffix == ".gz" else content
    if hashlib.sha256(plain).hexdigest() != row["sha256"]:
        raise ValueError(f"{source}: its sha256 is not that of the manifest, {row['sha256']}")
    if _is_told(row["file"]):
        plain = plain.partition(b"\n")[2]
        content = gzip.compress(plain, mtime=0) if source.suffix == ".gz" else plain
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def _with_healthy(case: Case, cases: list[Case]) -> Case:
    """The healthy jobs of its group but itself are those of similar settings."""
    healthy = tuple(
        other.folder
        for other in cases
        if other.group == case.group and other.is_healthy and other is not case
    )
    return replace(case, healthy=healthy)
