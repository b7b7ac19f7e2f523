"""Flight recorder dumps and stacks of py-spy name the rank that holds up the others."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from rmetric._util.errors import LogError
from rmetric.diagnosis.auxiliary.recorder import culprits, read_dump
from rmetric.diagnosis.auxiliary.stacks import main_threads, states_stack
from rmetric.diagnosis.decide import diagnose

FRAMES = [
    {"name": "all_reduce", "filename": "/opt/lib/torch/distributed/distributed_c10d.py", "line": 9},
    {"name": "train_step", "filename": "/home/ada/train.py", "line": 41},
]


def entry(
    number: int,
    operation: str = "all_reduce",
    state: str = "completed",
    group: tuple[str, str] = ("0", "default_pg"),
    size: int = 1024,
) -> dict[str, Any]:
    """An entry as torch 2.6 writes it."""
    return {
        "frames": FRAMES, "record_id": number, "pg_id": int(group[0]), "process_group": group,
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": f"nccl:{operation}", "time_created_ns": 10**18 + number,
        "input_sizes": [[size]], "input_dtypes": ["Float"], "output_sizes": [[size]],
        "output_dtypes": ["Float"], "state": state, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": state == "completed",
        "timeout_ms": 600000, "is_p2p": False,
    }  # fmt: skip


def write(
    folder: Path,
    rank: int,
    entries: list[dict[str, Any]],
    *,
    as_json: bool = False,
    groups: dict[tuple[str, str], list[int]] | None = None,
    ranks: int = 8,
    active: bool = False,
) -> Path:
    """A rank's dump; of `active` entries alone, those that ended are in its status."""
    groups = groups or {("0", "default_pg"): list(range(ranks))}
    dump = {
        "version": "2.4",
        "pg_config": {
            name: {"name": name, "desc": words, "ranks": str(members)}
            for (name, words), members in groups.items()
        },
        "pg_status": {
            name: {f"last_{did}_collective": max(numbers) for did, numbers in lasts.items()}
            for (name, _), lasts in _lasts(entries).items()
            if active
        },
        "entries": [one for one in entries if one["state"] != "completed" or not active],
    }
    path = folder / (f"nccl_trace_rank_{rank}" + (".json" if as_json else ""))
    path.write_bytes(json.dumps(dump).encode() if as_json else pickle.dumps(dump, protocol=2))
    return path


def _lasts(entries: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, list[int]]]:
    """Numbers of the collectives of each group that were enqueued and completed."""
    lasts: dict[tuple[str, str], dict[str, list[int]]] = {}
    for one in entries:
        last = lasts.setdefault(one["process_group"], {"enqueued": [-1], "completed": [-1]})
        for did in ("enqueued", one["state"]) if not one["is_p2p"] else ():
            last.setdefault(did, []).append(one["collective_seq_id"])
    return lasts


def behind(folder: Path, *, as_json: bool = False) -> None:
    """Rank 5 of 8 did not enter collective 47."""
    for rank in range(8):
        done = [entry(number) for number in range(40, 47)]
        last = [] if rank == 5 else [entry(47, state="started")]
        write(folder, rank, done + last, as_json=as_json)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_rank_that_did_not_enter_is_named_with_the_collective(
    as_json: bool, tmp_path: Path
) -> None:
    behind(tmp_path, as_json=as_json)
    steps = [f"[rank{rank}]: step 9 loss 2.{rank}" for rank in range(8)]
    timeout = (
        "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=47, OpType=ALLREDUCE) ran for 600020 milliseconds"
    )
    (tmp_path / "job.log").write_text("\n".join([*steps, timeout]) + "\n")
    found = diagnose([tmp_path])
    assert [one.rank for one in found.nodes] == [5]
    assert (found.outcome, found.cause) == ("failed", "collective_not_entered")
    assert "all_reduce" in found.title
    assert "#47" in found.title
    assert "train.py:41" in found.title
    assert found.score >= 0.8


def test_dumps_need_no_logs(tmp_path: Path) -> None:
    behind(tmp_path)
    found = diagnose([tmp_path])
    assert [one.rank for one in found.nodes] == [5]
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


def test_another_operation_and_another_size_are_named(tmp_path: Path) -> None:
    for rank in range(8):
        other = entry(12, "all_gather" if rank == 3 else "all_reduce", "scheduled")
        write(tmp_path, rank, [entry(11), other])
    blamed = culprits(dumps_of(tmp_path))
    assert list(blamed) == [3]
    assert "all_gather" in blamed[3].words
    for rank in range(8):
        write(tmp_path, rank, [entry(11), entry(12, size=7 if rank == 2 else 8, state="started")])
    assert list(culprits(dumps_of(tmp_path))) == [2]


def test_a_rank_that_waits_in_its_own_group_is_not_the_cause(tmp_path: Path) -> None:
    """Rank 3 is out of tensor group 1 (2, 3); rank 2 waits there and so lacks in the world."""
    groups = {("0", "default_pg"): [0, 1, 2, 3], ("1", "tp"): [0, 1], ("2", "tp"): [2, 3]}
    for rank in range(4):
        own = ("1", "tp") if rank < 2 else ("2", "tp")
        entries = [entry(1, group=own), entry(1)]
        if rank == 2:
            entries.append(entry(2, state="started", group=own))
        elif rank < 2:
            entries += [entry(2, group=own), entry(2, state="started")]
        write(tmp_path, rank, entries, groups=groups)
    assert list(culprits(dumps_of(tmp_path))) == [3]


WORLD = ("0", "default_pg")
ONE, TWO = ("1", "tensor"), ("2", "tensor")
PAIRS = {ONE: [0, 1], TWO: [2, 3], WORLD: [0, 1, 2, 3]}


def write_pairs(
    folder: Path,
    entered: dict[int, list[tuple[tuple[str, str], int, bool]]],
    *,
    active: bool,
) -> None:
    """Dumps of ranks, each of which entered collectives (group, number, whether it ended)."""
    for rank, own in entered.items():
        entries = [
            entry(number, state="completed" if done else "scheduled", group=group)
            for group, number, done in own
        ]
        write(folder, rank, entries, groups=PAIRS, active=active)


@pytest.mark.parametrize("active", [False, True])
def test_all_ranks_that_did_not_enter_are_named(active: bool, tmp_path: Path) -> None:
    """Each of two tensor groups waits for a rank of its own, and all others for both."""
    entered = {}
    for rank in range(4):
        own = ONE if rank < 2 else TWO
        entered[rank] = [(own, 7, True), (WORLD, 3, True)]
        if rank in (0, 3):
            entered[rank] += [(own, 8, False), (WORLD, 4, False)]
    write_pairs(tmp_path, entered, active=active)
    found = diagnose([tmp_path])
    assert (found.cause, [one.rank for one in found.nodes]) == ("collective_not_entered", [1, 2])
    assert all("never entered all_reduce" in one.why for one in found.nodes)


@pytest.mark.parametrize("active", [False, True])
def test_a_rank_that_did_not_end_what_others_ended_is_named_after_those_more_wait_for(
    active: bool, tmp_path: Path
) -> None:
    """The GPUs of ranks 3 and 1 stand; 3 entered no more, and 1 all that the others wait in."""
    entered = {
        0: [(ONE, 5, True), (WORLD, 2, False)],
        1: [(ONE, 5, False), (WORLD, 2, False)],
        2: [(TWO, 5, True), (WORLD, 2, False)],
        3: [(TWO, 5, False)],
    }
    write_pairs(tmp_path, entered, active=active)
    blamed = culprits(dumps_of(tmp_path))
    assert list(blamed) == [3, 1]
    assert "did not end all_reduce" in blamed[1].words
    assert [one.rank for one in diagnose([tmp_path]).nodes] == [3, 1]


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
    assert [one.rank for one in found.nodes] == [5]
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
