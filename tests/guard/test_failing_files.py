"""Files that fail, folders that were copied, links and odd JSON: the training goes on."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rmetric.guard import checkpoint_dir
from rmetric.guard.checkpoint_dir import MANIFEST_NAME, candidates
from rmetric.guard.checkpoints import Checkpoints
from rmetric.guard.guard import Guard
from rmetric.guard.layout import Layout
from rmetric.guard.policy import PolicyConfig
from rmetric.guard.run_folder import LAUNCH_VARIABLE, RunFolder
from rmetric.guard.supervisor import Settings, journal
from rmetric.guard.supervisor.allocation import shrink_data
from rmetric.guard.supervisor.launch_failure import HeartbeatTracker, _error_file
from rmetric.guard.supervisor.supervise import Supervisor
from rmetric.guard.trust import distrust
from tests.guard.supervisor import ONE, program
from tests.guard.test_trust import UNTOUCHED, planted, save, seal_again


def stale(*_arguments, **_more):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def supervise(folder, code="pass"):
    """Supervise a program without heartbeats to its end; the `supervisor` lines."""
    supervisor = Supervisor(
        RunFolder(folder), program(sys.executable, "-c", code), {"": (0,)},
        shrink_data(Layout(data=1), None), settings=Settings(poll_seconds=0.03, grace_seconds=0.2),
        again=True, print_line=lambda line: None,
    )  # fmt: skip
    supervisor.run()
    lines = journal.read_journal(RunFolder(folder).journal)
    return [line for line in lines if line["event"] == "supervisor"]


def test_a_copied_run_folder_does_not_end_the_processes_of_the_original(tmp_path):
    token = supervise(tmp_path / "a")[0]["token"]
    variables = os.environ | {LAUNCH_VARIABLE: f"{token}-2"}
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, env=variables) as original:
        subprocess.run(["cp", "-r", tmp_path / "a", tmp_path / "b"], check=True)
        copied = [line["token"] for line in supervise(tmp_path / "b")]
        assert original.poll() is None
        assert copied[0] == token != copied[1]
        assert supervise(tmp_path / "b")[-1]["token"] == copied[1]
        moved = (tmp_path / "a").rename(tmp_path / "moved")
        assert supervise(moved)[-1]["token"] == token
        original.wait(30)


def test_what_cannot_be_examined_is_not_trusted(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.ask("user", "now")
    monkeypatch.setattr(Path, "stat", stale)
    assert "cannot be examined: [Errno 116]" in distrust(folder.request_file)
    assert folder.request() is None


def test_earlier_checkpoints_that_cannot_be_listed_do_not_end_the_training(
    tmp_path, monkeypatch, caplog
):
    checkpoints = Checkpoints(tmp_path, fingerprint="m", asynchronous=False)
    state = {"weights": torch.ones(2)}
    guard = Guard(
        checkpoints, policy=PolicyConfig(interval_steps=100), state=lambda: state, signals={}
    )
    with monkeypatch.context() as broken:
        broken.setattr(Path, "iterdir", stale)
        guard.request("alarm", "loss 9", since=1)
        guard.step(2)
    assert "rmetric: earlier checkpoints cannot be marked suspect: [Errno 116]" in caplog.text
    guard.save(3)
    assert checkpoints.newest_good().suspect.since == 1
    guard.close()


def test_heartbeats_that_cannot_be_listed_are_reported(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.beat(0, 3)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "glob", stale)
        assert folder.beats() == {}
    (words,) = folder.take_problems()
    assert words.startswith(f"{folder.heartbeats} is ignored: [Errno 116]")
    assert list(folder.beats()) == [0]


def test_a_log_that_cannot_be_examined_has_its_last_size(tmp_path, monkeypatch):
    log = tmp_path / "log"
    log.write_text("a line")
    tracker = HeartbeatTracker(Settings(quiet_seconds=5.0), ONE, log, 0.0)
    assert tracker.look({}, 1.0) is None
    monkeypatch.setattr(Path, "stat", stale)
    assert tracker.look({}, 5.0) is None
    assert "no output for 6 s" in tracker.look({}, 7.0).words


def test_trainer_checkpoints_that_go_or_cannot_be_listed_end_nothing(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / checkpoint_dir.STATE_NAME).write_text("{}")
    stat = Path.stat

    def going(path, **more):
        found = stat(path, **more)
        if path.parent.name == "checkpoint-2":
            path.unlink()
        return found

    with monkeypatch.context() as race:
        race.setattr(Path, "stat", going)
        assert {one.step for one in checkpoint_dir.checkpoints_in(tmp_path)} >= {1, 3}
    with monkeypatch.context() as broken:
        broken.setattr(Path, "iterdir", stale)
        checkpoint_dir.rotate(tmp_path, 1, None)
    assert f"rmetric: checkpoints in {tmp_path} cannot be rotated: [Errno 116]" in caplog.text
    assert len(list(tmp_path.iterdir())) == 3


def test_a_heartbeat_that_cannot_be_read_for_a_moment_is_no_hang(tmp_path):
    folder = RunFolder(tmp_path)
    folder.beat(0, 3)
    beats, now = folder.beats(), 0.0
    limits = Settings(start_seconds=5.0, hang_seconds=20.0)
    tracker = HeartbeatTracker(limits, ONE, tmp_path / "log", now)
    for now in (1.0, 10.0):
        assert tracker.look(beats, now) is None
    assert tracker.look({}, 11.0) is None
    assert tracker.last_sign == beats[0].time
    assert tracker.look({}, 22.0).kind == "hang"


def test_a_file_system_without_locks_is_no_other_supervisor(tmp_path, monkeypatch):
    def flock(*_arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(journal.fcntl, "flock", flock)
    folder = RunFolder(tmp_path)
    with pytest.raises(OSError, match=r"cannot be locked: No locks available.*lock'"):
        journal.folder_lock(folder).__enter__()


@pytest.mark.parametrize(
    "changed", [{"serial": "3"}, {"step": True}, {"request": None}, {"written": "now"}, None]
)
def test_a_manifest_of_other_types_is_a_problem_and_not_an_error(tmp_path, changed):
    for step in (1, 2):
        assert save(tmp_path, step=step).step == step
    path = tmp_path / "step-2" / MANIFEST_NAME
    if changed:
        seal_again(path.parent, **changed)
    else:
        path.write_text('{"about": ' + "[" * 100_000)
    good, (problem,) = candidates(tmp_path)
    assert [one.step for one in good] == [1]
    assert str(path) in problem
    if changed:
        assert next(iter(changed)) in problem


def test_the_log_of_the_spare_is_no_link_and_needs_no_folder_that_can_be_made(tmp_path):
    from rmetric.guard.supervisor.processes import WarmSpare

    command = [sys.executable, "-m", "torch.distributed.run", "a.py"]
    target = planted(tmp_path / "logs" / "spare.log", tmp_path / "outside")
    spare = WarmSpare([], tmp_path / "logs" / "spare.log")
    spare.start(command, "spare-test-1", 2)
    assert spare.pids == []
    assert target.read_text() == UNTOUCHED
    (tmp_path / "file").touch()
    spare = WarmSpare([], tmp_path / "file" / "spare.log")
    spare.start(command, "spare-test-2", 2)
    assert spare.pids == []


@pytest.mark.parametrize("kind", ["link", "pipe", "deep"])
def test_an_error_file_that_is_a_link_a_pipe_or_too_deep_is_ignored(tmp_path, kind):
    path = tmp_path / "logs" / "launch-1-error.json"
    if kind == "link":
        planted(path, tmp_path / "outside")
    else:
        path.parent.mkdir()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.write_text('{"message": ' + "[" * 100_000)
    assert _error_file(path) == ""
    path.unlink()
    path.write_text('{"message": {"message": "ValueError: no beans"}}')
    assert _error_file(path) == "ValueError: no beans"
