"""Reader of the CSV that the charts of Weights & Biases export: a column for each run and metric.

    "Step","run-1 - train/loss","run-1 - train/loss__MIN","run-1 - train/loss__MAX",...

`__MIN` and `__MAX` are the ends of a bucket of points and no further values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import Stream, columns_of_table, stream_rows
from rmetric.readers.table import Table, header_of

NAME = "W&B chart export (CSV)"
FOLLOWS = False
_BETWEEN = " - "
_ENDS = ("__MIN", "__MAX")
_LOGGER_STEP = "Step"
_RUN = "(run)"


class _Curve(NamedTuple):
    """Split the name of a column into its run and its metric."""

    column: str
    run: str
    metric: str


def matches(head: str) -> bool:
    names = header_of(head)
    return any(_BETWEEN in name and all(f"{name}{end}" in names for end in _ENDS) for name in names)


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    table = Table(source)
    curves = [
        _Curve(name, *name.rsplit(_BETWEEN, 1))
        for name in table.names
        if _BETWEEN in name and not name.endswith(_ENDS)
    ]
    shared = [name for name in table.names if _BETWEEN not in name and not name.endswith(_ENDS)]
    # Its "Step" counts calls of the logger; another metric on the axis is what it says.
    renamed = {name: "_step" if name == _LOGGER_STEP else name for name in shared}
    metrics = list(dict.fromkeys(curve.metric for curve in curves))
    names = [*metrics, *renamed.values()]
    columns = columns_of_table(source, names, mapping)
    columns.by_target["run"] = _RUN
    return stream_rows(source, columns, _rows(table, curves, renamed), table.notes)


def _rows(table: Table, curves: list[_Curve], shared: Mapping[str, str]) -> Iterator[Row]:
    by_run: dict[str, list[_Curve]] = {}
    for curve in curves:
        by_run.setdefault(curve.run, []).append(curve)
    for row in table.rows():
        common = {to: row.cells[name] for name, to in shared.items() if name in row.cells}
        for run, own in by_run.items():
            cells = {c.metric: row.cells[c.column] for c in own if c.column in row.cells}
            if cells:
                yield Row(row.line, common | cells | {_RUN: run})
