"""What logs beside a job's say of other jobs, nodes and times, and of the job itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading.file_names import identify_files
from rmetric.diagnosis.reading.other_jobs import is_of_another, numbers_in

DAY = "2025-06-28"


def steps(number: int = 60, *, hour: int = 1) -> list[str]:
    return [f"{DAY} {hour:02d}:{at:02d}:00 INFO step {at} loss 2.10" for at in range(number)]


def controller(*own: str) -> list[str]:
    others = [
        f"[{DAY}T01:{at:02d}:30.123] _job_complete: JobId={7000 + at} WEXITSTATUS {at % 2 * 137}"
        for at in range(0, 58, 3)
    ]
    late = [
        f"[{DAY}T01:59:40.000] Time limit exhausted for JobId=7099",
        f"[{DAY}T02:09:10.000] _job_complete: JobId=7098 WEXITSTATUS 0",
    ]
    return [*others, *own, *late]


def test_a_job_that_nothing_names_keeps_all_of_a_schedulers_log(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n".join(steps()) + "\n")
    (tmp_path / "slurmctld.log").write_text("\n".join(controller()) + "\n")
    job = ingest([tmp_path], SignatureLibrary.shipped())
    assert ("slurm_time_limit", "slurmctld.log") in job.matches


@pytest.mark.parametrize(
    ("line", "other"),
    [
        (b"[2024-04-18T12:00:31.781] [77.0] error: *** STEP 77.0 ON a CANCELLED ***", False),
        (b"[2024-04-18T12:00:31.781] [88.batch] done with job", True),
        (b"launch task StepId=88.0 request from UID:1", True),
        (b"requeue JobId=88 to reclaim resources for JobId=77", False),
        (b"step 88 loss 2.1", False),
    ],
)
def test_the_job_that_a_schedulers_line_is_about(line: bytes, other: bool) -> None:
    assert is_of_another(line, {b"77"}) is other


def test_numbers_of_jobs_in_names() -> None:
    assert numbers_in("logs/train-90211.out.3") == {"90211"}


@pytest.mark.parametrize(
    ("names", "nodes"),
    [
        (
            ["fit-worker-0-0-k7xwq.log", "fit-worker-0-1-9tbz4.log", "fit-worker-0-2-m2rlf.log"],
            ["fit-worker-0-0", "fit-worker-0-1", "fit-worker-0-2"],
        ),
        (["ift-node-0-0-hx4rz.log", "ift-node-0-1-q8m2d.log"], ["ift-node-0-0", "ift-node-0-1"]),
    ],
)
def test_pods_of_a_jobset(names: list[str], nodes: list[str]) -> None:
    found = identify_files(names)
    assert [one.node for one in found] == nodes
    assert not any(one.ranked for one in found)


def test_a_rack_is_no_rank() -> None:
    assert identify_files(["kernel.h800-r12-n07.jsonl"])[0].rank is None
    assert identify_files(["r12.log"])[0].rank == 12


def test_ranks_of_mindspore_on_several_nodes() -> None:
    names = ["node0/scheduler.log", "node0/worker_3.log", "node1/worker_11.log"]
    assert [one.rank for one in identify_files(names)] == [None, 3, 11]
    again = ["node0/scheduler.log", "node0/worker_3.log", "node1/worker_3.log"]
    assert [one.rank for one in identify_files(again)][:2] == [None, 3]
