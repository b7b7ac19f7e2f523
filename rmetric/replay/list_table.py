"""Reader of a CSV with one run a row and its whole curves as lists in the cells."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rmetric.logs import LogError, parse_line
from rmetric.records import Run
from rmetric.replay.columns import choose_columns, listed, plain_name
from rmetric.replay.rows import Row, UnknownFormat, run_name, runs_from_rows
from rmetric.replay.table import header_of, read_table

NAME = "CSV with one run a row and lists in its cells"
_LIST_CELL = re.compile(r'(^|[,;\t])"?\[')
_NON_FINITE = {"nan": "NaN", "inf": "Infinity"}


def matches(head: str) -> bool:
    lines = head.lstrip("\r\n").split("\n", 2)
    return len(lines) > 1 and len(header_of(head)) > 1 and _LIST_CELL.search(lines[1]) is not None


def read(path: Path, data: bytes, mapping: Mapping[str, str]) -> list[Run]:
    table = read_table(path, data)
    runs: list[Run] = []
    for index, row in enumerate(table.rows):
        curves = {name: _curve(path, row, name) for name in table.names if _is_list(row, name)}
        for run in _runs(path, row.line, curves, mapping):
            run.id = run.id.replace(run_name(path), f"{run_name(path)}__row{index}", 1)
            run.notes += table.notes
            runs.append(run)
    if not runs:
        raise LogError(path, None, "no row below the header")
    return runs


def _runs(
    path: Path, line: int | None, curves: Mapping[str, Sequence[Any]], mapping: Mapping[str, str]
) -> list[Run]:
    try:
        columns = choose_columns(list(curves), mapping)
    except ValueError as error:
        raise LogError(path, line, str(error)) from None
    if not columns.has_loss:
        raise UnknownFormat(path, line, f"no list is known to be a loss; {listed(curves)}")
    chosen = columns.by_target
    main = chosen.get("loss") or chosen["eval_loss"]
    steps = curves[chosen.pop("step")] if "step" in chosen else range(len(curves[main]))
    if isinstance(steps, range):
        columns.notes.append(f"no step is logged: the entries of {main!r} are counted from 0")
    rows = []
    for name in chosen.values():
        places = _places(name, main, curves, columns.notes)
        rows += [
            (p, Row(line, {"step": steps[p], name: v}))
            for p, v in zip(places, curves[name], strict=True)
        ]
    rows.sort(key=lambda placed: placed[0])
    names = ["step", *chosen.values()]
    runs = runs_from_rows(path, names, [row for _, row in rows], {**chosen, "step": "step"})
    for run in runs:
        run.notes = columns.notes + run.notes
    return runs


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


def _is_list(row: Row, name: str) -> bool:
    return str(row.cells.get(name, "")).startswith("[")


def _curve(path: Path, row: Row, name: str) -> list[Any]:
    cell = re.sub(r"\b(nan|inf)\b", lambda found: _NON_FINITE[found[0]], row.cells[name])
    try:
        return parse_line(cell.encode())
    except ValueError:
        raise LogError(path, row.line, f"{name!r} is no list of numbers: {cell[:60]!r}") from None
