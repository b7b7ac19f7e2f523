"""Runs whose curves are stored as whole lists, and the reader of a CSV with one run a row."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rmetric._util.errors import LogError
from rmetric.logs import parse_line
from rmetric.readers.assembler import Assembler, Batches
from rmetric.readers.columns import Columns, choose_columns, listed, plain_name
from rmetric.readers.rows import Row, UnknownFormat, run_name
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream
from rmetric.readers.table import Table, header_of
from rmetric.records import Run

Curves = Mapping[str, Sequence[Any]]


def stream_curves(
    source: Source,
    runs_of_curves: Iterable[tuple[str, int | None, Curves]],
    mapping: Mapping[str, str],
    notes: list[str],
) -> Stream:
    """The records of runs that are given whole: id, line in the file, name -> list."""
    runs: dict[str, Run] = {}

    def batches() -> Batches:
        for id, line, curves in runs_of_curves:
            assembler, rows = _placed(source, line, curves, mapping)
            own = run_name(source.path)
            for own_id, records in assembler.records(rows):
                yield own_id.replace(own, id, 1), records
            for own_id, run in assembler.runs.items():
                run.id = run.id.replace(own, id, 1)
                run.notes += notes
                runs[own_id.replace(own, id, 1)] = run

    return Stream(batches=batches(), runs=runs)


def _placed(
    source: Source, line: int | None, curves: Curves, mapping: Mapping[str, str]
) -> tuple[Assembler, list[Row]]:
    """One run's curves as rows in the order of their steps."""
    try:
        columns = choose_columns(list(curves), mapping)
    except ValueError as error:
        raise LogError(source.path, line, str(error)) from None
    if not columns.is_judged:
        raise UnknownFormat(source.path, line, f"no list is known to be a loss; {listed(curves)}")
    chosen, notes = columns.by_target, columns.notes
    main = next(chosen[target] for target in ("loss", "eval_loss", "reward") if target in chosen)
    steps: Sequence[Any] = range(len(curves[main]))
    if "step" in chosen and len(curves[chosen["step"]]) == len(steps):
        steps = curves[chosen["step"]]
    else:
        notes.append(f"no step is logged: the entries of {main!r} are counted from 0")
    chosen.pop("step", None)
    placed: dict[int, list[dict[str, Any]]] = {}
    for name in chosen.values():
        for p, value in zip(_places(name, main, curves, notes), curves[name], strict=True):
            here = placed.setdefault(p, [])
            cells = next((cells for cells in here if name not in cells), None)
            if cells is None:
                here.append(cells := {"step": steps[p]})
            cells[name] = value
    rows = [Row(line, cells) for p in sorted(placed) for cells in placed[p]]
    of_rows = Columns(by_target={**chosen, "step": "step"}, notes=notes)
    return Assembler(source.path, of_rows), rows


def _places(
    name: str, main: str, curves: Mapping[str, Sequence[Any]], notes: list[str]
) -> Sequence[int]:
    """At which entry of `main` each entry of the curve `name` was logged."""
    num, num_main = len(curves[name]), len(curves[main])
    if num == num_main:
        return range(num)
    for fine, coarse in _clocks(num, num_main, curves):
        notes.append(f"{name!r} is placed along {main!r} by {coarse!r} and {fine!r}")
        return [max(bisect_right(curves[fine], value) - 1, 0) for value in curves[coarse]]
    notes.append(f"{name!r} has {num} entries for {num_main}: they are spread evenly")
    return [max((i + 1) * num_main // num - 1, 0) for i in range(num)]


def _clocks(num: int, num_main: int, curves: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
    """Pairs of rising lists that count one thing (tokens, epochs), as long as the two curves."""

    def rising(length: int) -> dict[str, str]:
        return {
            re.sub(r"_(train|training|val|validation|eval)$", "", plain_name(name)): name
            for name, curve in curves.items()
            if len(curve) == length
            and all(isinstance(value, (int, float)) for value in curve)
            and all(a < b for a, b in pairwise(curve))
        }

    fine, coarse = rising(num_main), rising(num)
    return [(fine[what], coarse[what]) for what in fine if what in coarse]


_LIST_CELL = re.compile(r'(^|[,;\t])"?\[')


def _matches(head: str) -> bool:
    lines, names = head.lstrip("\r\n").split("\n", 2), header_of(head)
    # A line that begins with a date in brackets is no header.
    named = len(names) > 1 and not any(name.startswith("[") for name in names)
    return len(lines) > 1 and named and _LIST_CELL.search(lines[1]) is not None


def _stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    table = Table(source)

    def curves() -> Iterator[tuple[str, int | None, dict[str, list[Any]]]]:
        index = -1
        for index, row in enumerate(table.rows()):
            lists = {n: _curve(source, row, n) for n in table.names if _is_list(row, n)}
            yield f"{run_name(source.path)}__row{index}", row.line, lists
        if index < 0:
            raise LogError(source.path, None, "no row below the header")

    return stream_curves(source, curves(), mapping, table.notes)


def _is_list(row: Row, name: str) -> bool:
    return str(row.cells.get(name, "")).startswith("[")


def _curve(source: Source, row: Row, name: str) -> list[Any]:
    cell = row.cells[name]
    try:
        curve: list[Any] = parse_line(cell.encode())
    except ValueError:
        problem = f"{name!r} is no list of numbers: {cell[:60]!r}"
        raise LogError(source.path, row.line, problem) from None
    return curve


READER = Reader("CSV with one run a row and lists in its cells", _matches, _stream)
