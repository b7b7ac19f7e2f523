"""One name and one meaning for an option over all commands."""

from __future__ import annotations

import argparse
from importlib import import_module

import pytest

from rmetric._util.options import layout_of, wait_seconds


@pytest.mark.parametrize(
    ("module", "arguments", "problem"),
    [
        ("rmetric.cli.main", ["watch", "a.csv", "--wait"], "--wait: expected one argument"),
        ("rmetric.cli.main", ["watch", "--wait", "a.csv"], "seconds from 0 is accepted (inf"),
        ("rmetric.cli.main", ["save", "a", "--wait", "-1"], "seconds from 0 is accepted (inf"),
        ("studies.tiny_llama.__main__", ["--layout", "tensor=0"], "NAME=N with N from 1"),
        ("studies.tiny_llama.__main__", ["--layout", "context=2"], "NAME of tensor, pipeline"),
        ("run_modern_experiments", ["--jobs", "0"], "--jobs: '0': a whole number from 1"),
        *(("rmetric.cli.main", ["telemetry", "--http", port], "a port from 0 to 65535")
          for port in ("-1", "65536", "http")),
    ],
)  # fmt: skip
def test_a_value_that_is_none_or_means_something_else_now(module, arguments, problem, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(arguments)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    assert problem in shown.err


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
