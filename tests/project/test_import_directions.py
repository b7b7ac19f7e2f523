"""Imports go one way, and the table below says which.

A room is a package or a module directly below `rmetric/`. A name in it is listed where some line
of its code imports that room: at the top of a file, inside a function, for types only, or by a
string that names a module (`import_module`, `python -m`).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Each room and what it imports. A room imports only what stands above it: so there is no cycle.
#: `__init__` is the face, `import rmetric`: it offers what is in the rooms, and no room imports it.
IMPORTS = {
    "_util": "",
    "records": "_util",
    "normalisers": "",
    "signals": "normalisers",
    "metric": "records normalisers signals",
    "metric_settings": "_util records metric",
    "log_entries": "_util records metric",
    "logs": "_util records metric log_entries",
    "detectors": "_util records signals metric",
    "audits": "",
    "telemetry": "_util records",
    "simulation": "_util records metric logs",
    "readers": "_util records metric metric_settings log_entries logs",
    "replay": "_util records metric metric_settings detectors readers",
    "evaluation": "_util records metric log_entries logs detectors",
    "monitor": "_util audits records metric log_entries logs detectors",
    "reporting": "_util records metric metric_settings logs detectors readers replay evaluation",
    "diagnosis": "_util telemetry readers replay reporting",
    "guard": "_util detectors telemetry replay monitor",
    "rescue": "_util records detectors monitor guard",
    "integrations": "audits telemetry readers monitor guard rescue",
    "cli": "_util records metric detectors telemetry readers replay evaluation reporting diagnosis "
    "guard integrations",
    "__main__": "_util cli",
    "__init__": "_util records metric detectors simulation readers evaluation monitor diagnosis "
    "guard rescue integrations",
}
#: What no study may import: the command line, which is for people.
NOT_FOR_STUDIES = {"cli", "__main__"}
#: Studies share one package: tables, provenance, generated parts of pages.
SHARED = "studies.common"


class Import(NamedTuple):
    """One import of another room, by the line that has it."""

    of: str
    room: str
    name: str
    where: str


def modules(top: str) -> dict[str, Path]:
    """The dotted names of all modules below a folder of the checkout."""
    out = {}
    for path in sorted((ROOT / top).rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = modules("rmetric") | modules("studies")


def room_of(module: str) -> str:
    """`rmetric.a.b` is in the room `a`, `studies.a.b` in `studies.a`."""
    top, _, rest = module.partition(".")
    inner = rest.split(".")[0] or "__init__"
    return inner if top == "rmetric" else f"{top}.{inner}"


def imported(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str, str]]:
    """(line, module, name or "") of each import of ours in a file, wherever it stands in it.

    A private name that is reached through an imported module counts as imported from it.
    """
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    reached = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
            reached |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                reached[alias.asname or alias.name] = inner
                yield (node.lineno, inner, "") if inner in MODULES else (
                    node.lineno, base, alias.name
                )  # fmt: skip
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.rstrip(".") in MODULES
            and "." in node.value.rstrip(".")
            and id(node) not in docstrings
        ):
            yield node.lineno, node.value.rstrip("."), ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = reached.get(node.value.id, "")
            if module in MODULES and is_private(node.attr):
                yield node.lineno, module, node.attr


@cache
def imports() -> list[Import]:
    out = []
    for module, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        package = path.name == "__init__.py"
        for line, target, name in imported(source, module, is_package=package):
            if target.split(".")[0] in ("rmetric", "studies") and room_of(target) != room_of(
                module
            ):
                where = f"{path.relative_to(ROOT)}:{line} imports {target} {name}".rstrip()
                out.append(Import(room_of(module), room_of(target), name, where))
    return out


def test_the_table_has_every_room_and_lists_nothing_that_is_not_imported():
    found = defaultdict(set)
    for entry in imports():
        if not entry.of.startswith("studies"):
            found[entry.of].add(entry.room)
    rooms = {room_of(module) for module in MODULES if module.split(".")[0] == "rmetric"}
    assert rooms == set(IMPORTS)
    for room, listed in IMPORTS.items():
        assert found[room] == set(listed.split()), f"{room}: the table lists what is not imported"


def test_the_table_has_no_cycle():
    above: list[str] = []
    for room, listed in IMPORTS.items():
        assert set(listed.split()) <= set(above), f"{room} imports what stands below it"
        above.append(room)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_study(room: str) -> bool:
    return room.startswith("studies")


FORBIDDEN: dict[str, Callable[[Import], bool]] = {
    "a room imports what its line of the table lacks": (
        lambda entry: entry.of in IMPORTS and entry.room not in IMPORTS[entry.of].split()
    ),
    "a room imports a study or the face": (
        lambda entry: not of_study(entry.of) and (of_study(entry.room) or entry.room == "__init__")
    ),
    "a study imports another study or the command line": (
        lambda entry: of_study(entry.of) and entry.room != SHARED
        and (of_study(entry.room) or entry.room in NOT_FOR_STUDIES)
    ),
    # `_util` is a room for all of the house; the names in it are not for it alone.
    "a private name of another room is imported": lambda entry: is_private(entry.name),
}  # fmt: skip


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_import_is_forbidden(what):
    wrong = [entry.where for entry in imports() if FORBIDDEN[what](entry)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from rmetric.logs import read_log", ("rmetric.logs", "read_log")),
        ("from rmetric import logs", ("rmetric.logs", "")),
        ("import rmetric.logs as them", ("rmetric.logs", "")),
        ("def f():\n    from rmetric.logs import _take", ("rmetric.logs", "_take")),
        ("def f():\n    them._take()\nfrom rmetric import logs as them", ("rmetric.logs", "_take")),
        ("import rmetric.logs as them\nthem._take()", ("rmetric.logs", "_take")),
        ("from ..logs import read_log", ("rmetric.logs", "read_log")),
        ("import_module('rmetric.logs')", ("rmetric.logs", "")),
        ("import_module(f'rmetric.cli.{name}')", ("rmetric.cli", "")),
    ],
)
def test_every_form_of_an_import_is_seen(line, found):
    seen = imported(line, "rmetric.signals.authors", is_package=False)
    assert found in [(target, name) for _, target, name in seen]
