"""From rows of named cells, whatever file they came from, to runs of records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from rmetric.logs import LogError
from rmetric.records import Record, Run
from rmetric.replay.columns import TARGETS, Columns, choose_columns, listed
from rmetric.strict_json import shown

_NOT_LOGGED = {"", "none", "null", "-", "n/a"}
_VAGUE_NAME = re.compile(
    r"(trainer_state|metrics|measurements|history|log|train|loss|(checkpoint|trial|version|run)[-_]?\d+)"
    r"(__.*)?"
)
_MEASURED = [f.name for f in fields(Record) if f.name != "step"]


class UnknownFormat(LogError):
    """A file that is no log which replay can read."""


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
    """What a cell holds; None for not logged, nan where it says so.

    >>> number("1e3"), number("NaN"), number("-inf"), number("")
    (1000.0, nan, -inf, None)
    """
    if isinstance(cell, str):
        if cell.strip().lower() in _NOT_LOGGED:
            return None
        return float(cell)
    if cell is None:
        return None
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        raise ValueError
    return float(cell)


def runs_from_rows(
    path: Path, names: Sequence[str], rows: Iterable[Row], mapping: Mapping[str, str]
) -> list[Run]:
    """The runs in `rows`, split by the column that names the run and where steps restart.

    Raises UnknownFormat where no column is a loss, LogError for a cell that
    cannot be read.
    """
    try:
        columns = choose_columns(names, mapping)
    except ValueError as error:
        raise LogError(path, None, str(error)) from None
    if not columns.has_loss:
        raise UnknownFormat(
            path,
            None,
            f"no column is known to be a loss; {listed(names)}; --map loss=COLUMN says which",
        )
    runs = []
    for name, own_rows in _by_run(rows, columns.by_target.get("run")).items():
        notes = list(columns.notes)
        records = list(_merged(_records(path, own_rows, columns, notes)))
        id = f"{run_name(path)}__{name}" if name else run_name(path)
        runs += _split_at_restarts(Run(id=id, records=records, notes=notes, source=path))
    runs = [run for run in runs if run.records]
    if not runs:
        raise LogError(path, None, "no row holds a measurement")
    return runs


def run_name(path: Path) -> str:
    """A name for the run in `path`, with its folder's where the file's says nothing."""
    name = re.sub(r"(\.(jsonl?|ndjson|csv|tsv|txt|log|gz))+$", "", path.name, flags=re.IGNORECASE)
    for parent in list(path.resolve().parents)[:3]:
        if not _VAGUE_NAME.fullmatch(name) or not parent.name:
            break
        name = f"{parent.name}__{name}"
    return name


def _by_run(rows: Iterable[Row], column: str | None) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        cell = row.cells.get(column) if column else None
        groups.setdefault("" if cell is None else str(cell), []).append(row)
    return groups


def _records(
    path: Path, rows: Sequence[Row], columns: Columns, notes: list[str]
) -> Iterator[Record]:
    """A record for each row that measured something."""
    measured = [(t, c) for t, c in columns.by_target.items() if t not in ("step", "run")]
    step_columns = [columns.by_target[t] for t in ("step",) if t in columns.by_target]
    step_columns += columns.other_steps
    if not step_columns:
        notes.append("no column is known to be the step: rows are counted from 0")
    step, empty, unplaced = 0, 0, 0
    for position, row in enumerate(rows):
        found = position if not step_columns else _step(path, row, step_columns)
        values: dict[str, Any] = {}
        for target, column in measured:
            value = _value(path, row, column)
            if value is not None:
                values[TARGETS[target].field or ""] = value
        if not values.keys() - {"time", "learning_rate"}:
            empty += found is not None
            continue
        unplaced += found is None
        step = step if found is None else found
        yield Record(step=step, **values)
    if empty:
        notes.append(
            f"{empty} of {len(rows)} rows hold a step and no loss or norm and were left out: "
            "a log that writes nan as a blank looks like this too"
        )
    if unplaced:
        notes.append(f"{unplaced} rows without a step were given that of the row before")


def _value(path: Path, row: Row, column: str) -> float | None:
    cell = row.cells.get(column)
    try:
        return number(cell)
    except (ValueError, OverflowError):
        raise LogError(
            path,
            row.line,
            f"{column!r} is {shown(cell)}: a number, nan, inf or a blank is accepted",
        ) from None


def _step(path: Path, row: Row, columns: Sequence[str]) -> int | None:
    for column in columns:
        value = _value(path, row, column)
        if value is None:
            continue
        if not (isfinite(value) and value == int(value) and abs(value) < 2**63):
            found = shown(row.cells[column])
            raise LogError(
                path, row.line, f"{column!r} is {found}: a whole step below 2^63 is accepted"
            )
        return int(value)
    return None


def _merged(records: Iterable[Record]) -> Iterator[Record]:
    """Neighbours of one step that measured different things, as one record."""
    last: Record | None = None
    for record in records:
        if last is not None and record.step == last.step and not _clash(last, record):
            for name in _MEASURED:
                if getattr(record, name) is not None:
                    setattr(last, name, getattr(record, name))
            continue
        if last is not None:
            yield last
        last = record
    if last is not None:
        yield last


def _clash(first: Record, second: Record) -> bool:
    # Both rows know the time and the learning rate; that is no reason to keep them apart.
    return any(
        getattr(first, name) is not None and getattr(second, name) is not None
        for name in _MEASURED
        if name not in ("time", "learning_rate")
    )


def _split_at_restarts(run: Run) -> list[Run]:
    """One run for each time that the steps start again; a resumed run stays one."""
    steps = [record.step for record in run.records]
    early = next((step for step in steps if step > steps[0]), -1)
    starts, resumed, repeated = [0], 0, 0
    for index, (before, step) in enumerate(pairwise(steps), start=1):
        if step < before and step <= early:
            starts.append(index)
        else:
            resumed += step < before
            repeated += step == before
    if resumed:
        run.notes.append(f"the step falls back {resumed} times: taken as one run that was resumed")
    if repeated:
        run.notes.append(f"{repeated} records have the step of the record before them")
    if len(starts) == 1:
        return [run]
    parts = [run.records[a:b] for a, b in pairwise([*starts, None])]
    notes = [*run.notes, f"the steps start again: the file holds {len(parts)} runs, one a part"]
    return [
        Run(id=f"{run.id}__part{n}", records=part, notes=notes[:], source=run.source)
        for n, part in enumerate(parts, start=1)
    ]
