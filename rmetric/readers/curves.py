"""Runs whose curves are stored as whole lists, and the reader of a CSV with one run a row."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rmetric._util.errors import LogError
from rmetric.logs import parse_line
from rmetric.readers.assembler import Batches
from rmetric.readers.columns import Columns, choose_columns, listed
from rmetric.readers.names import plain_name
from rmetric.readers.rows import Row, UnknownFormat
from rmetric.readers.source import Source
from rmetric.readers.stream import RUN, Reader, Stream, check_has_loss, stream_rows
from rmetric.readers.table import Table, header_of
from rmetric.records import Run

Curves = Mapping[str, Sequence[Any]]
_STEP = "(step)"


def stream_curves(
    source: Source,
    runs_of_curves: Iterable[tuple[str | None, int | None, Curves]],
    mapping: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Stream:
    """The records of runs that are given whole: name (None for the only one), line, curves."""
    runs: dict[str, Run] = {}
    placed = [_placed(source, *run, mapping) for run in runs_of_curves]

    def batches() -> Batches:
        for columns, rows in placed:
            stream = stream_rows(source, columns, rows, notes, of_table=False)
            for complete in stream.batches:
                runs.update(stream.runs)
                yield complete

    return Stream(batches=batches(), runs=runs)


def _placed(
    source: Source, run: str | None, line: int | None, curves: Curves, mapping: Mapping[str, str]
) -> tuple[Columns, list[Row]]:
    """One run's curves as rows in the order of their steps."""
    try:
        columns = choose_columns(list(curves), mapping)
    except ValueError as error:
        raise LogError(source.path, line, str(error)) from None
    check_has_loss(source, columns, curves, line)
    chosen, notes = columns.by_target, columns.notes
    main = next((chosen[t] for t in ("loss", "eval_loss", "reward") if t in chosen), None)
    if main is None:
        raise UnknownFormat(source.path, line, f"no list is known to be a loss; {listed(curves)}")
    steps: Sequence[Any] = range(len(curves[main]))
    if "step" in chosen and len(curves[chosen["step"]]) == len(steps):
        steps = curves[chosen["step"]]
    else:
        notes.append(f"no step is logged: the entries of {main!r} are counted from 0")
    chosen.pop("step", None)
    placed: dict[int, list[dict[str, Any]]] = {}
    for name in chosen.values():
        for place, value in zip(_places(name, main, curves, notes), curves[name], strict=True):
            here = placed.setdefault(place, [])
            if (cells := next((cells for cells in here if name not in cells), None)) is None:
                here.append(cells := {_STEP: steps[place], RUN: run})
            cells[name] = value
    chosen |= {"step": _STEP, "run": RUN}
    return columns, [Row(line, cells) for place in sorted(placed) for cells in placed[place]]


def _places(name: str, main: str, curves: Curves, notes: list[str]) -> Sequence[int]:
    """At which entry of `main` each entry of the curve `name` was logged."""
    num, num_main = len(curves[name]), len(curves[main])
    if num == num_main:
        return range(num)
    fine, coarse = _counters(num_main, curves), _counters(num, curves)
    for what in fine:
        if what in coarse:
            notes.append(
                f"{name!r} is placed along {main!r} by {coarse[what]!r} and {fine[what]!r}"
            )
            along = curves[fine[what]]
            return [max(bisect_right(along, value) - 1, 0) for value in curves[coarse[what]]]
    notes.append(f"{name!r} has {num} entries for {num_main}: they are spread evenly")
    return [max((i + 1) * num_main // num - 1, 0) for i in range(num)]


def _counters(length: int, curves: Curves) -> dict[str, str]:
    """The rising lists of a length, by what they count (tokens, epochs)."""
    return {
        re.sub(r"_(train|training|val|validation|eval)$", "", plain_name(name)): name
        for name, curve in curves.items()
        if len(curve) == length
        and all(isinstance(value, (int, float)) for value in curve)
        and all(a < b for a, b in pairwise(curve))
    }


_LIST_CELL = re.compile(r'(^|[,;\t])"?\[')


def _matches(head: str) -> bool:
    lines, names = head.lstrip("\r\n").split("\n", 2), header_of(head)
    # A line that begins with a date in brackets is not a header.
    named = len(names) > 1 and not any(name.startswith("[") for name in names)
    return len(lines) > 1 and named and _LIST_CELL.search(lines[1]) is not None


def _stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    table = Table(source)
    runs = []
    for index, row in enumerate(table.rows()):
        lists = [name for name in table.names if str(row.cells.get(name, "")).startswith("[")]
        curves = {name: _curve(source, row, name) for name in lists}
        runs.append((f"row{index}", row.line, curves))
    if not runs:
        raise LogError(source.path, None, "no row below the header")
    return stream_curves(source, runs, mapping, table.notes)


def _curve(source: Source, row: Row, name: str) -> list[Any]:
    cell = row.cells[name]
    try:
        curve: list[Any] = parse_line(cell.encode())
    except ValueError:
        problem = f"{name!r} is not a list of numbers: {cell[:60]!r}"
        raise LogError(source.path, row.line, problem) from None
    return curve


READER = Reader("CSV with one run a row and lists in its cells", _matches, _stream)
