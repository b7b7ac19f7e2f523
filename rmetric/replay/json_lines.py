"""Reader of any log with one JSON object a line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmetric.logs import LogError, parse_line
from rmetric.records import Run
from rmetric.replay.rows import Row, runs_from_rows

NAME = "JSONL (one object a line)"


def matches(head: str) -> bool:
    first = head.lstrip().split("\n", 1)[0]
    try:
        return isinstance(parse_line(first.encode()), dict)
    except ValueError:
        return False


def read(path: Path, data: bytes, mapping: Mapping[str, str]) -> list[Run]:
    rows, cut_off = [], []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_line(line)
        except ValueError:
            if line.endswith((b"\n", b"\r")):
                raise LogError(path, number, f"not JSON: {line.strip()[:60]!r}") from None
            cut_off = [f"line {number} is cut off and was left out"]
            break
        if not isinstance(entry, dict):
            raise LogError(path, number, f"a JSON object is accepted, found {line.strip()[:60]!r}")
        rows.append(Row(number, flat(entry)))
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    runs = runs_from_rows(path, names, rows, mapping)
    for run in runs:
        run.notes += cut_off
    return runs


def flat(entry: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, their names joined by ``/``.

    >>> flat({"step": 1, "train": {"loss": 2.5}})
    {'step': 1, 'train/loss': 2.5}
    """
    cells: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            cells |= flat(value, f"{prefix}{name}/")
        else:
            cells[f"{prefix}{name}"] = value
    return cells
