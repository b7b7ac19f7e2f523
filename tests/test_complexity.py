"""No function of the diagnosis has more branches than one can keep in mind."""

import ast
from collections.abc import Iterator
from pathlib import Path

import rmetric.diagnosis

#: As radon counts them: from 21 on a block has the grade D.
MOST = 20
ONE = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert, ast.Lambda)


def branches(block: ast.AST) -> Iterator[int]:
    for one in ast.walk(block):
        if isinstance(one, ast.BoolOp):
            yield len(one.values) - 1
        elif isinstance(one, ast.comprehension):
            yield 1 + len(one.ifs)
        elif isinstance(one, (*ONE, ast.match_case)):
            yield 1


def test_no_function_of_the_diagnosis_is_too_complex() -> None:
    assert sum(branches(ast.parse("def f(a, b):\n if a and b:\n  return [c for c in a if c]"))) == 4
    found = {
        f"{path.name}: {one.name}": 1 + sum(branches(one))
        for path in Path(rmetric.diagnosis.__file__).parent.rglob("*.py")
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(one, ast.FunctionDef)
    }
    assert len(found) > 500
    assert {name: count for name, count in found.items() if count > MOST} == {}
