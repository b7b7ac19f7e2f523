"""The spare launcher: a launch by it behaves as a plain one, its ranks forked or not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from rmetric.guard.run_folder import LAUNCH_VARIABLE
from rmetric.guard.supervisor import processes
from rmetric.guard.supervisor.processes import (
    THREADS,
    Program,
    WarmSpare,
    interpreter_of,
    launcher_end,
)
from tests.guard.supervisor import ONE, SMALL, TORCHRUN, TWO, SupervisedRun, supervise_command

SCRIPT = """
import atexit, json, os, pathlib, sys, threading
import helper_beside_the_script
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
rank = int(os.environ["RANK"])
atexit.register(lambda: pathlib.Path(f"exit-{rank}").touch())
import numpy, random
seen = {"argv": sys.argv, "file": __file__, "session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(), "warm": "antigravity_of_the_test" in sys.modules,
        "drawn": [numpy.random.random(), random.random()],
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "threads": threading.active_count(),
        "world": os.environ["WORLD_SIZE"], "descriptors": len(os.listdir("/proc/self/fd"))}
pathlib.Path(f"rank-{rank}.json").write_text(json.dumps(seen))
sys.stdout.write(f"printed by {rank}\\n")  # one write: both ranks have the same pipe
exec(sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper_beside_the_script.py").touch()
    (folder / "path").mkdir()
    (folder / "path" / "antigravity_of_the_test.py").touch()
    return folder


def launched(folder, code, monkeypatch, preload=("numpy", "antigravity_of_the_test")):
    """Exit code and output of a launch of two ranks by a spare launcher."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder / "path"))
    for old in folder.glob("*-[01]*"):
        old.unlink()
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py", code]
    token = f"warm-{os.getpid()}-{time.monotonic_ns()}"
    spare = WarmSpare(preload, folder / "spare.log")
    spare.start(command, token, 2)
    variables = {LAUNCH_VARIABLE: token, "CUDA_VISIBLE_DEVICES": "1,0"}
    log = folder / "launch.log"
    log.unlink(missing_ok=True)
    process = spare.take(command, variables, TWO, log)
    assert process is not None
    assert spare.pids == []
    try:
        return process.wait(120), log.read_text()
    finally:
        processes.end(token, grace=0.1)


@pytest.mark.parametrize("preload", [("numpy", "antigravity_of_the_test"), ()])
def test_a_rank_runs_its_script_as_python_does(folder, monkeypatch, preload):
    code, output = launched(folder, "pass", monkeypatch, preload)
    assert code == 0, output
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for report in seen:
        assert report["argv"] == ["train.py", "pass"]
        assert Path(report["file"]).name == "train.py"
        assert (report["session"], report["warm"]) == (True, bool(preload))
        assert (report["gpus"], report["world"], report["threads"]) == ("1,0", "2", 1)
        assert report["descriptors"] <= 6  # no socket of the launcher
    assert not set(seen[0]["drawn"]) & set(seen[1]["drawn"])
    assert sorted(path.name for path in folder.glob("exit-*")) == ["exit-0", "exit-1"]
    assert {f"printed by {rank}" for rank in (0, 1)} <= set(output.splitlines())


@pytest.mark.parametrize(
    ("happens", "report"),
    [
        ("os.kill(os.getpid(), 9)", "exitcode  : -9"),
        ("sys.exit(7)", "exitcode  : 7"),
        ("raise ValueError('no beans')", "ValueError: no beans"),
    ],
)
def test_the_exit_of_a_forked_rank_reaches_torchrun(folder, monkeypatch, happens, report):
    others = "import time; time.sleep(60)"
    code, output = launched(folder, f"if rank == 1: {happens}\nelse: {others}", monkeypatch)
    assert code == 1
    assert "rank      : 1 (local_rank: 1)" in output
    assert report in output


def test_a_preload_that_fails_is_reported_and_no_launch_depends_on_it(folder):
    spare = WarmSpare(["no_such_module_of_anyone"], folder / "spare.log")
    spare.start([*TORCHRUN, "train.py"], "warm-none-1", 2)
    while spare.process.poll() is None:
        time.sleep(0.05)
    assert "No module named 'no_such_module_of_anyone'" in spare.problem()
    assert spare.pids == []
    assert spare.take([*TORCHRUN, "train.py"], {}, TWO, folder / "log") is None


def test_a_safe_path_is_left_as_it_is(folder):
    done = subprocess.run(
        [sys.executable, str(processes.SCRIPT), "antigravity_of_the_test"],
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder / "path")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "ready\n", done.stderr


def test_a_device_in_use_makes_it_a_plain_start(folder, monkeypatch):
    (folder / "path" / "uses_a_device.py").write_text(
        "import torch\ntorch.cuda.is_initialized = lambda: True\n"
    )
    code, output = launched(folder, "pass", monkeypatch, preload=("uses_a_device",))
    assert code == 0
    assert "warm start impossible (RuntimeError('an import has initialised a device" in output
    seen = json.loads((folder / "rank-0.json").read_text())
    assert (seen["warm"], seen["gpus"]) == (False, "1,0")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_spare_has_the_threads_of_the_launch_that_it_is_for(folder, monkeypatch, ranks):
    monkeypatch.delenv(THREADS, raising=False)
    command = [*TORCHRUN, "train.py"]
    for allocation in (ONE, TWO):
        spare = WarmSpare([], folder / "spare.log")
        spare.start(command, "warm-threads-1", ranks)
        seen = {}
        while not seen:  # between fork and exec there is none
            seen = psutil.Process(spare.process.pid).environ()
        assert seen.get(THREADS) == ("1" if ranks > 1 else None)
        variables = {LAUNCH_VARIABLE: "warm-threads-1"}
        taken = spare.take(command, variables, allocation, folder / "launch.log")
        assert (taken is not None) == (allocation.per_node == ranks)
        if taken is not None:
            taken.kill()
            taken.wait(60)


def test_the_spare_ends_with_its_supervisor(folder):
    spare = WarmSpare([], folder / "spare.log")
    spare.start([*TORCHRUN, "train.py"], "warm-gone-1", 2)
    spare.process.stdin.close()
    assert spare.process.wait(60) == 0


FORKS = """
import os
from rmetric.guard.supervisor import warm_launcher

pids, fork = [], os.fork

def failing():
    if pids:
        raise BlockingIOError(11, "no more processes")
    pids.append(fork())
    return pids[0]

os.fork = failing
try:
    warm_launcher.forking(2)
except BlockingIOError:
    print("plain start")
"""


def test_where_not_all_ranks_can_be_forked_the_start_is_plain_and_none_is_left():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )  # it returns when all have closed its output
    assert (done.returncode, done.stdout) == (0, "plain start\n")


@pytest.mark.parametrize(
    ("command", "end", "interpreter"),
    [
        ([*TORCHRUN, "a.py"], 3, TORCHRUN[:1]),
        (["python", "-u", "/opt/bin/torchrun", "a.py"], 3, ["python", "-u"]),
        (["python", "-m", "torch.distributed.launch", "a.py"], 3, []),
        (["ft_launcher", "a.py"], 1, []),
        (["python", "-m", "train", "-m", "torch.distributed.run"], 0, []),
        (["docker", "run", "image", "python", "-m", "torch.distributed.run", "a.py"], 0, []),
        (["env", "-i", "torchrun", "a.py"], 3, []),
        (["python", "a.py"], 0, []),
        ([], 0, []),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_only_torchrun_has_a_spare(command, end, interpreter, kind):
    assert launcher_end(kind(command)) == end
    assert interpreter_of(kind(command)) == interpreter
    assert Program(arguments=tuple(command), prefixes={}).is_torchrun == bool(end)


@pytest.mark.parametrize("options", [[], ["--preload", "json"]])
def test_a_restart_uses_the_spare_and_leaves_no_process(start, tmp_path, options):
    command = supervise_command(
        tmp_path, "--gpus", "0-1", "--poll-seconds", "0.1", "--grace-seconds", "1", *options, "--",
        *TORCHRUN, SMALL, "worker", "--seconds", "0.05", "--steps", "300",
    )  # fmt: skip
    run = SupervisedRun(tmp_path, process=start(command))
    try:
        spare = run.folder.logs / "spare.log"
        run.until(lambda: spare.exists() and "ready" in spare.read_text())
        os.kill(run.folder.beats()[1].pid, signal.SIGKILL)
        run.until(lambda: len(run.of("resumed")) == 2)
        assert [line["warm"] for line in run.of("started")] == [False, True]
        assert run.failures[0].startswith("rank 1 was killed by SIGKILL")
        assert len(run.failures) == 1
        assert run.of("ended")[1]["left"] == 0
    finally:
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)
    assert run.nobody_is_left()
