"""Files with arbitrary JSON, links, copied folders, files that fail: nothing falls over."""

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rmetric.guard import checkpoint_dir
from rmetric.guard.checkpoint_dir import MANIFEST_NAME, candidates
from rmetric.guard.layout import Layout
from rmetric.guard.run_folder import LAUNCH_VARIABLE, RunFolder
from rmetric.guard.supervisor import Settings, journal
from rmetric.guard.supervisor.allocation import ShrinkData
from rmetric.guard.supervisor.attempt import VerdictDedup, words_of
from rmetric.guard.supervisor.journal import Journal, console_line, journal_state, read_journal
from rmetric.guard.supervisor.launch_failure import HeartbeatTracker, _error_file
from rmetric.guard.supervisor.processes import WarmSpare
from rmetric.guard.supervisor.summary import summarise, to_markdown
from rmetric.guard.supervisor.supervise import Supervisor
from rmetric.guard.trust import distrust
from rmetric.telemetry.lines import GpuVerdict, verdict_line
from rmetric.telemetry.sources import VerdictFiles
from tests.guard.supervisor import ONE, TORCHRUN, TWO, SupervisedRun, program
from tests.guard.supervisor.test_parts import CONSOLE_LINES
from tests.guard.test_suspect import a_guard
from tests.guard.test_trust import UNTOUCHED, planted, save, seal_again

JSON = st.recursive(
    st.none() | st.booleans() | st.text() | st.floats() | st.integers(-(10**30), 10**30)
    | st.sampled_from([1e308, -1, 0, 2**63, 10**400, "3", "rank-0", "", "training"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def like(good):
    """Objects with the fields of `good`, some of them replaced by arbitrary JSON, or absent."""
    changes = st.fixed_dictionaries({}, optional=dict.fromkeys(good, JSON))
    return st.builds(
        lambda changed, gone: {k: v for k, v in {**good, **changed}.items() if k not in gone},
        changes, st.sets(st.sampled_from(sorted(good)), max_size=1),
    ) | JSON  # fmt: skip


BEAT = {"rank": 0, "pid": 7, "node": "n", "launch": "x-1", "step": 3, "phase": "training",
        "time": 1e9, "resumed": 0, "every": 1.0, "problem": ""}  # fmt: skip
REQUEST = {"number": 3, "source": "user", "reason": "r", "fatal": False, "stop": True}


@given(entries=st.lists(like(BEAT), max_size=3))
def test_any_heartbeat_is_valid_or_ignored(tmp_path_factory, entries):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.heartbeats.mkdir()
    for rank, entry in enumerate(entries):
        (folder.heartbeats / f"rank-{rank}.json").write_text(json.dumps(entry))
    beats = folder.beats("x-1")
    for beat in beats.values():
        assert all(type(n) is int for n in (beat.rank, beat.step, beat.pid))
        assert all(isinstance(text, str) for text in (beat.node, beat.launch, beat.problem))
    tracker = HeartbeatTracker(Settings(hang_seconds=1.0), TWO, folder.path / "log", 0.0)
    for now in (0.0, 0.5, 2000.0):
        tracker.look(beats, now)


@given(request=like(REQUEST), answered=like({"number": 2, "step": 5}), layout=like({"data": 2}))
def test_any_request_answer_and_layout_is_valid_or_ignored(
    tmp_path_factory, request, answered, layout
):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    for path, entry in ((folder.request_file, request), (folder.answered_file, answered),
                        (folder.layout_file, layout)):  # fmt: skip
        path.write_text(json.dumps(entry))
    received = folder.request()
    assert received is None or (type(received.number), type(received.stop)) == (int, bool)
    assert type(folder.answered()) is int
    assert type(folder.answered_step()) in (int, type(None))
    assert folder.layout() is None or folder.layout().num_gpus >= 1
    folder.withdraw()
    number = folder.ask("user", "again")
    assert folder.request().number == number > folder.answered()


LINES = [line for line, _ in CONSOLE_LINES]


@example([{"time": 1.0, "event": "waiting"}])
@example([{"time": 1.0, "event": "failure", "gpu": ["", 1]}])
@example([{"time": 1.0, "event": "of a later version", "passed_over": 3}])
@given(st.lists(st.sampled_from(LINES).flatmap(lambda good: like({"time": 1.0, **good}))))
def test_any_journal_of_an_earlier_supervisor_is_read(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("run") / "journal.jsonl"
    path.write_bytes(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
    lines = read_journal(path)
    assert journal_state(lines).launches >= 0
    for line in lines:
        console_line(line)
    json.dumps(to_markdown(summarise(lines)))
    over = Journal(path)
    over.write("over", outcome="finished", words="")
    over.close()
    assert summarise(read_journal(path)).outcome == "finished"


@given(st.lists(like(json.loads(verdict_line(GpuVerdict(gpu=1, time=5.0, level="risk"))))))
def test_any_verdict_line_is_valid_or_ignored(tmp_path_factory, entries):
    folder = tmp_path_factory.mktemp("telemetry")
    data = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    (folder / "n.jsonl").write_bytes(data)
    files = VerdictFiles(folder)
    changes = VerdictDedup([""], "here")
    for verdict in files.poll():
        assert verdict.gpu >= 0
        changes.changed(verdict)
        words_of(verdict)


@pytest.mark.parametrize(
    "content", ['{"rank": [0]}', "[[" * 50_000, '{"rank": 0, "step": 1e999}', "nonsense", "\x00"]
)
def test_an_invalid_file_is_reported_once_until_it_changes(folder, content):
    folder.beat(0, 3)
    folder.beat(1, 3)
    path = folder.heartbeats / "rank-0.json"
    path.write_text(content)
    assert list(folder.beats()) == [1]
    (words,) = folder.take_problems()
    assert words.startswith(f"{path} is ignored: ")
    folder.beats()
    assert folder.take_problems() == []
    path.write_text('{"rank": true}')
    folder.beats()
    assert len(folder.take_problems()) == 1
    folder.beat(0, 4)
    assert (folder.beats()[0].step, folder.take_problems()) == (4, [])


def test_concurrent_requests_get_a_number_each_and_none_is_lost(tmp_path):
    def ask(number):
        return RunFolder(tmp_path).ask("user", f"asker {number}", stop=number == 7)

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(ask, range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert RunFolder(tmp_path).request().number == 40
    assert RunFolder(tmp_path).request().stop


def stale(*_arguments, **_more):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def supervise(folder, code="pass"):
    """Supervise a program without heartbeats to its end; the `supervisor` lines."""
    supervisor = Supervisor(
        RunFolder(folder), program(sys.executable, "-c", code), {"": (0,)},
        ShrinkData(Layout(data=1), None), settings=Settings(poll_seconds=0.03, grace_seconds=0.2),
        again=True, print_line=lambda line: None,
    )  # fmt: skip
    supervisor.run()
    return SupervisedRun(folder).of("supervisor")


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


def test_what_cannot_be_examined_is_not_trusted(folder, monkeypatch):
    folder.ask("user", "now")
    monkeypatch.setattr(Path, "stat", stale)
    assert "cannot be examined: [Errno 116]" in distrust(folder.request_file)
    assert folder.request() is None


def test_earlier_checkpoints_that_cannot_be_listed_do_not_end_the_training(
    tmp_path, monkeypatch, caplog
):
    guard = a_guard(tmp_path, interval=100)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "iterdir", stale)
        guard.request("alarm", "loss 9", since=1)
        guard.step(2)
    assert "rmetric: earlier checkpoints cannot be marked suspect: [Errno 116]" in caplog.text
    guard.save(3)
    assert guard.checkpoints.newest_good().suspect.since == 1
    guard.close()


def test_heartbeats_that_cannot_be_listed_are_reported(folder, monkeypatch):
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
        assert {checkpoint.step for checkpoint in checkpoint_dir.checkpoints_in(tmp_path)} >= {1, 3}
    with monkeypatch.context() as broken:
        broken.setattr(Path, "iterdir", stale)
        checkpoint_dir.rotate(tmp_path, 1, None)
    assert f"rmetric: checkpoints in {tmp_path} cannot be rotated: [Errno 116]" in caplog.text
    assert len(list(tmp_path.iterdir())) == 3


def test_a_heartbeat_that_cannot_be_read_for_a_moment_is_no_hang(folder, tmp_path):
    folder.beat(0, 3)
    beats, now = folder.beats(), 0.0
    limits = Settings(start_seconds=5.0, hang_seconds=20.0)
    tracker = HeartbeatTracker(limits, ONE, tmp_path / "log", now)
    for now in (1.0, 10.0):
        assert tracker.look(beats, now) is None
    assert tracker.look({}, 11.0) is None
    assert tracker.last_sign == beats[0].time
    assert tracker.look({}, 22.0).kind == "hang"


def test_a_file_system_without_locks_is_no_other_supervisor(folder, monkeypatch):
    def flock(*_arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(journal.fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"cannot be locked: No locks available.*lock'"):
        journal.folder_lock(folder).__enter__()


@pytest.mark.parametrize(
    "changed",
    [{"serial": "3"}, {"step": True}, {"request": None}, {"written": "now"},
     {"suspect": {"since": "10", "reason": "x"}}, None],
)  # fmt: skip
def test_a_manifest_of_other_types_is_a_problem_and_not_an_error(tmp_path, changed):
    for step in (1, 2):
        assert save(tmp_path, step=step).step == step
    path = tmp_path / "step-2" / MANIFEST_NAME
    if changed:
        seal_again(path.parent, **changed)
    else:
        path.write_text('{"about": ' + "[" * 100_000)
    good, (problem,) = candidates(tmp_path)
    assert [checkpoint.step for checkpoint in good] == [1]
    assert str(path) in problem
    if changed:
        assert f"at `$.{next(iter(changed))}" in problem


def test_the_log_of_the_spare_is_no_link_and_needs_no_folder_that_can_be_made(tmp_path):
    target = planted(tmp_path / "logs" / "spare.log", tmp_path / "outside")
    spare = WarmSpare([], tmp_path / "logs" / "spare.log")
    spare.start([*TORCHRUN, "a.py"], "spare-test-1", 2)
    assert spare.pids == []
    assert target.read_text() == UNTOUCHED
    (tmp_path / "file").touch()
    spare = WarmSpare([], tmp_path / "file" / "spare.log")
    spare.start([*TORCHRUN, "a.py"], "spare-test-2", 2)
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
