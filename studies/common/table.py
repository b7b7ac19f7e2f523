"""A table as a value; `studies.common.renderers` give it a form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from typing import Any

import pandas as pd

from rmetric.evaluation import Estimate

#: A text, a count, a number (nan: undefined), a number with its interval, or nothing to say.
Cell = str | int | float | Estimate | None

UNDEFINED = "–"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A heading; digits after the point, except of counts; wide: sentences, wrapped."""

    label: str
    digits: int = 2
    wide: bool = False

    @classmethod
    def of(cls, head: str) -> Column:
        """From a label; ``:N`` behind it sets the digits, ``:wide`` wraps.

        >>> Column.of("Lead (steps):0").digits, Column.of("Paper: F1").label
        (0, 'Paper: F1')
        """
        label, _, form = head.rpartition(":")
        if label and (form == "wide" or form.isdecimal()):
            wide = form == "wide"
            return cls(label=label, digits=2 if wide else int(form), wide=wide)
        return cls(label=head)


@dataclass(frozen=True)
class Table:
    """Rows under columns, with what the reader must know.

    Attributes:
        name: of its files.
        heads: as `Column.of` reads them; in one text with bars between, or several such texts.
        notes: in sentences, printed below.
        number: as people refer to it; 0 for one that has none.
        grouped: rows of equal first cell belong together; a rule parts the groups.
    """

    name: str
    title: str
    heads: str | Sequence[str]
    rows: Sequence[tuple[Cell, ...]]
    notes: Sequence[str] = ()
    number: int = 0
    grouped: bool = False

    @classmethod
    def of(
        cls, name: str, title: str, rows: pd.DataFrame | Iterable[dict[str, Any]], **about: Any
    ) -> Table:
        """From a frame whose columns are named by the heads, or from its rows."""
        frame = pd.DataFrame(rows, dtype=object)
        cells = list(frame.itertuples(index=False, name=None))
        return cls(name, title, list(frame), cells, **about)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        heads = self.heads if isinstance(self.heads, str) else " | ".join(self.heads)
        return tuple(map(Column.of, heads.split(" | ")))

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
        """True where a column holds text rather than numbers."""
        return any(isinstance(row[index], str) for row in self.rows)

    def starts_group(self, index: int) -> bool:
        return self.grouped and (index == 0 or self.rows[index][0] != self.rows[index - 1][0])


def numbered(tables: Iterable[Table], first: int = 1) -> list[Table]:
    """The tables with their places as numbers."""
    return [replace(table, number=number) for number, table in enumerate(tables, start=first)]


def percent(share: Estimate) -> Estimate:
    """A share and its interval in percent."""
    return Estimate(*(100 * bound for bound in share))


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
