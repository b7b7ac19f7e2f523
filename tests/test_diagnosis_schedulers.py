"""Logs as LSF, docker and kubectl keep them, and ranks that only a device's number tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.reading.lsf import LsfReports

LSF = """\
Sender: LSF System <lsfadmin@c0117>
Subject: Job 77: <fit> in cluster <a> Exited

Job <fit> was submitted from host <login2> by user <u> in cluster <a> at Tue Mar  4 06:12:51 2025
Started at Tue Mar  4 06:40:11 2025
Terminated at Tue Mar  4 12:40:33 2025

TERM_RUNLIMIT: job killed after reaching LSF run time limit.
Exited with exit code 140.

The output (if any) follows:

"""


def steps(begin: int = 0, number: int = 60) -> list[str]:
    return [
        f"2025-03-04 {6 + (2400 + 60 * at) // 3600:02d}:{(2400 + 60 * at) // 60 % 60:02d}:11 "
        f"step {begin + at} loss 2.1"
        for at in range(number)
    ]


def test_a_report_of_lsf_stands_behind_its_output() -> None:
    reports = LsfReports()
    out = reports.moved([b"Sender: LSF System <a>", b"TERM_OWNER: killed", b"The output (if any)"])
    out += reports.moved([b"step 1", b"step 2"])
    assert [*out, *reports.rest()] == [b"step 1", b"step 2", b"", b"TERM_OWNER: killed", b""]
    assert reports.pieces == [(1, 4), (3, 1)]
    assert LsfReports().moved([b"step 1", b"Sender: no report"]) == [
        b"step 1",
        b"Sender: no report",
    ]


def test_a_hang_until_the_limit_of_lsf(tmp_path: Path) -> None:
    log = tmp_path / "lsf.77.out"
    last = "2025-03-04 12:30:33 run.sh: caught SIGUSR2 from LSF, 600 s left"
    log.write_text(LSF + "\n".join([*steps(), last]) + "\n")
    found = diagnose([log])
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert {one.line for one in found.events} >= {8}, "its line in the file"


def test_a_limit_of_lsf_that_ends_a_training_that_went_on(tmp_path: Path) -> None:
    log = tmp_path / "lsf.77.out"
    log.write_text(LSF + "\n".join(steps(number=360)) + "\n")
    found = diagnose([log])
    assert (found.outcome, found.cause) == ("terminated", "batch_time_limit")


def test_the_json_files_of_docker_are_unpacked(tmp_path: Path) -> None:
    lines = [*(f"[rank0]: step {at} loss 2.1\n" for at in range(20)), "[rank3]: KeyError: 'ids'\n"]
    log = tmp_path / "4c1f-json.log"
    log.write_text(
        "\n".join(
            json.dumps(
                {"log": line, "stream": "stderr", "time": f"2025-01-22T14:50:{at:02d}.1Z"},
                separators=(",", ":"),
            )
            for at, line in enumerate(lines)
        )
        + '\n{"log":"cut o'
    )
    found = diagnose([log])
    assert (found.cause, found.events[0].line) == ("key_error", 21)
    assert [one.rank for one in found.nodes] == [3]
    assert found.job["last_time"] - found.job["first_time"] == 20.0


def test_the_log_of_a_container_before_its_restart_is_an_attempt(tmp_path: Path) -> None:
    begin = ["+ torchrun --nnodes=1 --nproc_per_node=8 train.py", "model has 7 layers", "begins"]
    first = [f"2025-03-04 05:{at:02d}:00 {line}" for at, line in enumerate(begin)]
    again = [f"2025-03-04 06:{at:02d}:00 {line}" for at, line in enumerate(begin)]
    ends = "2025-03-04 05:50:00 RuntimeError: CUDA error: uncorrectable ECC error encountered"
    (tmp_path / "worker-1.previous.log").write_text("\n".join([*first, ends]) + "\n")
    (tmp_path / "worker-1.log").write_text("\n".join([*again, *steps()]) + "\n")
    found = diagnose([tmp_path])
    assert [one.cause for one in found.attempts] == ["gpu_ecc_error", None]


def test_a_tools_reports_on_each_device_are_no_attempts(tmp_path: Path) -> None:
    reports = [
        line
        for device in range(8)
        for line in (
            f"== {device}",
            f"link status: {'DOWN' if device == 3 else 'UP'}",
            f"[device {device}]current time        : Wed Jun 11 12:12:03 2025",
            f"[device {device}]link up count       : 1",
            f"[device {device}]link change records :",
            f"[device {device}]    Wed Jun 11 11:21:59 2025    LINK DOWN",
        )
    ]
    (tmp_path / "hccn_check.txt").write_text("\n".join(reports) + "\n")
    (tmp_path / "train.log").write_text("\n".join(steps()) + "\n")
    assert diagnose([tmp_path]).attempts == ()


def test_a_gpu_that_broke_in_the_attempt_before_explains_that_none_is_found(tmp_path) -> None:
    begin = ["+ torchrun --nproc_per_node=4 train.py", "loads the data", "builds the model"]
    broke = (
        "kernel: NVRM: Xid (PCI:0000:81:00): 79, pid=4, name=python, GPU has fallen off the bus."
    )
    absent = (
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment"
    )
    log = tmp_path / "job.log"
    log.write_text("\n".join([*begin, *steps(), broke, *begin, absent]) + "\n")
    found = diagnose([log])
    assert [one.cause for one in found.attempts] == ["xid_79_fallen_off_the_bus"] * 2
    assert found.confidence < 0.8
    log.write_text("\n".join([*begin, absent]) + "\n")
    assert diagnose([log]).cause == "cuda_initialisation"


def nccl(node: int, device: int, text: str) -> str:
    return f"hgx-3{node}:{7000 + device}:{8000 + device} [{device}] {text}"


def test_the_gpu_in_nccls_prefix_is_the_rank_within_its_node(tmp_path: Path) -> None:
    made = [
        nccl(node, device, "NCCL INFO Using network IB") for node in range(4) for device in range(8)
    ]
    placed = [f"rank {8 * node} on hgx-3{node}" for node in range(4)]
    failed = nccl(
        2, 4, "transport/net_ib.cc:214 NCCL WARN NET/IB : mlx5_4:1 Got async event : port error"
    )
    log = tmp_path / "job.log"
    world = "torchrun --nnodes=4 --nproc_per_node=8 train.py"
    log.write_text("\n".join([world, *placed, *made, *steps(), failed]) + "\n")
    assert [one.rank for one in diagnose([log]).nodes] == [20]
    one_each = [nccl(node, 0, "NCCL INFO Using network IB") for node in range(4)]
    failed = failed.replace("[4]", "[0]")
    log.write_text("\n".join([world, *placed, *one_each, *steps(), failed]) + "\n")
    assert 16 not in [one.rank for one in diagnose([log]).nodes], "each process may see one GPU"


@pytest.mark.parametrize("apart", [True, False])
def test_pods_with_names_that_end_at_random_are_attempts_if_one_follows_the_other(
    tmp_path: Path, apart: bool
) -> None:
    begin = ["+ torchrun --nnodes=2 --nproc_per_node=8 train.py", "model has 7 layers", "begins"]
    for pod, hour in {"x7k2p": 7, "4kx8d": 5, "t2bfw": 6}.items():
        for number in range(2):
            lines = [
                f"2025-03-04 {hour if apart else 5:02d}:{at:02d}:00 {line}"
                for at, line in enumerate([*begin, f"step 1{hour} loss 2.1", f"KeyError: '{hour}'"])
            ]
            (tmp_path / f"sft-worker-{number}-{pod}.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert len(found.attempts) == (3 if apart else 0)
    assert found.events[0].file.endswith("x7k2p.log") or not apart
