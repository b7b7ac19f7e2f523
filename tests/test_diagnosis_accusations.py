"""A rank that a watchdog or a launcher names is named; one that names itself is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.result import Diagnosis


def job(path: Path, *end: str, ranks: int = 8, prefix: str = "[rank{}]: ") -> Diagnosis:
    """Ranks that log two steps each, and then `end`."""
    steps = [
        f"{prefix.format(rank)}step {step} loss 2.{rank}"
        for step in (9, 10)
        for rank in range(ranks)
    ]
    log = path / "job.log"
    log.write_text("\n".join([*steps, *end]) + "\n")
    return diagnose([log])


def ranks_of(found: Diagnosis) -> list[int | None]:
    return [one.rank for one in found.nodes]


TORCHRUN = "ERROR:torch.distributed.elastic.multiprocessing.api:"
REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2024-05-01_12:00:00
  host      : gpu-07.cluster
  rank      : 5 (local_rank: 5)
  exitcode  : -9 (pid: 4100)
  error_file: <N/A>
============================================================"""

TRACED = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()'

ACCUSES = {
    "lagging": "[rank0]: torch.distributed: ranks [5] are the lagging ranks that caused this "
    "timeout. They never joined any collectives",
    "missing": "Stalled ops:HorovodBroadcast_dense_1_bias_0 [missing ranks: 5]",
    "missing, below": "Missing ranks:\n5: [allreduce.grad_12, allreduce.grad_13]",
    "barrier": "[rank0]: RuntimeError: [Rank 0]: Rank 5 failed to pass monitoredBarrier in 1800000"
    " ms",
    "local rank": TORCHRUN
    + "failed (exitcode: -9) local_rank: 5 (pid: 1168) of binary: /bin/python",
    "local rank, exit code": TORCHRUN
    + "failed (exitcode: 1) local_rank: 5 (pid: 1168) of binary: /bin/python",
    "report": REPORT,
    "task": "E0503 12:00:01.123456    4000 coordination_service.cc:525] "
    "/job:jax_worker/replica:0/task:5 has been set to ERROR in coordination service: UNAVAILABLE",
    "mpirun": "mpirun noticed that process rank 5 with PID 4100 on node gpu-07 exited on signal 9"
    " (Killed).",
    "mpirun, process": "  Process name: [[12345,1],5]\n  Exit code:    1",
    "abort": "MPI_ABORT was invoked on rank 5 in communicator MPI_COMM_WORLD",
    "srun": "srun: error: gpu-07: task 5: Exited with exit code 1",
    "srun, killed": "srun: error: gpu-07: task 5: Killed",
    "json": '{"level": "error", "rank": 5, "message": "RuntimeError: CUDA error: an illegal memory'
    ' access was encountered"}',
    "exception": f"{TRACED}\n"
    "RuntimeError: Rank 5, node gpu-07, device 5, iteration 10: Unexpected result nan "
    "(message='found NaN in local grad norm for bucket #0 in backward pass')",
}


@pytest.mark.parametrize("how", ACCUSES)
def test_one_accusation_is_enough_and_its_reason_is_given(how: str, tmp_path: Path) -> None:
    found = job(tmp_path, *ACCUSES[how].split("\n"))
    assert ranks_of(found) == [5]
    assert found.nodes[0].why


@pytest.mark.parametrize("how", ["lagging", "missing", "task", "abort", "report"])
def test_a_rank_without_log_lines_of_its_own_is_named(how: str, tmp_path: Path) -> None:
    assert ranks_of(job(tmp_path, *ACCUSES[how].split("\n"), ranks=1, prefix="")) == [5]


def test_horovod_lines_with_prefixes_name_the_missing_rank(tmp_path: Path) -> None:
    end = ("[1,0]<stderr>:Missing ranks:", "[1,0]<stderr>:5: [allreduce.grad_12, broadcast.w]")
    assert ranks_of(job(tmp_path, *end, prefix="[1,{}]<stdout>:")) == [5]


NAMES_ITSELF = {
    "watchdog": "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=47, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds "
    "before timing out.",
    "takes down": "[rank{0}]: [Rank {0}] To avoid data inconsistency, we are taking the entire "
    "process down.",
    "heartbeat": "[rank{0}]: [PG ID 0 PG GUID 0 Rank {0}] Heartbeat monitor timed out! Process will"
    " be terminated after dumping debug info.",
}


@pytest.mark.parametrize("how", NAMES_ITSELF)
def test_a_rank_that_names_itself_is_not_accused(how: str, tmp_path: Path) -> None:
    assert ranks_of(job(tmp_path, NAMES_ITSELF[how].format(3))) == []


def test_all_of_many_are_not_accused(tmp_path: Path) -> None:
    lagging = "ranks [0, 1, 2, 3, 4, 5] are the lagging ranks that caused this timeout."
    assert ranks_of(job(tmp_path, lagging)) == []
    tasks = "srun: error: gpu-07: tasks 0-7: Exited with exit code 1"
    assert ranks_of(job(tmp_path, tasks)) == []


def test_one_of_ranks_that_all_raise_the_same_is_not_accused(tmp_path: Path) -> None:
    raised = [f"[rank{rank}]: ValueError: the batch has 7 rows, not 8" for rank in range(8)]
    found = job(tmp_path, *raised, REPORT.replace("-9", "1"))
    assert (found.cause, ranks_of(found)) == ("value_error", [])


def test_exceptions_of_all_ranks_accuse_none(tmp_path: Path) -> None:
    raised = "RuntimeError: Rank {}, node gpu-07, iteration 10: Unexpected result nan"
    lines = [line for rank in range(8) for line in (TRACED, raised.format(rank))]
    assert ranks_of(job(tmp_path, *lines, prefix="")) == []


def test_json_entries_of_all_ranks_accuse_none(tmp_path: Path) -> None:
    line = '{{"level": "error", "rank": {}, "message": "ValueError: the batch has 7 rows, not 8"}}'
    assert ranks_of(job(tmp_path, *(line.format(rank) for rank in range(8)))) == []


def test_a_local_rank_of_one_of_several_nodes_is_no_rank(tmp_path: Path) -> None:
    found = job(tmp_path, ACCUSES["local rank"], ranks=16)
    assert 5 not in ranks_of(found)


def test_a_local_rank_is_of_the_node_that_reports_it(tmp_path: Path) -> None:
    for node in (0, 1):
        lines = [
            f"[default{local}]:[rank{4 * node + local}]: step {step} loss 2.0"
            for step in (9, 10)
            for local in range(4)
        ]
        if node == 1:
            lines.append(ACCUSES["local rank"].replace("local_rank: 5", "local_rank: 2"))
        (tmp_path / f"gpu-{node + 1:02d}.log").write_text("\n".join(lines) + "\n")
    assert ranks_of(diagnose([tmp_path])) == [6]


def test_a_local_rank_counts_where_the_node_has_another_name_for_one_of_its_ranks(
    tmp_path: Path,
) -> None:
    report = REPORT.replace("host      : gpu-07", "host      : other-07").splitlines()
    for node in (0, 1):
        ranks = [rank for rank in range(8 * node, 8 * node + 8) if rank != 2]
        lines = [f"[rank{rank}]: step {step} loss 2.0" for step in (9, 10) for rank in ranks]
        lines += ["[rank2]: step 9 loss 2.0"] if node == 0 else []
        lines += [TORCHRUN + "failed (exitcode: 1) local_rank: 5 (pid: 7)"] if node == 0 else []
        (tmp_path / f"node{node}.log").write_text("\n".join([*lines, *report]) + "\n")
    assert 6 not in ranks_of(diagnose([tmp_path]))


def test_a_rank_of_deepspeeds_launcher_is_placed_by_its_list_of_nodes(tmp_path: Path) -> None:
    """Its last line shows the command of the node's last rank, whichever failed."""
    begun = "gpu-02: [2024-05-02 09:12:05,118] [INFO] [launch.py:256:main] process {} spawned with"
    lines = [
        "gpu-02: [2024-05-02 09:12:04,118] [INFO] [launch.py:145:main] WORLD INFO DICT: "
        "{'gpu-01': [0, 1, 2, 3], 'gpu-02': [0, 1, 2, 3]}",
        *(
            f"{begun.format(8122 + rank)} command: ['/bin/python', 'a.py', '--local_rank={rank}']"
            for rank in range(4)
        ),
        *(f"gpu-01: [2024-05-02 09:14:{at:02d},382] step={at}, loss=2.1" for at in range(1, 30)),
        "gpu-02: [2024-05-02 09:44:30,911] [ERROR] [launch.py:321:sigkill_handler] "
        "['/bin/python', '-u', 'train.py', '--local_rank=3', '--zero'] exits with return code = -9",
        "pdsh@gpu-01: gpu-02: ssh exited with exit code 247",
    ]
    (tmp_path / "job.out").write_text("\n".join(lines) + "\n")
    kernel = "Out of memory: Killed process 8124 (python) total-vm:19404kB, anon-rss:1572014kB"
    (tmp_path / "dmesg-gpu-02.txt").write_text(f"[718220.110090] {kernel}\n")
    found = diagnose([tmp_path])
    assert found.cause == "kernel_out_of_memory"
    assert [(one.rank, one.node) for one in found.nodes[:1]] == [(6, "gpu-02")]


def test_the_process_that_the_kernel_kills_is_known_by_torchruns_report(tmp_path: Path) -> None:
    lines = [
        "W0408 21:00:00.0 77042 torch/distributed/run.py:792] --nproc_per_node=8 train.py",
        *(f"2025-04-08 21:{at}:00 INFO step {at} loss 2.1" for at in range(10, 40)),
        "E0408 21:42:43.0 77042 torch/distributed/elastic/multiprocessing/api.py:869] failed"
        " (exitcode: -9) local_rank: 5 (pid: 77123) of binary: /bin/python3.11",
    ]
    (tmp_path / "slurm-22.out").write_text("\n".join(lines) + "\n")
    kernel = "Memory cgroup out of memory: Killed process 77123 (python3.11) total-vm:86410232kB"
    oom = "python3.11 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"
    (tmp_path / "a100n21.dmesg-T.txt").write_text(
        f"[Tue Apr  8 21:42:39 2025] {oom}\n[Tue Apr  8 21:42:39 2025] {kernel}\n"
    )
    found = diagnose([tmp_path])
    assert found.family == "oom killer"
    assert [(one.rank, one.node) for one in found.nodes[:1]] == [(5, "a100n21")]


def test_a_process_number_is_no_rank(tmp_path: Path) -> None:
    end = (
        "gpu-07:1003:1003 [3] NCCL WARN Cuda failure 'out of memory'",
        TORCHRUN + "Sending process 1003 closing signal SIGTERM",
    )
    assert all(rank is None or rank < 8 for rank in ranks_of(job(tmp_path, *end)))


def test_the_rank_whose_last_collective_is_behind_is_named(tmp_path: Path) -> None:
    line = (
        "[rank{0}]:[E410 11:01:09.809962084 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID"
        " 0(default_pg) Rank {0}]  failure detected by watchdog at work sequence id: 4704"
        " PG status: last enqueued work: {1}, last completed work: 4703"
    )
    dump = (
        "[rank6]:[E519 ProcessGroupNCCL.cpp:1375] [PG ID 0 PG GUID 0(default_pg) Rank 6] Received a"
        " dump signal due to a collective timeout from  rank 0 and we will try our best to dump the"
        " debug info. Last enqueued NCCL work: 4703, last completed NCCL work: 4703."
    )
    all_others = [line.format(rank, 4704) for rank in range(8) if rank != 6]
    abort = TORCHRUN + "failed (exitcode: -6) local_rank: 0 (pid: 1168) of binary: /bin/python"
    found = job(tmp_path, *all_others, dump, abort)
    assert ranks_of(found) == [6]
    assert found.family == "collective communication"
    groups = [  # of which each has its own numbers
        line.replace("(default_pg)", f"(pipe{rank % 4})").format(rank, 4704 + rank)
        for rank in range(8)
    ]
    assert ranks_of(job(tmp_path, *groups, abort)) == []
    every = [line.format(rank, 4704) for rank in range(8)]
    assert ranks_of(job(tmp_path, *every, abort)) == []


CALLSTACK = (
    r'{"name": "torchelastic.worker.status.FAILED", "source": "WORKER", "metadata":'
    r' {"global_rank": 5, "role": "default", "state": "FAILED", "raw_error":'
    r' "{\"message\": {\"message\": \"KeyError:'
    r" 'lr_min'\", \"extraInfo\": {\"py_callstack\": \"Traceback (most recent call last):\\n  File"
    r" \\\"/home/ada/train.py\\\", line 41, in build\\n    low = config['lr_min']"
    r"\\nKeyError: 'lr_min'\\n\","
    r' \"timestamp\": \"1714702447\"}}}"}}'
)


def test_a_traceback_within_json_has_its_exception_and_its_rank(tmp_path: Path) -> None:
    found = job(tmp_path, CALLSTACK)
    assert (found.outcome, found.cause, ranks_of(found)) == ("failed", "key_error", [5])
    assert "lr_min" in found.title
    assert "train.py:41" in found.title
    assert "timestamp" not in found.title


@pytest.mark.parametrize(("rank", "named"), [(3, [3]), (0, [])])
def test_a_log_of_one_rank_alone_names_it_where_it_cannot_be_the_whole_job(
    rank: int, named: list[int], tmp_path: Path
) -> None:
    log = tmp_path / "tail.log"
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    log.write_text(f"[rank{rank}]:     return t.to(\n[rank{rank}]: {memory}\n")
    assert ranks_of(diagnose([log])) == named


ENDS_THE_OTHERS = [f"{TORCHRUN}Sending process {pid} closing signal SIGTERM" for pid in range(3)]
FIRST_FAILED = (
    f"{TORCHRUN}failed (exitcode: 1) local_rank: 2 (pid: 3) of binary: /opt/conda/bin/python"
)


@pytest.mark.parametrize(
    ("before", "ranks"),
    [
        ([], [2]),
        (["world_size=4"], [2]),
        (["world_size=16"], []),  # of several nodes: a local rank tells no rank
        (["FileNotFoundError: [Errno 2] No such file: 'a'"] * 4, []),
    ],
)
def test_a_launcher_names_the_first_of_a_log_without_ranks(
    before: list[str], ranks: list[int], tmp_path: Path
) -> None:
    """It ends the others before it says so; an error that all raised was of none of them."""
    log = tmp_path / "train.log"
    steps = [f"step {step} loss 2.1" for step in range(9)]
    log.write_text("\n".join([*steps, *before, *ENDS_THE_OTHERS, FIRST_FAILED]) + "\n")
    assert ranks_of(diagnose([log])) == ranks


def test_hardware_that_fails_for_all_ranks_of_a_node_is_the_nodes(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    card = (
        "[0] transport/net_ib.cc:80 NCCL WARN NET/IB : Got async event : local catastrophic error"
    )
    lost = "[0] transport/net_ib.cc:800 NCCL WARN NET/IB : Got completion with error 12, opcode 1"
    lines = [f"[1,{rank}]<stdout>:gpu-57:{800 + rank}:86 {card}" for rank in (12, 13, 14)]
    lines += [f"[1,2]<stdout>:gpu-31:802:86 {lost}"]
    stamped = [f"2019-06-02T16:13:{44 + at}.884Z: {line}" for at, line in enumerate(lines)]
    log.write_text("\n".join(stamped) + "\n")
    found = diagnose([log])
    assert found.cause == "ib_card_failed"
    assert found.nodes[0].node == "gpu-57"


def test_a_port_that_reports_no_name_is_of_its_host(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    port = "[0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error"
    lost = "[4] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got completion from peer node48<3794>"
    lines = [f"iter {at}: loss 1.5455, time: 4401.19ms" for at in range(9)]
    lines += [f"node48:{pid}:{pid + 71} {port}" for pid in range(34050, 34053)]
    lines += [f"node51:73076:73185 {lost} with error 12, opcode 2, len 1, vendor err 129"]
    log.write_text("\n".join(lines) + "\n")
    assert diagnose([log]).nodes[0].node == "node48"
