"""Readers of experiment trackers: MLflow, trackio, Comet; and of any log in long form.

In long form a row holds one value and its name, as MLflow and Comet export them and torchtitan
traces them. MLflow keeps a folder with a file for each metric, or an SQLite file, as trackio does.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rmetric._util.errors import LogError
from rmetric._util.strict_json import parse_line
from rmetric.readers import json_lines
from rmetric.readers.json_lines import flat, object_on
from rmetric.readers.rows import Row, UnknownFormat, number
from rmetric.readers.source import Source
from rmetric.readers.stream import RUN, Reader, Stream, long_form, one_value, stream_wide
from rmetric.readers.table import Table, header_of

Cells = Mapping[str, Any]
#: Columns of an SQLite table `metrics` -> query for run, step, and all values or name and value.
_QUERIES = {
    ("run_name", "step", "metrics"): (
        "SELECT run_name, step, CAST(metrics AS BLOB) FROM metrics ORDER BY id"
    ),
    ("run_uuid", "step", "key", "value", "is_nan"): (
        "SELECT coalesce(runs.name, metrics.run_uuid), step, key, "
        "CASE WHEN is_nan THEN 'nan' ELSE value END FROM metrics "
        "LEFT JOIN runs ON runs.run_uuid = metrics.run_uuid ORDER BY metrics.run_uuid, step"
    ),
}


def widened(entries: Iterable[tuple[int | None, Cells]]) -> list[Row] | None:
    """A row for each step of each run, in their order, from lines and cells in long form.

    Some exports list one metric after the other. None for another form.
    """
    entries = list(entries)
    if (parts := long_form({name: None for _, cells in entries for name in cells})) is None:
        return None
    found: dict[tuple[str, float], list[Row]] = {}
    for line, cells in entries:
        if (logged := one_value(cells, parts)) is None:
            continue
        name, value, own = logged
        try:
            place = number(own["step"]) or 0.0
        except (ValueError, TypeError):
            place = inf
        alike = found.setdefault((str(own[RUN]), place), [])
        if (row := next((row for row in alike if name not in row.cells), None)) is None:
            alike.append(row := Row(line, own))
        row.cells = {**row.cells, name: value}
    return [row for place in sorted(found) for row in found[place]]


def _entries(text: str) -> Iterator[tuple[int, Cells]]:
    """The objects on the lines, which may have others between them."""
    for line, content in enumerate(text.splitlines(), start=1):
        if (entry := object_on(content.encode())) is not None:
            yield line, flat(entry)


def _matches(head: str) -> bool:
    is_json = head.lstrip().startswith("{")
    names = (name for _, cells in _entries(head) for name in cells) if is_json else header_of(head)
    return long_form(names) is not None


def _stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    is_json = source.head.lstrip().startswith(b"{")
    if source.foreign_lines.forgiving:
        if is_json:
            return json_lines.stream(source, mapping)
        problem = f"{READER.name}: a table is read as a whole, JSONL can be followed"
        raise LogError(source.path, None, problem)
    table = () if is_json else ((row.line, row.cells) for row in Table(source).rows())
    rows = widened(_entries(source.whole()) if is_json else table)
    return stream_wide(source.path, lambda: rows or [], mapping)


def run_folder(file: Path) -> Path | None:
    """The folder of the MLflow run that has the file among its metrics; None for no such."""
    folders = (folder.parent for folder in file.parents if folder.name == "metrics")
    return next((folder for folder in folders if (folder / "meta.yaml").is_file()), None)


def stream_folder(folder: Path, mapping: Mapping[str, str]) -> Stream:
    """The run in a folder of MLflow's file store: a file a metric, lines of time, value, step."""
    known = re.search(r"^run_name: *(\S.*)$", _text(folder / "meta.yaml"), re.MULTILINE)
    run = {"run": known[1]} if known else {}
    entries: list[tuple[None, Cells]] = []
    for file in sorted((folder / "metrics").rglob("*")):
        name = file.relative_to(folder / "metrics").as_posix()
        for line in map(str.split, _text(file).splitlines()):
            if len(line) > 2:
                entries.append((None, {"name": name, "value": line[1], "step": line[2], **run}))
    return stream_wide(folder, lambda: widened(entries) or [], mapping)


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.is_file() else ""


def _stored(path: Path) -> Iterator[Row]:
    # Without a journal beside it nothing writes, and none has to be made.
    state = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    with closing(sqlite3.connect(f"file:{quote(str(path))}?{state}", uri=True)) as database:
        names = {name for _, name, *_ in database.execute("PRAGMA table_info(metrics)")}
        query = next((query for needed, query in _QUERIES.items() if names.issuperset(needed)), "")
        if not query:
            problem = "an SQLite file without the metrics of trackio or of MLflow"
            raise UnknownFormat(path, None, problem)
        for run, step, *values in database.execute(query):
            cells = {values[0]: values[1]} if len(values) == 2 else flat(parse_line(values[0]))
            yield Row(None, {RUN: run, "step": step, **cells})


def _stream_database(source: Source, mapping: Mapping[str, str]) -> Stream:
    try:
        rows = list(_stored(source.path))
    except sqlite3.Error as error:
        raise LogError(source.path, None, f"no SQLite file that can be read: {error}") from None
    return stream_wide(source.path, lambda: rows, mapping)


READER = Reader("long form, a value a row (MLflow, Comet)", _matches, _stream, follows=True)
DATABASE = Reader(
    "SQLite of trackio or MLflow", lambda head: head.startswith("SQLite format 3"), _stream_database
)
