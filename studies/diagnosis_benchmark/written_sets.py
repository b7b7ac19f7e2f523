"""The sets of written jobs: archives with the jobs' logs and labels, and what is known of each set.

data/sets/NAME.tar.xz holds JOB/logs/... and JOB/manifest.json. sets.csv has a row for each: who
wrote it, its number of jobs, the SHA-256 of its archive, and of numbered sets the day and the
commit of the code of their first look. Numbered sets were judged once before anybody looked at
them; set 01 was sealed by a digest. `development` and `opened` were looked at from the start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from studies.common.csv_rows import read_dicts
from studies.diagnosis_benchmark.cases import Case, Label

SETS = Path(__file__).parent / "data" / "sets"


class WrittenSet(NamedTuple):
    """A row of sets.csv; `first_look` and `commit` are "" where there was no first look."""

    name: str
    authors: str
    jobs: int
    first_look: str
    commit: str
    sha256: str

    @property
    def archive(self) -> Path:
        return SETS / f"{self.name}.tar.xz"


@dataclass(frozen=True, kw_only=True)
class WrittenCase:
    """A case, its set, and the whole of its manifest, as `manifest["causes"]`."""

    case: Case
    set: str
    manifest: dict[str, Any]


def written_sets() -> dict[str, WrittenSet]:
    """All sets by name, in the order of their first looks."""
    rows = (row.values() for row in read_dicts(SETS / "sets.csv"))
    found = (WrittenSet(name, who, int(jobs), *rest) for name, who, jobs, *rest in rows)
    return {entry.name: entry for entry in found}


def add_sets(parser: argparse.ArgumentParser) -> None:
    """The option --set, one or several names for `opened`."""
    names = [*written_sets(), "all"]
    parser.add_argument(
        "--set", nargs="+", default=["all"], choices=names, metavar="SET", dest="sets",
        type=lambda word: word.zfill(2),
        help=f"written jobs: {names[0]} to {', '.join(names[-4:])} (default)",
    )  # fmt: skip


@contextmanager
def opened(sets: Sequence[str]) -> Iterator[list[WrittenCase]]:
    """The jobs of some sets, or of "all", unpacked into a folder that is removed afterwards."""
    known = written_sets()
    with TemporaryDirectory() as work:
        names = known if "all" in sets else sets
        yield [job for name in names for job in unpacked(known[name], Path(work))]


def unpacked(of: WrittenSet, folder: Path) -> list[WrittenCase]:
    """The jobs of a set, unpacked below FOLDER/NAME."""
    with tarfile.open(of.archive) as tar:
        tar.extractall(folder / of.name, filter="data")
    return written_jobs(folder / of.name)


def packed(folder: Path, archive: Path) -> str:
    """Pack the jobs in FOLDER/JOB, without owners and times; the archive's SHA-256."""

    def bare(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime, info.mode = 0, 0o755 if info.isdir() else 0o644
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as tar:
        for job in sorted(folder.iterdir()):
            tar.add(job, job.name, filter=bare)
    return digest([archive])


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 of files, one after another."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def written_jobs(folder: Path) -> list[WrittenCase]:
    """The jobs in FOLDER/JOB/logs, each with FOLDER/JOB/manifest.json.

    `Case.cause_class` is of `CAUSES`.

    Raises ValueError: there is no job, or a manifest lacks something.
    """
    paths = sorted(folder.glob("*/manifest.json"))
    if not paths:
        raise ValueError(f"{folder} holds no job: no */manifest.json is there")
    return [_case(path) for path in paths]


def _case(path: Path) -> WrittenCase:
    """The job of a manifest, whose logs are in logs/ beside it."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        labels = [(mark["file"], int(mark["line"]), mark["role"]) for mark in manifest["labels"]]
        case = Case(
            cause_class="" if manifest["cause_class"] == "none" else manifest["cause_class"],
            name=path.parent.name,
            group=manifest["group"],
            folder=path.parent / "logs",
            outcome=manifest["outcome"],
            kind="" if manifest["kind"] == "healthy" else manifest["kind"],
            stage=manifest["stage"],
            rank=manifest["rank"],
            node=manifest["node"],
            world_size=manifest["world_size"],
            node_of_rank={int(rank): node for rank, node in manifest["node_of_rank"].items()},
            labels=tuple(Label(file=file, line=line, role=role) for file, line, role in labels),
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return WrittenCase(case=case, set=path.parent.parent.name, manifest=manifest)
