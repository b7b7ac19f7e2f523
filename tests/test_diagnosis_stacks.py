"""Stacks of py-spy as people take them: in notes, of few processes, of processes by number."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.beside.owners import assign
from rmetric.diagnosis.beside.places import odd_stacks
from rmetric.diagnosis.beside.stacks import Stack, holds_stacks, is_stack_dump, read_stacks
from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.job import Job
from rmetric.diagnosis.result import Diagnosis

WAITS = "    {op} (torch/distributed/distributed_c10d.py:2050)\n    step (train.py:41)"
READS = (
    "    wait (threading.py:359)\n    get (queue.py:180)\n"
    "    _try_get_data (torch/utils/data/dataloader.py:1251)\n"
    "    __next__ (torch/utils/data/dataloader.py:708)\n    step (train.py:30)"
)
WRITES = (
    "    _write_item (torch/distributed/checkpoint/filesystem.py:346)\n"
    "    write_data (torch/distributed/checkpoint/filesystem.py:660)\n    save (train.py:60)"
)


def stack(pid: int, frames: str, *, command: str = "python train.py", head: bool = True) -> str:
    process = f"Process {pid}: {command}\nPython v3.11.4 (/usr/bin/python3)\n\n" if head else ""
    return f'{process}Thread {pid} (idle): "MainThread"\n{frames}\n    <module> (train.py:99)\n'


def timeouts(ranks: int, *, but: int, launched: str = "") -> str:
    """Steps, and the watchdogs of all ranks but one, which only hears of them."""
    steps = [f"[rank0]: 2025-03-04 10:00:{at:02d} step {at} loss 2.1" for at in range(50)]
    ends = [
        f"[rank{rank}]:[E304 10:31:00.1 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum=90, OpType=ALLREDUCE, Timeout(ms)=1800000)"
        for rank in range(ranks)
        if rank != but
    ]
    heard = (
        f"[rank{but}]:[E304 10:31:01.1 ProcessGroupNCCL.cpp:1683] [PG ID 0 PG GUID 0 Rank {but}] "
        "Received a dump signal due to a collective timeout from rank 1 and we will try our best "
        "to dump the debug info. Last enqueued NCCL work: 12, last completed NCCL work: 12."
    )
    return "\n".join([launched, *steps, *ends, heard]) + "\n"


def with_one_that_reads(folder: Path) -> Diagnosis:
    """The diagnosis of a folder beside stacks of four ranks, of which rank 2 reads its data."""
    stacks = [
        stack(
            400 + rank,
            READS if rank == 2 else WAITS.format(op="barrier"),
            command=f"t --rank {rank}",
        )
        for rank in range(4)
    ]
    (folder / "pyspy.txt").write_text("".join(stacks))
    return diagnose([folder])


def ranks_of(found: Diagnosis) -> list[int | None]:
    return [one.rank for one in found.nodes]


def test_the_rank_that_only_heard_of_the_timeouts_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(timeouts(8, but=5))
    found = diagnose([tmp_path])
    assert (found.cause, ranks_of(found)) == ("nccl_timeout", [5])


def test_the_rank_that_goes_on_to_retry_its_read_kept_the_others_waiting(tmp_path: Path) -> None:
    said = "datasets.utils.file_utils - WARNING - Got disconnected from remote data host. Retrying"
    text = timeouts(8, but=5)
    before, ends = text.split("[rank0]:[E304", 1)
    retries = "".join(f"[rank5]: 2025-03-04 10:{at}:00 {said} [{at}/20]\n" for at in (10, 20, 30))
    after = f"[rank5]: 2025-03-04 10:40:00 {said} [4/20]\n"
    (tmp_path / "job.log").write_text(f"{before}{retries}[rank0]:[E304{ends}{after}")
    found = diagnose([tmp_path])
    assert (found.cause, found.stage) == ("rank_kept_others_waiting", "load data")
    assert ranks_of(found) == [5]


def test_dumps_that_follow_one_another_without_a_line_between_are_several(tmp_path: Path) -> None:
    """faulthandler.dump_traceback_later(repeat=True) states no time; nothing ended the job."""
    for rank in range(8):
        waits = ("__next__", "data_loader.py") if rank == 5 else ("wait", "collectives.py")
        dump = (
            "Current thread 0x00007d1c05000740 (most recent call first):\n"
            f'  File "/lib/{waits[1]}", line 359 in {waits[0]}\n'
            '  File "/src/train.py", line 512 in train_loop\n'
        )
        steps = "".join(
            f"I0512 05:47:{at:02d}.582 19 logger.py:190] completed step: {at}, loss: 4.2\n"
            for at in range(39 if rank == 5 else 40)
        )
        (tmp_path / f"rank_{rank}.log").write_text(steps + 12 * dump)
    found = diagnose([tmp_path])
    assert (found.outcome, found.stage, ranks_of(found)) == ("failed", "load data", [5])


def test_the_stack_with_which_a_process_aborts_tells_where_its_rank_stood(tmp_path: Path) -> None:
    """The abort after a watchdog is its consequence, also where it states no time."""
    for rank in range(8):
        waits = (
            ("_try_get_data", "torch/utils/data/dataloader.py")
            if rank == 5
            else ("wait", "c10d.py")
        )
        said = timeouts(8, but=5).splitlines()
        own = [line for line in said if line.startswith(f"[rank{rank}]:[E304")]
        stack = [
            "Fatal Python error: Aborted",
            "",
            "Thread 0x00007d1c05000740 (most recent call first):",
            f'  File "/lib/{waits[1]}", line 359 in {waits[0]}',
            '  File "/src/train.py", line 512 in train_loop',
        ]
        path = tmp_path / "attempt_0" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(["loading", *own, *stack]) + "\n")
    found = diagnose([tmp_path])
    assert (found.stage, ranks_of(found)) == ("load data", [5])


def test_a_job_that_a_person_cancels_hours_later_hung_where_its_stacks_stand(
    tmp_path: Path,
) -> None:
    steps = [
        f"[rank{rank}]: 2026-11-24 03:{at:02d}:00 step {at} loss 2.1"
        for at in range(30)
        for rank in range(8)
    ]
    end = (
        "slurmstepd-gpu-07: error: *** JOB 48 ON gpu-07 CANCELLED AT 2026-11-24T05:36:22 DUE to"
        " SIGNAL Terminated ***"
    )
    (tmp_path / "job.out").write_text("\n".join([*steps, end]) + "\n")
    stacks = [
        f"### SLURM_PROCID={rank}\n"
        + stack(4000 + rank, READS if rank == 5 else WAITS.format(op="all_reduce"))
        for rank in range(8)
    ]
    (tmp_path / "pyspy.txt").write_text("\n".join(stacks))
    found = diagnose([tmp_path])
    assert (found.cause, found.stage, ranks_of(found)) == ("training_hung", "load data", [5])


def test_all_ranks_that_time_out_accuse_nobody(tmp_path: Path) -> None:
    text = timeouts(8, but=9).split("[rank9]:", maxsplit=1)[0]
    (tmp_path / "job.log").write_text(text)
    assert ranks_of(diagnose([tmp_path])) == []


@pytest.mark.parametrize(
    ("frames", "stage"), [(READS, "load data"), (WRITES, "checkpoint"), (WAITS, None)]
)
def test_one_process_of_two_that_waits_outside_the_job(frames, stage, tmp_path: Path) -> None:
    notes = "# taken by hand, the log stands\n$ py-spy dump --pid 4110\n" + stack(
        4110, WAITS.format(op="all_reduce")
    )
    notes += "$ py-spy dump --pid 4113\n" + stack(4113, frames.format(op="all_gather"))
    (tmp_path / "notes.txt").write_text(notes)
    (tmp_path / "job.log").write_text(timeouts(8, but=3))
    found = diagnose([tmp_path])
    if stage is None:
        assert found.cause == "nccl_timeout"
    else:
        assert (found.cause, found.stage) == ("rank_stands_elsewhere", stage)
    assert ranks_of(found) == [3]


def test_a_process_is_known_by_its_number(tmp_path: Path) -> None:
    launched = "\n".join(f"rank {rank}/8 local {rank} pid {700 + 7 * rank}" for rank in range(8))
    dumps = [
        stack(700 + 7 * rank, READS if rank == 6 else WAITS.format(op="all_reduce"))
        for rank in range(8)
    ]
    (tmp_path / "pyspy.txt").write_text("\n".join(dumps))
    (tmp_path / "job.log").write_text(timeouts(8, but=6, launched=launched))
    found = diagnose([tmp_path])
    assert (found.cause, found.stage) == ("rank_stands_elsewhere", "load data")
    assert ranks_of(found)[0] == 6


OF_XLA = (
    "    mark_step (torch_xla/core/xla_model.py:1055)\n    {op} (torch_xla/core/xla_model.py:9)"
)


@pytest.mark.parametrize(
    ("waits", "own", "others"),
    [
        (WAITS, "all_gather", "all_reduce"),
        (OF_XLA, "mesh_reduce", "optimizer_step"),
        (OF_XLA, "rendezvous", "optimizer_step"),
    ],
)
def test_a_rank_in_another_collective_explains_a_hang(
    tmp_path: Path, waits: str, own: str, others: str
) -> None:
    for rank in range(4):
        frames = waits.format(op=own if rank == 2 else others)
        (tmp_path / f"pyspy_rank_{rank}.txt").write_text(stack(4700 + rank, frames))
    steps = [f"2025-03-04 10:00:{at:02d} step {at} loss 2.1" for at in range(50)]
    end = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-03-04T13:20:00 ***"
    (tmp_path / "job.log").write_text("\n".join([*steps, end]) + "\n")
    found = diagnose([tmp_path])
    assert (found.cause, ranks_of(found)) == ("collectives_differ", [2])


def test_stacks_behind_hosts_and_workers_of_data() -> None:
    text = "\n".join(
        f"{host}: {line}"
        for host, rank in (("nid001", 0), ("nid002", 4))
        for line in stack(70 + rank, READS, command=f"python train.py (RANK={rank})").splitlines()
    )
    read = read_stacks(text, "notes.txt", None)
    assert [(one.node, one.rank, one.stage) for one in read] == [
        ("nid001", 0, "load data"),
        ("nid002", 4, "load data"),
    ]
    worker = stack(99, "    read (mmap.py:1)\n    _worker_loop (torch/utils/data/worker.py:9)")
    assert read_stacks(text + "\n" + worker, "notes.txt", None) == read


def test_what_is_a_file_of_stacks() -> None:
    dump = stack(4, READS)
    assert is_stack_dump(dump.encode())
    assert is_stack_dump(stack(4, READS, head=False).encode())
    prose = "\n".join(f"line {at} of the notes" for at in range(40))
    assert not is_stack_dump(f"{dump}\n{prose}".encode())
    assert holds_stacks(f"{prose}\n{dump}\n{prose}".encode())
    assert not holds_stacks(b"Process 3: started\nThread 4 of the pool is idle\n")


def test_a_number_in_a_files_name_is_no_part_of_an_address():
    job = Job(node_of_rank={0: "10.0.0.7", 1: "10.0.0.8"})
    named, numbered = (
        Stack(file=file, frames=(("wait", "x.py", "1"),))
        for file in ("hang_10.0.0.7.txt", "hang_10.txt")
    )
    assign(job, [named, numbered], lambda node, local_rank: [])
    assert (named.stream, numbered.stream) == ("node 10.0.0.7", "")


def test_stacks_of_all_in_one_place_tell_that_a_cancelled_job_hung(tmp_path: Path) -> None:
    steps = [f"{at % 4}: completed step: {at // 4}, loss: 2.1" for at in range(80)]
    end = "slurmstepd: error: *** JOB 77 ON gh-1 CANCELLED AT 2025-03-09T07:58:14 ***"
    (tmp_path / "job.out").write_text("\n".join([*steps, end]) + "\n")
    assert diagnose([tmp_path]).outcome == "terminated"
    waits = WAITS.format(op="all_gather")
    stacks = [f"# SLURM_PROCID={rank}\n{stack(400 + 7 * rank, waits)}" for rank in range(4)]
    (tmp_path / "pyspy.txt").write_text("".join(stacks))
    found = diagnose([tmp_path])
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert found.title == "The training hung after step 19 and was ended later"
    (tmp_path / "pyspy.txt").write_text("".join(stacks[:2]))
    assert diagnose([tmp_path]).outcome == "terminated", "of two processes no more is known"


def test_a_worker_below_its_process_is_another_process() -> None:
    """py-spy sets it in; its frames are none of the process above it."""
    worker = stack(
        512, "    get (dataset.py:388)\n    _worker_loop (torch/utils/data/worker.py:351)"
    )
    inner = "".join(f"  {line}\n" for line in worker.splitlines() if line)
    found = read_stacks(stack(511, READS) + inner, "gpu-1.txt", None)
    assert [one.pid for one in found] == [511]
    assert found[0].stage == "load data"


def test_processes_in_order_are_ranks_only_where_all_are_there(tmp_path: Path) -> None:
    job = Job()
    stacks = [
        Stack(file="a", frames=(("f", "a.py", "1"),), pid=900 + at, node="n1") for at in range(4)
    ]
    assign(job, stacks, lambda node, local: [f"node {node}"])
    assert [one.stream for one in stacks] == [f"rank {rank}" for rank in range(4)]
    job.world_size = 8
    few = [
        Stack(file="a", frames=(("f", "a.py", "1"),), pid=900 + at, node="n1") for at in range(2)
    ]
    assign(job, few, lambda node, local: [f"node {node}"])
    assert [one.stream for one in few] == ["node n1", "node n1"]


def fault(frames: str) -> str:
    """A dump of faulthandler, with the frames of py-spy."""
    lines = []
    for line in frames.splitlines():
        name, _, place = line.strip().partition(" (")
        file, _, number = place.rstrip(")").rpartition(":")
        lines.append(f'  File "{file}", line {number} in {name}')
    head = "Timeout (0:30:00)!\nThread 0x000014b519b4740 (most recent call first):\n"
    return head + "\n".join(lines) + "\n"


def test_a_rank_that_never_moved_explains_the_limit_that_ended_the_job(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    for rank in range(8):
        frames = READS if rank == 5 else WAITS.format(op="all_reduce")
        (tmp_path / "stacks" / f"rank{rank}.txt").write_text(fault(frames) * 3)
    steps = [f"2025-03-04 10:{at:02d}:00 step {at} loss 2.1" for at in range(50)]
    end = "=>> PBS: job killed: walltime 14436 exceeded limit 14400"
    (tmp_path / "job.o88").write_text("\n".join([*steps, end]) + "\n")
    found = diagnose([tmp_path])
    assert (found.outcome, found.cause, ranks_of(found)[0]) == (
        "failed",
        "training_hung",  # the line states for how long it ran, and so when it ended
        5,
    )


def test_a_rank_that_reads_explains_more_than_an_unknown_error(tmp_path: Path) -> None:
    steps = [f"[rank0]: 2025-03-04 10:{at:02d}:00 step {at} loss 2.1" for at in range(50)]
    error = "ERROR:launcher:Failed to kill global rank 0 (PID 118) with SIGTERM"
    (tmp_path / "job.log").write_text("\n".join([*steps, error]) + "\n")
    found = with_one_that_reads(tmp_path)
    assert (found.cause, ranks_of(found)) == ("rank_stands_elsewhere", [2])


@pytest.mark.parametrize(
    "frame",
    [
        "_checkpointed_attention_forward (megatron/core/transformer/attention.py:180)",
        "checkpoint (megatron/core/tensor_parallel/random.py:341)",
        "checkpoint (torch/utils/checkpoint.py:120)",
    ],
)
def test_activations_that_are_computed_again_are_no_checkpoint(frame: str) -> None:
    text = stack(7, f"    forward (megatron/core/models/gpt_model.py:285)\n    {frame}")
    assert read_stacks(text, "a.txt", 0)[0].stage == ""


@pytest.mark.parametrize("stamp", ["", "2025-03-04T10:30:02.000Z "])
def test_stacks_below_the_line_of_a_rank_are_those_of_the_rank(tmp_path: Path, stamp: str) -> None:
    """One log of a node: each rank's own line stands above faulthandler's, which name none."""
    waits = '  File "/lib/torch/autograd/graph.py", line 823 in _engine_run_backward'
    reads = '  File "/code/shards.py", line 88 in read_shard'
    lines = [f"[rank {rank}] step {at} loss 2.1" for at in range(50) for rank in range(4)]
    for rank in range(4):
        lines += [
            f"[rank {rank}] no step finished for 1200s, stacks follow",
            "Timeout (0:20:00)!",
            "Thread 0x00007f6b2c7fe700 (most recent call first):",
            '  File "/lib/python3.11/threading.py", line 331 in wait',
            "",
            "Thread 0x00007f6d9f1d2740 (most recent call first):",
            reads if rank == 2 else waits,
            '  File "/code/train.py", line 170 in main',
        ]
    lines.append("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-03-04T10:50:00 ***")
    (tmp_path / "node0.log").write_text("".join(f"{stamp}{line}\n" for line in lines))
    found = diagnose([tmp_path])
    assert ranks_of(found)[:1] == [2]
    assert "read_shard" in str(found.nodes[0])


def hung(path: Path, stacks: dict[str, str]) -> Diagnosis:
    """A job that a person cancelled hours after its last step, and stacks of its processes."""
    steps = [f"2025-03-04 10:00:{at:02d} step {at} loss 2.1" for at in range(50)]
    end = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-03-04T13:20:00 ***"
    (path / "job.log").write_text("\n".join([*steps, end]) + "\n")
    for name, text in stacks.items():
        (path / name).write_text(text)
    return diagnose([path])


@pytest.mark.parametrize(("head", "rank"), [("Timeout (0:30:00)!", 2), ("Asked", 0)])
def test_a_stack_that_faulthandler_wrote_once_when_its_time_was_over_stays(
    head: str, rank: int, tmp_path: Path
) -> None:
    """One that a person asked for may be of between two steps: what the launcher says counts."""
    for at in range(4):
        steps = "".join(f"step {step} loss 2.1\n" for step in range(50))
        frames = READS if at == 2 else WAITS.format(op="all_reduce")
        stacks = fault(frames).replace("Timeout (0:30:00)!", head)
        (tmp_path / f"rank_{at}.log").write_text(f"{steps}{stacks}")
    end = "failed (exitcode: -9) local_rank: 0 (pid: 400) of binary: python"
    (tmp_path / "job.log").write_text(f"E0304 10:31:00 41 api.py:869] {end}\n")
    found = diagnose([tmp_path])
    assert ranks_of(found)[:1] == [rank]


def test_stacks_explain_a_kill_without_a_reason(tmp_path: Path) -> None:
    lines = [f"[rank0]: 2025-03-04 10:00:{at:02d} step {at} loss 2.1" for at in range(50)]
    killed = (
        "E0304 10:31:00 41 api.py:869] failed (exitcode: -9) local_rank: 0 (pid: 400) of binary: p"
    )
    (tmp_path / "job.log").write_text("\n".join([*lines, killed]) + "\n")
    found = with_one_that_reads(tmp_path)
    assert (found.cause, ranks_of(found)[:1]) == ("rank_stands_elsewhere", [2])


def test_a_pods_name_above_a_stack_is_that_of_a_ranks_own_file(tmp_path: Path) -> None:
    stacks = "".join(
        f"$ kubectl exec t5-{pod} -- py-spy dump --pid 7\n"
        + stack(7, READS if pod == "d" else WAITS.format(op="all_reduce"))
        for pod in "abcd"
    )
    pods = {
        f"t5-{pod}.log": "".join(f"[rank{rank}]: step {at} loss 2\n" for at in range(50))
        for rank, pod in enumerate("badc")
    }
    found = hung(tmp_path, {**pods, "notes.txt": stacks})
    assert (found.stage, ranks_of(found)) == ("load data", [2])


def test_local_ranks_that_recur_are_of_several_nodes() -> None:
    frames = (("wait", "x.py", "1"),)
    stacks = [Stack(file="a.txt", frames=frames, local_rank=at % 2) for at in range(4)]
    assert {one.stream for one in assign(Job(), stacks, lambda node, local: [])} == {""}
    stacks = [Stack(file="a.txt", frames=frames, local_rank=at) for at in range(4)]
    assert [one.stream for one in assign(Job(), stacks, lambda node, local: [])] == [
        f"rank {at}" for at in range(4)
    ]


DOWNLOADS = (
    "    read (ssl.py:1103)\n    recv_into (ssl.py:1251)\n    generate (requests/models.py:820)\n"
    "    _next_data (torchdata/stateful_dataloader/stateful_dataloader.py:430)\n"
    "    step (train.py:30)"
)


def test_a_rank_that_downloads_its_data_waits_for_no_other_rank(tmp_path: Path) -> None:
    stacks = {
        f"pyspy_rank_{rank}.txt": stack(
            47, DOWNLOADS if rank == 2 else WAITS.format(op="wait_tensor")
        )
        for rank in range(4)
    }
    found = hung(tmp_path, stacks)
    assert (found.cause, found.stage, ranks_of(found)) == ("training_hung", "load data", [2])


def test_a_rank_is_named_before_its_node_of_which_one_process_stands_elsewhere(
    tmp_path: Path,
) -> None:
    lines = timeouts(8, but=5).strip().splitlines()
    ranks = [int(line[5]) for line in lines]
    text = "\n".join(f"n{rank // 4 + 1}: {line}" for rank, line in zip(ranks, lines, strict=True))
    (tmp_path / "job.log").write_text(text + "\n")
    stacks = "".join(
        f"$ ssh n2 py-spy dump --pid {pid}\n"
        + stack(pid, WRITES if pid == 4131 else WAITS.format(op="all_gather"))
        for pid in (4100, 4131, 4150, 4199)
    )
    (tmp_path / "pyspy.txt").write_text(stacks)
    found = diagnose([tmp_path])
    assert (found.cause, ranks_of(found)[:1]) == ("rank_stands_elsewhere", [5])


def test_processes_of_a_pod_that_share_its_stream_are_told_apart(tmp_path: Path) -> None:
    """Faulthandler names no rank; of the two processes of fit-1 one reads its data."""
    lines = [f"fit-0 trainer {{'loss': 2.1, 'step': {step}}}" for step in range(50)]
    for pod, frames in (("fit-1", READS), *[("fit-0", WAITS.format(op="all_reduce"))] * 2):
        lines += [f"{pod} trainer {line}" for line in fault(frames).splitlines()]
    other = fault(WAITS.format(op="all_reduce")).replace("9b4740", "9b4741")
    lines += [f"fit-1 trainer {line}" for line in other.splitlines()]
    lines += [
        f"fit-{rank // 2} trainer [rank{rank}]:[E304 10:31:00.1 ProcessGroupNCCL.cpp:629] "
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=90)"
        for rank in (0, 1, 3)
    ]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert (found.cause, found.stage) == ("rank_stands_elsewhere", "load data")


def test_a_process_of_a_node_in_another_collective_is_found_beside_known_ranks(
    tmp_path: Path,
) -> None:
    """Only the ranks of the first pod are known; of the other pods' processes one is elsewhere."""
    for pod in range(3):
        steps = "".join(f"2025-03-04 10:00:{at:02d} step {at} loss 2.1\n" for at in range(50))
        (tmp_path / f"fit-{pod}.log").write_text(steps if pod == 0 else "[rank9] opened\n")
        stacks = "".join(
            stack(30 + at, WAITS.format(op="barrier" if (pod, at) == (2, 1) else "all_gather"))
            for at in range(2)
        )
        (tmp_path / f"node-{pod}.txt").write_text(stacks)
    end = "slurmstepd: error: *** JOB 41 ON node-0 CANCELLED AT 2025-03-04T12:58:37 ***"
    (tmp_path / "slurm.out").write_text(f"{end}\n")
    found = diagnose([tmp_path])
    assert found.cause == "collectives_differ"
    assert found.nodes[0].name == "node node-2"


PIDS = (917, 955, 902, 931)


def test_a_process_is_known_by_the_name_of_its_ray_workers_file(tmp_path: Path) -> None:
    for rank in range(4):
        lines = [f"INFO:2025-03-04 10:{at:02d}:00,1:[Rank {rank}] step {at}" for at in range(50)]
        name = f"worker-{'5f' * 28}-01000000-{PIDS[rank]}.out"
        (tmp_path / name).write_text("\n".join([":job_id:01000000", *lines]) + "\n")
    stacks = "".join(
        stack(pid, WRITES if at == 2 else WAITS.format(op="barrier")) for at, pid in enumerate(PIDS)
    )
    (tmp_path / "pyspy.txt").write_text(stacks)
    end = "slurmstepd: error: *** JOB 41 ON n1 CANCELLED AT 2025-03-04T14:58:37 ***"
    (tmp_path / "slurm.out").write_text(f"{end}\n")
    found = diagnose([tmp_path])
    assert (found.stage, ranks_of(found)[:1]) == ("checkpoint", [2])
    assert not any("scheduler's numbers" in note for note in found.notes)


@pytest.mark.parametrize("watched", [True, False])
def test_stacks_explain_an_abort_by_a_watchdog(watched: bool, tmp_path: Path) -> None:
    """An abort for another reason, without a collective that timed out, stays one."""
    steps = "".join(f"[rank0]: 2025-03-04 10:00:{at:02d} step {at} loss 2.1\n" for at in range(50))
    end = "failed (exitcode: -6) local_rank: 0 (pid: 400) of binary: python"
    aborted = "E0304 {} 41 api.py:869] " + end + "\n"
    if watched:  # the launcher's clock is some seconds behind
        (tmp_path / "job.log").write_text(timeouts(4, but=2))
        (tmp_path / "torchrun.log").write_text(aborted.format("10:30:58"))
    else:
        (tmp_path / "job.log").write_text(steps + aborted.format("10:31:09"))
    found = with_one_that_reads(tmp_path)
    if watched:
        assert (found.cause, found.stage, ranks_of(found)[:1]) == (
            "rank_stands_elsewhere",
            "load data",
            [2],
        )
    else:
        assert found.cause == "process_aborted"


def test_a_machine_of_a_tpu_slice_above_a_stack_is_its_rank() -> None:
    text = "".join(
        f"##### (t1v-n-5c1e07a3-w-{at})\n" + stack(20 + at, READS if at == 2 else WAITS)
        for at in range(4)
    )
    assert [one.rank for one in read_stacks(text, "pyspy.txt", None)] == [0, 1, 2, 3]


def test_who_waits_for_ranks_that_write_is_in_no_other_collective() -> None:
    """Most write a checkpoint, and one waits for them: it calls nothing else."""
    stacks = [
        one
        for at in range(5)
        for one in read_stacks(
            stack(20 + at, WAITS.format(op="barrier") if at == 3 else WRITES),
            f"{at}.txt",
            at,
        )
    ]
    for one in stacks:
        one.stream = f"rank {one.rank}"
    assert not any(one.collective for one in odd_stacks(stacks).values())


def test_a_process_of_which_no_more_is_known_tells_where_the_training_hung(tmp_path: Path) -> None:
    stacks = "".join(
        stack(pid, WRITES if at == 2 else WAITS.format(op="barrier")) for at, pid in enumerate(PIDS)
    )
    found = hung(tmp_path, {"pyspy.txt": stacks})
    assert (found.cause, found.stage, found.nodes) == ("training_hung", "checkpoint", ())
