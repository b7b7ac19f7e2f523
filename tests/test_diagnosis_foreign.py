"""What logs by authors who had read no code showed: each case in small, with one that it is not."""

from __future__ import annotations

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.result import Diagnosis
from tests.diagnosed_files import written


def steps(number: int = 60, prefix: str = "", day: str = "2025-03-04 ") -> list[str]:
    return [
        f"{prefix}{day}10:{at // 2:02d}:{30 * (at % 2):02d} step {at} loss 2.1"
        for at in range(number)
    ]


def names(found: Diagnosis) -> list[str]:
    return [one.name for one in found.nodes]


ZIP = "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 128 vs 22"


@pytest.mark.parametrize(
    ("shown", "cause"),
    [
        ("1: /dev/md0        440G  440G   20K 100% /local_scratch", "disk_shown_full"),
        ("1: /dev/md0        440G  261G  179G  60% /local_scratch", "checkpoint_write_failed"),
        ("/dev/loop3       64M   64M     0 100% /snap/core20/1828", "checkpoint_write_failed"),
    ],
)
def test_a_disk_that_df_shows_full_explains_a_failed_write(shown, cause, tmp_path) -> None:
    end = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-03-04T10:31:00 ***"
    assert written(tmp_path, job_log=[*steps(), ZIP, end, shown]).cause == cause


def test_a_fatal_error_before_a_cancellation_by_a_clock_of_another_zone(tmp_path) -> None:
    fault = "11: Memory access fault by GPU node-7 (Agent handle: 0x55) on address 0x15."
    end = "0: slurmstepd: error: *** STEP 9.0 ON n6 CANCELLED AT 2025-03-04T12:30:12 ***"
    lines = [line for rank in range(12) for line in steps(20, f"{rank}: ")]
    found = written(tmp_path, job_log=[*lines, *steps(60, "0: ")[20:], fault, end])
    assert (found.outcome, found.cause) == ("failed", "hip_illegal_address")


def test_the_host_to_which_the_others_lost_their_connections(tmp_path) -> None:
    lost = (
        "cn-041{}:7{}:8{} [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by "
        "remote peer {}<41000>"
    )
    ranks = {rank: [f"rank {rank} of 24", *steps()] for rank in (0, 5, 17)}
    for rank, node in ((0, 2), (5, 2), (17, 5)):
        ranks[rank].append(lost.format(node, rank, rank, "cn-0413-ib0"))
    found = written(tmp_path, **{f"task_{rank:02d}_out": lines for rank, lines in ranks.items()})
    assert names(found)[:1] == ["node cn-0413"]


def test_a_node_that_lost_its_peer_is_known_by_its_own_name_beside_that_of_its_file(tmp_path):
    """Node 0 lost node 1, which had lost node 2 before."""
    lost = (
        "[2025-11-18 23:16:22] ip-10-0-3-1{}:7{}:8{} [{}] misc/socket.cc:64 NCCL WARN "
        "socketProgress: Connection closed by remote peer "
        "ip-10-0-3-1{}.us-west-2.compute.internal<41{}00>"
    )
    nodes = {node: [f"rank {8 * node} of 24", *steps()] for node in (0, 1)}
    for node in (1, 0):
        nodes[node] += [lost.format(node, at, at, at, node + 1, at) for at in range(4)]
        entry = '{{"log":"{}\\n","stream":"stderr","time":"2025-11-18T23:16:{:02}.1Z"}}'
        nodes[node] = [entry.format(line, at % 60) for at, line in enumerate(nodes[node])]
    found = written(tmp_path, **{f"node{node}_log": lines for node, lines in nodes.items()})
    assert names(found)[:1] == ["node ip-10-0-3-12"]


def test_two_nodes_that_lost_each_other_are_not_told_apart_by_their_names(tmp_path) -> None:
    lost = (
        "gpu-0{}:7:8 [0] NCCL WARN socketProgress: Connection closed by remote peer gpu-0{}<41000>"
    )
    ranks = {rank: [f"rank {rank} of 4", *steps()] for rank in range(4)}
    for rank in range(4):
        ranks[rank].append(lost.format(rank // 2, 1 - rank // 2))
    found = written(tmp_path, **{f"rank_{rank}_log": lines for rank, lines in ranks.items()})
    assert not any(name.startswith("node ") for name in names(found))


def test_a_node_that_cannot_resolve_the_name_keeps_the_others_waiting(tmp_path) -> None:
    waits = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
    begin = "W0304 10:00:00.1 1 torch/distributed/run.py:792] *****"
    name = (
        "[W304 10:00:02.1 socket.cpp:697] [c10d] The IPv6 network addresses of "
        "(master-0, 23456) cannot be retrieved (gai error: -2 - Name or service not known)."
    )
    found = written(
        tmp_path,
        worker_0_log=[begin, waits],
        worker_2_log=[begin, waits],
        worker_1_log=[begin, name],
    )
    assert found.cause == "rendezvous_name_unknown"
    for log in tmp_path.glob("*"):
        log.write_text(f"{begin}\n{waits}\n")
    assert diagnose([tmp_path]).cause == "rendezvous_failed"


BLOCKED = """\
[Tue Mar  4 10:32:24 2025] INFO: task pt_main_thread:2193337 blocked for more than 122 seconds.
[Tue Mar  4 10:32:24 2025] Call Trace:
[Tue Mar  4 10:32:24 2025]  {}+0xa5/0x1b0"""


@pytest.mark.parametrize(
    ("call", "stage"), [("vfs_write", "checkpoint"), ("filemap_fault", "load data")]
)
def test_a_process_that_its_kernel_finds_waiting_explains_the_timeouts(
    call, stage, tmp_path
) -> None:
    timeouts = [
        f"[rank{rank}]:[E304 10:59:30.1 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=1800000)"
        for rank in range(3)
    ]
    (tmp_path / "dmesg-gpu-07.txt").write_text(BLOCKED.format(call) + "\n")
    found = written(tmp_path, job_log=[*steps(), *timeouts])
    assert (found.cause, found.stage) == ("rank_kept_others_waiting", stage)
    assert names(found) == ["node gpu-07"]


def test_a_worker_that_ray_killed_is_named_by_its_place_in_the_pool(tmp_path) -> None:
    killed = (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.4.0.12, ID: 5c) where the task (actor ID: 3f, "
        "name=MbG7ZbWorkerDict_1:3, pid=88239, memory used=521.94GB) was running was 957.02GB / "
        "1007.38GB (0.950009), which exceeds the memory usage threshold of 0.95."
    )
    config = "(TaskRunner pid=3)  'trainer': {'n_gpus_per_node': 8, 'nnodes': 2}"
    found = written(tmp_path, driver_log=[config, *steps(), killed])
    assert (found.cause, [one.rank for one in found.nodes]) == ("ray_out_of_memory", [11])


def test_a_causes_of_a_list_that_ray_prints_is_none(tmp_path) -> None:
    timeouts = [
        f"[rank{rank}]:[E304 10:59:30.1 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=1800000)"
        for rank in range(8)
    ]
    boiler = (
        "(raylet) A worker died or was killed while executing a task by an unexpected system error."
        " Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of "
        "file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM "
        "killer due to high memory usage. (2) ray stop --force is called."
    )
    assert written(tmp_path, driver_log=[*steps(), *timeouts, boiler]).cause == "nccl_timeout"


def test_events_of_an_earlier_attempt_do_not_explain_the_last(tmp_path) -> None:
    begin = ["+ torchrun --nproc_per_node=8 train.py", "model has 7 layers", "reads /ckpt/600"]
    first = [f"2025-10-02 09:{14 + at:02d}:00 {line}" for at, line in enumerate(begin)]
    again = [f"2025-10-02 10:{30 + at:02d}:00 {line}" for at, line in enumerate(begin)]
    work = [f"2025-10-02 09:{20 + at % 7}:{at % 60:02d} step {at} loss 2" for at in range(7)]
    ecc = "2025-10-02 09:27:48 RuntimeError: CUDA error: uncorrectable ECC error encountered"
    bad = (
        "2025-10-02 10:33:00 RuntimeError: PytorchStreamReader failed reading zip archive: "
        "failed finding central directory"
    )
    events = [
        "2025-10-02T09:14:01Z   Normal   Started      pod/w-0   Started container trainer",
        "2025-10-02T09:27:48Z   Warning  GPUXidError  node/g-7  NVRM: Xid (PCI:0000:ab:00): 94, "
        "pid=2, name=python, Contained: SM (0x1). RST: No, D-RST: No",
        "2025-10-02T10:30:01Z   Normal   Started      pod/w-0   Started container trainer",
    ]
    found = written(tmp_path, job_log=[*first, *work, ecc, *again, bad], events_txt=events)
    assert [one.cause for one in found.attempts] == ["gpu_ecc_error", "checkpoint_corrupt"]


def test_a_file_of_errors_without_times_beside_a_training_that_made_all_steps(tmp_path) -> None:
    error = (
        "fatal error: An error occurred (SlowDown) when calling the GetObject operation (reached "
        "max retries: 4): Please reduce your request rate."
    )
    done = [line.replace(f"step {at} ", f"step {at}/59 ") for at, line in enumerate(steps())]
    found = written(tmp_path, out_log=done, stderr_log=[error])
    assert found.outcome == "healthy"
    found = written(tmp_path, out_log=done[:40], stderr_log=[error])
    assert found.cause == "hub_rate_limit"


def test_an_export_of_logs_as_a_table_is_read_and_settings_are_not(tmp_path) -> None:
    lines = ["timestamp\tpod_name\ttextPayload", *(f"{line}" for line in steps()), "KeyError: 'a'"]
    found = written(tmp_path, export_tsv=lines)
    assert found.cause == "key_error"
    (tmp_path / "job.log").write_text("\n".join(steps()) + "\n")
    (tmp_path / "metrics.csv").write_text("step,loss,time\n1,2.5,0.3\n")
    found = diagnose([tmp_path])
    assert found.cause == "key_error"
    assert "1 settings and tables" in " ".join(found.notes)


def test_the_labels_of_crays_launcher_are_hosts_and_ranks(tmp_path) -> None:
    lines = [f"x1002c3s{rank // 4}b0n0 {rank}: {line}" for line in steps(20) for rank in range(8)]
    found = written(tmp_path, job_log=[*lines, "x1002c3s1b0n0 6: KeyError: 'ids'"])
    assert [(one.rank, one.node) for one in found.nodes] == [(6, "x1002c3s1b0n0")]
