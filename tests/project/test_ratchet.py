"""The size of the project may only fall: raising a number below is a line that a reviewer sees."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Package -> lines of Python and files, at most.
LARGEST = {
    "rmetric": (56_666, 291),
    "studies": (22_572, 130),
    "tests": (45_420, 248),
}
#: Words of docs/*.md, at most.
MOST_WORDS = 59_598
#: As radon counts branches: from 21 on a function has the grade D.
MOST_BRANCHES = 20
_BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert)
#: Constants that each module of a registry declares.
DECLARED = {"ADVICE", "COMMAND", "EXAMPLES", "HELP", "NAME", "OUT", "PACKAGES", "PAGE", "READER"}


def branches(block: ast.AST) -> Iterator[int]:
    for node in ast.walk(block):
        if isinstance(node, ast.BoolOp):
            yield len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            yield 1 + len(node.ifs)
        elif isinstance(node, (*_BRANCHES, ast.match_case)):
            yield 1
        if isinstance(node, (ast.For, ast.While, ast.Try)) and node.orelse:
            yield 1


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for pattern in ("*.py", "benchmarks/*.py", "rmetric/**/*.py", "studies/**/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", LARGEST)
def test_a_package_is_no_larger_than_before(package):
    files = sorted((ROOT / package).rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    most, most_files = LARGEST[package]
    assert lines <= most
    assert len(files) <= most_files
    smaller = lines < 0.97 * most or len(files) < 0.97 * most_files
    assert not smaller, "take the new numbers over"


def test_the_documents_are_no_longer_than_before():
    pages = (ROOT / "docs").glob("*.md")
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS


def test_no_function_has_too_many_branches():
    assert sum(branches(ast.parse("def f(a, b):\n if a and b:\n  return [c for c in a if c]"))) == 4
    found = {
        f"{path}:{node.lineno} {node.name}": 1 + sum(branches(node))
        for path, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef)
    }
    assert len(found) > 3_000
    assert {name: count for name, count in found.items() if count > MOST_BRANCHES} == {}


def assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, str]]:
    assert node.value is not None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, map(ast.unparse, node.value.elts), strict=True)
        else:
            yield target, ast.unparse(node.value)


def test_a_constant_has_one_value_in_a_package():
    found = defaultdict(lambda: defaultdict(list))
    for path, module in modules():
        for node in module.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target, value in assigned(node):
                    if isinstance(target, ast.Name) and target.id.isupper():
                        name = "/".join(path.parts[:2]), target.id
                        found[name][value].append(f"{path}:{node.lineno}")
    assert len(found) > 1_500
    several = {name: places for name, places in found.items() if len(places) > 1}
    assert {name: places for name, places in several.items() if name[1] not in DECLARED} == {}
