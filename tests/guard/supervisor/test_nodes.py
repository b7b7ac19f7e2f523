"""Several nodes: two agents of torchrun on this machine, one of which is lost."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.guard.supervisor import SMALL, TORCHRUN, Told, supervise_command

#: Both are this machine; the first is where the others meet.
FIRST, SECOND = "localhost", "127.0.0.1"


def supervised(start, folder, *options):
    command = supervise_command(
        folder, "--nodes", f"{FIRST}:2,{SECOND}:2", "--batch", "8", "--poll-seconds", "0.1",
        "--backoff-seconds", "0.1", "--grace-seconds", "2", *options, "--",
        *TORCHRUN, SMALL, "worker", "--seconds", "0.1", "--steps", "60",
    )  # fmt: skip
    return Told(folder, process=start(command, stderr=subprocess.PIPE, text=True))


def trains(run, launch):
    launches = run.of("launch")
    token = launches[-1]["token"] if len(launches) == launch else "-"
    beats = run.folder.beats(token).values()
    return len(beats) == 4 and all(beat.step >= 3 for beat in beats)


@pytest.mark.slow
def test_a_killed_agent_of_two_and_then_a_node_that_keeps_failing_is_dropped(start, tmp_path):
    run = supervised(start, tmp_path, "--suspect-after", "2")
    for launch in (1, 2):
        run.until(lambda launch=launch: trains(run, launch))
        os.kill(run.of("started")[-1]["pids"][SECOND], signal.SIGKILL)
        run.until(lambda n=launch: len(run.of("failure")) == n)
    run.end()
    assert [(line["words"], line["node"]) for line in run.of("failure")] == [
        ("the launcher was killed by SIGKILL", SECOND)
    ] * 2
    assert [len(line["gpus"]) for line in run.of("launch")] == [2, 2, 1]
    assert run.of("dropped")[0]["gpus"] == [[SECOND, 0], [SECOND, 1]]
    assert all(line["found"] >= 3 for line in run.of("ended")[1:3]), "orphans and agent"


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
    run = supervised(start, tmp_path / "run", "--prefix", prefix)
    run.until(lambda: trains(run, 1))
    (tmp_path / "down").touch()
    os.kill(run.of("started")[-1]["pids"][SECOND], signal.SIGKILL)
    run.end()
    assert run.of("ended")[1]["unreachable"] == [SECOND]
    assert run.of("dropped")[0]["words"] == f"{SECOND} cannot be reached"
    assert [list(line["gpus"].items()) for line in run.of("launch")] == [
        [(FIRST, [0, 1]), (SECOND, [0, 1])],
        [(FIRST, [0, 1])],
    ]
