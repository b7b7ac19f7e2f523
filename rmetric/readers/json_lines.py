"""Reader of any log with one JSON object a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rmetric._util.errors import LogError
from rmetric._util.strict_json import shown
from rmetric.logs import parse_line
from rmetric.readers.assembler import Assembler, Batches, Complete
from rmetric.readers.columns import (
    add_columns,
    check_mapping,
    choose_columns,
    plain_name,
    unused_notes,
)
from rmetric.readers.rows import BadRow, Row
from rmetric.readers.source import Source
from rmetric.readers.stream import (
    RUN,
    Reader,
    Stream,
    check_has_loss,
    long_form,
    one_value,
)

_LOOKED_AT = 5
#: Different names of values in one log.
MOST_NAMES = 100_000
_OF_ONE_STEP = {"step", "global_step", "iteration", "loss", "train_loss"}


def matches(head: str) -> bool:
    lines = [line for line in head.split("\n", _LOOKED_AT) if line.strip()]
    first, *more = [object_on(line.encode()) for line in lines[:_LOOKED_AT]] or [None]
    if first is None:  # a wrong line may be the first too
        return len(more) > 1 and all(more) and lines[0].lstrip().startswith("{")
    # A program that prints its settings as JSON, and then text, writes no JSONL.
    if len(more) > 1 and not any(more):
        return False
    return bool(more) or not _is_document(first)


def object_on(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None for another line."""
    try:
        entry = parse_line(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _is_document(entry: Mapping[str, Any]) -> bool:
    """True if the only line of a file holds whole curves and not one step."""
    scalars = {plain_name(n) for n, v in entry.items() if not isinstance(v, (list, dict))}
    return len(scalars) < len(entry) and not scalars & _OF_ONE_STEP


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    reading = _Reading(source, mapping)
    return Stream(
        batches=reading.batches(),
        runs=reading.assembler.runs,
        held=reading.assembler.held,
        guessed=lambda: [*reading.columns.notes, *unused_notes(reading.columns, reading.names)],
    )


class _Reading:
    def __init__(self, source: Source, mapping: Mapping[str, str]) -> None:
        self.source, self.mapping = source, mapping
        # Wrong lines in the beginning are reported when they are read.
        first = map(object_on, source.head.splitlines())
        plain = [entry for entry in first if entry is not None and _is_plain(entry)]
        self.names = dict.fromkeys(name for entry in plain for name in flat(entry))
        self.columns = choose_columns(list(self.names), mapping, more_may_come=True)
        self.assembler = Assembler(source.path, self.columns)
        self.cut_off: list[str] = []
        self._long: dict[str, str] | None = None
        self._expect_long_form()

    def _expect_long_form(self) -> None:
        """Read a log that grows in long form where its names say so; `trackers` reads a whole one.

        There the values of a step follow each other, and each one's name is a column.
        """
        if self.source.foreign_lines.forgiving and not self.columns.has_loss:
            self._long = long_form(self.names)
        if self._long is not None:
            self.names = dict.fromkeys(("step", RUN))
            self.columns = choose_columns(["step"], self.mapping, more_may_come=True)
            self.columns.by_target["run"] = RUN
            self.assembler.use(self.columns)

    def batches(self) -> Batches:
        for number, chunk in self.source.chunks():
            lines = chunk.split(b"\n")
            for at, line in enumerate(lines, start=number):
                last = at == number + len(lines) - 1
                entry = self._entry(at, line, last=last) if line.strip() else None
                if entry is None:
                    continue
                try:
                    complete = self._take(at, flat(entry))
                except (BadRow, RecursionError) as error:
                    if not self.source.foreign_lines.forgiving:
                        raise
                    self._leave_out(at, getattr(error, "problem", "nested too deeply"))
                    continue
                if complete is not None:
                    yield complete
        yield from self._finish()

    def _entry(self, number: int, line: bytes, *, last: bool) -> dict[str, Any] | None:
        """The object on line `number`; None if it is cut off or no object."""
        problem = "not JSON"
        try:
            entry = parse_line(line)
        except ValueError:
            if self.source.cut and last:
                self.cut_off = [f"line {number} is cut off and was left out"]
                return None
            try:
                entry = parse_line(self.source.decoded(number, line).encode())
            except ValueError as error:
                entry, problem = None, str(error)
        if isinstance(entry, dict):
            return entry
        of_record = line.lstrip().startswith(b"{")
        if problem.startswith("not JSON"):
            problem = f"no JSON object: {shown(line)}"
        self._leave_out(number, problem, of_record=of_record)
        return None

    def _take(self, number: int, cells: dict[str, Any]) -> Complete | None:
        if self._long is not None:
            if (logged := one_value(cells, self._long)) is None:
                return None
            name, value, own = logged
            cells = own | {name: value}
        if not cells.keys() <= self.names.keys():
            new = [name for name in cells if name not in self.names]
            if len(self.names) + len(new) > MOST_NAMES:
                problem = f"{len(new):,} names that no line before has; the log may have"
                raise BadRow(number, f"{problem} {MOST_NAMES:,} names")
            self.names |= dict.fromkeys(new)
            add_columns(self.columns, new)
            self.assembler.use(self.columns)
            if self._long is None:
                self._expect_long_form()
                if self._long is not None:
                    return self._take(number, cells)
        return self.assembler.take(Row(number, cells))

    def _leave_out(self, number: int, problem: str, *, of_record: bool = True) -> None:
        self.source.foreign_lines.good = self.assembler.num_rows
        self.source.foreign_lines.add(number, problem, of_record=of_record)

    def _finish(self) -> list[Complete]:
        try:
            check_mapping(self.names, self.mapping)
        except ValueError as error:
            raise LogError(self.source.path, None, str(error)) from None
        check_has_loss(self.source, self.columns, self.names)
        self.source.foreign_lines.good = self.assembler.num_rows
        self.source.foreign_lines.check(self.source.path)
        last = self.assembler.finish()
        unused = unused_notes(self.columns, self.names)
        for run in self.assembler.all_runs():
            run.notes += [*unused, *self.cut_off]
        return last


def _is_plain(entry: Mapping[str, Any]) -> bool:
    """False for an object that is too deep, or has half of a surrogate: the parser takes these."""
    try:
        return bool(msgspec.json.encode(flat(entry)))
    except (RecursionError, UnicodeEncodeError):
        return False


def flat(entry: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, their names joined by ``/``.

    >>> flat({"step": 1, "train": {"loss": 2.5}})
    {'step': 1, 'train/loss': 2.5}
    """
    if not prefix and dict not in map(type, entry.values()):
        return dict(entry)
    cells: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            cells |= flat(value, f"{prefix}{name}/")
        else:
            cells[f"{prefix}{name}"] = value
    return cells


READER = Reader("JSONL (one object a line)", matches, stream, follows=True)
