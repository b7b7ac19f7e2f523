"""The script `tasks.py`: its help starts nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tasks
from tests.conftest import SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_help_of_a_task_installs_and_runs_nothing(task, option, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr(sys, "argv", ["tasks.py", task, option])
    assert tasks.main() == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: python3 tasks.py {task}")
    assert len(output.split("\n\n")[1]) > 10


def test_the_help_of_a_fresh_clone_makes_no_environment(tmp_path):
    shutil.copy(ROOT / "tasks.py", tmp_path)
    command = [sys.executable, tmp_path / "tasks.py", "reproduce", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the published study, its tables and figures" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.py"]


@pytest.mark.parametrize("task", ["reproduce", "check", "setup"])
def test_an_argument_that_no_task_takes_is_an_error(task, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr(sys, "argv", ["tasks.py", task, "--fast"])
    assert tasks.main() == 2
    assert capsys.readouterr().err == f"error: {task} takes no arguments: found --fast\n"


@pytest.mark.parametrize("task", tasks.PASSED_ON)
def test_other_arguments_are_passed_on(task, monkeypatch):
    commands = []
    monkeypatch.setattr(tasks, "set_up", lambda *_: None)
    monkeypatch.setattr(tasks, "run", commands.append)
    monkeypatch.setattr(sys, "argv", ["tasks.py", task, "--given"])
    assert tasks.main() == 0
    assert tasks.PASSED_ON[task].split()[-1] in commands[0]
    assert "--given" in commands[0]


def test_the_durations_are_of_tests_that_are_there():
    for test in SECONDS:
        path, *names = test.split("::")
        words = re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8"))
        assert {name.rpartition(".")[2] for name in names} <= {"runTest", *words}, test
