"""Several nodes: two agents of torchrun on this machine, one of which is lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rmetric.guard.run_folder import RunFolder
from tests.guard.supervisor import Told, until

SMALL = str(Path(__file__).with_name("small_workers.py"))
#: Both are this machine; the first is where the others meet.
FIRST, SECOND = "localhost", "127.0.0.1"


def supervised(start, folder, *options, steps=60):
    folder.mkdir(exist_ok=True)
    (folder / "faults.json").write_text("[]")
    return start(
        [
            *(sys.executable, "-m", "rmetric", "supervise", str(folder)),
            *("--nodes", f"{FIRST}:2,{SECOND}:2", "--batch", "8", "--poll-seconds", "0.1"),
            *("--backoff-seconds", "0.1", "--grace-seconds", "2", *options, "--"),
            *(sys.executable, "-m", "torch.distributed.run", SMALL, "worker"),
            *("--seconds", "0.1", "--steps", str(steps)),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def trains(folder, launch):
    launches = Told(folder).of("launch")
    token = launches[-1]["token"] if len(launches) == launch else "-"
    beats = RunFolder(folder).beats(token).values()
    return len(beats) == 4 and all(beat.step >= 3 for beat in beats)


@pytest.mark.slow
def test_a_killed_agent_of_two_and_then_a_node_that_keeps_failing_is_dropped(start, tmp_path):
    process = supervised(start, tmp_path, "--suspect-after", "2")
    for launch in (1, 2):
        until(lambda launch=launch: trains(tmp_path, launch), process)
        os.kill(Told(tmp_path).of("started")[-1]["pids"][SECOND], signal.SIGKILL)
        until(lambda n=launch: len(Told(tmp_path).of("failure")) == n, process)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    failures = Told(tmp_path).of("failure")
    assert [(line["words"], line["node"]) for line in failures] == [
        ("the launcher was killed by SIGKILL", SECOND)
    ] * 2
    assert [len(line["gpus"]) for line in Told(tmp_path).of("launch")] == [2, 2, 1]
    assert Told(tmp_path).of("dropped")[0]["gpus"] == [[SECOND, 0], [SECOND, 1]]
    assert all(line["found"] >= 3 for line in Told(tmp_path).of("ended")[1:3]), "orphans and agent"
    assert Told(tmp_path).nobody_is_left()


@pytest.mark.slow
def test_a_node_that_cannot_be_reached_is_dropped(start, tmp_path):
    shell = tmp_path / "shell.py"
    shell.write_text(
        "import os, sys\n"
        f"if os.path.exists({str(tmp_path / 'down')!r}) and sys.argv[1] == {SECOND!r}:\n"
        "    sys.exit(255)\n"
        "os.execvp(sys.argv[2], sys.argv[2:])\n"
    )
    prefix = f"{sys.executable} {shell} {{node}}"
    process = supervised(start, tmp_path / "run", "--prefix", prefix)
    until(lambda: trains(tmp_path / "run", 1), process)
    (tmp_path / "down").touch()
    os.kill(Told(tmp_path / "run").of("started")[-1]["pids"][SECOND], signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert Told(tmp_path / "run").of("ended")[1]["unreachable"] == [SECOND]
    assert Told(tmp_path / "run").of("dropped")[0]["words"] == f"{SECOND} cannot be reached"
    assert [list(line["gpus"].items()) for line in Told(tmp_path / "run").of("launch")] == [
        [(FIRST, [0, 1]), (SECOND, [0, 1])],
        [(FIRST, [0, 1])],
    ]
    assert Told(tmp_path / "run").nobody_is_left()
