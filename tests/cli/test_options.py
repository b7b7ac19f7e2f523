"""One name for one option over all commands, and what is said of the names of before."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rmetric._util.options import layout_of, wait_seconds

ROOT = Path(__file__).resolve().parents[2]

#: Module or script -> words before the option, the old option, the new one.
RENAMED = [
    ("rmetric.cli.main", ["diagnose", "a.log"], "--cores 2", "--jobs"),
    ("rmetric.cli.main", ["logs", "learn", "--job", "a", "a.log"], "--cores 2", "--jobs"),
    ("rmetric.cli.main", ["plan"], "--memory 40", "--gpu-memory"),
    ("simulator", [], "--evaluate-every 10", "--eval-every"),
    ("run_modern_experiments", [], "--workers 2", "--jobs"),
    ("run_case_study", ["--tiny"], "--max-steps 5", "--steps"),
    ("run_case_study", [], "--fault-step=5", "--onset"),
    ("run_case_study", [], "--fault-steps 5", "--duration"),
    ("studies.fault_lab.__main__", [], "--workers 2", "--jobs"),
    ("studies.detector_benchmark.__main__", [], "--processes 2", "--jobs"),
    ("studies.diagnosis_benchmark.__main__", [], "--processes 2", "--jobs"),
    ("studies.diagnosis_benchmark.injected.__main__", ["--out", "a"], "--lanes 2", "--jobs"),
    ("studies.fleet.__main__", ["risk"], "--processes 2", "--jobs"),
    ("studies.fleet.__main__", ["cost"], "--processes 2", "--jobs"),
    ("studies.tiny_llama.__main__", [], "--tensor 2", "--layout tensor=N"),
    ("studies.tiny_llama.__main__", [], "--pipeline=2", "--layout pipeline=N"),
    ("studies.tiny_llama.__main__", [], "--data 2", "--layout data=N"),
    ("studies.tiny_llama.__main__", [], "--replicas 2", "--layout replicas=N"),
]


def refused(capsys: pytest.CaptureFixture[str], module: str, arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize(("module", "before", "old", "new"), RENAMED)
def test_a_renamed_option_is_refused_with_its_new_name(module, before, old, new, capsys):
    name = old.partition("=")[0].partition(" ")[0]
    said = refused(capsys, module, [*before, *old.split()])
    assert said.splitlines()[-1].endswith(f"error: {name} is now {new}")
    said = refused(capsys, module, [*before, name])  # the name alone
    assert f"{name} is now {new}" in said


@pytest.mark.parametrize(("module", "before", "old", "new"), RENAMED)
def test_help_shows_the_new_option_alone(module, before, old, new, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(module).main([*before[:2], "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"  {new.split()[0]} " in shown
    name = old.partition("=")[0].partition(" ")[0]
    assert f"{name} " not in shown


def test_a_renamed_option_of_a_benchmark():
    command = [sys.executable, "benchmarks/study.py", "--processes", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("error: --processes is now --jobs\n")


@pytest.mark.parametrize(
    ("module", "arguments", "problem"),
    [
        ("rmetric.cli.main", ["watch", "a.csv", "--wait"], "--wait: expected one argument"),
        ("rmetric.cli.main", ["watch", "--wait", "a.csv"], "seconds from 0 is accepted (inf"),
        ("rmetric.cli.main", ["save", "a", "--wait", "-1"], "seconds from 0 is accepted (inf"),
        ("studies.diagnosis_benchmark.injected.__main__", ["--out", "a", "--jobs", "240"],
         "to be judged is now --count"),
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
