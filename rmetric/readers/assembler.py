"""From rows of named cells, whatever file they came from, to the records of runs.

Neighbouring rows of one step may measure different things, which makes them one record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError
from rmetric._util.strict_json import shown
from rmetric.readers.columns import MEMORY, POLICY, SPEED, WITH_UNIT, Columns, columns_among
from rmetric.readers.names import TARGETS, unit
from rmetric.readers.rows import BadRow, Row, flag, is_blank, number, run_name
from rmetric.records import MissingLosses, Record, Run

#: What is known without anything having been measured.
_CIRCUMSTANCES = {
    "time", "learning_rate", "loss_scale", "memory", "step_seconds", "data_wait_seconds",
    "throughput",
}  # fmt: skip
_SPEEDS = {"step_seconds", "throughput"}
#: Group of quantities, a field of `Record` -> their names.
_GROUPS = {
    "policy": POLICY,
    "memory": tuple(str(TARGETS[name].field) for name in MEMORY),
    "throughput": ("tokens", "samples"),
}

#: A step as ``10/873``.
_OF_TOTAL = re.compile(r"(\d{1,18})\s*/\s*\d{1,18}")

#: Records of one run, some at a time, with its id.
Complete = tuple[str, list[Record]]
Batches = Iterator[Complete]


class ClosingBlanks(MissingLosses):
    """Counts the rows at a log's end whose loss is blank and was due.

    A log that has rows without a loss by design is given twice as many as it had in a row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.with_loss: Mapping[str, Any] = {}  # cells of a row with a loss
        self._blank = self._since = 0

    def update(self, *, logged: bool, blank_at: int | None = None) -> None:
        """Take a row; `blank_at` is its step if it has no loss and should have one."""
        super().update(logged=logged)
        if logged:
            self._blank = 0
        elif blank_at is not None:
            self._since = self._since if self._blank else blank_at
            self._blank += 1

    @property
    def words(self) -> str:
        """Losses that are blank at the end of the log, in words; empty without any."""
        if self._blank < 2:
            return f"the last loss is blank, at step {self._since:,}" if self._blank else ""
        return f"the last {self._blank:,} losses are blank, from step {self._since:,} on"


class RunState:
    """State of one run while its rows come in.

    Args:
        runs: takes up each part with the first of its records.

    Attributes:
        run: of the part that the file is in; its id is the stream's.
        pending: the record that the next row may still add to; `before` is the one before it.
        first, last: steps of records.
        early: the first step above the first: steps that fall to it start again.
        losses: which rows have one.
        held: rows since the last record that hold a step and no measurement. They become records
            where the losses stay away: the log goes on without. `blank` of them lack a loss alone.
    """

    def __init__(self, base: str, path: Path, runs: dict[str, Run]) -> None:
        self.base, self.runs = base, runs
        self.run = Run(id=base, records=[], source=path)
        self.parts = [self.run]
        self.pending: Record | None = None
        self.before: Record | None = None
        self.first: int | None = None
        self.last: int | None = None
        self.early: int | None = None
        self.losses = ClosingBlanks()
        self.held: list[Record] = []
        self.rows = self.empty = self.unplaced = self.resumed = self.repeated = 0
        self.blank = self.redrawn = 0

    def measured(self, step: int | None, values: dict[str, Any], blank: bool) -> Complete | None:
        """Take what the next row holds; return the records now complete, with their run's id.

        `blank`: the row holds no measurement, and no column says why.
        """
        self.rows += 1
        held = [] if values.keys() - _CIRCUMSTANCES else self._bare(step, values, blank)
        if held is None:
            return None
        self.leave_out_held()
        if step is None:
            self.unplaced += 1
            step = self.last or 0
        before, last = self.pending, self.last
        # Time and learning rate may be in both rows; they do not keep the rows apart.
        own = values.keys() - _CIRCUMSTANCES
        is_same_step = before is not None and step == before.step
        if is_same_step and all(getattr(before, name) is None for name in own):
            for name, value in values.items():
                setattr(before, name, value)
            return None
        complete, of_run = [*([] if before is None else [before]), *held], self.run.id
        if self._is_redrawn(step, values):
            complete, before = complete[1:], self.before
            self.redrawn += 1
        self.before, self.pending, self.last = before, Record(step, **values), step
        if last is None:
            self.first = step
        elif step < last and self.early is not None and step <= self.early:
            id = f"{self.base}__part{len(self.parts) + 1}"
            self.run = Run(id=id, records=[], source=self.run.source)
            self.parts.append(self.run)
        else:
            self.resumed += step < last
            self.repeated += step == last
        if self.early is None and self.first is not None and step > self.first:
            self.early = step
        self.runs.setdefault(self.run.id, self.run)
        return (of_run, complete) if complete else None

    def _is_redrawn(self, step: int, values: dict[str, Any]) -> bool:
        """True if `pending` repeats `before`: a progress bar drawn again before its next loss."""
        before, now = self.before, self.pending
        if before is None or now is None or not before.step < now.step == step:
            return False
        newer = values.get("training_loss", now.training_loss) != now.training_loss
        return newer and replace(before, step=step) == now

    def _bare(self, step: int | None, values: dict[str, Any], blank: bool) -> list[Record] | None:
        """Take a row without a measurement; if it is a record, so are those that are returned."""
        if self.pending is not None and step == self.pending.step and values.keys() & _SPEEDS:
            for name in values.keys() & _SPEEDS:  # of the whole training, at its end
                setattr(self.pending, name, getattr(self.pending, name) or values[name])
            return None
        if step is None or self.last is None or step <= self.last or not self.losses.known:
            self.empty += blank and step is not None
            return None
        if not self.losses.stay_away:
            self.held.append(Record(step, **values))
            self.blank += blank
            return None
        held, self.held, self.blank = self.held, [], 0
        return held

    def leave_out_held(self) -> None:
        self.empty += self.blank
        self.held, self.blank = [], 0

    def release(self) -> list[tuple[str, Record]]:
        """The record that is held back; a row of its step that comes later is another."""
        record, self.pending = self.pending, None
        return [] if record is None else [(self.run.id, record)]


class Assembler:
    """Rows in, records out, read as `columns` say; `path` is for messages and names.

    Attributes:
        runs: id in the stream -> run, without its records. At the end of the
            file the notes are whole, and a run that turned out to be the first
            part of several has its final id.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self.path, self.columns = path, columns
        self.runs: dict[str, Run] = {}
        self._states: dict[str, RunState] = {}
        self._no_numbers: set[str] = set()

    def _look_at_columns(self) -> None:
        chosen = self.columns.by_target
        self._run_column = chosen.get("run")
        self._step_columns = [*filter(None, [chosen.get("step")]), *self.columns.other_steps]
        self._measured = [
            (str(TARGETS[t].field), c, _reader(t, c))
            for t, c in chosen.items()
            if t not in ("step", "run", *self._no_numbers)
        ]
        parts = self.columns.parts
        self._measured += [(part, column, number) for column, part in parts.items()]
        self._groups = _GROUPS | {"loss_parts": tuple(dict.fromkeys(parts.values()))}
        loss = "loss" if "loss" in chosen else "eval_loss"
        self._loss_column, self._loss_field = chosen.get(loss), str(TARGETS[loss].field)
        self._always = {chosen[t] for t in ("step", *_CIRCUMSTANCES) if t in chosen}
        self.columns.changed = False

    def take(self, row: Row) -> Complete | None:
        """Take the next row; return the records that are now complete, if there are any."""
        if self.columns.changed:
            self._look_at_columns()
        cells = row.cells
        name = cells.get(self._run_column) if self._run_column else None
        state = self._state("" if name is None else str(name))
        found = self._step(row, state)
        values: dict[str, Any] = {}
        for field, column, read in self._measured:
            cell = cells.get(column)
            if cell is None:
                continue
            try:
                value = read(cell)
            except (ValueError, OverflowError):
                self._give_up(row, column)
                continue
            if value is not None:
                values[field] = value
        if self._loss_field in values:
            state.losses.update(logged=True)
            state.losses.with_loss = cells
        else:
            goes_on = found is not None and (state.last is None or found > state.last)
            is_too_many = state.losses.missing >= 2 * state.losses.longest
            due = goes_on and is_too_many and self._lacks_loss(cells, state.losses)
            state.losses.update(logged=False, blank_at=found if due else None)
        for group, names in self._groups.items():
            if grouped := {name: values.pop(name) for name in names if name in values}:
                values[group] = grouped
        blank = not (values.keys() - _CIRCUMSTANCES or self._holds_more(cells, state.losses))
        return state.measured(found, values, blank)

    def _holds_more(self, cells: Mapping[str, Any], losses: ClosingBlanks) -> bool:
        """True for a row with a cell that those with a loss lack; before these, with any more."""
        usual = losses.with_loss if losses.known else dict.fromkeys(self._always, True)
        return any(is_blank(usual.get(name)) for name, cell in cells.items() if not is_blank(cell))

    def _lacks_loss(self, cells: Mapping[str, Any], losses: ClosingBlanks) -> bool:
        """True for a row like one with a loss; an evaluation has a cell that those lack."""
        return (
            not self._holds_more(cells, losses)
            and _logged(losses.with_loss) & self._always <= _logged(cells)
            and (self._loss_column in cells or self.columns.of_header)
        )

    def _number(self, row: Row, column: str) -> float | None:
        try:
            return number(row.cells.get(column))
        except (ValueError, OverflowError):
            raise self._bad_cell(row, column) from None

    def _state(self, name: str) -> RunState:
        """State of the run that the file calls `name`."""
        if (state := self._states.get(name)) is None:
            base = run_name(self.path)
            base = f"{base}__{name}" if name else base
            state = self._states[name] = RunState(base, self.path, self.runs)
        return state

    def held(self) -> list[tuple[str, Record]]:
        """The records held back so far: for a file that may not grow for a while."""
        return [released for state in self._states.values() for released in state.release()]

    def finish(self) -> list[Complete]:
        """The last records; the runs' notes are whole from here on."""
        last = [(id, [record]) for id, record in self.held()]
        if not self.runs:
            raise LogError(self.path, None, "no row holds a measurement")
        for state in self._states.values():
            state.leave_out_held()
            notes = self._notes_on(state)
            if len(state.parts) > 1:
                state.parts[0].id = f"{state.base}__part1"
            for part in state.parts:
                part.notes += notes
            state.run.unread = state.losses.words
        return last

    def all_runs(self) -> list[Run]:
        """Every part of every run."""
        return [part for state in self._states.values() for part in state.parts]

    def _notes_on(self, of: RunState) -> list[str]:
        repeated = of.repeated - of.redrawn
        notes = {
            "no column is known to be the step: rows are counted from 0": not self._step_columns,
            f"{of.empty} of {of.rows} rows hold a step and no loss or norm and were left "
            "out: a log that writes nan as a blank looks like this too": of.empty,
            f"{of.unplaced} rows without a step took the previous row's step": of.unplaced,
            f"the step falls back {of.resumed} times: taken as one run that was resumed": (
                of.resumed
            ),
            f"{repeated} records have the step of the record before them": repeated,
            f"{of.redrawn} records were left out that repeat the one before them at the step "
            "of the next, as a progress bar that is drawn again": of.redrawn,
            f"the steps start again: the file holds {len(of.parts)} runs, one a part": (
                len(of.parts) > 1
            ),
        }
        return [*self.columns.notes, *(note for note, holds in notes.items() if holds)]

    def _step(self, row: Row, state: RunState) -> int | None:
        if not self._step_columns:
            return state.rows
        for column in self._step_columns:
            cell = row.cells.get(column)
            if isinstance(cell, str) and (of_total := _OF_TOTAL.fullmatch(cell.strip())):
                cell = int(of_total[1])
            if type(cell) is int and -(2**63) < cell < 2**63:
                return cell
            if (value := self._number(row, column)) is None:
                continue
            if not (isfinite(value) and value == int(value) and abs(value) < 2**63):
                chosen = self.columns.by_target.get("step")
                if column == chosen and "step" in self.columns.by_meaning:
                    self._count_otherwise(row, column)
                    return self._step(row, state)
                problem = f"{column!r} is {shown(cell)}: a whole step below 2^63 is accepted"
                raise BadRow(row.line, problem)
            return int(value)
        return None

    def _count_otherwise(self, row: Row, column: str) -> None:
        """Read another counter from now on, or count the rows: this one has fractions."""
        columns = self.columns
        columns.notes.append(f"{column!r} is not read as step: it is {shown(row.cells[column])}")
        others = tuple(name for name in row.cells if name != column)
        del columns.by_target["step"]
        columns.by_target |= columns_among(others, ("step",))
        self._look_at_columns()

    def _give_up(self, row: Row, column: str) -> None:
        """Stop reading a column whose name was guessed; raise BadRow for a known name."""
        columns = self.columns
        target = next((t for t, c in columns.by_target.items() if c == column), "loss")
        is_needed = target not in columns.by_meaning or target in ("loss", "eval_loss")
        if is_needed and target not in SPEED:
            raise self._bad_cell(row, column) from None
        self._no_numbers.add(target)
        columns.notes.append(
            f"{column!r} is not read as {target}: line {row.line} has {shown(row.cells[column])}"
        )
        columns.changed = True

    def _bad_cell(self, row: Row, column: str) -> BadRow:
        cell = shown(row.cells.get(column))
        return BadRow(row.line, f"{column!r} is {cell}: a number, nan, inf or a blank is accepted")


def _logged(cells: Mapping[str, Any]) -> set[str]:
    return {name for name, cell in cells.items() if not is_blank(cell)}


def _reader(target: str, column: str) -> Callable[[Any], Any]:
    if target == "skipped":
        return flag
    if target == "steps_per_second":
        return lambda cell: 1 / value if (value := number(cell)) else None
    if target not in WITH_UNIT or (factor := unit(column)) == 1:
        return number
    return lambda cell: None if (value := number(cell)) is None else factor * value
