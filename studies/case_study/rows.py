"""The rows of a dataset: local files in four formats, or a dataset on the hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from studies.case_study.hub import check_available, is_local
from studies.case_study.settings import DATASET, DATASET_CONFIG, CaseStudyError

Rows = Sequence[dict[str, Any]]


def read_rows(source: str) -> Rows:
    """The rows of a local file or folder, or of a dataset on the hub."""
    rows = _local(Path(source).expanduser()) if is_local(source) else _from_hub(source)
    if len(rows) == 0:
        raise CaseStudyError(f"--dataset {source}: it has no rows")
    return rows


def _from_hub(name: str) -> Rows:
    from datasets import load_dataset  # takes seconds, which local files need not spend

    check_available(name, "dataset")
    config = DATASET_CONFIG if name == DATASET else None
    try:
        return load_dataset(name, config, split="train")
    except Exception as error:  # whatever is wrong with somebody's dataset, it is said
        reason = " ".join(str(error).split())
        raise CaseStudyError(f"--dataset {name}: it cannot be loaded ({reason[:300]})") from None


def _local(path: Path) -> Rows:
    if not path.exists():
        raise CaseStudyError(f"--dataset {path}: there is no such file or folder")
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in READERS)
    if not files:
        raise CaseStudyError(f"--dataset {path}: no {', '.join(READERS)} file is in it")
    return [row for file in files for row in _read(file)]


def _read(path: Path) -> Rows:
    read = READERS.get(path.suffix)
    if read is None:
        raise CaseStudyError(
            f"--dataset {path}: {path.suffix or 'no suffix'} is not known; "
            f"accepted are {', '.join(READERS)}"
        )
    try:
        rows = read(path)
    except (OSError, ValueError, csv.Error) as error:
        raise CaseStudyError(f"--dataset {path}: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise CaseStudyError(
                f"--dataset {path}, row {number}: found {row!r:.60}, and a row has named columns"
            )
    return rows


def _json_lines(path: Path) -> Rows:
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"line {number} is no JSON ({error})") from None
    return rows


def _json(path: Path) -> Rows:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError("a list of rows is needed")
    return rows


def _csv(path: Path) -> Rows:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _parquet(path: Path) -> Rows:
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
