"""Readers of logs with one JSON object a line: our own and the authors', and any other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from rmetric._util.errors import LogError
from rmetric._util.strict_json import shown
from rmetric.log_entries import records_from_lines
from rmetric.logs import LogReader, parse_line
from rmetric.metric_settings import comparison
from rmetric.readers.assembler import Batches
from rmetric.readers.columns import add_columns, check_mapping, choose_columns, unused_notes
from rmetric.readers.names import plain_name
from rmetric.readers.rows import BadRow, Row, run_name
from rmetric.readers.source import Source
from rmetric.readers.stream import (
    RUN,
    Reader,
    Stream,
    check_has_loss,
    long_form,
    one_value,
    stream_rows,
)
from rmetric.records import Run

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
    # The only line of a file may hold whole curves and not one step.
    scalars = {plain_name(n) for n, v in first.items() if not isinstance(v, (list, dict))}
    return bool(more) or len(scalars) == len(first) or bool(scalars & _OF_ONE_STEP)


def object_on(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None for another line."""
    try:
        entry = parse_line(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    lines = _Lines(source, mapping)
    return replace(
        stream_rows(source, lines.columns, lines.rows(), lines.notes, of_table=False),
        guessed=lambda: [*lines.columns.notes, *unused_notes(lines.columns, lines.names)],
    )


class _Lines:
    """The objects of a log as rows, and the columns that are chosen while these are read."""

    def __init__(self, source: Source, mapping: Mapping[str, str]) -> None:
        self.source, self.mapping = source, mapping
        self.notes: list[str] = []
        # Wrong lines in the beginning are reported when they are read.
        first = map(object_on, source.head.splitlines())
        plain = [entry for entry in first if entry is not None and _is_plain(entry)]
        self.names = dict.fromkeys(name for entry in plain for name in flat(entry))
        self.columns = choose_columns(list(self.names), mapping, more_may_come=True)
        self._long: dict[str, str] | None = None
        self._expect_long_form()

    def _expect_long_form(self) -> None:
        """Read a log that grows in long form if its names are such; `trackers` reads a whole one.

        There the values of a step follow each other, and each one's name is a column.
        """
        if self.source.foreign_lines.forgiving and not self.columns.has_loss:
            self._long = long_form(self.names)
        if self._long is not None:
            self.names = dict.fromkeys(("step", RUN))
            chosen = choose_columns(["step"], self.mapping, more_may_come=True)
            self.columns.by_target, self.columns.notes = chosen.by_target, chosen.notes
            self.columns.by_target["run"], self.columns.other_steps = RUN, []
            self.columns.changed = True

    def rows(self) -> Iterator[Row]:
        foreign = self.source.foreign_lines
        for number, chunk in self.source.chunks():
            lines = chunk.split(b"\n")
            for at, line in enumerate(lines, start=number):
                if not line.strip():
                    continue
                entry, problem = self._object(at, line)
                if entry is None and self.source.cut and at == number + len(lines) - 1:
                    self.notes.append(f"line {at} is cut off and was left out")
                    continue
                if entry is None:
                    foreign.add(at, problem, of_record=line.lstrip().startswith(b"{"))
                    continue
                try:
                    cells = self._cells(at, entry)
                except BadRow as error:
                    if not foreign.forgiving:
                        raise
                    foreign.add(at, error.problem, of_record=True)
                    continue
                if cells is not None:
                    yield Row(at, cells)
        self._finish()

    def _object(self, number: int, line: bytes) -> tuple[dict[str, Any] | None, str]:
        """The object on a line, or None and what is wrong with it."""
        entry, problem = None, "not JSON"
        try:
            entry = parse_line(line)
        except ValueError:
            try:  # it may hold bytes that are not UTF-8
                entry = parse_line(self.source.decoded(number, line).encode())
            except ValueError as error:
                problem = str(error)
        if isinstance(entry, dict):
            return entry, ""
        is_json = not problem.startswith("not JSON")
        return None, problem if is_json else f"no JSON object: {shown(line)}"

    def _cells(self, number: int, entry: dict[str, Any]) -> dict[str, Any] | None:
        """The cells of an object, whose names may be new; None for one without a value."""
        try:
            cells = flat(entry)
        except RecursionError:
            raise BadRow(number, "nested too deeply to be read") from None
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
            if self._long is None:
                self._expect_long_form()
                if self._long is not None:
                    return self._cells(number, entry)
        return cells

    def _finish(self) -> None:
        try:
            check_mapping(self.names, self.mapping)
        except ValueError as error:
            raise LogError(self.source.path, None, str(error)) from None
        check_has_loss(self.source, self.columns, self.names)
        self.notes[:0] = unused_notes(self.columns, self.names)


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


_EVENT = re.compile(r'"event"\s*:\s*"(EXPERIMENT_\w+|METRICS|FAULT_INJECTED)"')
#: What the monitor calls a run that its user gave no name.
_UNNAMED = "run"


def _stream_experiment(source: Source, mapping: Mapping[str, str]) -> Stream:
    reader = LogReader(source.path)
    runs: dict[str, Run] = {}

    def batches() -> Batches:
        for number, chunk in source.chunks():
            decoded = records_from_lines(chunk, ours=reader.ours)
            if decoded is not None:  # all lines are METRICS and plain
                records, reader.ours = decoded
                source.foreign_lines.good += len(records)
                if records:
                    runs[reader.run.id] = reader.run
                    yield reader.run.id, records
                continue
            # One a time: where a line is wrong, those before it have been read.
            for at, line in enumerate(chunk.splitlines(keepends=True), start=number):
                try:
                    record = reader.take(at, source.decoded(at, line).encode())
                except LogError as error:
                    is_object = object_on(line) is not None
                    if (at == 1 or is_object) and not source.foreign_lines.forgiving:
                        raise
                    problem = error.problem if is_object else f"no JSON object: {shown(line)}"
                    of_record = line.lstrip().startswith(b"{")
                    source.foreign_lines.add(at, problem, of_record=of_record)
                    continue
                if reader.run.id == _UNNAMED:
                    reader.run.id = run_name(source.path)
                source.foreign_lines.good += 1
                if record is not None:
                    runs[reader.run.id] = reader.run  # its id may change with a line of the log
                    yield reader.run.id, [record]
        run = reader.finish()
        source.foreign_lines.check(source.path)
        if not runs:
            raise LogError(source.path, None, "no METRICS line: there is nothing to score")
        if mapping:
            run.notes.append("--map is not needed for this format and was not used")

    return Stream(batches=batches(), runs=runs)


def compare(run: Run, *, thinned: bool) -> None:
    """Note whether R, computed again, is the one that the log states.

    That of a run of which some records were dropped is not compared.
    """
    if any(record.stated_score is not None for record in run.records):
        unchecked = "the logged r_metric was not checked: the R computed here is of the records "
        run.notes.append(f"{unchecked}that were kept" if thinned else comparison(run))


READER = Reader("JSONL (one object a line)", matches, stream, follows=True)
EXPERIMENT = Reader(
    "experiment log (JSONL)",
    lambda head: _EVENT.search(head) is not None,
    _stream_experiment,
    follows=True,
)
