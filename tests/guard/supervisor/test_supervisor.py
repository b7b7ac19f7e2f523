"""The supervisor with real processes, killed for real: a training in miniature without torch.

At the end several nodes: two agents of torchrun on this machine, one of which is lost.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rmetric.cli.main import main
from rmetric.guard.layout import Layout
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor import Settings, processes
from rmetric.guard.supervisor.allocation import ShrinkData
from rmetric.guard.supervisor.attempt import Attempt, Look
from rmetric.guard.supervisor.journal import FolderLockedError, folder_lock
from rmetric.guard.supervisor.processes import Program
from rmetric.guard.supervisor.supervise import Supervisor
from rmetric.telemetry.lines import GpuVerdict, verdict_line
from tests.guard.supervisor import SMALL, TORCHRUN, SupervisedRun, supervise_command
from tests.monitor.webhook_server import WebhookServer

AGENT = (sys.executable, SMALL, "agent", "--ranks", "{gpus}", "--seconds", "0.01")


def supervisor(folder, faults=(), *, more=(), gpus=2, batch=None, webhook=None, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "faults.json").write_text(json.dumps(list(faults)))
    given = {"backoff_seconds": 0.01, "save_seconds": 5.0, "start_seconds": 20.0, "look_seconds": 0}
    given |= {"hang_seconds": 20.0, "poll_seconds": 0.03, "progress_seconds": 0.05}
    return Supervisor(
        RunFolder(folder),
        Program(arguments=(*AGENT, *more), prefixes={"": ()}),
        {"": tuple(range(gpus))},
        ShrinkData(Layout(data=gpus, accumulation=1 if batch is None else batch // gpus), batch),
        settings=Settings(**given | {"grace_seconds": 0.2} | settings),
        webhook=webhook,
        print_line=lambda line: None,
    )


def run(folder, faults=(), **more):
    return SupervisedRun(folder, supervisor(folder, faults, **more).run())


def at(folder, step, act):
    """A source of verdicts that calls `act` once, when a rank has reached `step`."""
    acts = [act]

    def poll():
        if acts and any(beat.step >= step for beat in folder.beats().values()):
            acts.pop()()
        return ()

    return SimpleNamespace(problem=None, poll=poll, close=lambda: None)


def fault(do, launch=1, rank=1, step=7):
    return {"launch": launch, "rank": rank, "step": step, "do": do}


def test_a_healthy_training_finishes_and_a_finished_folder_is_not_run_again(tmp_path):
    result = run(tmp_path)
    assert (result.code, result.summary.outcome, result.summary.step) == (0, "finished", 20)
    assert "of layout 2" in result.log(1)
    assert result.failures == []
    again = run(tmp_path)
    assert (again.code, len(again.of("launch"))) == (0, 1)
    assert again.of("over")[-1]["words"] == "it had finished before"


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("kill", "rank 1 was killed by SIGKILL, last seen at step 7"),
        ("raise", "rank 1 failed with exit code 1, last seen at step 7: RuntimeError: the loss"),
        ("agent", "the program was killed by SIGKILL"),
    ],
)
def test_a_rank_or_the_agent_fails_and_training_goes_on(tmp_path, do, words):
    result = run(tmp_path, [fault(do)])
    assert f"fault: {do}" in result.log(1)
    assert result.failures[0].startswith(words)
    assert (result.code, result.summary.outcome, result.summary.step) == (0, "finished", 20)
    assert result.of("resumed")[1]["step"] >= 5
    assert result.nobody_is_left()
    if do == "agent":  # its ranks outlived it, and one of them does not listen to TERM
        assert result.of("ended")[1]["killed"] >= 1
    (incident,) = result.summary.incidents
    assert incident.launch == 1
    assert incident.resume_seconds > 0
    assert incident.steps_lost < 20
    assert 0 < result.summary.ettr < 1


def test_a_hang_is_noticed_and_what_does_not_listen_is_killed(tmp_path):
    result = run(tmp_path, [fault("hang")], hang_seconds=0.4)
    assert "fault: hang" in result.log(1)
    assert "rank 1 is at step 7, the others at" in result.failures[0]
    assert result.of("ended")[1]["found"] >= 2
    assert result.code == 0
    assert result.summary.incidents[0].notice_seconds > 0.3
    assert result.nobody_is_left()


def test_a_failure_is_diagnosed_beside_the_restart_and_the_webhook_is_called(tmp_path):
    pytest.importorskip("drain3")
    faults = [fault("raise"), fault("raise", launch=2)]
    with WebhookServer() as server:
        url = f"discord+{server.url}/hook"
        result = run(tmp_path / "run", faults, look_seconds=60.0, webhook=url)
    assert (result.code, result.summary.step) == (0, 20)
    first, second = result.of("advice")
    assert (first["launch"], second["launch"]) == (1, 2)
    assert (first["restart"]["action"], second["restart"]["action"]) == ("stop", "stop")
    assert "at the same step" in second["restart"]["why"]
    posted = "\n".join(body["content"] for _, _, body in server.messages)
    assert f"restart: {second['restart']['text']}" in posted
    assert posted.count("FAILED: rank 1 failed") == 2
    assert "finished: the training exited with 0" in posted


def test_one_that_ends_with_0_before_it_has_finished_is_started_again(tmp_path):
    result = run(tmp_path, [fault("leave"), fault("leave", rank=0)])
    assert result.failures == ["it ended with exit code 0 before it had finished"]
    assert (result.code, result.summary.outcome, result.summary.step) == (0, "finished", 20)


def test_a_training_that_never_reports_its_end_is_not_restarted_for_ever(tmp_path):
    result = run(tmp_path, [fault("leave", launch=0, rank=r, step=20) for r in (0, 1)])
    assert (result.code, result.summary.outcome, result.summary.launches) == (0, "finished", 2)


@pytest.mark.parametrize("where", ["look", "exited"])
def test_an_internal_error_leaves_no_process_behind_and_is_named(tmp_path, monkeypatch, where):
    def falls_over(self, *arguments):
        if where == "exited" or self.tracker.beats or self.folder.beats(self.token):
            raise TypeError("unhashable type")
        return Look()

    monkeypatch.setattr(Attempt, where, falls_over)
    result = run(tmp_path, [fault("kill")] if where == "exited" else [], stop_seconds=0.2)
    assert result.code == 1
    assert result.summary.outcome == "failed"
    assert result.summary.words.startswith("internal error: TypeError: unhashable type (test_")
    assert result.nobody_is_left()


def test_what_cannot_be_started_is_reported(tmp_path):
    runner = supervisor(tmp_path)
    runner.program = Program(arguments=("no-such-program",), prefixes={"": ()})
    assert runner.run() == 1
    result = SupervisedRun(tmp_path, 1)
    assert "no-such-program cannot be started" in result.failures[0]
    assert result.summary.words.startswith("repeated immediate failure")


def test_a_fatal_gpu_is_drained_and_training_goes_on_with_the_rest(folder, tmp_path):
    verdict = GpuVerdict(gpu=2, time=time.time(), level="fatal", action="reboot",
                         reasons=("Xid 79: the GPU has fallen off the bus",))  # fmt: skip
    runner = supervisor(tmp_path, gpus=4, batch=12, more=("--every", "1000"))

    def report():  # as another process would
        folder.telemetry.mkdir(exist_ok=True)
        (folder.telemetry / "here.jsonl").write_bytes(verdict_line(verdict))

    runner.sources.append(at(folder, 9, report))
    result = SupervisedRun(tmp_path, runner.run())
    assert result.code == 0
    assert result.failures == ["GPU 2 is fatal: Xid 79: the GPU has fallen off the bus"]
    (request,) = result.of("asked")
    assert (request["fatal"], request["stop"]) == (True, True)
    (answered,) = result.of("answered")
    assert result.of("resumed")[1]["step"] == answered["step"] >= 9
    assert result.of("dropped")[0]["gpus"] == [["", 2]]
    first, second = (Layout.from_json(line["layout"]) for line in result.of("launch"))
    assert (first.data, second.data) == (4, 3)
    assert first.global_batch == second.global_batch == 12
    assert result.of("launch")[1]["gpus"] == {"": [0, 1, 3]}
    assert "of layout 3" in result.log(2)
    assert result.summary.steps_lost <= 3  # those of ranks that ran ahead: these are not in step
    (incident,) = result.summary.incidents
    assert incident.action == f"dropped GPU 2, checkpoint of step {answered['step']}, restarted"
    assert "Xid 79" in result.folder.summary.read_text()
    # Another supervisor on the folder does not take the GPU back.
    assert supervisor(tmp_path, gpus=4).run() == 0


def test_a_request_of_a_user_to_stop_is_obeyed(folder, tmp_path):
    runner = supervisor(tmp_path, more=("--seconds", "0.05"))
    runner.sources.append(at(folder, 3, lambda: folder.ask("user", "enough", stop=True)))
    result = SupervisedRun(tmp_path, runner.run())
    assert (result.code, result.summary.outcome) == (4, "stopped")
    assert [line["stop"] for line in result.of("request")] == [True]
    assert result.summary.step < 20
    result = run(tmp_path)
    assert (result.code, result.summary.step) == (0, 20)
    assert result.of("resumed")[1]["step"] >= 3


def test_two_supervisors_on_one_folder(tmp_path, capsys):
    with folder_lock(RunFolder(tmp_path)):
        with pytest.raises(FolderLockedError, match=rf"by process {os.getpid()} on "):
            supervisor(tmp_path).run()
        assert main(["supervise", str(tmp_path), "--", "true"]) == 3
    assert f"supervised already, by process {os.getpid()}" in capsys.readouterr().err
    assert run(tmp_path).code == 0


@pytest.fixture
def supervised(start, tmp_path):
    """A run in a process of its own, whose two ranks have made six steps."""
    command = supervise_command(
        tmp_path, "--gpus", "0-1", "--poll-seconds", "0.05", "--backoff-seconds", "0.01",
        "--grace-seconds", "0.3", "--", *AGENT, "--seconds", "0.05", "--steps", "60",
    )  # fmt: skip
    result = SupervisedRun(tmp_path, process=start(command, stderr=subprocess.PIPE, text=True))
    result.until(lambda: sum(beat.step >= 6 for beat in result.folder.beats().values()) == 2)
    return result


def test_sigterm_saves_and_ends_all(supervised, tmp_path):
    supervised.process.send_signal(signal.SIGTERM)
    result = supervised.end(143, seconds=20)
    assert (result.summary.outcome, result.summary.words) == ("stopped", "SIGTERM")
    (answered,) = result.of("answered")
    assert answered["step"] >= 6
    assert int((tmp_path / "saved").read_text()) == answered["step"]


def test_a_killed_supervisor_is_followed_by_one_that_ends_its_orphans_and_goes_on(
    supervised, tmp_path
):
    supervised.process.kill()
    supervised.process.wait()
    orphans = processes.of_launches(supervised.of("supervisor")[0]["token"])
    assert len(orphans) == 3  # the agent and two ranks train on
    with open(tmp_path / "journal.jsonl", "ab") as journal:
        journal.write(b'{"time": 17, "event": "prog')  # as a crash leaves it
    result = run(tmp_path, more=("--steps", "60"))
    assert not any(map(processes.is_alive, orphans))
    assert result.code == 0
    assert [line["found"] for line in result.of("ended")[:2]] == [0, 3]
    assert [line["launch"] for line in result.of("launch")] == [1, 2]
    assert result.of("resumed")[-1]["step"] >= 5
    assert result.nobody_is_left()


def test_a_disk_too_full_to_start_is_a_failure_like_any_other(tmp_path, monkeypatch):
    full = Mock(side_effect=[OSError(28, "No space left on device"), None])
    monkeypatch.setattr(RunFolder, "set_layout", full)
    runner = supervisor(tmp_path)
    runner.program = Program(arguments=(sys.executable, "-c", "pass"), prefixes={"": ()})
    assert runner.run() == 0
    done = SupervisedRun(tmp_path, 0)
    assert done.failures == ["disk full: it cannot be started: [Errno 28] No space left on device"]
    assert full.call_count == 2


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    lines = []
    runner = supervisor(tmp_path)
    runner._print_line = lines.append
    full = Mock(side_effect=chain([None] * 3, repeat(OSError(28, "No space left on device"))))
    monkeypatch.setattr("rmetric.guard.supervisor.journal.os.fsync", full)
    assert runner.run() == 0
    assert any("No space left" in line for line in lines)


#: Both are this machine; the first is where the others meet.
FIRST, SECOND = "localhost", "127.0.0.1"


def of_two_nodes(start, folder, *options):
    pytest.importorskip("torch")
    command = supervise_command(
        folder, "--nodes", f"{FIRST}:2,{SECOND}:2", "--batch", "8", "--poll-seconds", "0.1",
        "--backoff-seconds", "0.1", "--grace-seconds", "2", *options, "--",
        *TORCHRUN, SMALL, "worker", "--seconds", "0.1", "--steps", "60",
    )  # fmt: skip
    return SupervisedRun(folder, process=start(command, stderr=subprocess.PIPE, text=True))


def trains(run, launch):
    launches = run.of("launch")
    token = launches[-1]["token"] if len(launches) == launch else "-"
    beats = run.folder.beats(token).values()
    return len(beats) == 4 and all(beat.step >= 3 for beat in beats)


def test_a_killed_agent_of_two_and_then_a_node_that_keeps_failing_is_dropped(start, tmp_path):
    run = of_two_nodes(start, tmp_path, "--suspect-after", "2")
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


def test_a_node_that_cannot_be_reached_is_dropped(start, tmp_path):
    shell = tmp_path / "shell.py"
    shell.write_text(
        "import os, sys\n"
        f"if os.path.exists({str(tmp_path / 'down')!r}) and sys.argv[1] == {SECOND!r}:\n"
        "    sys.exit(255)\n"
        "os.execvp(sys.argv[2], sys.argv[2:])\n"
    )
    prefix = f"{sys.executable} {shell} {{node}}"
    run = of_two_nodes(start, tmp_path / "run", "--prefix", prefix)
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
