"""Arbitrary JSON in every file that the supervisor reads: reported once, and nothing falls over."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor import Settings
from rmetric.guard.supervisor.attempt import VerdictDedup, words_of
from rmetric.guard.supervisor.journal import Journal, console_line, journal_state, read_journal
from rmetric.guard.supervisor.launch_failure import HeartbeatTracker
from rmetric.guard.supervisor.summary import summarise, to_markdown
from rmetric.telemetry.lines import GpuVerdict, verdict_line
from rmetric.telemetry.sources import VerdictFiles
from tests.guard.supervisor import TWO
from tests.guard.supervisor.test_parts import CONSOLE_LINES

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
    asked = folder.request()
    assert asked is None or (type(asked.number), type(asked.stop)) == (int, bool)
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
    journal = Journal(path)
    journal.write("over", outcome="finished", words="")
    journal.close()
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
def test_an_invalid_file_is_reported_once_until_it_changes(tmp_path, content):
    folder = RunFolder(tmp_path)
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
