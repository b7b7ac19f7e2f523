"""What schedulers, launchers and shells record of a job's end, its restarts and its processes."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.ingest import ingest_attempts
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.report.render import headline
from rmetric.diagnosis.result import Diagnosis, Suspect
from tests.diagnosed_files import written


def steps(number: int = 60, prefix: str = "", hour: int = 10) -> list[str]:
    time = prefix + "2025-03-04 {}:{:02d}:{:02d} "
    return [
        time.format(hour, at // 2, 30 * (at % 2)) + f"step {at}/{number - 1} loss 2.1"
        for at in range(number)
    ]


def named(found: Diagnosis) -> tuple[str | None, int | None, str | None]:
    """The cause, and the rank and the node that are named first."""
    first = found.nodes[0] if found.nodes else None
    return found.cause, first and first.rank, first and first.node


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.31 GiB."


@pytest.mark.parametrize(
    ("records", "made", "outcome"),
    [
        (["4100|train|COMPLETED|0:0|02:01:52|"], 60, "healthy"),
        (["1737487650.716068 finish status=0"], 60, "healthy"),
        (["Job 'raysubmit_abc' succeeded"], 60, "healthy"),
        (["4100|train|FAILED|1:0|02:01:52|"], 60, "failed"),
        ([], 60, "failed"),
        # A script may end well though its training did not.
        (["4100|train|COMPLETED|0:0|02:01:52|"], 40, "failed"),
    ],
)
def test_a_fault_of_a_server_is_outlived_where_the_job_ended_well(
    records: list[str], made: int, outcome: str, tmp_path: Path
) -> None:
    server = ["INFO:     Started server process [4117]", OOM, 'INFO:     "POST /reward" 200 OK']
    train = steps()[:made]
    assert written(tmp_path, job_log=[*train, *records], server_log=server).outcome == outcome


STACK = """[hang-watch] --- rank {rank} (pid 18{rank}) ---
Thread 0x00007f2d801fe740 (most recent call first):
  File "xla_model.py", line 994 in mark_step
  File "{file}", line 183 in {function}
  File "train.py", line 402 in main"""


def test_stacks_of_several_ranks_in_the_log_of_their_node(tmp_path: Path) -> None:
    train = [f"{line} [rank {rank}]" for line in steps(60) for rank in range(4)]
    end = "[hang-watch] limit of 30 min reached: SIGUSR1 to all workers, then SIGKILL"
    stacks = [
        STACK.format(rank=rank, file="train.py", function="evaluate" if rank == 2 else "train_loop")
        for rank in range(4)
    ]
    stacks[2] = stacks[2].replace("mark_step", "mesh_reduce")
    late = f"[hang-watch Tue Mar  4 11:00:00 UTC 2025] limit of 30 min reached{end[31:]}"
    found = written(tmp_path, train_log=[*train[:200], late, *"\n".join(stacks).split("\n")])
    assert named(found) == ("collectives_differ", 2, None)


def kill(pid: int) -> list[str]:
    return [
        "2025-03-04T08:19:31+0000 gpu-2 kernel: python invoked oom-killer: gfp_mask=0x1100cca",
        f"2025-03-04T08:19:31+0000 gpu-2 kernel: Out of memory: Killed process {pid} (python) "
        "total-vm:244883616kB, anon-rss:124981404kB",
    ]


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(("pid", "rank"), [(7203, 7), (7201, 5)])
def test_the_killed_process_is_a_rank_by_its_launchers_lines(
    pid: int, rank: int, begun: bool, tmp_path: Path
) -> None:
    """The kernel logs UTC, the launcher the time of a zone two hours ahead."""
    launch = "gpu-2: [2025-03-04 10:00:00,1] [INFO] [launch.py:256:main] "
    end = "gpu-2: [2025-03-04 10:19:34,1] [{}] [launch.py:319:sigkill_handler] "
    lines = [
        f"{launch}WORLD INFO DICT: {{'gpu-1': [0, 1, 2, 3], 'gpu-2': [0, 1, 2, 3]}}",
        *(
            f"{launch}process {7200 + at} spawned with command: ['a.py', '--local_rank={at}']"
            for at in range(4)
            if begun
        ),
        *steps(40, "gpu-1: "),
        *(f"{end.format('INFO')}Killing subprocess {7200 + at}" for at in range(4)),
        # Always the command of the last rank.
        f"{end.format('ERROR')}['a.py', '--local_rank=3'] exits with return code = -9",
    ]
    found = written(tmp_path, job_log=lines, **{"kernel-gpu-2_txt": kill(pid)})
    assert named(found) == ("kernel_out_of_memory", rank, "gpu-2")
    assert "2.0 h behind" in " ".join(found.notes)


def test_a_process_that_is_no_rank_was_killed_by_a_clock_of_its_own(tmp_path: Path) -> None:
    lines = [*steps(60, "gpu-2: "), "gpu-2: KeyError: 'ids'"]
    found = written(tmp_path, job_log=lines, **{"kernel-gpu-2_txt": kill(99)})
    assert found.cause == "key_error"


def test_a_port_that_went_down_hours_before_is_not_the_one_that_ended_the_job(
    tmp_path: Path,
) -> None:
    down = "2025-03-04T{} {} kernel: mlx5_core 0000:5d:00.0 mlx5_3: Port: 1 Link DOWN"
    lost = (
        "[rank5]: gpu-2:41:42 [5] transport/net_ib.cc:2356 NCCL WARN NET/IB: Got completion from "
        "peer 10.0.0.2<41001> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=0 len=0 vendor err 129"
    )
    found = written(
        tmp_path,
        job_log=[*(f"[rank0]: step {at}/90 loss 2.1" for at in range(40)), lost],
        **{
            "dmesg-gpu-1_txt": [down.format("08:41:08+00:00", "gpu-1")],
            "dmesg-gpu-2_txt": [down.format("20:29:31+00:00", "gpu-2")],
        },
    )
    assert [one.node for one in found.nodes] == ["gpu-2", "gpu-2"]


PROMPT = "root@e8c1:/work# accelerate launch -m axolotl.cli.train cfg.yml 2>&1 | tee -a run.log"
TRACED = "+ python3 -m verl.trainer.main_ppo data.train_batch_size={} trainer.name=a"


@pytest.mark.parametrize("command", [PROMPT, TRACED])
def test_a_command_that_is_given_again_behind_a_failure_starts_an_attempt(
    command: str, tmp_path: Path
) -> None:
    refused = ["ValueError: please set only one of micro_batch_size or batch_size"]
    parts = [refused, [*steps(20), OOM], [*steps(30), OOM]]
    lines = [line for at, part in enumerate(parts) for line in (command.format(at), *part)]
    lines = ["+ set -x", "+ date", *lines]
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")
    jobs = ingest_attempts([tmp_path], SignatureLibrary.shipped())
    assert [job.furthest and job.furthest.last_step for job in jobs] == [None, 19, 29]


def test_a_command_that_is_given_once_or_after_nothing_starts_none(tmp_path: Path) -> None:
    lines = [PROMPT, PROMPT, *steps(20), "+ python3 plot.py", *steps(60)[20:]]
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")
    assert len(ingest_attempts([tmp_path], SignatureLibrary.shipped())) == 1


def test_a_command_that_each_node_gives_starts_none(tmp_path: Path) -> None:
    nodes = [f"{node}: {TRACED.format(node)}" for node in range(4)]
    train = [f"{at % 4}: {line}" for at, line in enumerate(steps(60))]
    (tmp_path / "run.log").write_text("\n".join([nodes[0], f"0: {OOM}", *nodes[1:], *train]) + "\n")
    assert len(ingest_attempts([tmp_path], SignatureLibrary.shipped())) == 1


def test_steps_that_fall_back_behind_a_launchers_restart_are_of_that_attempt(
    tmp_path: Path,
) -> None:
    again = "[default] Worker group FAILED. 1/1 attempts left; will restart worker group"
    first, then = steps(60)[:40], steps(60, hour=11)[20:]
    lines = [*first, OOM, again, "restart_count=1", *then]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    assert len(ingest_attempts([tmp_path], SignatureLibrary.shipped())) == 2


def test_the_launchers_of_all_nodes_state_one_restart(tmp_path: Path) -> None:
    again = "node-{}: [2025-03-04 10:3{}:00] [INFO] [default] {}; will restart worker group"
    words = ["Worker group FAILED. 3/3 attempts left", "Detected 1 new nodes"]
    lines = [
        *steps(40, "node-0: "),
        *(again.format(node, node, words[node > 0]) for node in range(4)),
        *steps(60, "node-0: ", hour=11),
    ]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    assert len(ingest_attempts([tmp_path], SignatureLibrary.shipped())) == 2


ZIP = "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 128 vs 22"


QUOTA = "touch: cannot touch '/project/x': Disk quota exceeded"


def of_ranks(*ranks: int) -> list[str]:
    """Ranks that begin, of which rank 0 logs steps, and the tracebacks of some."""
    trace = ["Traceback (most recent call last):", "  File 'a.py', line 3, in f", ZIP]
    return [
        *(f"[rank{rank}]: setting up rank {rank} of 3" for rank in range(3)),
        *(f"[rank0]: {line}" for line in steps(40)),
        *(f"[rank{rank}]: {line}" for rank in ranks for line in trace),
    ]


def test_who_met_first_what_a_shell_shows_later_is_named(tmp_path: Path) -> None:
    found = written(tmp_path, job_log=[*of_ranks(2, 0, 1), QUOTA])
    assert named(found) == ("quota_exceeded", 2, None)


def test_nobody_fell_silent_where_a_write_failed(tmp_path: Path) -> None:
    """Rank 1 only has nothing to log."""
    more = [f"[rank{rank}]: closing file {at}" for at in range(80) for rank in (0, 2)]
    found = written(tmp_path, job_log=[*of_ranks(), *more, QUOTA])
    assert named(found) == ("quota_exceeded", None, None)


@pytest.mark.parametrize(
    ("head", "node"),
    [
        ("##### Fri 29 Aug 2025 run.sh on dgx-lab-2", "dgx-lab-2"),
        ("Running on host gpu-07", "gpu-07"),
        ("hostname: a100-3", "a100-3"),
        ("Starting training on cuda0", None),
        ("starting 3 jobs on the queue", None),
    ],
)
def test_the_only_node_of_a_job_has_the_full_disk(
    head: str, node: str | None, tmp_path: Path
) -> None:
    full = "OSError: [Errno 28] No space left on device"
    world = [f"[rank{rank}]: world_size=4 ready" for rank in range(4)]
    found = written(tmp_path, job_log=[head, *world, *steps(40), *[f"[rank0]: {full}"]])
    assert (found.family, found.nodes[0].node if found.nodes else None) == ("disk full", node)


@pytest.mark.parametrize("length", range(20, 120))
def test_a_headline_keeps_its_cause_however_long_a_nodes_name_is(length: int) -> None:
    name = "a" * length
    suspect = Suspect(name=f"node {name}", rank=None, node=name, score=1.0, why="")
    title = "The training hung after step 1210 and was ended 40 min later"
    line = headline(
        Diagnosis(outcome="failed", cause="training_hung", title=title, nodes=(suspect,))
    )
    assert title[:12] in line


def test_the_memory_of_a_gpu_broke_by_the_kernels_clock(tmp_path: Path) -> None:
    """The kernel logs UTC; the program's last error says no more than that its queue aborted."""
    broken = (
        "2025-03-04T08:29:58.638844+00:00 MI300X-07 kernel: amdgpu 0000:c6:00.0: amdgpu: socket: "
        "6, die: 1, 1 new uncorrectable hardware errors detected in umc block"
    )
    aborted = (
        ":0:rocdevice.cpp :3020: 918213441000 us: Callback: Queue 0x7ee1c8400000 aborting with "
        "error : HSA_STATUS_ERROR_EXCEPTION: a hardware exception. code: 0x1016"
    )
    end = "2025-03-04 10:30:03 [ERROR] failed (exitcode: -6) local_rank: 6 (pid: 41239) of binary"
    files = {"journal-k_txt": [broken], "job_log": [*steps(90)[:60], aborted, end]}
    found = written(tmp_path, **files)
    assert found.cause == "amdgpu_ras_error"
    assert "2.0 h behind" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("clock", "cause"), [("11:29:40", "ib_port_error"), ("11:03:40", "ib_retry_exceeded")]
)
def test_a_link_went_down_by_the_clock_of_another_zone(
    clock: str, cause: str, tmp_path: Path
) -> None:
    down = f"2025-03-04T{clock}+0100 gpu-2 kernel: mlx5_core 0000:5d:00.0 mlx5_3: Port: 1 Link DOWN"
    lost = (
        "gpu-{0}:4{0}:4{0} [5] transport/net_ib.cc:2356 NCCL WARN NET/IB: Got completion from "
        "peer 10.0.0.2<41001> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=0 len=0 vendor err 129"
    )
    train = [f"gpu-1: {line}" for line in steps(90)[:60]]
    ends = [f"gpu-{node}: {lost.format(node)}" for node in (1, 2)]
    late = "gpu-1: 2025-03-04 10:30:02 ERROR giving up"
    found = written(tmp_path, job_log=[*train, *ends, late], **{"dmesg-gpu-2_txt": [down]})
    assert found.cause == cause


def test_a_queue_took_the_nodes_back_by_the_clock_of_another_zone(tmp_path: Path) -> None:
    told = "2025-03-04 10:30:00 W torchrun: Received 15 death signal, shutting down workers"
    event = "2025-03-04T17:29:59Z Warning Evict Pod is evicted, because of preempt"
    found = written(tmp_path, pod_log=[*steps(90)[:60], told], events_txt=[event])
    assert (found.outcome, found.family) == ("terminated", "preempted")


def test_a_description_of_how_the_job_ended_is_read_and_one_of_the_job_is_not(
    tmp_path: Path,
) -> None:
    said = "  message: 'The replica worker-1 ran out-of-memory and exited with a non-zero"
    ended = ["error:", "  code: 8", said, "    status of 1.'", "state: JOB_STATE_FAILED"]
    job = ["kind: PyTorchJob", "spec:", "  replicas: 2"]
    killed = "[ERROR] failed (exitcode: -9) local_rank: 3 (pid: 100) of binary: /bin/python3"
    found = written(
        tmp_path, stream_log=[*steps(90)[:60], killed], describe_yaml=ended, job_yaml=job
    )
    assert named(found) == ("managed_replica_out_of_memory", None, "worker-1")
    assert "left out: 1 settings" in " ".join(found.notes)


def test_files_of_two_attempts_with_the_same_content_are_two(tmp_path: Path) -> None:
    for attempt in range(2):
        for rank in range(2):
            (folder := tmp_path / f"attempt_{attempt}" / f"{rank}").mkdir(parents=True)
            (folder / "stderr.log").write_text(f"{OOM}\n" if rank else "begins\n")
    assert len(diagnose([tmp_path]).attempts) == 2


def test_the_order_in_which_tasks_end_that_lost_another_node_tells_nothing(
    tmp_path: Path,
) -> None:
    lost = (
        "{0}: node-{0}:7{0}:8{0} [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed "
        "by remote peer node-9<41000>"
    )
    train = [f"{at % 4}: {line}" for at, line in enumerate(steps(90)[:60])]
    ends = ["srun: error: node-1: task 1: Exited with exit code 1"]
    lines = [*train, *(lost.format(rank) for rank in (2, 3)), *ends]
    found = written(tmp_path, job_log=lines)
    assert [one.node for one in found.nodes][:1] == ["node-9"]
    assert 1 not in [one.rank for one in found.nodes]


ACTOR = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: PolicyModelActor\n\tpid: {pid}\n\tip: 10.0.0.2"
)


@pytest.mark.parametrize(("pid", "cause"), [(99, "kernel_out_of_memory"), (77, "ray_actor_died")])
def test_the_kill_of_a_process_whose_end_a_framework_reports_ended_the_job(
    pid: int, cause: str, tmp_path: Path
) -> None:
    """The kernel's clock seems to be one hour and 40 minutes before the end."""
    lines = [*steps(60), *ACTOR.format(pid=pid).split("\n")]
    found = written(tmp_path, job_log=lines, **{"kernel-gpu-2_txt": kill(99)})
    assert found.cause == cause


@pytest.mark.parametrize("pid", [99, 77])
def test_the_end_that_a_framework_reports_is_a_consequence_of_that_process_kill(
    pid: int, tmp_path: Path
) -> None:
    """The kernel's clock seems to be two hours behind the report."""
    lines = [*steps(60, hour=6), *ACTOR.format(pid=pid).split("\n")]
    found = written(tmp_path, job_log=lines, **{"kernel-gpu-2_txt": kill(99)})
    assert found.cause == "kernel_out_of_memory"
    assert ("before all other faults" in found.why) == (pid == 99)


@pytest.mark.parametrize(
    ("ran", "outcome"),
    [("15130 exceeded limit 15000", "failed"), ("1810 exceeded limit 1800", "terminated")],
)
def test_a_walltime_without_a_date_states_when_the_job_ended(
    ran: str, outcome: str, tmp_path: Path
) -> None:
    end = f"=>> PBS: job killed: walltime {ran}"
    found = written(tmp_path, job_o88=[*steps(60), end])
    assert found.outcome == outcome


@pytest.mark.parametrize("saved", [6, 7])
def test_what_was_begun_oftener_than_it_was_done_is_where_a_hung_job_stands(
    saved: int, tmp_path: Path
) -> None:
    lines = []
    for at, line in enumerate(steps(70)):
        lines.append(line)
        if at % 10 == 9:
            lines.append(f"{line[:20]}Saving shard of optimizer at {at}")
            lines += [f"{line[:20]}Saved shard of optimizer at {at}"] * (at < 10 * saved)
    # What all ranks log of themselves stands below the last step.
    lines += [f"2025-03-04 10:34:3{at} memory of rank {at}: 61 GB" for at in range(8)]
    end = "=>> PBS: job killed: walltime 14436 exceeded limit 14400"
    found = written(tmp_path, job_o88=[*lines, end])
    assert (found.outcome, found.stage) == ("failed", "checkpoint" if saved == 6 else "train")


@pytest.mark.parametrize(("last", "attempts"), [(100, 1), (80, 2)])
def test_the_bar_of_the_next_epoch_is_no_other_attempt(
    last: int, attempts: int, tmp_path: Path
) -> None:
    """Also where an evaluation takes long between the two."""

    def bar(hour: int, at: int) -> str:
        drawn = f"{at:3d}%|{'#' * (at // 10):10}| {at}/100 [00:{at % 60:02d}<00:10, 1.0it/s]"
        return f"2025-03-04 {hour}:{at // 60:02d}:{at % 60:02d} {drawn}"

    lines = [*(bar(10, at) for at in range(last + 1)), *(bar(12, at) for at in range(60))]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    assert len(ingest_attempts([tmp_path], SignatureLibrary.shipped())) == attempts


def test_condor_dates_its_events_behind_their_numbers(tmp_path: Path) -> None:
    events = [
        "001 (48213.000.000) 2025-03-04 10:00:00 Job executing on host: <10.32.4.7:9618>",
        "...",
        "012 (48213.000.000) 2025-03-04 10:31:05 Job was held.",
        "\tError from slot1_1@gpu-11: Job has gone over cgroup memory limit of 131072 megabytes.",
        "...",
    ]
    found = written(tmp_path, train_log=steps(60), condor_log=events)
    assert (found.outcome, found.cause) == ("failed", "batch_memory_limit")
    assert found.time == datetime(2025, 3, 4, 10, 31, 5, tzinfo=timezone.utc).timestamp()


@pytest.mark.parametrize("host", ["10.0.0.{}", "gpu-{}"])
def test_a_peer_that_is_known_by_its_address_alone_was_lost(host: str, tmp_path: Path) -> None:
    lost = (
        "gpu-{0}:7{0}:8{0} [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by "
        "remote peer {1}<{2}>"
    )
    train = [f"gpu-{at % 2 + 1}: {line}" for at, line in enumerate(steps(90)[:60])]
    peer = host.format(9)
    ends = [
        f"gpu-{node}: {lost.format(node, peer, port)}"
        for node, port in ((1, "41000"), (2, "10.0.0.9:41001"))
    ]
    found = written(tmp_path, job_log=[*train, *ends])
    assert [one.node for one in found.nodes][:1] == [peer]


def test_hosts_that_are_called_like_gpus_stand_before_lines(tmp_path: Path) -> None:
    lines = [f"gpu{11 + at % 3}: {line}" for at, line in enumerate(steps(90)[:60])]
    found = written(tmp_path, job_log=[*lines, f"gpu12: {OOM}"])
    assert [one.node for one in found.nodes][:1] == ["gpu12"]


def test_gpus_that_stand_before_lines_are_no_hosts(tmp_path: Path) -> None:
    lines = [f"gpu{at % 3}: {line}" for at, line in enumerate(steps(90)[:60])]
    found = written(tmp_path, job_log=[*lines, f"gpu2: {OOM}"])
    assert "gpu2" not in [one.node for one in found.nodes]


@pytest.mark.parametrize("made", [60, 40])
def test_the_step_of_servers_that_is_ended_behind_a_training_that_made_all_its_steps(
    made: int, tmp_path: Path
) -> None:
    found = written(
        tmp_path,
        driver_log=steps()[:made],
        slurm_out=["worker 0: fit.sh exited with status 0"],
        servers_log=["slurmstepd: error: *** STEP 41.2 ON n1 CANCELLED AT 2025-03-04T10:31:49 ***"],
    )
    assert (found.outcome == "healthy") == (made == 60)


def test_the_end_that_the_jobs_script_records_outweighs_what_came_before(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        driver_log=steps(),
        slurm_out=["[INFO] Driver finished with exit code 0 (Feb 12)"],
        ray_log=["Traceback (most recent call last):", "RpcError: Timed out while waiting for GCS"],
    )
    assert found.outcome == "healthy"
