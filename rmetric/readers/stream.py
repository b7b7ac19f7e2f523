"""Stream of records that every reader returns, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rmetric._util.errors import LogError
from rmetric.readers.assembler import Assembler, Batches
from rmetric.readers.columns import Columns, choose_columns, listed, suggestions, unused_notes
from rmetric.readers.names import is_loss, plain_name
from rmetric.readers.rows import BadRow, Row, UnknownFormat, is_blank, number
from rmetric.readers.source import PathOnly, Source
from rmetric.records import Record, Run


@dataclass(kw_only=True)
class Stream:
    """The records of one log, in constant memory where the format is one of lines.

    Attributes:
        batches: records of one run, some at a time, with its id; read once.
        runs, held, guessed: see `OpenLog`.
    """

    batches: Batches
    runs: dict[str, Run]
    held: Callable[[], list[tuple[str, Record]]] = list
    guessed: Callable[[], list[str]] = list


class Reader(NamedTuple):
    """One log format.

    Attributes:
        name: as messages and the index print it.
        matches: of the beginning of a file, True if it is in the format.
        stream: the records of a source, read by a mapping; raises LogError.
        follows: True if a file that grows can be read line by line.
    """

    name: str
    matches: Callable[[str], bool]
    stream: Callable[[Source, Mapping[str, str]], Stream]
    follows: bool = False


def stream_rows(
    source: Source, columns: Columns, rows: Iterable[Row], notes: Sequence[str] = (), *,
    of_table: bool = True,
) -> Stream:  # fmt: skip
    """The stream of a format that yields rows; `notes` go to every run at the end.

    A row `of_table` without any number is left out: it is text with as many commas as the header.
    """
    assembler, foreign = Assembler(source.path, columns), source.foreign_lines

    def batches() -> Batches:
        for row in rows:
            try:
                complete = assembler.take(row)
            except BadRow as error:
                is_text = of_table and not any(map(_is_number, row.cells.values()))
                if error.line is None or not (foreign.forgiving or is_text):
                    raise
                foreign.add(error.line, error.problem, of_record=not is_text)
                continue
            foreign.good += 1
            if complete is not None:
                yield complete
        foreign.check(source.path)
        yield from assembler.finish()
        for run in assembler.all_runs():
            run.notes += notes

    return Stream(
        batches=batches(),
        runs=assembler.runs,
        held=assembler.held,
        guessed=lambda: [*columns.notes, *notes],
    )


def stream_wide(
    path: Path,
    rows: Callable[[], Iterable[Row]],
    mapping: Mapping[str, str],
    notes: Sequence[str] = (),
    own: Mapping[str, str] = MappingProxyType({}),
    empty: str = "it holds no values",
) -> Stream:
    """The stream of rows of a binary format, whose names are known once all were seen.

    `rows` is called twice; the run's name may be in `RUN`. `own` maps cells to targets
    in this format; `empty` states what is wrong with a log without values.
    """
    names: dict[str, None] = {}
    for row in rows():
        names |= dict.fromkeys(row.cells)
    source, is_named = PathOnly(path), names.pop(RUN, RUN) is None
    if not names.keys() - set(own.values()):
        raise LogError(path, None, empty)
    columns = columns_of_table(source, list(names), {**own, **mapping})
    if "step" in own and "step" not in mapping:
        columns.other_steps = []
    if is_named:
        columns.by_target["run"] = RUN
    return stream_rows(source, columns, rows(), notes)


def _is_number(cell: object) -> bool:
    try:
        return number(cell) is not None
    except (ValueError, OverflowError):
        return False


RUN = "(run)"  # cell with the name of a run
#: Name of the column with a metric's name -> that of its value; and names of one with the run.
_VALUE_KEY = {"metric_name": "metric_value"}
_VALUE_KEY |= dict.fromkeys(("key", "metric", "event_name", "tag", "name"), "value")
_RUN_NAMES = ("run_name", "run_id", "run_uuid", "run", "experiment_key")
#: Columns of the scores.csv of a replay.
_OF_A_REPLAY = {"gradient_variance_normalised", "loss_drift_normalised", "r_metric", "alert"}


def long_form(names: Iterable[str]) -> dict[str, str] | None:
    """Column -> its part in a row of one value: name, value, step, `RUN`; None for other rows."""
    folders: dict[str, dict[str, str]] = {}
    for column in names:
        folder, _, own = column.rpartition("/")
        folders.setdefault(folder, {}).setdefault(plain_name(own), column)
    for columns in folders.values():
        for name, value in _VALUE_KEY.items():
            if {name, value, "step"} <= columns.keys() and not any(map(is_loss, columns)):
                run = next((columns[run] for run in _RUN_NAMES if run in columns), RUN)
                parts = (columns[name], columns[value], columns["step"], run)
                return dict(zip(parts, ("name", "value", "step", RUN), strict=True))
    return None


def one_value(
    cells: Mapping[str, Any], parts: Mapping[str, str]
) -> tuple[str, Any, dict[str, Any]] | None:
    """Name and value of a row in long form, and its step and run; None for one without."""
    own = {part: cells.get(column) for column, part in parts.items()}
    name, value = own.pop("name"), own.pop("value")
    if is_blank(name) or is_blank(own["step"]) or value is None:
        return None
    return str(name), value, own


def columns_of_table(source: Source, names: list[str], mapping: Mapping[str, str]) -> Columns:
    """The columns of a table whose header is known. Raises LogError and UnknownFormat."""
    try:
        columns = choose_columns(names, mapping)
    except ValueError as error:
        raise LogError(source.path, None, str(error)) from None
    check_has_loss(source, columns, names)
    columns.notes += unused_notes(columns, names)
    return columns


def check_has_loss(
    source: Source, columns: Columns, names: Iterable[str], line: int | None = None
) -> None:
    """Raise UnknownFormat where neither a loss nor anything of the metric is logged."""
    names = list(names)
    if columns.has_statement and not columns.has_loss and set(names) >= _OF_A_REPLAY:
        raise UnknownFormat(source.path, None, "the scores that a replay wrote, and no log")
    if not (columns.is_judged or columns.parts or columns.has_statement):
        meant = suggestions(columns, names).get("loss", "COLUMN")
        problem = f"no column is known to be a loss; {listed(names)}"
        raise UnknownFormat(source.path, line, f"{problem}; --map loss={meant} says which")
