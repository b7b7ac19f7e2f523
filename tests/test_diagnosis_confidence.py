"""The confidence is calibrated by a monotone table, and is never sure on indirect evidence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rmetric.diagnosis.confidence import KINDS, MIN_CONFIDENCE, Basis, calibrated, shipped_table

from rmetric.diagnosis import diagnose
from rmetric.diagnosis.result import SURE, Diagnosis

DIRECT = ("cause", "ending", "hang", "planned end")
BEGIN = datetime(2024, 5, 1, 10, 40)


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


def test_the_score_of_the_evidence_is_kept(tmp_path: Path) -> None:
    found = judged(tmp_path, [*steps(20), "[rank0]: OSError: [Errno 28] No space left on device"])
    assert found.score == 0.93
    assert found.confidence == calibrated(Basis(found.basis), found.score)
    assert found.as_json()["basis"] == "cause"
