"""Rows of one dataclass as CSV, for scores that a change must show job by job."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

from rmetric.logs import write_atomically

Row = TypeVar("Row")
#: Type of a field, as annotated -> its cell, and the field of a cell. None is an empty cell.
_CELLS: dict[str, tuple[Any, Any]] = {
    "str": (str, str),
    "int": (str, int),
    "float": (repr, float),
    "bool": (lambda value: "yes" if value else "no", {"yes": True, "no": False}.__getitem__),
    "tuple[str, ...]": (" or ".join, lambda cell: tuple(filter(None, cell.split(" or ")))),
}


def write_rows(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    known = fields(kind)  # type: ignore[arg-type]
    writer.writerow([col.name for col in known])
    for row in rows:
        values = [(col, getattr(row, col.name)) for col in known]
        writer.writerow(["" if value is None else _of(col)[0](value) for col, value in values])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [out.getvalue().encode()])


def read_dicts(path: Path) -> list[dict[str, str]]:
    """The rows of any file, by its heads."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file; none where there is no file.

    Raises ValueError: a row is not as `write_rows` leaves it.
    """
    if not path.exists():
        return []
    out = []
    for number, cells in enumerate(read_dicts(path), start=2):
        try:
            known = fields(kind)  # type: ignore[arg-type]
            out.append(kind(**{col.name: _value(col, cells[col.name]) for col in known}))
        except (KeyError, TypeError, ValueError) as error:
            what = f"no row of {kind.__name__}: {error}"
            raise ValueError(f"{path}, line {number}: {what}") from None
    return out


def _of(field: Field[Any]) -> tuple[Any, Any]:
    return _CELLS[str(field.type).removesuffix(" | None")]


def _value(field: Field[Any], cell: str) -> Any:
    return None if not cell and "None" in str(field.type) else _of(field)[1](cell)
