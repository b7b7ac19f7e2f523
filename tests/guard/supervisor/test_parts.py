"""The parts of the supervisor one by one: commands, diagnosis, journal, tracker, summary."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from queue import SimpleQueue
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.cli import supervise
from rmetric.cli.main import main
from rmetric.guard.checkpoint_dir import CheckpointDirectory, LastCheckpoint, last_checkpoint
from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec, plan
from rmetric.guard.planner.cluster import Cluster
from rmetric.guard.run_folder import LAUNCH_VARIABLE, RunFolder
from rmetric.guard.supervisor import Settings, processes
from rmetric.guard.supervisor.allocation import Allocation, NothingFitsError, ShrinkData, by_model
from rmetric.guard.supervisor.attempt import VerdictDedup, fresh_verdicts
from rmetric.guard.supervisor.journal import Journal, console_line, journal_state, read_journal
from rmetric.guard.supervisor.launch_failure import HeartbeatTracker
from rmetric.guard.supervisor.processes import Program, option_of
from rmetric.guard.supervisor.summary import summarise, to_markdown
from rmetric.telemetry.lines import GpuVerdict, verdict_line
from rmetric.telemetry.sources import VerdictFiles
from tests.guard.planner.test_planner import LLAMA_8B
from tests.guard.supervisor import ONE, beat, launched, options_of, program

TWO = Allocation(gpus={"": (0, 2)}, layout=Layout(tensor=1, data=2, accumulation=4))


@pytest.mark.parametrize("options", ["--nproc-per-node 4", "--nproc_per_node=4", "--nnodes=9", ""])
@pytest.mark.parametrize("own", ["train.py", "-m train", "--module train"])
@pytest.mark.parametrize(
    "launcher",
    ["torchrun", "ft_launcher", "python -u /bin/torchrun", "python -m torch.distributed.run"],
)
def test_torchrun_gets_the_planned_number_and_the_script_keeps_its_own(launcher, own, options):
    after = [*own.split(), "--nproc-per-node", "9"]
    prog = program(*launcher.split(), *options.split(), *after, "--dp={data}")
    (command,) = prog.commands(TWO, 29500).values()
    n, end = len(launcher.split()), -len(after) - 1
    assert command[:n] == launcher.split()
    assert {"--nproc-per-node=2", "--nnodes=1", "--standalone"} == set(command[n:end])
    assert command[end:] == [*after, "--dp=2"]


def test_a_rendezvous_of_the_users_own_is_kept():
    prog = program("torchrun", "--master-port", "1234", "--nproc-per-node=2", "train.py")
    (command,) = prog.commands(TWO, 29500).values()
    assert ("--standalone" in command, option_of(command, "master-port")) == (False, "1234")


def test_nodes_meet_at_the_first_and_a_remote_shell_gets_quoted_words():
    two = Allocation(gpus={"b": (1,), "c": (3,)}, layout=Layout(data=2))
    prog = Program(
        arguments=("torchrun", "train.py", "a b; rm"),
        prefixes={"a": ("ssh", "a"), "b": ("ssh", "b"), "c": ("ssh", "c")},
    )
    commands = prog.commands(two, 29511)
    assert [option_of(commands[node], "node-rank") for node in "bc"] == ["0", "1"]
    for command in commands.values():
        assert option_of(command, "master-addr") == "b"
        assert option_of(command, "master-port") == "29511"
        assert option_of(command, "nnodes") == "2"
        assert option_of(command, "nproc-per-node") == "1"
    remote = prog.behind("c", commands["c"], {"RMETRIC_LAUNCH": "x-1"})
    assert remote[:2] == ["ssh", "c"]
    assert "RMETRIC_LAUNCH=x-1" in remote
    assert remote[-1] == "'a b; rm'"


class TestPulse:
    def tracker(self, tmp_path, **timeouts):
        return HeartbeatTracker(Settings(**timeouts), TWO, tmp_path / "log", now=0.0)

    def test_each_phase_has_its_timeout(self, tmp_path):
        for phase, limit in (("starting", 50.0), ("training", 10.0), ("saving", 30.0)):
            tracker = self.tracker(
                tmp_path, start_seconds=50.0, hang_seconds=10.0, saving_seconds=30.0
            )
            beats = {0: beat(0, 3, phase), 1: beat(1, 3, phase)}
            assert tracker.look(beats, 5.0) is None
            assert tracker.look(beats, 5.0 + limit) is None
            failure = tracker.look(beats, 5.1 + limit)
            assert failure.kind == "hang"
            assert f"while {phase}" in failure.words

    def test_one_silent_rank_is_enough(self, tmp_path):
        tracker = self.tracker(tmp_path, hang_seconds=10.0)
        assert tracker.look({0: beat(0, 3), 1: beat(1, 3)}, 0.0) is None
        assert tracker.look({0: beat(0, 4), 1: beat(1, 3)}, 11.0).rank == 1

    def test_a_clock_that_is_wrong_is_no_hang(self, tmp_path):
        tracker = self.tracker(tmp_path, hang_seconds=10.0)
        for n in range(5):
            assert tracker.look({0: beat(0, n, time=-1e6 + n)}, n * 9.0) is None

    def test_a_program_that_never_beats_lives_while_it_prints(self, tmp_path):
        tracker = self.tracker(tmp_path, start_seconds=50.0)
        for now in range(0, 200, 40):
            (tmp_path / "log").write_text("step\n" * (now + 1))
            assert tracker.look({}, float(now)) is None
        assert tracker.look({}, 210.0) is None
        failure = tracker.look({}, 210.1)
        assert failure.kind == "hang"
        assert failure.words == "training has not started after 50 s, the limit is 50"

    def test_where_it_came_back_is_what_its_first_beat_stated(self, tmp_path):
        tracker = self.tracker(tmp_path)
        tracker.look({0: beat(0, 20, "starting")}, 0.0)
        assert (tracker.resumed, tracker.step) == (None, None)
        tracker.look({0: beat(0, 23, time=7.0, resumed=20)}, 1.0)
        assert (tracker.resumed, tracker.resumed_at, tracker.step) == (20, 7.0, 23)


def test_verdicts_are_news_once_and_only_of_gpus_that_are_ours():
    news = VerdictDedup(["a", "b"], "here")
    bad = GpuVerdict(gpu=1, node="a", time=1.0, level="fatal", action="drain")
    assert news.changed(bad) == ("a", 1)
    assert news.changed(bad) is None
    assert news.changed(GpuVerdict(gpu=1, node="a", time=2.0)) == ("a", 1)
    assert news.changed(bad) == ("a", 1)
    elsewhere = GpuVerdict(gpu=1, node="c", time=1.0, level="fatal", action="drain")
    assert news.changed(elsewhere) is None
    alone = VerdictDedup([""], "here")
    for node in ("", "here"):
        assert alone.changed(GpuVerdict(gpu=len(node), node=node, time=1.0, level="risk"))
    assert alone.changed(GpuVerdict(gpu=3, node="there", time=1.0, level="risk")) is None


def test_of_old_verdicts_only_the_last_and_only_if_fresh(tmp_path):
    lines = [GpuVerdict(gpu=0, time=500.0, level="fatal", action="drain"),
             GpuVerdict(gpu=1, time=900.0, level="fatal", action="drain"),
             GpuVerdict(gpu=1, time=950.0, level="risk", action="watch")]  # fmt: skip
    (tmp_path / "n.jsonl").write_bytes(b"".join(map(verdict_line, lines)) + b"{half")
    fresh = fresh_verdicts(VerdictFiles(tmp_path), now=1200.0)
    assert [(v.gpu, v.level) for v in fresh] == [(1, "risk")]


class TestJournal:
    @given(cut=st.integers(0, 400))
    def test_a_journal_that_was_cut_short_is_read_and_continued(self, tmp_path_factory, cut):
        path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
        journal = Journal(path)
        for n in range(5):
            journal.write("progress", launch=1, at=1.0, step=n, words="ü" * n, loss=float("nan"))
        journal.close()
        data = path.read_bytes()[: -cut or None]
        path.write_bytes(data)
        whole = [json.loads(line)["step"] for line in data.split(b"\n")[:-1]]
        again = Journal(path)
        again.write("over", outcome="finished")
        again.close()
        lines = read_journal(path)
        kept = [line["step"] for line in lines[:-1]]
        assert kept[: len(whole)] == whole
        assert len(kept) <= len(whole) + 1  # a line that lacks only its end is whole
        assert lines[-1]["outcome"] == "finished"

    def test_a_full_disk_raises_when_a_line_is_written_and_not_again_at_the_end(self, tmp_path):
        journal = Journal(tmp_path / "journal.jsonl")
        journal._file.close()
        journal._file = open("/dev/full", "ab")  # noqa: SIM115
        with pytest.raises(OSError, match="No space left"):
            journal.write("launch")
        journal.close()

    def test_the_past(self):
        lines = [
            {"event": "launch"}, {"event": "progress", "step": 9}, {"event": "waiting"},
            {"event": "dropped", "gpus": [["", 2]]}, {"event": "launch"},
            {"event": "enough progress"}, {"event": "waiting"},
        ]  # fmt: skip
        state = journal_state(lines)
        assert (state.launches, state.restarts, state.best_step) == (2, 1, 9)
        assert (state.dropped, state.outcome) == ([("", 2)], "")
        assert journal_state([*lines, {"event": "over", "outcome": "gave up"}]).outcome == "gave up"


LAST_SAVE = ("not saved", "saved again")
STORY = [
    {"time": 0.0, "event": "supervisor"},
    {"time": 1.0, "event": "launch", "launch": 1, "gpus": {"": [0, 1]}, "words": "DP2"},
    {"time": 10.0, "event": "resumed", "launch": 1, "step": 0, "at": 10.0},
    {"time": 20.0, "event": "progress", "launch": 1, "step": 100, "at": 20.0},
    {"time": 21.0, "event": "request", "number": 0, "source": "rule", "words": "w", "stop": False},
    {"time": 22.0, "event": "request", "number": 1, "source": "user", "words": "x", "stop": False},
    {"time": 23.0, "event": "failure", "launch": 1, "kind": "signal", "words": "rank 1 was killed",
     "last_sign": 21.0, "checkpoint": 90},
    {"time": 24.0, "event": "dropped", "gpus": [["", 1]], "words": "bad"},
    {"time": 24.0, "event": "launch", "launch": 2, "gpus": {"": [0]}, "words": "DP1"},
    {"time": 25.0, "event": "failure", "launch": 2, "kind": "exit", "words": "again",
     "last_sign": None},
    {"time": 26.0, "event": "launch", "launch": 3, "gpus": {"": [0]}, "words": "DP1"},
    {"time": 30.0, "event": "resumed", "launch": 3, "step": 80, "at": 30.0,
     "passed_over": 90},
    {"time": 31.0, "event": "request", "number": 2, "source": "user", "words": "y", "stop": False},
    {"time": 32.0, "event": "answered", "number": 2, "step": 160},
    {"time": 40.0, "event": "progress", "launch": 3, "step": 180, "at": 40.0},
    {"time": 50.0, "event": "over", "outcome": "finished", "words": "the training exited with 0",
     "checkpoint": 160},
]  # fmt: skip


class TestSummary:
    def test_the_time_between_two_supervisors_does_not_count(self):
        later = [{**line, "time": line["time"] + 1e6, "launch": 4} for line in STORY[:2]]
        summary = summarise([*STORY, *later])
        assert summary.wall_seconds == 51.0
        assert summary.outcome == "running or cut off"

    def test_as_markdown(self):
        assert to_markdown(summarise(STORY)) == (
            "# Supervisor summary\n\n"
            "**finished**: the training exited with 0\n\n"
            "- step reached: 180\n"
            "- 3 launches, 2 failures, 20 steps lost\n"
            "- ETTR 36.0%: 18.0 s advanced the training of 50.0 s\n"
            "- newest good checkpoint: step 160\n"
            "- checkpoints requested by the supervisor: 0\n"
            "- user requests: 2, 1 of them unanswered\n"
            "- **launch 3 resumed at step 80 and skipped the checkpoint of step 90: damaged,"
            " suspect or of another model? see logs/launch-3.log**\n"
            "- dropped: GPU 1\n"
            "- output of the last launch: logs/launch-3.log\n\n"
            "| launch | cause | action | new layout | steps lost | noticed after s |"
            " resumed after s |\n"
            "| --- | --- | --- | --- | --- | --- | --- |\n"
            "| [1](logs/launch-1.log) | rank 1 was killed |"
            " dropped GPU 1, restarted | DP1 | 20 | 2.0 | - |\n"
            "| [2](logs/launch-2.log) | again | restarted | DP1 | 0 | - | 5.0 |\n"
        )

    def test_what_a_training_without_heartbeats_achieved_is_unknown_and_not_nothing(self):
        summary = summarise([*STORY[:2], {**STORY[-1], "time": 9.0}])
        assert summary.ettr is None
        assert "ETTR unknown" in to_markdown(summary)

    def test_it_says_that_saves_fail_until_one_does_not(self):
        lines = [STORY[1], {"time": 2.0, "event": "not saved", "words": "step 50: no space"}]
        assert "**the last save failed**: step 50: no space" in to_markdown(summarise(lines))
        lines.append({"time": 3.0, "event": "saved again", "words": ""})
        assert "the last save failed" not in to_markdown(summarise(lines))

    @given(st.lists(st.sampled_from(STORY[:-1]), max_size=30))
    def test_of_any_lines_it_says_something_between_0_and_1(self, lines):
        lines = [{**line, "time": float(n), "at": float(n)} for n, line in enumerate(lines)]
        summary = summarise(lines)
        assert summary.ettr is None or 0 <= summary.ettr <= 1
        assert summary.steps_lost >= 0
        assert to_markdown(summary)


class TestLastCheckpoint:
    def make(self, folder, step):
        part = folder.checkpoints / f"{step}.part"
        part.mkdir(parents=True)
        CheckpointDirectory(folder.checkpoints, keep=9, fingerprint="m").commit(
            part, step, about={}, request=0, world_size=1, files={}
        )

    def test_the_newest_good_one_and_one_that_cannot_be_read(self, folder):
        assert last_checkpoint(folder.checkpoints) == LastCheckpoint()
        for step in (10, 40, 30):  # 30 after 40: it was gone back to
            self.make(folder, step)
        assert last_checkpoint(folder.checkpoints) == LastCheckpoint(good=30, there=30)
        (folder.checkpoints / "step-40" / "good.json").write_text("{cut")
        assert last_checkpoint(folder.checkpoints) == LastCheckpoint(good=30, there=40)

    @pytest.mark.parametrize(("back", "passed_over"), [(10, 20), (20, None)])
    def test_a_launch_that_passes_one_over_says_so(self, folder, back, passed_over):
        for step in (10, 20):
            self.make(folder, step)
        attempt = launched(folder, "true", report=(report := Mock()))
        attempt.folder.beats = lambda launch: {0: beat(0, back, resumed=back)}
        attempt.look(1.0)
        fields = {call.args[0]: call.kwargs for call in report.call_args_list}["resumed"]
        assert (fields["step"], fields["passed_over"]) == (back, passed_over)


FULL = "[Errno 28] No space left on device"
UNSAVED = "the training exited with 0 at step 20 or later, but there is no good checkpoint"


@pytest.mark.parametrize(
    ("code", "beats", "disk", "expected"),
    [
        (0, beat(0, 20, "finished"), "", {"stopped": False, "early": False, "unsaved": ""}),
        (0, beat(0, 20), "", {"stopped": False, "early": True, "unsaved": ""}),
        (0, beat(0, 20, "finished", problem=f"OSError: {FULL}"), "",
         {"unsaved": f"disk full: {UNSAVED}: OSError: {FULL}"}),
        # Where no later heartbeat could be written, the last is of step 20 in training.
        (0, beat(0, 20), FULL, {"unsaved": f"disk full: {UNSAVED}: {FULL}"}),
        (7, beat(0, 20), FULL,
         {"failure": f"disk full: the training failed with exit code 7: {FULL}"}),
    ],
)  # fmt: skip
def test_how_a_launch_ended(tmp_path, monkeypatch, code, beats, disk, expected):
    monkeypatch.setattr(RunFolder, "write_problem", lambda self: disk)
    attempt = launched(RunFolder(tmp_path), "true")
    attempt.tracker.look({0: beats}, 1.0)
    attempt._problem = beats.problem
    found = attempt.exited("", code)
    if code:
        found["failure"] = found["failure"].words
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("code", [0, 6])
def test_a_launch_that_its_rescue_holds_is_held_with_any_exit_code(folder, code):
    attempt = launched(folder, "true")
    folder.hold.mkdir()
    verdict = {"step": 5, "reason": "it stays", "saved": "weights.pt"}
    folder.verdict_file.write_text(json.dumps(verdict))
    assert attempt.exited("", code) == {
        "held": "the rescue holds it at step 5: it stays; its weights are in weights.pt, the "
        f"verdict is in {folder.verdict_file}"
    }
    # In a later launch the verdict is that of an earlier one.
    assert "held" not in launched(folder, "true").exited("", code)


def test_heartbeats_state_that_saves_begin_to_fail_and_that_they_succeed_again(tmp_path):
    attempt = launched(RunFolder(tmp_path), "true", report=(report := Mock()))
    for step, problem in enumerate(["", "no space", "no space", "", "gone"]):
        beats = {0: beat(0, step, problem=problem)}
        attempt.folder.beats = lambda launch, beats=beats: beats
        attempt.look(1.0)
    calls = [call for call in report.call_args_list if call.args[0] in LAST_SAVE]
    found = [(call.args[0], call.kwargs["words"]) for call in calls]
    assert found == [("not saved", "no space"), ("saved again", ""), ("not saved", "gone")]


def test_a_training_that_goes_on_after_a_wait_is_not_taken_for_a_hang(folder):
    attempt = launched(folder, "true", hang_seconds=20.0, quiet_seconds=20.0)
    beats = {0: beat(0, 5, resumed=5)}
    attempt.folder.beats = lambda launch: beats

    def hangs(now):
        return attempt.look(now).hung is not None

    assert not hangs(1.0)
    folder.hold.mkdir()
    folder.verdict_file.write_text(json.dumps({"step": 5, "reason": "it stays"}))
    assert not hangs(1000.0)
    folder.verdict_file.unlink()
    folder.verdict_file.write_text(json.dumps({"step": 5, "went_on": "SIGUSR1"}))
    assert not hangs(1001.0)  # its next heartbeat comes with its next step
    assert not hangs(1019.0)
    assert hangs(1021.0)


#: Lines of the journal -> text at the terminal.
CONSOLE_LINES = [
    ({"event": "supervisor", "token": "t" * 16, "command": ["torchrun", "a b.py"],
      "gpus": {"": [0, 1, 3]}},
     "supervises `torchrun 'a b.py'` on GPUs 0-1,3"),
    ({"event": "launch", "launch": 2, "gpus": {"a": [0], "b": [1, 2]}, "words": "DP2"},
     "launch 2: DP2, node a GPU 0, node b GPUs 1-2"),
    ({"event": "started", "launch": 2, "pids": {"": 3}}, ""),
    ({"event": "ended", "words": "remains of an earlier supervisor", "found": 0, "killed": 0,
      "left": 0, "unreachable": []}, ""),
    ({"event": "ended", "words": "rank 1 was killed", "found": 3, "killed": 1, "left": 0,
      "unreachable": ["b"]},
     "ended 3 processes, 1 of them had to be killed; not reached: b (rank 1 was killed)"),
    ({"event": "resumed", "launch": 2, "step": 10, "at": 9.0, "passed_over": 20},
     "launch 2 resumed training at step 10; the checkpoint of step 20 was skipped"),
    ({"event": "verdict", "gpu": ["a", 1], "level": "fatal", "action": "restart_application",
      "words": "node a GPU 1 is fatal: Xid 94"},
     "node a GPU 1 is fatal: Xid 94 (advised: restart application)"),
    ({"event": "asked", "number": 3, "source": "risk", "reason": "GPU 1 is at risk", "fatal": False,
      "stop": False}, "requested a checkpoint (request 3): GPU 1 is at risk"),
    ({"event": "request", "number": 4, "source": "user", "stop": True, "words": "the\x1b driver"},
     "a user requested a checkpoint and a stop (request 4): the\\x1b driver"),
    ({"event": "answered", "number": 4, "step": 30},
     "request 4 answered by the checkpoint of step 30"),
    ({"event": "failure", "kind": "exception", "words": "rank 1 failed", "rank": 1, "gpu": ["", 1],
      "launch": 2, "checkpoint": 30},
     "FAILED: rank 1 failed (on GPU 1); newest good checkpoint: step 30; see logs/launch-2.log"),
    ({"event": "dropped", "gpus": [["", 2]], "words": "Xid 79"}, "GPU 2 dropped: Xid 79"),
    ({"event": "progress", "launch": 1, "step": 100, "at": 20.0}, ""),
    ({"event": "enough progress", "step": 3},
     "step 3: enough new steps, restart counter reset"),
    ({"event": "waiting", "words": "before the next launch", "seconds": 0.0}, ""),
    ({"event": "not saved", "words": "the disk is full"}, "NOT SAVED: the disk is full"),
    ({"event": "over", "outcome": "stopped", "words": "SIGTERM", "code": 143, "checkpoint": None},
     "stopped: SIGTERM"),
    ({"event": "over", "outcome": "finished", "words": "it ended", "checkpoint": 103, "step": 120},
     "finished: it ended; newest good checkpoint: step 103, THE STEPS AFTER IT ARE IN NONE (the "
     "last was 120)"),
    ({"event": "over", "outcome": "finished", "words": "it ended", "checkpoint": 120, "step": 120},
     "finished: it ended; newest good checkpoint: step 120"),
    # A number that no journal may hold.
    ({"event": "over", "words": "it ended", "checkpoint": 2**60}, "over: it ended"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"), CONSOLE_LINES, ids=[line["event"] for line, _ in CONSOLE_LINES]
)
def test_a_line_at_the_terminal(line, words):
    text = console_line({"time": 1.7e9, **line})
    assert text[9:] == words
    assert not words or re.fullmatch(r"\d\d:\d\d:\d\d ", text[:9])


def test_without_gpus_a_launch_names_processes():
    line = {"time": 0.0, "event": "launch", "launch": 1, "words": "DP2", "gpus": {"": [0, 1]}}
    assert console_line(line, "process")[9:] == "launch 1: DP2, 2 processes"
    found = ShrinkData(Layout(data=2), None, "process")({"": (0, 1)}, None)
    assert (str(found), found.words) == ("TP1 x PP1 x DP2", "2 processes in 2 copies")
    assert "batch 6 = 1 x 3 x 2" in str(ShrinkData(Layout(data=2), 6)({"": (0, 1)}, None))


class TestPlans:
    @given(batch=st.sampled_from([12, 16, 60]), dropped=st.integers(0, 7))
    def test_the_batch_is_kept_and_no_more_gpus_are_used_than_there_are(self, batch, dropped):
        plan = ShrinkData(Layout(data=4, tensor=2, accumulation=batch // 4), batch)
        pool = {"": tuple(range(8 - dropped))}
        if 8 - dropped < 2:
            with pytest.raises(NothingFitsError, match="1 GPU is left; one copy needs 2"):
                plan(pool, None)
            return
        found = plan(pool, None)
        assert found.layout.global_batch == batch
        assert found.layout.tensor == 2
        most = max(d for d in range(1, (8 - dropped) // 2 + 1) if batch % d == 0)
        assert found.layout.data == most

    def test_the_planners_choice_stands_before_a_faster_layout_that_changes_more(self):
        cluster, batch = Cluster.of([8], "h100"), BatchSpec(samples=96)
        now = Layout(context=2, data=4)
        found = plan(LLAMA_8B, cluster, batch, engine="megatron", current=now)
        speeds = [option.step.tokens_per_second for option in found.alternatives]
        assert max(speeds) > found.best.step.tokens_per_second
        chosen = by_model(LLAMA_8B, cluster.gpu, batch, engine="megatron")
        assert chosen({"": tuple(range(8))}, now).layout == found.best.layout

    def test_a_size_that_the_training_is_not_given_stays(self):
        gpu, pool = Cluster.of([1], "h100").gpu, {"": tuple(range(8))}
        long = replace(LLAMA_8B, sequence=131072)
        experts = replace(LLAMA_8B, layers=16, experts=8, experts_per_token=2, expert_ffn=14336)

        def planned(model, samples, **more):
            plan = by_model(model, gpu, BatchSpec(samples=samples), engine="megatron", **more)
            return plan(pool, None).layout

        assert planned(long, 4).context > 1
        assert planned(long, 4, fixed_sizes={"context": 1}).context == 1
        assert planned(experts, 64).expert > 1
        assert planned(experts, 64, fixed_sizes={"expert": 1}).expert == 1
        with pytest.raises(NothingFitsError, match=r"no \{tensor\}, \{pipeline\}, \{expert\}"):
            planned(experts, 64, fixed_sizes=dict.fromkeys(("tensor", "pipeline", "expert"), 1))


class TestProcesses:
    def test_all_that_descends_is_found_and_ended_also_what_has_left_its_group(self):
        code = (
            "import subprocess, sys, time, signal\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
            " start_new_session=True)\n"
            "print('ready', flush=True)\n"
            "time.sleep(60)\n"
        )
        token = f"test-{os.getpid()}-launch"
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                                  env={**os.environ, LAUNCH_VARIABLE: f"{token}-1"})  # fmt: skip
        assert parent.stdout.readline() == b"ready\n"
        for _ in range(100):  # a process in the middle of its exec shows no environment
            if len(processes.of_launches(token)) == 2:
                break
            time.sleep(0.05)
        ending = processes.end(token, grace=0.3)
        assert (ending.found, ending.killed, ending.left) == (2, 2, 0)
        assert processes.of_launches(token) == []
        parent.stdout.close()

    @pytest.mark.parametrize("seconds", [0, 60])
    def test_the_pid_of_a_launcher_that_has_ended_is_nobodys(self, tmp_path, seconds):
        exits: SimpleQueue = SimpleQueue()
        token = f"test-{os.getpid()}-{seconds}"
        running = launched(
            RunFolder(tmp_path), sys.executable, "-c", f"import time; time.sleep({seconds})",
            token=token, report=lambda *fields, **more: more or exits.put(fields),
        )  # fmt: skip
        if seconds == 0:
            assert exits.get(timeout=30.0) == (1, "", 0)
        assert running.alive() == ([running.pids[""]] if seconds else [])
        ending = processes.end(token, grace=5.0, also=running.alive())
        assert (ending.found, ending.left) == (bool(seconds), 0)

    def test_a_token_that_says_nothing_is_refused(self):
        with pytest.raises(ValueError, match="too short"):
            processes.end("", grace=0.1)


def test_a_request_that_is_withdrawn_is_not_obeyed_and_numbers_go_on(folder):
    assert folder.ask("user", "x", stop=True) == 1
    folder.withdraw()
    assert (folder.answered(), folder.answered_step()) == (1, None)
    assert folder.ask("user", "y") == 2
    assert not folder.request().stop
    folder.answer(2, 70)
    folder.withdraw()
    assert folder.answered_step() == 70


@pytest.mark.parametrize(
    ("there_are", "seconds", "interval"),
    [(True, None, 10.0), (True, 0.0, None), (False, None, None), (False, 0.5, 0.5)],
)
def test_where_there_are_gpus_they_are_watched(monkeypatch, there_are, seconds, interval):
    monkeypatch.setattr(supervise, "_has_gpus", lambda: there_are)
    monkeypatch.setattr(supervise, "GpuWatch", lambda gpus, config: (gpus, config.interval))
    sources = supervise._sources(argparse.Namespace(nvml_seconds=seconds), {"": (0, 1)})
    assert sources == ([((0, 1), interval)] if interval else [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0-x"], "GPUs such as 0-3,6"),
        (["--nodes", "a:0"], "NAME:GPUS with at least one GPU"),
        (["--layout", "tensr=2"], "NAME of tensor, pipeline"),
        (["--hang-seconds", "0"], "--hang-seconds is 0.0: it must be a number of seconds above 0"),
        (["--quiet-seconds", "nan"], "--quiet-seconds is nan: it must be a number of seconds ab"),
        (["--max-restarts", "-1"], "--max-restarts is -1: it must be a number of at least 0"),
        (["--grace-seconds", "-1"], "-1.0: it must be a number of seconds from 0"),
        (["--nvml-seconds", "-1"], "--nvml-seconds: '-1': a number of seconds from 0"),
        (["--batch", "13", "--gpus", "0-1", "--layout", "micro_batch=2"],
         "a batch of 13 cannot be split with micro-batches of 2"),
        (["--uneven-batch"], "--uneven-batch needs --batch"),
        (["--allow-batch-change", "0.1"], "--allow-batch-change needs --batch"),
        (["--allow-batch-change", "1", "--batch", "8"], "'1': a share from 0 to below 1"),
        (["--layout", "data=4", "--gpus", "0-1"],
         "--layout data=4 needs 4 GPUs, evenly on nodes; there are 2"),
        (["--nodes", "a:1,b:1"], "--nodes needs torchrun"),
        (["--model", "m.json"], "--model needs --batch"),
        (["--", "torchrun", "--nproc-per-node=gpu"],
         "--nproc-per-node is 'gpu': say which GPUs there are with --gpus"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_reported_and_starts_nothing(tmp_path, refused, arguments, words):
    assert words in refused("supervise", tmp_path / "run", *arguments, "--", "true")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["supervise", str(tmp_path / "file" / "run"), "--", "true"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(("more", "variable"), [((), None), (("--resume", "clean"), "clean")])
def test_what_to_resume_from_is_passed_on(tmp_path, more, variable):
    supervisor = supervise._supervisor(options_of(tmp_path, *more, "--", "true"))
    assert supervisor.program.variables("", ONE).get("RMETRIC_RESUME") == variable


@pytest.mark.parametrize(
    ("visible", "pool"),
    [("", (0, 1)), ("4,6,7", (4, 6)), ("GPU-8f2c,GPU-11aa", "say the numbers of these GPUs")],
)
def test_the_gpus_that_may_be_used_are_those_that_are_visible(monkeypatch, visible, pool):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = options_of("run", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    if isinstance(pool, str):
        with pytest.raises(ValueError, match=pool):
            supervise._pool(options)
    else:
        assert supervise._pool(options) == {"": pool}
