"""The confidence is calibrated by a monotone table, and is never sure on indirect evidence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis import diagnose
from rmetric.diagnosis.confidence import KINDS, MIN_CONFIDENCE, Basis, calibrated, shipped_table
from rmetric.diagnosis.result import SURE, Diagnosis

DIRECT = ("cause", "ending", "hang", "planned end")
BEGIN = datetime(2024, 5, 1, 10, 40)
LIMIT = "slurmstepd: error: *** STEP 77.0 ON node01 CANCELLED AT {} DUE TO TIME LIMIT ***"


def test_the_shipped_table_is_monotone_and_within_0_and_1() -> None:
    table = shipped_table()
    assert set(table) <= set(KINDS)
    assert {"cause", "ending", "planned end"} <= set(table)
    for knots in table.values():
        scores, values = zip(*knots, strict=True)
        assert sorted(set(scores)) == list(scores)
        assert sorted(values) == list(values)
        assert 0 <= min(*scores, *values) <= max(*scores, *values) <= 1


@given(st.sampled_from(sorted(KINDS)), st.floats(0, 1), st.floats(0, 1))
def test_more_evidence_is_never_less_confidence(kind: str, one: float, other: float) -> None:
    low, high = (calibrated(Basis(kind), score) for score in sorted((one, other)))
    assert low <= high <= KINDS[kind]
    assert low >= MIN_CONFIDENCE or min(one, other) == 0


@given(st.sampled_from(sorted(set(KINDS) - set(DIRECT))), st.floats(0, 1))
def test_indirect_evidence_is_never_sure(kind: str, score: float) -> None:
    assert calibrated(Basis(kind), score) < SURE


def test_between_knots_the_confidence_is_linear_and_beyond_them_constant() -> None:
    table = {"cause": [(0.4, 0.2), (0.8, 0.6)]}
    confidences = [calibrated(Basis("cause"), score, table) for score in (0.1, 0.5, 0.8, 0.9)]
    assert confidences == [0.2, 0.3, 0.6, 0.6]
    assert calibrated(Basis("echo"), 0.4, table) == 0.4


def judged(tmp_path: Path, lines: Sequence[str]) -> Diagnosis:
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    return diagnose(path)


def steps(last: int, *, every: float = 10) -> list[str]:
    times = [BEGIN + timedelta(seconds=every * step) for step in range(last)]
    return [
        f"0: {time:%Y-%m-%d %H:%M:%S} step {step} loss {3 - step / 1000:.3f}"
        for step, time in enumerate(times)
    ]


def ended(seconds: float) -> str:
    return LIMIT.format((BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S"))


def test_a_limit_amid_progress_is_sure(tmp_path: Path) -> None:
    found = judged(tmp_path, [*steps(400), ended(4005)])
    assert (found.cause, found.basis) == ("slurm_time_limit", "ending")
    assert found.confidence >= SURE


@pytest.mark.parametrize(
    ("lines", "against"),
    [
        (["0: building the model", ended(4000)], "no training step"),
        ([f"0: step {step} loss 2.5" for step in range(40)] + [ended(4000)], "is not known"),
        ([*steps(400), ended(4000 + 7200)], "long before the end"),  # or another time zone
    ],
)
def test_a_limit_without_progress_before_it_is_not_sure(
    tmp_path: Path, lines: list[str], against: str
) -> None:
    found = judged(tmp_path, lines)
    assert (found.cause, found.basis) == ("slurm_time_limit", "ending without progress")
    assert found.confidence < SURE
    assert against in found.why


def test_a_limit_is_not_sure_where_stacks_were_taken(tmp_path: Path) -> None:
    stacks = [
        "Timeout (0:30:00)!",
        "Thread 0x00007f6d9f1d2740 (most recent call first):",
        '  File "/code/train.py", line 170 in main',
    ]
    found = judged(tmp_path, [*steps(400), *stacks, ended(4005)])
    assert (found.cause, found.basis) == ("slurm_time_limit", "ending without progress")
    assert found.confidence < SURE
    assert "stacks of its processes" in found.why


def test_two_faults_that_are_as_likely_make_neither_sure(tmp_path: Path) -> None:
    full = "OSError: [Errno 28] No space left on device"
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    alone = judged(tmp_path, [*steps(20), f"[rank0]: {full}"])
    assert (alone.basis, alone.confidence >= SURE) == ("cause", True)
    for name, fault in (("job.log", full), ("other.log", memory)):
        (tmp_path / name).write_text("\n".join([*[line[24:] for line in steps(20)], fault]))
    both = diagnose(tmp_path)
    assert both.basis == "contradicted cause"
    assert both.confidence < SURE
    assert "not sure: another fault is as likely" in both.why
    assert all(one.confidence <= both.confidence for one in both.candidates)


def test_the_score_of_the_evidence_is_kept(tmp_path: Path) -> None:
    found = judged(tmp_path, [*steps(20), "[rank0]: OSError: [Errno 28] No space left on device"])
    assert found.score == 0.93
    assert found.confidence == calibrated(Basis(found.basis), found.score)
    assert found.as_json()["basis"] == "cause"


def test_a_log_that_stops_is_not_sure(tmp_path: Path) -> None:
    found = judged(tmp_path, [f"step {step}/1000 loss 2.5" for step in range(200)])
    assert (found.outcome, found.basis) == ("healthy", "log stops")
    assert found.confidence < 0.5
    whole = judged(tmp_path, [f"step {step} loss 2.5" for step in range(200)])
    assert (whole.outcome, whole.basis) == ("healthy", "no failure")
    assert whole.confidence < SURE
