"""Nodes that entries name are suspects, even without a log of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.result import Diagnosis

#: What is said at the end of a log of one stream -> the node that it names.
NAMES = {
    "srun: error: Node failure on node017": "node017",
    "[2026-02-03T04:05:06.123] error: Nodes gpu-[07] not responding, setting DOWN": "gpu-07",
    "ERROR health: node gpu-12 is not responding, giving up": "gpu-12",
    "srun: error: gpu-07: task 2: Out Of Memory": "gpu-07",
    "worker-0:3468:3905 [4] NCCL WARN NET/IB : Got completion from peer 10.0.0.3<54862>"
    " with status=12 opcode=0 len=0 vendor err 129": "worker-0",
    "The node with node id: 8f12 and ip: 10.0.0.7 has been marked dead because the detector"
    " has missed too many heartbeats from it.": "10.0.0.7",
}


def after_training(path: Path, *end: str) -> Diagnosis:
    steps = [f"2026-02-03 04:05:{at:02d} INFO step {at} loss {4 / at:.2f}" for at in range(1, 40)]
    path.write_text("\n".join([*steps, *end]) + "\n")
    return diagnose([path])


@pytest.mark.parametrize("said", NAMES)
def test_a_node_without_a_log_is_named(said: str, tmp_path: Path) -> None:
    found = after_training(tmp_path / "job.log", said)
    assert [(one.name, one.node) for one in found.nodes] == [(f"node {NAMES[said]}", NAMES[said])]


def test_the_node_to_which_all_connections_are_lost_is_known_by_its_address(
    tmp_path: Path,
) -> None:
    hosts = {f"gpu-{node:02d}": f"10.3.40.{10 + node}" for node in range(4)}
    (tmp_path / "hosts.txt").write_text("".join(f"{one} {ip}\n" for one, ip in hosts.items()))
    for rank in range(6):
        node, peer = f"gpu-{rank // 2:02d}", f"10.3.40.{11 + rank // 2}"
        lines = [
            f"{node}:{31 + rank}:55 [0] NCCL INFO Bootstrap : Using eth0:{hosts[node]}<0>",
            f"{node}:{31 + rank}:55 [0] NCCL INFO comm 0x55d0 rank {rank} nranks 8 cudaDev 0 busId"
            f" {rank + 1}0000 - Init COMPLETE",
            f"{node}:{31 + rank}:77 [0] misc/socket.cc:58 NCCL WARN socketProgressOpt: Call to recv"
            f" from {peer}<41256> failed : Connection reset by peer",
            f"[rank{rank}]: Traceback (most recent call last):",
            f'[rank{rank}]:   File "/src/train.py", line 716, in train_step',
            f'[rank{rank}]:   File "/src/p2p.py", line 162, in _communicate',
            f"[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp"
            ":2019, remote process exited or there was a network error, NCCL version 2.22.3",
        ]
        (tmp_path / f"job.{rank}.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert [one.name for one in found.nodes[:1]] == ["node gpu-03"]
    assert found.stage == "train"


def test_the_node_whose_tasks_all_end_first_is_named_in_the_launch(tmp_path: Path) -> None:
    for node in range(3):
        lines = [
            f"{rank}: > initialising torch distributed, rank {rank}"
            for rank in range(4 * node, 4 * node + 4)
        ]
        (tmp_path / f"gpu-{node:02d}.out").write_text("\n".join(lines) + "\n")
    end = [
        "12: slurmstepd: error: pyxis: container start failed with error code: 1",
        "12: slurmstepd: error: pyxis:     enroot-mount: failed to mount: /mnt/x: No such file",
    ]
    (tmp_path / "gpu-03.out").write_text("\n".join(end) + "\n")
    (tmp_path / "job.out").write_text(
        "srun: error: gpu-03: tasks 12-15: Exited with exit code 1\n"
        "srun: error: gpu-00: tasks 0-3: Terminated\n"
    )
    found = diagnose([tmp_path])
    assert (found.cause, found.stage) == ("container_start_failed", "launch")
    assert [one.name for one in found.nodes[:1]] == ["node gpu-03"]


def test_of_two_devices_at_a_failed_link_the_one_whose_link_was_down_is_named(
    tmp_path: Path,
) -> None:
    """By the table of hccn_tool in a file that is called after its node."""
    for node, other in ((1, 2), (2, 1)):
        rank = 8 * node - 3
        lines = [
            f"[2025-03-10 14:{at}:00] iteration {at}/ 500 | lm loss: 2.1" for at in range(10, 39)
        ]
        lines += [
            f"EI0013: [PID: {700 + node}] 2025-03-10-06:39:31.16 An error CQE occurred. Local"
            f" information: server 10.20.3.{node}, device ID 5, device IP 29.3.31.15. Peer"
            f" information: server 10.20.3.{other}, device ID 5, device IP 29.3.44.15.",
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2025-03-10_14:40:40",
            f"  host      : npu-0{node}",
            f"  rank      : {rank} (local_rank: 5)",
            f"  exitcode  : 1 (pid: {700 + node})",
        ]
        (tmp_path / f"train_npu-0{node}.log").write_text("\n".join(lines) + "\n")
    table = "[devid 5]    Mon Mar 10 14:38:53 2025    LINK UP\n"
    (tmp_path / "hccn_npu-02.txt").write_text(
        table + table.replace("53", "34").replace("UP", "DOWN")
    )
    found = diagnose([tmp_path])
    assert found.cause == "hccl_link_error"
    assert [one.rank for one in found.nodes[:1]] == [13]


def test_the_rank_that_all_others_name_is_named(tmp_path: Path) -> None:
    lines = [
        line
        for rank in range(8)
        for line in (
            f"[rank{rank}]: torch.distributed.checkpoint.api.CheckpointException:"
            " CheckpointException ranks:dict_keys([3])",
            f"[rank{rank}]: RuntimeError: PytorchStreamReader failed reading zip archive: failed"
            " finding central directory",
        )
    ]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert found.cause == "checkpoint_corrupt"
    assert [one.rank for one in found.nodes] == [3]


def test_a_port_that_went_down_comes_before_the_messages_without_an_answer(tmp_path: Path) -> None:
    """The kernel's clock is in UTC; the console's is not, and its messages state no time."""
    steps = [f"2025-11-16 02:{at:02d}:00 step {at} loss 2.1" for at in range(60)]
    lost = (
        "node-{0}:11:12 [5] transport/net_ib.cc:2228 NCCL WARN NET/IB: Got completion from peer"
        " 10.9.2.{1}<50340> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=1 vendor_err=129"
    )
    port = "node-02:11:13 [5] transport/net_ib.cc:188 NCCL WARN NET/IB : mlx5_5:1 Got async event"
    console = [*steps, f"{port} : port error", lost.format("01", 2), lost.format("02", 1)]
    (tmp_path / "console.log").write_text("\n".join(console) + "\n")
    journal = [
        "2025-11-15T18:56:34.940565+00:00 node-02 sshd[90211]: Connection closed",
        "2025-11-15T19:00:07.311886+00:00 node-02 kernel: mlx5_core 0000:a8:00.0: Port module"
        " event[error]: module 0, Cable error, High Temperature",
    ]
    (tmp_path / "node-02.journal.txt").write_text("\n".join(journal) + "\n")
    found = diagnose([tmp_path])
    assert found.cause == "ib_port_error"
    assert [one.node for one in found.nodes[:1]] == ["node-02"]


ENDED = (
    "slurmstepd: error: *** JOB 71 ON node017 CANCELLED AT 2026-02-03T04:06:00 ***",
    "slurmstepd: error: *** JOB 71 ON node017 CANCELLED AT 2026-02-03T04:06:00"
    " DUE TO TIME LIMIT ***",
)


@pytest.mark.parametrize("said", ENDED)
def test_the_node_on_which_a_job_was_ended_is_not_accused(said: str, tmp_path: Path) -> None:
    found = after_training(tmp_path / "job.log", said)
    assert (found.outcome, found.nodes) == ("terminated", ())


def test_the_node_that_failed_is_accused_and_not_the_one_that_reports_it(tmp_path: Path) -> None:
    found = after_training(
        tmp_path / "job.log",
        "srun: error: Node failure on node017",
        "slurmstepd: error: *** JOB 71 ON node001 CANCELLED AT 2026-02-03T04:06:00"
        " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
    )
    assert [one.name for one in found.nodes] == ["node node017"]


def test_ranks_that_are_known_are_accused_before_nodes_that_are_not(tmp_path: Path) -> None:
    ranks = [f"[rank{rank}]: step {at}" for at in range(20) for rank in range(4)]
    found = after_training(
        tmp_path / "job.log", *ranks,
        "srun: error: gpu-07: task 2: Killed", "srun: error: gpu-99: tasks 30-31: Killed",
    )  # fmt: skip
    assert [one.name for one in found.nodes] == ["rank 2"]


def test_a_full_name_is_the_node_s(tmp_path: Path) -> None:
    nodes = [f"gpu-0{node}: step {at}" for at in range(20) for node in range(3)]
    (tmp_path / "job.log").write_text(
        "\n".join([*nodes, "srun: error: gpu-02.cluster.lan: task 2: Out Of Memory"]) + "\n"
    )
    assert [one.name for one in diagnose([tmp_path / "job.log"]).nodes] == ["node gpu-02"]


def test_a_worker_of_ray_is_named_by_its_address(tmp_path: Path) -> None:
    lines = [
        f"(Trainer pid={700 + at % 4}, ip=10.0.0.{at % 4}) step {at // 4} loss {4 / (at + 1):.3f}"
        for at in range(80)
    ]
    before = "(Trainer pid=702, ip=10.0.0.2) "
    lines += [
        before + "Traceback (most recent call last):",
        before + '  File "fit.py", line 3, in fit',
        before + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    assert [one.node for one in diagnose([tmp_path / "job.log"]).nodes] == ["10.0.0.2"]
