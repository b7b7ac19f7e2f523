"""No rank is blamed for what is its own, for what all do, or in a job that completed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.result import Diagnosis

TIMEOUT = (
    "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=47, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)
#: Lines of a rank, with what differs for the odd one and what is the others'.
OWN = {
    "server": ("master 10.0.0.1 server {} port 29500 world_size 8", "10.0.0.1", "10.0.0.2"),
    "bootstrap": ("NCCL INFO Bootstrap : Using eth0:{}<0>", "10.0.0.9", "10.0.0.2"),
    "host": ("connected to the store from host {}", "node-1", "node-2"),
    "hostname": ("hostname={} starts the worker", "gpu-07.cluster", "gpu-08.cluster"),
    "bind": ("binds to tcp://{}:4711", "10.0.0.9", "10.0.0.2"),
    "IPv6": ("listens on [{}]:29500", "fe80::1ff:fe23:4567:890a", "fe80::1ff:fe23:4567:890b"),
    "process": ("starts process {} of the job", "4711", "4712"),
    "pid": ("worker pid={} ready", "4711", "4712"),
    "card": ("uses the network card {}", "mlx5_3", "mlx5_0"),
    "device": ("runs on device uuid {}", "GPU-509665ad-b600-ac93-3616-d754b23d636d",
               "GPU-509665ad-b600-ac93-3616-d754b23d636e"),
    "pointer": ("communicator {} is ready", "0x7f3a01", "0x7f3a02"),
    "bus": ("the GPU is at bus {}", "0000:3b:00.0", "0000:9b:00.0"),
}  # fmt: skip


def start(path: Path, line: str, odd: str, usual: str) -> Diagnosis:
    log = path / "job.log"
    lines = [f"[rank{rank}]: {line.format(odd if rank == 3 else usual)}" for rank in range(8)]
    lines += [f"[rank{rank}]: {TIMEOUT.format(rank)}" for rank in range(8)]
    log.write_text("\n".join(lines) + "\n")
    return diagnose([log])


@pytest.mark.parametrize("what", OWN)
def test_what_is_a_ranks_own_is_no_difference_of_settings(what: str, tmp_path: Path) -> None:
    found = start(tmp_path, *OWN[what])
    assert (found.nodes, found.cause) == ((), "nccl_timeout")


@pytest.mark.parametrize(
    ("line", "odd", "usual"),
    [
        ("init_process_group world_size={}", "7", "8"),
        ("torch {} with NCCL", "2.1.0+cu121", "2.3.0+cu121"),
        ("MASTER_ADDR={}", "10.0.0.9", "10.0.0.1"),
        ("NCCL version {}", "2.18.1+cuda12.1", "2.20.5+cuda12.4"),
        ("micro batch size {}", "4", "8"),
    ],
)
def test_what_ought_to_agree_is_a_difference(
    line: str, odd: str, usual: str, tmp_path: Path
) -> None:
    assert [one.rank for one in start(tmp_path, line, odd, usual).nodes] == [3]


LATE = {
    "UCX": "[1757813631.703236] [gpu-121:73058{0}:0] mm_posix.c:194  UCX  ERROR "
    "open(file_name=/proc/1184/fd/44 flags=0x0) failed: No such file or directory",
    "NCCL": "gpu-1:73058{0}:73058{0} [{0}] NCCL WARN Call to recv from 10.0.0.2<1> failed : "
    "Connection reset by peer",
    "store": "[W ProcessGroupNCCL.cpp:1496] recvValue failed on SocketImpl(fd=4): Connection reset"
    " by peer: Broken pipe",
}


@pytest.mark.parametrize("planned", ["all", "step"])
@pytest.mark.parametrize("what", LATE)
def test_a_connection_that_breaks_after_the_planned_end_is_no_failure(
    what: str, planned: str, tmp_path: Path
) -> None:
    log = tmp_path / "job.log"
    lines = [f"[rank{rank}]: step {step}/20 loss 2.0" for step in range(1, 21) for rank in range(4)]
    lines += ["[rank0]: Training completed after 20 steps"] if planned == "all" else []
    lines += [f"[rank{rank}]: {LATE[what].format(rank)}" for rank in range(0, 4, 2)]
    log.write_text("\n".join(lines) + "\n")
    found = diagnose([log])
    assert (found.outcome, found.nodes) == ("healthy", ())


def test_the_same_line_before_the_end_is_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    lines = [f"[rank{rank}]: step {step}/90 loss 2.0" for step in range(1, 21) for rank in range(4)]
    lines += [f"[rank{rank}]: {LATE['UCX'].format(rank)}" for rank in range(4)]
    log.write_text("\n".join(lines) + "\n")
    assert diagnose([log]).outcome != "healthy"


def test_a_kernel_log_before_the_job_is_no_attempt_of_its_own(tmp_path: Path) -> None:
    boot = [f"[Mon May  5 01:00:{at:02d} 2025] usb 1-1: new device" for at in range(9)]
    killed = "[Mon May  5 09:20:01 2025] Out of memory: Killed process 4711 (python)"
    (tmp_path / "dmesg-node-1.log").write_text("\n".join([*boot, killed]) + "\n")
    steps = [
        f"2025-05-05 09:{10 + step // 10}:{step % 10 * 6:02d} [rank{rank}] step {step} loss 2.0"
        for step in range(1, 90)
        for rank in range(4)
    ]
    (tmp_path / "job.log").write_text("\n".join(steps) + "\n")
    found = diagnose([tmp_path])
    assert (len(found.attempts), found.outcome) in ((0, "failed"), (1, "failed"))


@pytest.mark.parametrize("host", ["gpu-116", "gpu-3"])
def test_the_number_of_a_host_in_a_files_name_is_no_rank(host: str, tmp_path: Path) -> None:
    lines = [
        f"[default{rank}]:[rank{rank}]: step {step} loss 2.0"
        for step in range(9)
        for rank in range(8)
    ]
    lines += [
        "W0501 torchrun starts",
        *(f"[rank{rank}]: {TIMEOUT}".format(rank) for rank in range(8)),
    ]
    (tmp_path / f"{host}.log").write_text("\n".join(["launcher starts", *lines]) + "\n")
    found = diagnose([tmp_path])
    assert (found.cause, found.nodes) == ("nccl_timeout", ())


def test_what_a_rank_logged_before_all_steps_ended_nothing(tmp_path: Path) -> None:
    """Where the last entries are of the end, and the rank named a step once, and none later."""
    probe = (
        "[rank0]: batch probe: micro_batch_size=8 failed with torch.OutOfMemoryError: CUDA out of"
        " memory. Tried to allocate 7.42 GiB. -> trying micro_batch_size=4"
    )
    steps = [
        f" {step // 3:3}%|##  | {step}/300 [00:{step % 60:02}<01:00, 1.03it/s]"
        for step in range(300)
    ]
    once = "[rank0]: step: 150 non-finite gradient, left out"
    end = [f"upload of part {part} of 40" for part in range(40)]
    log = tmp_path / "job.log"
    log.write_text("\n".join(["starting", probe, *steps[:150], once, *steps[150:], *end]) + "\n")
    assert diagnose([log]).outcome == "healthy"
    log.write_text("\n".join(["starting", *steps[:150], once, *steps[150:200], probe, *end]) + "\n")
    assert diagnose([log]).cause == "cuda_out_of_memory"
