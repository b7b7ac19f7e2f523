"""A table as a value; `rmetric.reporting.renderers` give it a form."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan

from rmetric.evaluation import Estimate

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

    def is_text(self, index: int) -> bool:
        """Whether a column holds words rather than numbers."""
        return any(isinstance(row[index], str) for row in self.rows)

    def starts_group(self, index: int) -> bool:
        return self.grouped and (index == 0 or self.rows[index][0] != self.rows[index - 1][0])


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
