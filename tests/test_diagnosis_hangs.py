"""A hang that a clock or a person ended is a hang."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from rmetric.diagnosis import diagnose

BEGIN = datetime(2024, 5, 1, 10, 40)
LIMIT = "slurmstepd: error: *** STEP 77.0 ON node01 CANCELLED AT {} DUE TO TIME LIMIT ***"
CANCEL = "slurmstepd: error: *** JOB 77 ON node01 CANCELLED AT {} ***"


def at(seconds):
    return (BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S")


def ranks(step, seconds, who=range(8)):
    return [f"{rank}: {at(seconds)} step {step} loss {3 - step / 100:.3f}" for rank in who]


def trained(last, every=10):
    return [line for step in range(last) for line in ranks(step, every * step)]


def judged(tmp_path, lines, end, seconds):
    time = (BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
    path = tmp_path / "job.log"
    path.write_text("\n".join([*lines, end.format(time)]) + "\n")
    return diagnose(path)


@pytest.mark.parametrize("end", [LIMIT, CANCEL])
def test_the_rank_that_is_a_step_behind_hung(tmp_path, end):
    lines = [*trained(40), *ranks(40, 400, [0, 1, 2, 3, 4, 6, 7])]
    found = judged(tmp_path, lines, end, 35_999)
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert [one.name for one in found.nodes[:1]] == ["rank 5"]
    assert "hung after step 40 and was ended 9.9 h later" in found.title
    assert "rank 5" in found.summary.splitlines()[0]
    assert found.candidates[0].cause in ("slurm_time_limit", "slurm_cancelled")


def test_no_rank_is_named_where_none_is_behind(tmp_path):
    found = judged(tmp_path, trained(40), LIMIT, 35_999)
    assert found.cause == "training_hung"
    assert not found.nodes


def test_the_rank_that_does_not_finish_its_file_is_named(tmp_path):
    file = "/ckpt/step40/zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    log = [f"[{at(10 * step)}] step {step} loss 2.1" for step in range(41)]
    for said, seconds, done in (("Saving", 401, None), ("Saved", 409, 5)):
        log += [
            f"(Actor pid={6000 + rank}) [{at(seconds)}] [Torch] {said} {file.format(rank)}..."
            for rank in range(8)
            if rank != done
        ]
    found = judged(tmp_path, log, CANCEL, 3000)
    assert (found.cause, found.stage) == ("training_hung", "checkpoint")
    assert [one.rank for one in found.nodes] == [5]


EVALUATED = [
    *trained(40),
    *(f"0: {at(400 + 60 * n)} Evaluating iter {n}/600" for n in range(590)),
]


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (trained(3590), 35_999),  # at work until the limit
        (trained(40), 430),  # cancelled within a few steps
        (trained(20, every=1700), 35_999),  # slow steps
        # An evaluation that logs its progress.
        (
            [*trained(40), *(f"0: {at(400 + 60 * n)} Evaluating iter {n}/600" for n in range(590))],
            35_999,
        ),
        (trained(400), 4000 + 7200 + 12),  # a clock of another time zone
    ],
)
def test_a_job_that_made_progress_was_ended(tmp_path, lines, seconds):
    found = judged(tmp_path, lines, LIMIT, seconds)
    assert (found.outcome, found.cause) == ("terminated", "slurm_time_limit")


def test_a_cancellation_by_the_clock_of_another_zone_is_no_hang(tmp_path):
    assert judged(tmp_path, trained(40), CANCEL, 400 + 7200 + 12).outcome == "terminated"


def test_heartbeats_are_no_progress(tmp_path):
    beats = [f"0: {at(400 + 60 * n)} heartbeat: uptime {n} min" for n in range(1, 590)]
    found = judged(tmp_path, [*trained(40), *beats], LIMIT, 35_999)
    assert found.cause == "training_hung"
    assert found.confidence < 0.8


def test_a_monitor_that_counts_the_seconds_makes_no_progress(tmp_path):
    beats = [
        f'{rank}: {at(400 + 600 * n)} {{"event": "stall", "no_progress_s": {600 * n}, "phase": '
        f'"{"next_batch" if rank == 5 else "grad_allreduce"}"}}'
        for n in range(1, 9)
        for rank in range(8)
    ]
    note = "(from the other shell: pkill -USR1 -f train)"
    found = judged(tmp_path, [*trained(40), *beats, note], CANCEL, 5500)
    assert found.cause == "training_hung"


def test_the_key_that_interrupts_stands_before_a_time(tmp_path):
    beats = [f"0: {at(400 + 60 * n)} heartbeat: uptime {n} min" for n in range(1, 10)]
    end = "^CW0501 {} 200 torch/elastic/agent/api.py:719] Received Signals.SIGINT death signal"
    found = judged(tmp_path, [*trained(40), *beats], end.format("12:40:00.1"), 0)
    assert found.cause == "training_hung"


def test_a_job_that_never_reached_a_step(tmp_path):
    lines = [f"{rank}: {at(rank)} initializing torch distributed ..." for rank in range(8)]
    found = judged(tmp_path, lines, LIMIT, 35_999)
    assert found.cause == "training_hung"
    assert "before the first step" in found.title


def test_an_error_before_the_silence_explains_it(tmp_path):
    error = "3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    found = judged(tmp_path, [*trained(40), error], LIMIT, 35_999)
    assert found.cause == "cuda_out_of_memory"


def waiting(step, seconds, reading=(), who=range(8)):
    lines = [
        f"{rank}: {at(seconds)} rank {rank} step {step}: reading shard s-{rank}.tar" for rank in who
    ]
    return lines + [
        f"{rank}: {at(seconds + 1)} rank {rank} step {step}: done, it waits in all_reduce now"
        for rank in who
        if rank not in reading
    ]


def test_the_rank_that_stands_elsewhere_in_the_same_step_is_named_with_its_stage(tmp_path):
    lines = [*trained(40), *waiting(40, 400, reading=[5])]
    found = judged(tmp_path, lines, LIMIT, 35_999)
    assert found.cause == "training_hung"
    assert [one.name for one in found.nodes] == ["rank 5"]
    assert found.stage == "load data"
    assert "reading shard" in found.nodes[0].why


@pytest.mark.parametrize(
    ("said", "stage"), [("fetched batch {}, forward", "load data"), ("forward of {}", "train")]
)
def test_what_a_rank_has_not_done_tells_its_stage(tmp_path, said, stage):
    def batch(number, who=range(8)):
        ends = [f"{rank}: {at(10 * number)} batch_end: {number}" for rank in range(8)]
        return ends + [f"{rank}: {at(10 * number + 1)} " + said.format(number + 1) for rank in who]

    lines = [line for number in range(40) for line in ranks(number, 10 * number) + batch(number)]
    lines += [*ranks(40, 400), *batch(40, [0, 1, 2, 3, 4, 6, 7])]
    found = judged(tmp_path, lines, LIMIT, 35_999)
    assert (found.cause, found.stage) == ("training_hung", stage)
    assert [one.name for one in found.nodes] == ["rank 5"]


def test_a_rank_that_leads_is_named_by_a_line_that_all_log(tmp_path):
    found = judged(tmp_path, [*trained(40), *waiting(40, 400, reading=[0])], LIMIT, 35_999)
    assert [one.name for one in found.nodes] == ["rank 0"]


def test_a_line_that_only_the_leader_logs_says_nothing(tmp_path):
    lines = [*trained(40), *waiting(40, 400), f"0: {at(402)} wrote the summary for the board"]
    found = judged(tmp_path, lines, LIMIT, 35_999)
    assert not any("it stands at" in one.why for one in found.nodes)


@pytest.mark.parametrize("reading", [(), (2, 5), range(1, 8)])
def test_nobody_is_named_where_none_two_or_most_stand_elsewhere(tmp_path, reading):
    found = judged(tmp_path, [*trained(40), *waiting(40, 400, reading)], LIMIT, 35_999)
    assert found.cause == "training_hung"
    assert not any("it stands at" in one.why for one in found.nodes)


def saving(count=12, rank_of_hang=5, minutes=10):
    """Steps, then a checkpoint that one rank does not finish, and everybody's heartbeats."""
    lines = trained(40)
    for rank in range(8):
        lines.append(f"{rank}: {at(400)} Saving sharded checkpoint of step 40 to /ckpt/40")
        if rank != rank_of_hang:
            lines.append(f"{rank}: {at(420)} Finished saving shards in 17.8 s; waiting for others")
    return lines + [
        f"{rank}: {at(420 + 60 * minutes * beat)} heartbeat: alive, rss 31.{(7 * beat) % 9} GiB"
        for beat in range(1, count + 1)
        for rank in range(8)
    ]


def test_heartbeats_after_a_checkpoint_that_one_rank_never_ends(tmp_path):
    found = judged(tmp_path, saving(), LIMIT, 420 + 12 * 600 + 300)
    assert (found.outcome, found.cause, found.stage) == ("failed", "training_hung", "checkpoint")
    assert [one.name for one in found.nodes[:1]] == ["rank 5"]
    assert "2.1 h later" in found.title


def test_a_checkpoint_of_some_minutes_is_no_hang(tmp_path):
    found = judged(tmp_path, saving(count=4, rank_of_hang=None, minutes=3), LIMIT, 420 + 800)
    assert found.outcome == "terminated"


def test_an_evaluation_that_counts_its_batches_is_no_hang(tmp_path):
    lines = [
        *trained(40),
        *(f"0: {at(400 + 300 * n)} evaluating, batch {n} done" for n in range(1, 20)),
    ]
    assert judged(tmp_path, lines, LIMIT, 400 + 300 * 20).outcome == "terminated"


def test_a_launcher_that_only_logs_the_end_has_no_other_clock(tmp_path):
    for rank in range(8):
        lines = [f"{at(10 * step)} rank {rank} step {step} loss 2.1" for step in range(40)]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
    end = LIMIT.format((BEGIN + timedelta(seconds=17_043)).strftime("%Y-%m-%dT%H:%M:%S"))
    (tmp_path / "slurm.err").write_text(end + "\n")
    found = diagnose(tmp_path)
    assert found.cause == "training_hung"
    assert not [note for note in found.notes if "clock" in note]


def read(rank, step, seconds, text):
    return f"node-{rank}: {at(seconds)} step {step} {text}"


def waits(text, every=60, times=10):
    """Eight nodes whose steps end; one of them logs on."""
    lines = [read(rank, step, 10 * step, "loss 2.1") for step in range(40) for rank in range(8)]
    lines += [f"node-{rank}: {at(395)} batch on the device" for rank in range(8) if rank != 6]
    return lines + [
        f"node-6: {at(395 + every * n)} {text.format(every * n)}" for n in range(1, times + 1)
    ]


def test_a_node_that_waits_for_its_data_while_the_others_are_silent(tmp_path):
    path = tmp_path / "job.log"
    path.write_text(
        "\n".join(waits("WARNING prefetch queue empty, waited {}s for batch 40")) + "\n"
    )
    found = diagnose(path)
    assert (found.cause, found.stage) == ("training_hung", "load data")
    assert found.nodes[0].name == "node node-6"


@pytest.mark.parametrize(
    "text",
    ["alive, {}s since the last report", "WARNING waited {}s for rank 3", "batch {} of eval"],
)
def test_words_that_accuse_nobody(tmp_path, text):
    path = tmp_path / "job.log"
    path.write_text("\n".join(waits(text)) + "\n")
    assert not any("waits while" in one.why for one in diagnose(path).nodes)


def untimed(last, every=10, logs=100):
    """Steps of `every` seconds without times, and a checkpoint with one after each hundred."""
    lines = [f"{at(0)} begin"]
    for step in range(1, last + 1):
        lines += [f"{{'loss': {3 - step / 1000:.3f}, 'step': {step}}}"] if step % logs == 0 else []
        if step % 100 == 0:
            lines.append(f"{at(every * step)} Saving model checkpoint to out/checkpoint-{step}")
    return lines


@pytest.mark.parametrize(
    ("last", "logs", "seconds", "hung"),
    [
        (743, 1, 36_000, True),
        (743, 1, 8000, False),  # ended 570 s after the last step
        (743, 1, 9500, False),  # it may have been slower at last: less than half an hour is sure
        (2500, 100, 32_000, True),
        (2500, 100, 28_000, False),  # less than five pauses between two lines of steps
    ],
)
def test_steps_without_times_have_those_of_the_entries_between(tmp_path, last, logs, seconds, hung):
    found = judged(tmp_path, untimed(last, logs=logs), LIMIT, seconds)
    assert found.cause == ("training_hung" if hung else "slurm_time_limit")
    assert found.outcome == ("failed" if hung else "terminated")


WATCHDOG = (
    "[rank{0}]:[E501 11:47:40.1 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=1800000) ran for 1800032 milliseconds before timing out."
)
ENQUEUED = (
    "[rank{0}]:[E501 11:47:41.2 ProcessGroupNCCL.cpp:1382] [PG ID 0 PG GUID 0(default_pg) Rank {0}]"
    " Received a dump signal due to a collective timeout from rank 4 and we will try our best to "
    "dump the debug info. Last enqueued NCCL work: {1}, last completed NCCL work: 76."
)


@pytest.mark.parametrize(
    ("last", "stage"),
    [
        ("Saving model to out/rank_5_optim_states.pt", "checkpoint"),
        ("opening shard s3://corpus/00711.tar", "load data"),
        ("entering the forward pass", None),
    ],
)
def test_the_rank_that_kept_the_others_waiting_at_its_files(tmp_path, last, stage):
    for rank in range(8):
        lines = [f"{at(10 * step)} step {step} loss 2.{step}" for step in range(40)]
        lines += [f"{at(401)} {last}"] if rank == 5 else [f"{at(401)} {last}", f"{at(402)} done"]
        lines += [WATCHDOG.format(rank)] if rank != 5 else []
        lines += [ENQUEUED.format(rank, 76 if rank == 5 else 77)]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
    found = diagnose(tmp_path)
    assert [one.rank for one in found.nodes] == [5]
    if stage is None:
        assert found.cause == "nccl_timeout"
    else:
        assert (found.cause, found.stage) == ("rank_kept_others_waiting", stage)
        assert last[-20:] in found.title


@pytest.mark.parametrize("goes_on", [False, True])
def test_nobody_fell_silent_when_the_job_was_ended(tmp_path, goes_on):
    """The others only log that they lost one another, at the moment of the end."""
    lost = "ncclRemoteError: A call failed possibly due to a network error or a remote process"
    for rank in range(4):
        lines = [f"{at(10 * step)} step {step} loss 2.{step}" for step in range(40)]
        if rank != 2:
            lines += [f"{at(392 + 4 * beat)} waiting for batch" for beat in range(7 * goes_on)]
            lines += [f"{at(425)} {lost} exiting prematurely"]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
    time = (BEGIN + timedelta(seconds=424)).strftime("%Y-%m-%dT%H:%M:%S")
    (tmp_path / "slurm-77.out").write_text(LIMIT.format(time) + "\n")
    found = diagnose(tmp_path)
    assert found.cause == ("rank_fell_silent" if goes_on else "slurm_time_limit")


ABSL = "I0501 14:40:30.000000 4242 train.py:90] compiling"
MAXTEXT = "completed step: {}, seconds: 2.180, TFLOP/s/device: 440.2, loss: 8.130"
BARS = " 1%|          | {}/4300 [01:{:02d}<2:34:20,  2.18s/it]"
MEGATRON = " iteration {}/ 90000 | elapsed time per iteration (ms): 2180.0 | lm loss: 2.1E+00 |"


@pytest.mark.parametrize(
    ("step", "last", "every", "seconds", "cause"),
    [
        (MAXTEXT, 38, 1, 7200, "training_hung"),
        (MEGATRON, 40, 1, 7200, "training_hung"),
        (BARS, 38, 1, 7200, "training_hung"),
        (MAXTEXT, 38, 1, 600, "slurm_time_limit"),  # no time to hang in
        (MAXTEXT, 3000, 50, 7200, "slurm_time_limit"),  # at work until the limit
        (MEGATRON, 3000, 50, 7200, "slurm_time_limit"),
    ],
)
def test_steps_that_state_how_long_they_took(tmp_path, step, last, every, seconds, cause):
    begin = [BEGIN.strftime("%a %b %d %H:%M:%S EDT %Y"), ABSL]
    steps = [step.format(at, at % 60) for at in range(0, last, every)]
    found = judged(tmp_path, [*begin, *steps], LIMIT, seconds)
    assert found.cause == cause
    assert ("its steps took" in found.why) is (cause == "training_hung")


def test_a_launcher_that_announces_the_end_makes_no_progress(tmp_path):
    """Steps, then an evaluation that stands still, by a monitor's lines and an operator's log."""
    pods = [f"{at(10 * step)} step {step} loss 2.1" for step in range(100)]
    pods += [f"{at(1000 + at_batch)} eval batch {at_batch}/256" for at_batch in range(16)]
    pods += [
        f"{at(1600 * hour)} [monitor] util=100,100 power=141,13{hour % 9}" for hour in range(1, 30)
    ]
    end = 50_000
    operator = [
        *(f"{at(7000 * hour)} DEBUG workers expected=3, running=3" for hour in range(7)),
        f"{at(end)} INFO terminating the pods of a after 57600 s",
        f"{at(end)} DEBUG Job a has failed because it was active longer than specified deadline",
    ]
    (tmp_path / "pods.log").write_text("\n".join(pods) + "\n")
    (tmp_path / "operator.log").write_text("\n".join(operator) + "\n")
    assert diagnose(tmp_path).cause == "training_hung"


def test_a_bar_for_each_epoch_does_not_tell_how_long_the_steps_took(tmp_path):
    begin = [BEGIN.strftime("%a %b %d %H:%M:%S EDT %Y")]
    bars = [f" 9%|9 | {step}/150 [00:{step % 60:02}<00:59]" for step in (50, 100, 150)] * 40
    found = judged(tmp_path, [*begin, *bars], LIMIT, 7200)
    assert found.cause == "slurm_time_limit"


@pytest.mark.parametrize(("saved", "cause"), [(80, "training_hung"), (40, "slurm_cancelled")])
def test_another_file_tells_when_the_checkpoint_of_the_last_step_was_made(tmp_path, saved, cause):
    bars = [
        f" 2%|2  | {step}/4300 [{step // 30}:{2 * step % 60:02}:00<9:00:00, 120s/it]"
        for step in range(81)
    ]
    end = CANCEL.format((BEGIN + timedelta(seconds=20_000)).strftime("%Y-%m-%dT%H:%M:%S"))
    (tmp_path / "job.err").write_text(f"{at(0)} start\n" + "\n".join([*bars, end]) + "\n")
    out = [
        f"[{at(9700 + rank)},000] [INFO] [torch_checkpoint_engine.py:23:save] [Torch] Saved "
        f"/nfs/run7/checkpoint-{saved}/global_step{saved}/zero_pp_rank_{rank}_optim_states.pt."
        for rank in range(4)
    ]
    (tmp_path / "job.out").write_text("\n".join(out) + "\n")
    assert diagnose(tmp_path).cause == cause


def test_a_training_by_the_clock_of_another_zone_reaches_its_limit(tmp_path):
    """Steps stamped in UTC, the limit nine hours later by the scheduler's clock."""
    begin = [f"[W{BEGIN:%m%d} {BEGIN:%H:%M:%S}.177777868 Utils.hpp:165] Warning: deprecated"]
    quiet = [f"> building part {part}" for part in "abcdefghijklmnopqrstuvwxyz" * 3]
    steps = [
        f" [{at(300 + 88 * step)}.2] iteration {step}/ 900 | lm loss: 2.1" for step in range(140)
    ]
    found = judged(tmp_path, [*begin, *quiet, *steps], LIMIT, 300 + 88 * 139 + 9 * 3600 + 67)
    assert (found.outcome, found.cause) == ("terminated", "slurm_time_limit")
