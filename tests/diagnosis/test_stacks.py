"""Stacks of py-spy as people take them: in notes, of few processes, of processes by number."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.auxiliary.stacks import Stack, holds_stacks, is_stack_dump, read_stacks
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.patterns.odd_stacks import assign, odd_stacks

FRAMES = (("wait", "x.py", "1"),)
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
    # A worker that reads data, which py-spy sets in below its process, is another process.
    worker = stack(99, "    read (mmap.py:1)\n    _worker_loop (torch/utils/data/worker.py:9)")
    inner = "".join(f"  {line}\n" for line in worker.splitlines() if line)
    for more in (worker, inner):
        assert read_stacks(text + "\n" + more, "notes.txt", None) == read


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
        Stack(file=file, frames=FRAMES) for file in ("hang_10.0.0.7.txt", "hang_10.txt")
    )
    assign(job, [named, numbered], lambda node, local_rank: [])
    assert (named.stream, numbered.stream) == ("node 10.0.0.7", "")


def test_processes_in_order_are_ranks_only_where_all_are_there(tmp_path: Path) -> None:
    for world, count, names in (
        (None, 4, [f"rank {at}" for at in range(4)]),
        (8, 2, ["node n1"] * 2),
    ):
        stacks = [Stack(file="a", frames=FRAMES, pid=900 + at, node="n1") for at in range(count)]
        assign(Job(world_size=world), stacks, lambda node, local: [f"node {node}"])
        assert [one.stream for one in stacks] == names


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


def test_local_ranks_that_recur_are_of_several_nodes() -> None:
    for recur, names in ((2, [""] * 4), (4, [f"rank {at}" for at in range(4)])):
        stacks = [Stack(file="a.txt", frames=FRAMES, local_rank=at % recur) for at in range(4)]
        assert [one.stream for one in assign(Job(), stacks, lambda node, local: [])] == names


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
