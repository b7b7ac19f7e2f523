"""Orderly ends are no failures, and what stood still before an end is told apart from clocks."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

from rmetric.diagnosis import diagnose
from rmetric.diagnosis.patterns.stages import stated_stage
from rmetric.diagnosis.patterns.steps import match_step, may_state_step
from rmetric.diagnosis.reading.prefixes import PrefixParser

BEGIN = datetime(2024, 5, 1, 10, 40, tzinfo=timezone.utc)
LIMIT = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT {} DUE TO TIME LIMIT ***"
PREEMPTED = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT {} DUE TO PREEMPTION ***"


#: Seconds of the last line of `stamped(300)`.
LAST_OF_300 = 598


def at(seconds, form="%Y-%m-%d %H:%M:%S"):
    return (BEGIN + timedelta(seconds=seconds)).strftime(form)


def judged(tmp_path, lines):
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    return diagnose(path)


def steps(count, every=2):
    return [f"0: {at(every * n)} step {n} loss {4 - n / 1000:.3f}" for n in range(count)]


@pytest.mark.parametrize(("end", "cause"), [(LIMIT, "time_limit"), (PREEMPTED, "preempted")])
def test_a_rank_without_news_did_not_stop_a_training_that_went_on(tmp_path, end, cause):
    lines = steps(600)
    for rank in range(1, 8):
        last = 300 if rank == 3 else 596
        lines[last] += "".join(
            f"\n{rank}: {at(2 * last)} memory in use: {20 + n} GB" for n in range(9)
        )
    found = judged(tmp_path, [*lines, end.format(at(1201, "%Y-%m-%dT%H:%M:%S"))])
    assert (found.outcome, found.cause) == ("terminated", f"slurm_{cause}")
    assert not found.nodes


def test_a_rank_that_the_training_waited_for_is_still_named(tmp_path):
    lines = [
        f"{rank}: {at(2 * n)} step {n} loss {4 - n / 1000:.3f}"
        for n in range(300)
        for rank in range(8)
        if not (rank == 3 and n > 298)
    ]
    found = judged(tmp_path, [*lines, LIMIT.format(at(6_013, "%Y-%m-%dT%H:%M:%S"))])
    assert (found.outcome, found.nodes[0].name) == ("failed", "rank 3")


def stamped(count, begin=BEGIN):
    return [
        f"0: {begin.timestamp() + 2 * n:.3f} step {n} loss {4 - n / 1000:.3f}" for n in range(count)
    ]


def test_seconds_since_1970_and_a_local_clock_make_no_hang(tmp_path):
    found = judged(tmp_path, [*stamped(300), LIMIT.format(at(7 * 3600 + 603, "%Y-%m-%dT%H:%M:%S"))])
    assert found.outcome == "terminated"


def test_an_end_before_the_last_step_is_of_another_clock_and_not_sure(tmp_path):
    lines, end = stamped(300), at(LAST_OF_300 + 30 - 5 * 3600, "%Y-%m-%dT%H:%M:%S")
    found = judged(tmp_path, [*lines, LIMIT.format(end)])
    assert found.outcome == "terminated"
    assert found.confidence < 0.8


@pytest.mark.parametrize("hours", [-11, -5.5, -5, 2, 3, 5.75])
def test_a_silence_that_no_zone_explains_is_a_hang_whatever_the_zones(tmp_path, hours):
    end = at(LAST_OF_300 + 600 + hours * 3600, "%Y-%m-%dT%H:%M:%S")
    found = judged(tmp_path, [*stamped(300), LIMIT.format(end)])
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    if hours < 0:  # by the clocks alone a later end may be of one zone
        assert "at least 10 min later" in found.title


def test_a_hang_over_new_year_in_a_log_without_years(tmp_path):
    lines = [f"Dec 31 23:{n:02d}:00 n1 train[7]: step {n} loss 2.5" for n in range(50)]
    end = "Jan  1 04:58:00 n1 train[7]: " + LIMIT.format("2026-01-01T04:58:00")
    found = judged(tmp_path, [*lines, end])
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert "5.2 h later" in found.title


def test_a_script_that_saw_no_progress_ended_a_failed_job(tmp_path):
    end = f"{at(LAST_OF_300 + 60)} guard: no new step since 299 for 1 minute, ending the job"
    found = judged(tmp_path, [*stamped(300), end])
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert found.confidence < 0.8


def test_heartbeats_to_the_end_are_of_its_clock(tmp_path):
    """The silence of two hours is no zone, and the rank without heartbeats is named."""
    lines = [
        f"{rank}: {at(10 * n)} step {n} loss {4 - n / 1000:.3f}"
        for n in range(40)
        for rank in range(8)
    ]
    lines += [
        f"{rank}: {at(390 + 60 * n)} still here, at step 39"
        for n in range(1, 120)
        for rank in range(8)
        if rank != 5
    ]
    end = f"{at(390 + 7200)} guard: no progress for 40 minutes, stopping the job"
    found = judged(tmp_path, [*lines, end])
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert [one.name for one in found.nodes] == ["rank 5"]


IGNORED = [
    "Exception ignored in: <function Pool.__del__ at 0x7f12>",
    "TypeError: 'NoneType' object is not callable",
]


def test_an_exception_that_python_ignores_is_no_failure(tmp_path):
    found = judged(tmp_path, [*steps(60), "INFO Training completed", *IGNORED, *IGNORED])
    assert found.outcome == "healthy"


def test_an_exception_beside_an_ignored_one_is(tmp_path):
    error = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "KeyError: 'x'"]
    found = judged(tmp_path, [*steps(60), *error, *IGNORED])
    assert (found.outcome, found.cause) == ("failed", "key_error")


INTERRUPT = [
    "Traceback (most recent call last):",
    '  File "a.py", line 3, in f',
    "KeyboardInterrupt",
]


def test_an_interrupt_after_the_planned_end_is_no_end_of_the_training(tmp_path):
    found = judged(tmp_path, [*steps(60), "All 60 iterations completed.", "at port 80", *INTERRUPT])
    assert found.outcome == "healthy"
    assert judged(tmp_path, [*steps(60), *INTERRUPT]).outcome == "terminated"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("rank 3 upd 120 nll 2.1", 120),
        ("[12] it 77 ok, 1017 ms", 77),
        ("optimizer update 5 took 3 ms", 5),
        ("we saw it 77 times", None),
        ("last update 12 days ago", None),
        ("updates 0.3 s", None),
    ],
)
def test_short_words_for_steps(line, step):
    found = match_step(line)
    assert (found.step if found else None) == step
    assert step is None or may_state_step(line.replace(str(step), "0"))


def test_writing_a_checkpoint_is_one():
    assert stated_stage("rank 2 is writing part 4 of its checkpoint") == "checkpoint"
    assert stated_stage("Saving checkpoint 3") == "checkpoint"
    assert stated_stage("wrote 3 ckpts") == "checkpoint"


def test_ranks_of_loggers_that_write_json_or_keys_and_values():
    record = {"time": 1.25, "level": "info", "rank": 12, "node": "gpu-07", "message": "a"}
    parser = PrefixParser.learn([json.dumps(record).encode()] * 9)
    found = parser.split(json.dumps(record).encode())[0]
    assert (found.rank, found.node) == (12, "gpu-07")
    for other in ({"message": 'lost "rank": 3'}, {"local_rank": 3}, {"peer": {"rank": 3}}):
        assert parser.split(json.dumps(other).encode())[0].rank is None
    assert parser.split(b"lvl=info rank=31 state=sync")[0].rank == 31
    assert parser.split(b"step 7: waits for rank=31 state=sync")[0].rank is None


WORKER = "RuntimeError: DataLoader worker (pid 41) is killed by signal: Killed."
KERNEL = (
    "kernel: [ 99.736344] Out of memory: Killed process 41 (pt_data) total-vm:9kB, anon-rss:7kB"
)


@pytest.mark.parametrize("lines", [(WORKER, KERNEL), (KERNEL, WORKER)])
def test_the_kernel_explains_the_kill_of_a_worker_whatever_its_clock(tmp_path, lines):
    assert judged(tmp_path, [*steps(60), *lines]).family == "oom killer"
    assert judged(tmp_path, [*steps(60), WORKER]).cause == "dataloader_worker_killed"


def test_the_rank_that_did_not_join_is_named(tmp_path):
    report = (
        "1: - In short, the lagging/dead/mismatched ranks that caused the desync are:\n"
        "1:   - [6] finished collective #40, but didn't join collective #41 (count from 1)"
    )
    lines = [f"{rank}: {at(2 * n)} step {n} loss 2.1" for n in range(40) for rank in range(8)]
    found = judged(tmp_path, [*lines, report])
    assert [one.name for one in found.nodes] == ["rank 6"]


def unreachable(tmp_path):
    """Two nodes of four ranks; lines of NCCL have no time, and the steps are on the other node."""
    here = [f"{at(2 * n)} n1:0 train INFO [step={n}/900]" for n in range(300)]
    there = [f"[default{rank}]:{at(rank)} n2:{rank} train INFO ready" for rank in range(4)]
    there += [
        f"[default{rank}]:n2:77{rank}:88{rank} [{rank}] NCCL WARN socketProgressOpt: "
        f"Call to recv from n1<4871{rank}> failed : No route to host"
        for rank in range(4)
    ]
    there += ["W0501 10:59:14.896000 842565 api.py:1028] Sending process 77 closing signal SIGTERM"]
    here = [f"[default{rank}]:{at(0)} n1:{rank} train INFO ready" for rank in range(4)] + [
        f"[default0]:{line}" for line in here
    ]
    for name, lines in (("n1.log", here), ("n2.log", there)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return diagnose(tmp_path)


def test_lines_without_times_are_not_outlived_by_steps_before_the_next_time(tmp_path):
    found = unreachable(tmp_path)
    assert (found.outcome, found.cause) == ("failed", "no_route_between_nodes")


def test_a_node_that_cannot_be_reached_is_named_as_a_whole(tmp_path):
    assert [one.name for one in unreachable(tmp_path).nodes] == ["node n1"]


def test_steps_without_times_before_a_time_limit_are_no_hang(tmp_path):
    """Only the start states times, and how long ago the last step was is not known."""
    lines = [f"{rank}: {at(rank)} loading" for rank in range(4)]
    lines += [f"0: iteration {n}/9999 | loss: 2.0{n % 10} | timing in s: 3.0" for n in range(2000)]
    found = judged(tmp_path, [*lines, LIMIT.format(at(6_030, "%Y-%m-%dT%H:%M:%S"))])
    assert (found.outcome, found.cause) == ("terminated", "slurm_time_limit")
    assert found.confidence < 0.8


def test_a_rank_elsewhere_tells_of_a_hang_without_times_of_steps(tmp_path):
    lines = [f"{rank}: {at(rank)} loading" for rank in range(8)]
    for n in range(60):
        lines += [f"7: {at(10 + 2 * n)} queue {n}"]
        lines += [
            f"{rank}: rank {rank} step {n}: reading shard {n * 8 + rank}" for rank in range(8)
        ]
        ready = [rank for rank in range(8) if rank != 3 or n < 59]
        lines += [f"{rank}: rank {rank} step {n}: done, waiting in all_reduce" for rank in ready]
    found = judged(tmp_path, [*lines, LIMIT.format(at(9_430, "%Y-%m-%dT%H:%M:%S"))])
    assert (found.outcome, found.cause, found.stage) == ("failed", "training_hung", "load data")
    assert [one.name for one in found.nodes] == ["rank 3"]


def monitored(count, after):
    """Steps of rank 0, and a monitor's lines that go on."""
    lines = [f"{at(2 * n)} step {n} loss {4 - n / 1000:.3f}" for n in range(count)]
    return lines, [f"{at(2 * count + 600 * n)} sysmon: gpu util 100 100 0" for n in range(1, after)]


def test_a_log_that_goes_on_without_steps_is_of_a_hang(tmp_path):
    lines, later = monitored(400, 12)
    found = judged(tmp_path, [*lines, *later])
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert "after step 399, for at least 1.8 h" in found.title
    assert found.confidence < 0.8


def test_two_lines_after_the_last_step_make_no_hang(tmp_path):
    lines, later = monitored(400, 3)
    assert judged(tmp_path, [*lines, *later]).outcome == "healthy"


def test_the_last_words_before_the_silence_name_the_rank(tmp_path):
    lines, later = monitored(400, 12)
    words = f"{at(800)} INFO reader rank=11 worker=0 open /data/shard-00692.tar"
    end = LIMIT.format(at(2 * 400 + 9000, "%Y-%m-%dT%H:%M:%S"))
    ranks = [f"{at(0)} INFO reader rank={rank} worker=0 begins" for rank in range(16)]
    found = judged(tmp_path, [*ranks, *lines, words, *later, end])
    assert (found.cause, found.stage) == ("training_hung", "load data")
    assert [one.name for one in found.nodes] == ["rank 11"]


def test_a_rank_at_a_line_that_the_others_passed_is_named(tmp_path):
    """The lines differ in one word alone."""
    for rank in range(6):
        lines = [
            f"{at(2 * n + more)} rank{rank} engine: [ep=0][ba={n}][event={word}]: Running event"
            for n in range(80)
            for more, word in enumerate(("BEFORE_DATALOADER", "BEFORE_FORWARD"))
        ]
        (tmp_path / f"rank{rank}.log").write_text("\n".join(lines[:-1] if rank == 4 else lines))
    end = LIMIT.format(at(9000, "%Y-%m-%dT%H:%M:%S"))
    (tmp_path / "slurm.out").write_text(end + "\n")
    found = diagnose(tmp_path)
    assert (found.cause, found.nodes[0].name) == ("training_hung", "rank 4")


def test_a_launcher_of_another_zone_ends_no_job_before_its_steps(tmp_path):
    for rank in range(6):
        lines = [
            f"{at(5 * n + more)} rank{rank} trainer: {word} {n}"
            for n in range(80)
            for more, word in enumerate(("fetched batch", "end of step"))
        ]
        (tmp_path / f"rank{rank}.log").write_text("\n".join(lines[:-1] if rank == 4 else lines))
    end = LIMIT.format(at(400 + 400 - 7 * 3600, "%Y-%m-%dT%H:%M:%S"))
    (tmp_path / "slurm.out").write_text(end + "\n")
    found = diagnose(tmp_path)
    assert (found.outcome, found.cause) == ("failed", "training_hung")


def test_the_step_of_a_scheduler_is_no_step():
    assert match_step("[srun] node 0 of 2: gpu-b06 job 84213 step 0 time limit 10:00:00") is None
    assert match_step("job 3 finished, step 7").step == 7
    assert match_step("[restart 2] step 100 loss 2.1").step == 100
    assert match_step("[09:20:11] job 41 on n7, restart chain step 2/6") is None
    assert match_step("[ep=0][ba=11431][event=BEFORE_DATALOADER]: Running event").step == 11431


WANDB = ["wandb:", "wandb: Run summary:", "wandb:       iter 150", "wandb: train/loss 2.5"]


@pytest.mark.parametrize("line", WANDB)
def test_the_table_of_wandb_at_the_end_states_no_step(line):
    assert match_step(line) is None


FAILED_WRITE = [
    "torch.save failed on attempt 1/3",
    "Traceback (most recent call last):",
    '  File "train.py", line 289, in save_checkpoint',
    "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 34264 vs 34152",
]


@pytest.mark.parametrize(("since", "outcome"), [(100, "healthy"), (0, "failed")])
def test_a_fault_before_many_steps_is_outlived_whatever_the_last_lines_are(
    since, outcome, tmp_path
):
    lines = [f"step {n} loss 2.5" for n in range(200)]
    at_fault = len(lines) - since
    table = [f"wandb: value{n} 2.5" for n in range(30)]
    found = judged(tmp_path, [*lines[:at_fault], *FAILED_WRITE, *lines[at_fault:], *table])
    assert found.outcome == outcome


PULL = "{age}  {kind}  {reason}  pod/a-1  {what}"


@pytest.mark.parametrize(
    ("trained", "pulled", "fault"),
    [(True, True, False), (False, True, False), (False, False, True), (True, False, False)],
)
def test_an_image_that_was_pulled_at_last_is_no_fault(trained, pulled, fault, tmp_path):
    """Nor is one of a job that trained: its end may be missing from the list of events."""
    steps = [f"step {n} loss 2.5" for n in range(200)] if trained else ["waits for its peers"]
    (tmp_path / "rank0.log").write_text("\n".join(steps))
    events = [
        PULL.format(age="170m", kind="Warning", reason="Failed", what='Failed to pull image "a:1"'),
        PULL.format(
            age="169m", kind="Normal", reason="Pulled", what='Successfully pulled image "a:1" in 3s'
        ),
    ]
    (tmp_path / "events.txt").write_text("\n".join(events if pulled else events[:1]))
    found = diagnose(tmp_path)
    assert (found.cause == "pod_image_pull_failed") is fault


def test_sshd_of_a_worker_ends_after_the_job(tmp_path):
    lines = [f"step {n} loss 2.5" for n in range(200)]
    (tmp_path / "launcher.log").write_text("\n".join([*lines, "mpirun exit code 0"]))
    (tmp_path / "worker.log").write_text("Received signal 15; terminating.\n")
    assert diagnose(tmp_path).outcome == "healthy"


@pytest.mark.parametrize(
    "end", ["Fatal Python error: Aborted", "['python', 'a.py'] exits with return code = -6"]
)
def test_the_abort_after_a_watchdog_is_its_own(end, tmp_path):
    lines = [f"{at(2 * n)} step {n} loss 2.5" for n in range(200)]
    lines += [
        f"[rank{rank}]:[E501 10:58:00.0 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=8, "
        "NumelOut=8, Timeout(ms)=600000) ran for 600092 milliseconds before timing out."
        for rank in range(4)
    ]
    assert judged(tmp_path, [*lines, end]).cause == "nccl_timeout"


def test_events_of_kubernetes_are_entries_of_their_own(tmp_path):
    lines = [f"{at(2 * n, '%Y-%m-%dT%H:%M:%SZ')} step {n} loss 2.5" for n in range(200)]
    (tmp_path / "rank0.log").write_text("\n".join(lines))
    form = "%Y-%m-%dT%H:%M:%SZ"
    events = [
        "LAST SEEN              TYPE      REASON            OBJECT       MESSAGE",
        f"{at(0, form)}   Normal    Scheduled         pod/a-0      assigned a-0 to n1",
        f"{at(1, form)}   Normal    Started           pod/a-0      Started container pytorch",
        f"{at(9000, form)}   Normal    DeadlineExceeded  pytorchjob/a PyTorchJob a has failed "
        "because it was active longer than specified deadline",
    ]
    (tmp_path / "events.txt").write_text("\n".join(events))
    found = diagnose(tmp_path)
    assert (found.outcome, found.cause) == ("failed", "training_hung")


def test_a_rank_that_waits_in_another_operation_is_the_cause(tmp_path):
    lines = [f"{at(2 * n)} step {n} loss 2.5" for n in range(200)]
    lines += [
        f"[rank{rank}]:[E501 10:58:00.0 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum=41, OpType="
        f"{'_ALLGATHER_BASE' if rank == 6 else 'ALLREDUCE'}, NumelIn=8, NumelOut=8, "
        "Timeout(ms)=600000) ran for 600092 milliseconds before timing out."
        for rank in range(8)
    ]
    found = judged(tmp_path, lines)
    assert (found.cause, found.nodes[0].name) == ("collectives_differ", "rank 6")


@pytest.mark.parametrize(
    ("last", "stage"),
    [
        ("saving checkpoint at iteration 40 to /ckpt", "checkpoint"),
        ("  successfully saved checkpoint from iteration 40 to /ckpt [ t 1/2, p 1/1 ]", "train"),
        ("wrote checkpoint 40", "train"),
        ("zero checkpoint saved /ckpt/global_step40/zero_pp_rank_0.pt", "checkpoint"),
        ("[Torch] Checkpoint global_step40 is ready now!", "train"),
        ("Model weights saved in out/checkpoint-40/pytorch_model.bin", "checkpoint"),
    ],
)
def test_behind_a_complete_checkpoint_the_training_goes_on(tmp_path, last, stage):
    end = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT {} DUE TO TIME LIMIT ***"
    begun = "saving checkpoint at iteration 40 to /ckpt"
    found = judged(tmp_path, [*steps(40), begun, last, end.format(at(85, "%Y-%m-%dT%H:%M:%S"))])
    assert found.stage == stage


@pytest.mark.parametrize("reason", ["PREEMPTION", "TIME LIMIT"])
def test_the_schedulers_reason_explains_the_signal_that_came_before_it(tmp_path, reason):
    when = at(60)
    told = f"W0501 {when[11:]}.412 91 api.py:719] Received 15 death signal, shutting down workers"
    cancelled = f"CANCELLED AT {when.replace(' ', 'T')} DUE TO {reason}"
    end = f"slurmstepd: error: *** STEP 7.0 ON n1 {cancelled} ***"
    found = judged(tmp_path, [*steps(6), told, end])
    assert found.outcome == "terminated"
    assert (
        found.cause == {"PREEMPTION": "slurm_preempted", "TIME LIMIT": "slurm_time_limit"}[reason]
    )


def test_the_reason_of_a_cancellation_comes_after_the_time_of_grace(tmp_path):
    lines = [
        "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2024-05-01T10:50:00 ***",
        PREEMPTED.format("2024-05-01T11:00:00"),
    ]
    (tmp_path / "slurm-77.out").write_text("\n".join(lines) + "\n")
    assert diagnose(tmp_path).cause == "slurm_preempted"


def test_a_later_line_names_the_disk_to_which_a_checkpoint_was_not_written(tmp_path):
    lines = [
        "{'loss': 0.99, 'epoch': 0.1}",
        "RuntimeError: [enforce fail at inline_container.cc:783] . PytorchStreamWriter failed "
        "writing file data/214: file write failed",
        "run.sh: line 12: echo: write error: No space left on device",
    ]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    assert diagnose(tmp_path).cause == "disk_full"


EVENTS = """\
LAST SEEN   TYPE      REASON        OBJECT     MESSAGE
108m        Warning   FailedMount   pod/a-0    MountVolume.SetUp failed for volume "kube-api"
"""


def test_a_mount_that_failed_before_the_training_did_not_end_it(tmp_path):
    (tmp_path / "events.txt").write_text(EVENTS)
    assert diagnose(tmp_path).cause == "container_volume_failed"
    steps = [f"2024-05-01 10:50:{at:02d} step {at} loss 2.{at}" for at in range(40)]
    (tmp_path / "train.log").write_text("\n".join(steps) + "\n")
    assert diagnose(tmp_path).cause is None
