"""Reader of AlgoPerf's measurements.csv, which writes nan as a blank cell.

A line is a training step, an evaluation, or the closing line with the final
score. So a blank loss means nan on the first two and nothing on the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import Stream
from rmetric.readers.table import Table, header_of, stream_table

NAME = "AlgoPerf measurements.csv"
FOLLOWS = True
_OWN_COLUMNS = {"global_step", "score", "accumulated_submission_time"}
_TRAINING = ("loss", "grad_norm")


def matches(head: str) -> bool:
    return set(header_of(head)) >= _OWN_COLUMNS


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    table = Table(source)
    return stream_table(source, table, mapping, _rows(table))


def _rows(table: Table) -> Iterator[Row]:
    blanks = 0
    for row in table.rows():
        if not _is_evaluation(row) and "score" in row.cells:
            continue
        missing = _nan_columns(row, table.names)
        blanks += len(missing)
        yield Row(row.line, {**row.cells, **dict.fromkeys(missing, "nan")})
    if blanks:
        table.notes.append(
            f"{blanks} blank losses and norms were read as nan, as AlgoPerf writes it"
        )


def _is_evaluation(row: Row) -> bool:
    return any(name.startswith("validation/") for name in row.cells)


def _nan_columns(row: Row, names: Sequence[str]) -> list[str]:
    """The columns that this kind of line always holds and that are blank here."""
    if _is_evaluation(row):
        own = [n for n in names if n.startswith("validation/") and n.endswith("loss")]
    else:
        own = [n for n in names if n in _TRAINING]
    return [name for name in own if name not in row.cells]
