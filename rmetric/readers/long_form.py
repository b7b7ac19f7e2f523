"""Logs in long form, a row for each value: exports of MLflow and Comet, traces of torchtitan.

Also the folder of an MLflow run, which has a file for each metric. The rows are held and put in
the order of their steps, as some exports list one metric after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError
from rmetric._util.strict_json import parse_line
from rmetric.readers.columns import plain_name
from rmetric.readers.json_lines import flat
from rmetric.readers.rows import Row, is_blank, number
from rmetric.readers.source import PathOnly, Source
from rmetric.readers.stream import Reader, Stream, columns_of_table, stream_rows
from rmetric.readers.table import Table, header_of

#: Name of the column with a metric's name -> that of its value.
_VALUE = {
    "metric_name": "metric_value", "key": "value", "metric": "value", "event_name": "value",
    "tag": "value", "name": "value",
}  # fmt: skip
_RUN = ("run_name", "run_id", "run_uuid", "run", "experiment_key")
_RUN_COLUMN, _LOOKED_AT = "(run)", 50
Cells = Mapping[str, Any]


def _columns(names: Iterable[str]) -> dict[str, str] | None:
    """``name``, ``value``, ``step`` and perhaps ``run`` -> their columns; None for no long form."""
    folders: dict[str, dict[str, str]] = {}
    for name in names:
        folder, _, own = name.rpartition("/")
        folders.setdefault(folder, {}).setdefault(plain_name(own), name)
    for columns in folders.values():
        for name, value in _VALUE.items():
            if {name, value, "step"} <= columns.keys() and "loss" not in columns:
                run = next((columns[run] for run in _RUN if run in columns), "")
                found = {"name": columns[name], "value": columns[value], "step": columns["step"]}
                return found | ({"run": run} if run else {})
    return None


def widened_entries(entries: Sequence[Cells]) -> list[Row] | None:
    """The entries as rows; None if they are no long form."""
    columns = _columns({name: None for cells in entries for name in cells})
    return None if columns is None else _widened(((None, cells) for cells in entries), columns)


def _widened(rows: Iterable[tuple[int | None, Cells]], columns: Cells) -> list[Row]:
    """A row for each step of each run, the metrics under their names, in the order of the steps."""
    found: dict[tuple[str, float], list[Row]] = {}
    for line, cells in rows:
        name, value, step, run = (
            cells.get(columns.get(of, "")) for of in ("name", "value", "step", "run")
        )
        if is_blank(name) or is_blank(step) or value is None:
            continue
        try:
            place = number(step) or 0.0
        except (ValueError, TypeError):
            place = inf
        alike = found.setdefault((str(run), place), [])
        row = next((row for row in alike if name not in row.cells), None)
        if row is None:
            row = Row(line, {"step": step} | ({} if run is None else {_RUN_COLUMN: run}))
            alike.append(row)
        row.cells = {**row.cells, str(name): value}
    return [row for place in sorted(found) for row in found[place]]


def stream_wide(
    path: Path, rows: Sequence[Row], mapping: Mapping[str, str], run: str | None = _RUN_COLUMN
) -> Stream:
    """The records of rows whose names are known once all were read; `run` names their run."""
    names = list(dict.fromkeys(name for row in rows for name in row.cells if name != run))
    if not names:
        raise LogError(path, None, "no metric is logged")
    plain = PathOnly(path)
    columns = columns_of_table(plain, names, mapping)
    if run is not None and any(run in row.cells for row in rows):
        columns.by_target["run"] = run
    return stream_rows(plain, columns, rows)


def _entries(text: str) -> Iterator[tuple[int, Cells]]:
    for line, one in enumerate(text.splitlines(), start=1):
        try:
            entry = parse_line(one.encode())
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield line, flat(entry)


def _matches(head: str) -> bool:
    if head.lstrip().startswith("{"):
        first = "\n".join(head.splitlines()[:_LOOKED_AT])
        return _columns({name: None for _, cells in _entries(first) for name in cells}) is not None
    return _columns(header_of(head)) is not None


def _stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    rows: list[tuple[int | None, Cells]] = []
    if source.head.lstrip().startswith(b"{"):
        rows += _entries(source.whole())
    else:
        rows += ((row.line, row.cells) for row in Table(source).rows())
    columns = _columns({name: None for _, cells in rows for name in cells})
    return stream_wide(source.path, _widened(rows, columns or {}), mapping)


def run_folder(file: Path) -> Path | None:
    """The folder of the MLflow run that has the file among its metrics; None for no such."""
    folders = (folder for folder in file.parents if folder.name == "metrics")
    return next((f.parent for f in folders if (f.parent / "meta.yaml").is_file()), None)


def stream_folder(folder: Path, mapping: Mapping[str, str]) -> Stream:
    """The run in a folder of MLflow's file store: a file a metric, lines of time, value, step."""
    rows: list[tuple[int | None, Cells]] = []
    known = re.search(r"^run_name: *(\S.*)$", _text(folder / "meta.yaml"), re.MULTILINE)
    run = {"run": known[1]} if known else {}
    for file in sorted((folder / "metrics").rglob("*")):
        for line in map(str.split, _text(file).splitlines()):
            if len(line) >= 3:
                name = file.relative_to(folder / "metrics").as_posix()
                rows.append((None, {"name": name, "value": line[1], "step": line[2], **run}))
    columns = {name: name for name in ("name", "value", "step", "run")}
    return stream_wide(folder, _widened(rows, columns), mapping)


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.is_file() else ""


READER = Reader("long form, a value a row (MLflow, Comet)", _matches, _stream)
FOLDER = "MLflow run (folder)"
