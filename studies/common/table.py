"""A table as a value; `studies.common.renderers` give it a form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from rmetric.evaluation import Estimate

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: A text, a count, a number (nan: undefined), a number with its interval, or nothing to say.
Cell = str | int | float | Estimate | None

UNDEFINED = "–"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A heading, and how its cells are shown.

    Attributes:
        label: with the unit.
        digits: after the point, of numbers that are not counts.
        wide: holds sentences, which are wrapped.
    """

    label: str
    digits: int = 2
    wide: bool = False


def columns(*heads: str) -> tuple[Column, ...]:
    """Columns by their labels, single or with bars between; ``:N`` sets digits, ``:wide`` wraps.

    >>> [(column.label, column.digits) for column in columns("Fault | Lead (steps):0 | F1")]
    [('Fault', 2), ('Lead (steps)', 0), ('F1', 2)]
    """
    found = []
    for head in " | ".join(heads).split(" | "):
        label, _, form = head.rpartition(":")
        if form == "wide":
            found.append(Column(label=label, wide=True))
        elif label and form.isdecimal():
            found.append(Column(label=label, digits=int(form)))
        else:
            found.append(Column(label=head))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns, with what the reader must know.

    Attributes:
        name: of its files.
        number: as people refer to it; 0 for one that has none.
        title: one line, without the number.
        columns, rows: every row as long as `columns`.
        notes: in sentences, printed below.
        grouped: rows of equal first cell belong together; a rule parts the groups.
    """

    name: str
    number: int
    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]]
    notes: list[str] = field(default_factory=list)
    grouped: bool = False

    @property
    def heading(self) -> str:
        return f"Table {self.number}. {self.title}" if self.number else self.title

    def shown(self) -> list[list[str]]:
        """The cells as people read them."""
        return [
            [show(cell, column.digits) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def to_frame(self) -> DataFrame:
        """The table as a pandas DataFrame, for notebooks and for pandas' own writers.

        A column of intervals becomes three: the point under the label, then `LABEL low` and
        `LABEL high`. Counts are Int64, other numbers float64 (undefined and blank are both
        missing), and columns that hold any text are object.

        >>> rows = [("a", Estimate(0.5, 0.4, 0.6)), ("b", None)]
        >>> columns = (Column(label="Row"), Column(label="F1"))
        >>> Table(name="t", number=1, title="", columns=columns, rows=rows).to_frame()
          Row   F1  F1 low  F1 high
        0   a  0.5     0.4      0.6
        1   b  NaN     NaN      NaN
        """
        import pandas as pd

        return pd.concat([_series(*column) for column in self.flat()], axis="columns")

    def flat(self) -> list[tuple[str, list[Cell]]]:
        """Label and cells of each column; a column of intervals becomes three."""
        out: list[tuple[str, list[Cell]]] = []
        for index, column in enumerate(self.columns):
            cells = [row[index] for row in self.rows]
            if not any(isinstance(cell, Estimate) for cell in cells):
                out.append((column.label, cells))
                continue
            parts = [cell if isinstance(cell, Estimate) else (cell, None, None) for cell in cells]
            for place, suffix in enumerate(("", " low", " high")):
                out.append((f"{column.label}{suffix}", [part[place] for part in parts]))
        return out

    def is_text(self, index: int) -> bool:
        """True where a column holds text rather than numbers."""
        return any(isinstance(row[index], str) for row in self.rows)

    def starts_group(self, index: int) -> bool:
        return self.grouped and (index == 0 or self.rows[index][0] != self.rows[index - 1][0])


def _series(label: str, cells: Sequence[Cell]) -> Series:
    """Cells as a pandas Series of the narrowest of Int64, float64 and object that holds them."""
    import pandas as pd

    known = [cell for cell in cells if cell is not None]
    if known and all(isinstance(cell, Integral) for cell in known):
        kind = "Int64"
    elif known and all(isinstance(cell, Real) for cell in known):
        kind = "float64"
    else:
        kind = "object"
    values: list[Any] = list(cells)
    series: Series = pd.Series(values, name=label, dtype=kind)
    return series


def show(cell: Cell, digits: int = 2) -> str:
    """A cell as people read it: nan is an en dash, nothing to say is blank."""
    if cell is None:
        return ""
    if isinstance(cell, Estimate):
        if isnan(cell.point):
            return UNDEFINED
        return f"{show(cell.point, digits)} [{show(cell.low, digits)}, {show(cell.high, digits)}]"
    if isinstance(cell, float):
        # Adding 0 turns a rounded -0.0 into 0.0.
        return UNDEFINED if isnan(cell) else f"{round(cell, digits) + 0.0:.{digits}f}"
    return str(cell)
