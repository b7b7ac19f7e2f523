"""The ranks of a hang are looked at before anything is ended, and the diagnosis names one."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmetric.cli.main import main
from rmetric.guard.run_folder import LAUNCH_VARIABLE, STACK_SIGNAL, RunFolder
from rmetric.guard.supervisor import stacks
from rmetric.guard.supervisor.journal import read_journal
from rmetric.guard.supervisor.processes import Program
from rmetric.guard.supervisor.stacks import Adviser
from tests.guard.supervisor import TORCHRUN, supervise_command

ROOT = Path(__file__).resolve().parents[3]
HANGING = str(Path(__file__).with_name("hanging_ranks.py"))
#: Way in which rank 2 hangs -> cause, and a part of what the diagnosis states of it.
WAYS = {
    "stopped": ("process_stopped", "stopped by a signal"),
    "loader": ("rank_stands_elsewhere", "waits for its data in"),
    "checkpoint": ("rank_stands_elsewhere", "is at a checkpoint in"),
    "collective": ("collectives_differ", "all_gather"),
    "lock": ("rank_stands_elsewhere", "update_statistics"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_holds_up_the_others_is_named_before_it_is_ended(way, tmp_path):
    pytest.importorskip("torch")
    folder = RunFolder(tmp_path / "run")
    command = supervise_command(
        folder.path, "--gpus", "0-3", "--hang-seconds", "4", "--poll-seconds", "0.2",
        "--max-restarts", "0", "--no-spare", "--", *TORCHRUN, "--nproc-per-node", "4", HANGING, way,
    )  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = read_journal(folder.journal)
    events = [line["event"] for line in lines]
    advice, failure = (
        next(line for line in lines if line["event"] == e) for e in ("advice", "failure")
    )
    assert events.index("advice") < events.index("failure") < events.index("over")
    cause, words = WAYS[way]
    assert (advice["rank"], failure["rank"], advice["cause"]) == (2, 2, cause)
    assert words in advice["words"]
    assert advice["restart"]["action"] in ("restart", "stop")
    assert f"restart: {advice['restart']['text']}" in done.stderr
    look = folder.path / advice["look"]
    assert json.loads((look / "diagnosis.json").read_text())["cause"] == cause
    assert (look / "launch-1.log").read_text() == (folder.logs / "launch-1.log").read_text()


@contextmanager
def rank(folder, code, number=0, **environment):
    """A process that beats as a rank, and then runs `code`."""
    start = (
        "import sys, time; from rmetric.guard.run_folder import RunFolder\n"
        f"folder = RunFolder({str(folder.path)!r}); folder.beat({number}, 7)\n"
        f"def wait_for_a_lock():\n    print('ready', flush=True); {code}\nwait_for_a_lock()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {LAUNCH_VARIABLE: "a-launch-1"} | environment,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def look(folder):
    into = stacks.new_look(folder)
    return stacks.collect(folder, into), into


def test_without_py_spy_a_rank_writes_its_stack_itself(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    with rank(folder, "time.sleep(600)") as process:
        for number in (1, 2):
            (seen,), into = look(folder)
            assert into == tmp_path.resolve() / "stacks" / str(number)
            assert seen.startswith(f"rank 0 (process {process.pid}): step 7, training, heart")
            assert seen.endswith("stack: faulthandler")
            text = (into / "rank_0.txt").read_text()
            assert text.count("wait_for_a_lock (<string>:4)") == 1, text
        assert process.poll() is None


def test_a_process_without_a_handler_gets_no_signal(folder, monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    release = f"import signal; signal.signal({int(STACK_SIGNAL)}, signal.SIG_DFL); time.sleep(600)"
    with rank(folder, release) as process:
        time.sleep(0.3)
        (seen,), into = look(folder)
        assert seen.endswith("stack: none")
        assert not (into / "rank_0.txt").exists()
        assert process.poll() is None  # the signal's default would have ended it


def test_a_training_that_uses_the_signal_itself_keeps_it(tmp_path):
    before = signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    try:
        RunFolder(tmp_path).beat(0, 1)
        assert signal.getsignal(STACK_SIGNAL) == signal.SIG_IGN
        assert not (tmp_path / "heartbeats" / "rank-0.stacks").exists()
    finally:
        signal.signal(STACK_SIGNAL, before)


def test_py_spy_is_asked_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "py-spy").write_text('#!/bin/sh\necho "$* Thread 1: \\"MainThread\\""\n')
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with rank(RunFolder(tmp_path), "time.sleep(600)") as process:
        (seen,), into = look(RunFolder(tmp_path))
        assert seen.endswith("stack: py-spy")
        text = (into / "rank_0.txt").read_text()
        assert text.startswith(f"dump --nonblocking --pid {process.pid}")  # no rank is paused


def test_a_flight_recorder_is_asked_for_through_its_pipe(tmp_path):
    """As torch does it: a byte in PREFIX3.pipe makes the rank write its dump."""
    variables = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "ask_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "trace_"),
    }
    os.mkfifo(tmp_path / "ask_3.pipe")
    answer = (
        f"pipe = open({str(tmp_path / 'ask_3.pipe')!r}, 'r+b', buffering=0); pipe.read(1)\n"
        f"    open({str(tmp_path / 'trace_3')!r}, 'w').write('a dump'); time.sleep(600)"
    )
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "trace_3").write_text("of an earlier launch")
    os.utime(tmp_path / "trace_3", (0, 0))
    with rank(folder, "time.sleep(600)", 3, **variables):
        assert "nccl_trace" not in look(folder)[0][0]
    with rank(folder, answer, 3, **variables) as process:
        descriptors = Path(f"/proc/{process.pid}/fd")
        while not any(link.resolve().name == "ask_3.pipe" for link in descriptors.iterdir()):
            time.sleep(0.01)
        (seen,), into = look(folder)
        assert seen.endswith("; nccl_trace_rank_3")
        assert (into / "nccl_trace_rank_3").read_text() == "a dump"


def test_the_command_prints_the_ranks_and_the_verdict(tmp_path, capsys):
    pytest.importorskip("drain3")
    folder = RunFolder(tmp_path / "run")
    assert main(["stacks", str(folder.path)]) == 1
    assert "has a heartbeat" in capsys.readouterr().err
    with rank(folder, "time.sleep(600)") as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        assert main(["stacks", str(folder.path)]) == 0
        printed = capsys.readouterr().out
        assert f"rank 0 (process {process.pid}): step 7, training" in printed
        assert "; stopped; stack: none" in printed
        assert "Process stopped by a signal" in printed.partition("\n\n")[2]
        assert Adviser(folder, Program(arguments=("x",), prefixes={}), 60.0).of_hang(1)["rank"] == 0
        into = tmp_path / "there"
        assert main(["stacks", str(folder.path), "--into", str(into)]) == 0
        assert not (into / "diagnosis.json").exists()


def test_ranks_of_other_nodes_are_looked_at_there_and_a_slow_diagnosis_is_given_up(tmp_path):
    folder, record = RunFolder(tmp_path), tmp_path / "record"
    program = Program(
        arguments=("x",), prefixes={"a": (), "b": ("sh", "-c", f'echo "$@" > {record}', "b")}
    )
    found = Adviser(folder, program, 0.001).of_hang(4)
    assert found["words"] == "launch 4: no diagnosis: it took longer than 0.001 s"
    found = Adviser(folder, program, 60.0).of_hang(4)
    assert found["words"].startswith("launch 4: no diagnosis: ")  # of nothing
    assert f"stacks {tmp_path.resolve()} --into {tmp_path.resolve()}/stacks/1" in record.read_text()
