"""Reader of AlgoPerf's measurements.csv, which writes nan as a blank cell.

A line is a training step, an evaluation, or the closing line with the final
score. So a blank loss means nan on the first two and nothing on the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rmetric.records import Run
from rmetric.replay.rows import Row
from rmetric.replay.table import header_of, read_table, runs_from_table

NAME = "AlgoPerf measurements.csv"
_OWN_COLUMNS = {"global_step", "score", "accumulated_submission_time"}
_TRAINING = ("loss", "grad_norm")


def matches(head: str) -> bool:
    return set(header_of(head)) >= _OWN_COLUMNS


def read(path: Path, data: bytes, mapping: Mapping[str, str]) -> list[Run]:
    table = read_table(path, data)
    table.rows = [row for row in table.rows if _is_evaluation(row) or "score" not in row.cells]
    blanks = 0
    for row in table.rows:
        missing = _nan_columns(row, table.names)
        blanks += len(missing)
        row.cells = {**row.cells, **dict.fromkeys(missing, "nan")}
    if blanks:
        table.notes.append(
            f"{blanks} blank losses and norms were read as nan, as AlgoPerf writes it"
        )
    return runs_from_table(path, table, mapping)


def _is_evaluation(row: Row) -> bool:
    return any(name.startswith("validation/") for name in row.cells)


def _nan_columns(row: Row, names: Sequence[str]) -> list[str]:
    """The columns that this kind of line always holds and that are blank here."""
    if _is_evaluation(row):
        own = [n for n in names if n.startswith("validation/") and n.endswith("loss")]
    else:
        own = [n for n in names if n in _TRAINING]
    return [name for name in own if name not in row.cells]
