"""Reader of SQLite files: the metrics of trackio, and of MLflow's tracking database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from rmetric._util.errors import LogError
from rmetric._util.strict_json import parse_line
from rmetric.readers.json_lines import flat
from rmetric.readers.long_form import stream_wide
from rmetric.readers.rows import Row, UnknownFormat
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream

_RUN = "(run)"
#: Columns of the table `metrics` -> query for run, step, and all values or name and value.
_QUERIES = {
    ("run_name", "step", "metrics"): "SELECT run_name, step, metrics FROM metrics ORDER BY id",
    ("run_uuid", "step", "key", "value", "is_nan"): (
        "SELECT coalesce(runs.name, metrics.run_uuid), step, key, "
        "CASE WHEN is_nan THEN 'nan' ELSE value END FROM metrics "
        "LEFT JOIN runs ON runs.run_uuid = metrics.run_uuid ORDER BY metrics.run_uuid, step"
    ),
}


def matches(head: str) -> bool:
    return head.startswith("SQLite format 3")


def _rows(path: Path) -> Iterator[Row]:
    # Without a journal beside it nothing writes, and none has to be made.
    state = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    with closing(sqlite3.connect(f"file:{quote(str(path))}?{state}", uri=True)) as database:
        names = {name for _, name, *_ in database.execute("PRAGMA table_info(metrics)")}
        query = next((query for needed, query in _QUERIES.items() if names.issuperset(needed)), "")
        if not query:
            problem = "an SQLite file without the metrics of trackio or of MLflow"
            raise UnknownFormat(path, None, problem)
        for run, step, *values in database.execute(query):
            if len(values) == 2:
                yield Row(None, {_RUN: run, "step": step, str(values[0]): values[1]})
                continue
            text = values[0].encode() if isinstance(values[0], str) else values[0]
            yield Row(None, {_RUN: run, "step": step, **flat(parse_line(text))})


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    try:
        rows = list(_rows(source.path))
    except sqlite3.Error as error:
        raise LogError(source.path, None, f"no SQLite file that can be read: {error}") from None
    return stream_wide(source.path, rows, mapping)


READER = Reader("SQLite of trackio or MLflow", matches, stream)
