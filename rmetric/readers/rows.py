"""One line of somebody's log as named cells, and what a cell holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError
from rmetric._util.strict_json import plain_non_finite

_NOT_LOGGED = {"", "none", "null", "-", "n/a"}
_FLAGS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
#: Behind a number, as Flux writes it: ``0.52 (tracked)``.
_REMARK = re.compile(r"\s\([a-z]+\)$")
_VAGUE_NAME = re.compile(
    r"(trainer_state|metrics|measurements|history|log|train|loss|(checkpoint|trial|version|run)[-_]?\d+)"
    r"(__.*)?"
)


class UnknownFormat(LogError):
    """The file is not a training log in a known format."""


class BadRow(ValueError):
    """A line that a reader cannot pass over; `LogError` is made of it where the file is known."""

    def __init__(self, line: int | None, problem: str) -> None:
        self.line, self.problem = line, problem
        super().__init__(problem)


@dataclass(slots=True)
class Row:
    """One line of a table or one entry of a history.

    Attributes:
        line: its number in the file; None where entries have no lines.
        cells: column -> cell, as the file holds it; absent where not logged.
    """

    line: int | None
    cells: Mapping[str, Any]


def number(cell: Any) -> float | None:
    """Number in a cell; None if not logged, nan if the cell holds nan.

    >>> number("1e3"), number("NaN"), number("-inf"), number("0.5 (tracked)"), number("")
    (1000.0, nan, -inf, 0.5, None)
    """
    if is_blank(cell):
        return None
    if isinstance(cell, str):
        try:
            return float(plain_non_finite(cell))
        except ValueError:
            return float(plain_non_finite(_REMARK.sub("", cell)))
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        raise ValueError
    return float(cell)


def is_blank(cell: Any) -> bool:
    """True for a cell that is there and holds nothing, as None, ``""``, ``"null"`` or ``"-"``."""
    return cell is None or (isinstance(cell, str) and cell.strip().lower() in _NOT_LOGGED)


def flag(cell: Any) -> bool | None:
    """Truth value of a cell; None if not logged. A count above 0 is true.

    >>> flag("True"), flag(0), flag("2"), flag("nan")
    (True, False, True, None)
    """
    if isinstance(cell, bool):
        return cell
    if isinstance(cell, str):
        cell = _FLAGS.get(cell.strip().lower(), cell)
    value = number(cell)
    return None if value is None or value != value else value != 0


def run_name(path: Path) -> str:
    """A name for the run in `path`, with its folder's where the file's is a general one.

    The names of TensorBoard's event files are: the folder is the run.
    """
    if "tfevents" in path.name and path.resolve().parent.name:
        return run_name(path.resolve().parent)
    name = re.sub(
        r"(?i)(\.(jsonl?|ndjson|csv|tsv|txt|log|gz|bz2|xz|zst|wandb|db|sqlite))+$", "", path.name
    )
    for parent in list(path.resolve().parents)[:3]:
        if not _VAGUE_NAME.fullmatch(name) or not parent.name:
            break
        name = f"{parent.name}__{name}"
    return name
