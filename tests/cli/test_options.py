"""One name and one meaning for an option over all commands."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import pytest

from rmetric._util.options import layout_of, wait_seconds

ROOT = Path(__file__).resolve().parents[2]


def refused(capsys: pytest.CaptureFixture[str], module: str, arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize(
    ("module", "arguments", "problem"),
    [
        ("rmetric.cli.main", ["watch", "a.csv", "--wait"], "--wait: expected one argument"),
        ("rmetric.cli.main", ["watch", "--wait", "a.csv"], "seconds from 0 is accepted (inf"),
        ("rmetric.cli.main", ["save", "a", "--wait", "-1"], "seconds from 0 is accepted (inf"),
        ("studies.tiny_llama.__main__", ["--layout", "tensor=0"], "NAME=N with N from 1"),
        ("studies.tiny_llama.__main__", ["--layout", "context=2"], "NAME of tensor, pipeline"),
        ("run_modern_experiments", ["--jobs", "0"], "--jobs: '0': a whole number from 1"),
    ],
)  # fmt: skip
def test_a_value_that_means_something_else_now(module, arguments, problem, capsys):
    assert problem in refused(capsys, module, arguments)


def test_numbers():
    assert wait_seconds("inf") == float("inf")
    assert wait_seconds("1.5") == 1.5
    for text in ("nan", "-inf", "soon"):
        with pytest.raises(argparse.ArgumentTypeError, match="inf: without end"):
            wait_seconds(text)
    assert layout_of(["tensor", "data"])("data=4,tensor=2") == {"data": 4, "tensor": 2}


def test_plan_and_supervise_plan_for_the_same_gpu():
    defaults = []
    for name in ("plan", "supervise"):
        parser = argparse.ArgumentParser()
        import_module(f"rmetric.cli.{name}").add_arguments(parser)
        defaults.append(parser.get_default("gpu"))
    assert defaults[0] == defaults[1]
