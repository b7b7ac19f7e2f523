"""What logs beside a job's say of other jobs, nodes and times, and of the job itself."""

from __future__ import annotations

from pathlib import Path

from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary

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
