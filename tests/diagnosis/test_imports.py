"""Imports of the diagnosis go one way, and a constant's name has one value."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rmetric.diagnosis

FOLDER = Path(rmetric.diagnosis.__file__).parent
TREES = {
    path.relative_to(FOLDER).with_suffix("").parts: ast.parse(path.read_text(encoding="utf-8"))
    for path in FOLDER.rglob("*.py")
    if path.name != "__init__.py"
}


def imported(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Modules of the diagnosis that a module imports, in functions too, but not for types only."""
    for sub in ast.iter_child_nodes(tree):
        if isinstance(sub, ast.ImportFrom) and (sub.module or "").startswith("rmetric.diagnosis."):
            yield tuple(str(sub.module).split(".")[2:])
        elif not (isinstance(sub, ast.If) and ast.unparse(sub.test) == "TYPE_CHECKING"):
            yield from imported(sub)


@pytest.mark.parametrize("depth", [1, 2], ids=["between its rooms", "between its modules"])
def test_no_import_goes_round_in_the_diagnosis(depth: int) -> None:
    graph = defaultdict(set)
    for module, tree in TREES.items():
        for other in imported(tree):
            if module[:depth] != other[:depth]:
                graph[module[:depth]].add(other[:depth])
    assert len(graph) > 15
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go round: {error.args[1]}")


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Public constants of a module, each with its value's text."""
    for sub in tree.body:
        if isinstance(sub, ast.Assign) and isinstance(sub.targets[0], ast.Tuple):
            assert isinstance(sub.value, ast.Tuple)
            yield from zip(
                map(ast.unparse, sub.targets[0].elts), map(ast.unparse, sub.value.elts), strict=True
            )
        elif isinstance(sub, ast.Assign | ast.AnnAssign) and sub.value is not None:
            target = sub.targets[0] if isinstance(sub, ast.Assign) else sub.target
            yield ast.unparse(target), ast.unparse(sub.value)


def test_a_constant_of_the_diagnosis_has_one_value() -> None:
    values = defaultdict(set)
    for tree in TREES.values():
        for name, value in constants(tree):
            if name.isupper() and not name.startswith("_"):
                values[name].add(value)
    assert len(values) > 200
    assert {name: some for name, some in values.items() if len(some) > 1} == {}
