"""Flight recorder dumps and stacks of py-spy name the rank that holds up the others."""

from __future__ import annotations

import faulthandler
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from rmetric._util.errors import LogError
from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.patterns.recorder import culprits, read_dump
from rmetric.diagnosis.patterns.stacks import (
    Stack,
    assign,
    holds_stacks,
    is_stack_dump,
    main_threads,
    odd_stacks,
    read_stacks,
    states_stack,
)

FRAMES = [
    {"name": "all_reduce", "filename": "/opt/lib/torch/distributed/distributed_c10d.py", "line": 9},
    {"name": "train_step", "filename": "/home/ada/train.py", "line": 41},
]

WORLD = ("0", "default_pg")
PAIRS = {("1", "tensor"): [0, 1], ("2", "tensor"): [2, 3], WORLD: [0, 1, 2, 3]}


def entry(
    number: int,
    operation: str = "all_reduce",
    state: str = "completed",
    group: tuple[str, str] = WORLD,
) -> dict[str, Any]:
    """What is read of an entry as torch 2.6 writes it."""
    return {
        "frames": FRAMES, "pg_id": int(group[0]), "process_group": group,
        "collective_seq_id": number, "profiling_name": f"nccl:{operation}",
        "input_sizes": [[1024]], "state": state, "retired": state == "completed", "is_p2p": False,
    }  # fmt: skip


def write(
    folder: Path,
    rank: int,
    entries: list[dict[str, Any]],
    *,
    groups: dict[tuple[str, str], list[int]] | None = None,
    active: bool = False,
) -> Path:
    """A rank's dump; of `active` entries alone, those that ended are in its status."""
    groups = groups or {WORLD: list(range(8))}
    status: dict[str, dict[str, int]] = {}
    for record in entries:
        last = status.setdefault(record["process_group"][0], {"last_completed_collective": -1})
        for did in ("enqueued", record["state"]) if not record["is_p2p"] else ():
            last[f"last_{did}_collective"] = record["collective_seq_id"]
    dump = {
        "version": "2.4",
        "pg_config": {
            name: {"name": name, "desc": words, "ranks": str(members)}
            for (name, words), members in groups.items()
        },
        "pg_status": status if active else {},
        "entries": [record for record in entries if record["state"] != "completed" or not active],
    }
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(dump, protocol=2))
    return path


def behind(folder: Path) -> None:
    """Rank 5 of 8 did not enter collective 47."""
    for rank in range(8):
        done = [entry(number) for number in range(40, 47)]
        write(folder, rank, done + ([] if rank == 5 else [entry(47, state="started")]))


def test_the_rank_that_did_not_enter_is_named_with_the_collective(tmp_path: Path) -> None:
    """Pickles; dumps as JSON are jobs of the corpus."""
    behind(tmp_path)
    found = diagnose([tmp_path])
    assert [suspect.rank for suspect in found.nodes] == [5]
    assert (found.outcome, found.cause) == ("failed", "collective_not_entered")
    assert "all_reduce" in found.title
    assert "#47" in found.title
    assert "train.py:41" in found.title
    assert found.score >= 0.8
    named = diagnose([tmp_path / f"nccl_trace_rank_{rank}" for rank in range(8)])
    assert named.nodes == found.nodes


def test_an_exception_of_the_missing_rank_is_the_cause(tmp_path: Path) -> None:
    behind(tmp_path)
    steps = [f"[rank{rank}]: step {at} loss 2.{rank}" for at in (8, 9) for rank in range(8)]
    oom = "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    (tmp_path / "job.log").write_text("\n".join([*steps, oom]) + "\n")
    found = diagnose([tmp_path])
    assert (found.cause, found.nodes[0].rank) == ("cuda_out_of_memory", 5)
    assert "never entered" in found.nodes[0].why


def dumps_of(folder: Path) -> list[Any]:
    return [read_dump(path, path.name) for path in sorted(folder.iterdir())]


def test_a_rank_that_waits_in_its_own_group_is_not_the_cause(tmp_path: Path) -> None:
    """Rank 3 is out of tensor group 2 (2, 3); rank 2 waits there and so lacks in the world."""
    first, second = ("1", "tensor"), ("2", "tensor")
    entered = [[entry(2, group=first), entry(2, state="started")]] * 2
    entered += [[entry(2, state="started", group=second)], []]
    for rank, entries in enumerate(entered):
        begun = [entry(1, group=first if rank < 2 else second), entry(1)]
        write(tmp_path, rank, begun + entries, groups=PAIRS)
    assert list(culprits(dumps_of(tmp_path))) == [3]


@pytest.mark.parametrize("active", [False, True])
def test_a_rank_that_did_not_end_what_others_ended_is_named_after_those_more_wait_for(
    active: bool, tmp_path: Path
) -> None:
    """The GPUs of ranks 3 and 1 stand; 3 entered no more, and 1 all that the others wait in."""
    first, second = ("1", "tensor"), ("2", "tensor")
    waits = [entry(2, state="scheduled")]
    entered = [
        [entry(5, group=first), *waits],
        [entry(5, state="scheduled", group=first), *waits],
        [entry(5, group=second), *waits],
        [entry(5, state="scheduled", group=second)],
    ]
    for rank, entries in enumerate(entered):
        write(tmp_path, rank, entries, groups=PAIRS, active=active)
    blamed = culprits(dumps_of(tmp_path))
    assert list(blamed) == [3, 1]
    assert "did not end all_reduce" in blamed[1].words


def test_a_rank_that_waits_for_a_message_is_not_the_cause(tmp_path: Path) -> None:
    """Two stages of two ranks: rank 0 is late to its data group, as rank 1 sends it nothing."""
    groups = {("1", "data"): [0, 2], ("2", "data"): [1, 3]}
    for rank in range(4):
        own = ("1", "data") if rank % 2 == 0 else ("2", "data")
        receives = entry(9, "recv 0<-1", "scheduled", group=("3", "pipeline")) | {"is_p2p": True}
        more = {0: [receives], 1: []}.get(rank, [entry(2, state="started", group=own)])
        write(tmp_path, rank, [entry(1, group=own), *more], groups=groups)
    assert list(culprits(dumps_of(tmp_path))) == [1]


def test_nothing_is_found_where_all_ranks_are_at_one_place(tmp_path: Path) -> None:
    for rank in range(8):
        write(tmp_path, rank, [entry(1), entry(2, state="started")])
    assert culprits(dumps_of(tmp_path)) == {}
    for rank in range(8):
        write(tmp_path, rank, [entry(number) for number in range(1, 9 + rank % 2)])
    assert culprits(dumps_of(tmp_path)) == {}


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_an_object_is_refused_and_nothing_is_run(tmp_path: Path) -> None:
    behind(tmp_path)
    bad = tmp_path / "nccl_trace_rank_7"
    made = tmp_path / "made"
    bad.write_bytes(
        pickle.dumps({"pg_config": {}, "entries": [Harmful(made)], "collective_seq_id": 1})
    )
    with pytest.raises(LogError, match="object"):
        read_dump(bad, bad.name)
    found = diagnose([tmp_path])
    assert not made.exists()
    assert [suspect.rank for suspect in found.nodes] == [5]
    assert any("nccl_trace_rank_7" in note for note in found.notes)


@pytest.mark.parametrize("damage", [b"", b"\x80\x02}X", b'{"pg_config": [', b'{"pg_config": 1}'])
def test_a_damaged_dump_is_named(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_1"
    path.write_bytes(damage)
    with pytest.raises(LogError, match="nccl_trace_rank_1"):
        read_dump(path, path.name)


def test_a_dump_of_gloo_as_torch_writes_it_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    c10d = pytest.importorskip("torch._C._distributed_c10d")
    if not hasattr(c10d, "_dump_fr_trace"):
        pytest.skip(f"torch {torch.__version__} has no flight recorder without CUDA")
    path = tmp_path / "trace_rank_0"
    path.write_bytes(c10d._dump_fr_trace())
    assert read_dump(path, path.name).rank == 0


def test_a_stack_of_pythons_faulthandler_is_read(tmp_path: Path) -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    over.set()
    other.join()
    assert states_stack(text)
    assert main_threads(text)[-1][0][0] == "test_a_stack_of_pythons_faulthandler_is_read"


# Stacks as people take them: in notes, of few processes, of processes by number

PLACE = (("wait", "x.py", "1"),)
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
    assert [(dump.node, dump.rank, dump.stage) for dump in read] == [
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
        Stack(file=file, frames=PLACE) for file in ("hang_10.0.0.7.txt", "hang_10.txt")
    )
    assign(job, [named, numbered], lambda node, local_rank: [])
    assert (named.stream, numbered.stream) == ("node 10.0.0.7", "")


def test_processes_in_order_are_ranks_only_where_all_are_there() -> None:
    for world, count, names in (
        (None, 4, [f"rank {at}" for at in range(4)]),
        (8, 2, ["node n1"] * 2),
    ):
        stacks = [Stack(file="a", frames=PLACE, pid=900 + at, node="n1") for at in range(count)]
        assign(Job(world_size=world), stacks, lambda node, local: [f"node {node}"])
        assert [dump.stream for dump in stacks] == names


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
        stacks = [Stack(file="a.txt", frames=PLACE, local_rank=at % recur) for at in range(4)]
        assert [dump.stream for dump in assign(Job(), stacks, lambda node, local: [])] == names


def test_a_machine_of_a_tpu_slice_above_a_stack_is_its_rank() -> None:
    text = "".join(
        f"##### (t1v-n-5c1e07a3-w-{at})\n" + stack(20 + at, READS if at == 2 else WAITS)
        for at in range(4)
    )
    assert [dump.rank for dump in read_stacks(text, "pyspy.txt", None)] == [0, 1, 2, 3]


def test_who_waits_for_ranks_that_write_is_in_no_other_collective() -> None:
    """Most write a checkpoint, and one waits for them: it calls nothing else."""
    stacks = [
        dump
        for at in range(5)
        for dump in read_stacks(
            stack(20 + at, WAITS.format(op="barrier") if at == 3 else WRITES),
            f"{at}.txt",
            at,
        )
    ]
    for dump in stacks:
        dump.stream = f"rank {dump.rank}"
    assert not any(dump.collective for dump in odd_stacks(stacks).values())
