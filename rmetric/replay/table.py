"""Reader of any CSV with a header line, and what the other CSV readers share."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rmetric.logs import LogError
from rmetric.records import Run
from rmetric.replay.rows import Row, runs_from_rows
from rmetric.replay.source import text_of

NAME = "CSV with a header line"
_DELIMITERS = ",;\t"


@dataclass(kw_only=True)
class Table:
    """A CSV as rows of cells, blank ones left out; `notes` say what was dropped."""

    names: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def matches(head: str) -> bool:
    names = header_of(head)
    below = head.lstrip("\r\n").split("\n", 2)[1:2]
    # Prose has commas too; below a header at least one cell is a number.
    cells = _cells(below[0]) if below and below[0].strip() else ["0"]
    return (
        len(names) > 1
        and all(names)
        and not any(_is_number(name) for name in names)
        and any(_is_number(cell) for cell in cells)
    )


def read(path: Path, data: bytes, mapping: Mapping[str, str]) -> list[Run]:
    return runs_from_table(path, read_table(path, data), mapping)


def runs_from_table(path: Path, table: Table, mapping: Mapping[str, str]) -> list[Run]:
    runs = runs_from_rows(path, table.names, table.rows, mapping)
    for run in runs:
        run.notes += table.notes
    return runs


def header_of(head: str) -> list[str]:
    """The column names in the first line of a file."""
    names = [name.strip() for name in _cells(head.lstrip("\r\n").split("\n", 1)[0])]
    # Saved data frames carry their row numbers in a first column without a name.
    return ["(index)", *names[1:]] if len(names) > 1 and not names[0] else names


def read_table(path: Path, data: bytes) -> Table:
    """The whole CSV. A column name that comes twice counts where it comes first."""
    text = text_of(path, data)
    names = header_of(text)
    places = {name: names.index(name) for name in names}
    table = Table(names=list(places), rows=[])
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        table.notes.append(f"columns named twice, the first was read: {', '.join(doubled)}")
    for line, cells in _lines(path, text):
        if len(cells) < len(names):
            if line != text.count("\n") + 1:
                raise LogError(path, line, f"{len(cells)} cells, the header has {len(names)}")
            table.notes.append(f"line {line} is cut off and was left out")
        elif any(cell.strip() for cell in cells[len(names) :]):
            raise LogError(path, line, f"{len(cells)} cells, the header has {len(names)}")
        else:
            filled = {n: cells[i].strip() for n, i in places.items() if cells[i].strip()}
            table.rows.append(Row(line, filled))
    return table


def _lines(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """Line number and cells of each line below the header that is not blank."""
    first = text.lstrip("\r\n").split("\n", 1)[0]
    # Lists in cells outgrow the module's limit, which is set for all of its users.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(first))
        lines = [(reader.line_num, cells) for cells in reader if any(cells)]
    except csv.Error as error:
        raise LogError(path, reader.line_num, f"not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)
    return lines[1:]


def _cells(line: str) -> list[str]:
    return next(csv.reader([line], delimiter=_delimiter(line)), [])


def _delimiter(header: str) -> str:
    return max(_DELIMITERS, key=header.count)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
