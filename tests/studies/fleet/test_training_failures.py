"""GPU-days lost to failures of the training itself, with and without rescue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.common.markers import parts
from studies.fleet import cost_report, training_failures
from studies.fleet.closed_form import lost_with_rescue
from studies.fleet.cost_report import training_failure_lines
from studies.fleet.training_failures import Outcomes, gain, losses, table
from studies.fleet.writing import bullets

pytest.importorskip("simpy")
ROOT = Path(__file__).parents[3]
SHARE = st.floats(0.0, 1.0)
SECONDS = st.floats(0.0, 1e6)
RATE = st.floats(0.0, 100.0)


@st.composite
def found_outcomes(draw: st.DrawFn) -> Outcomes:
    averted = draw(SHARE)
    return Outcomes(
        averted=averted,
        held=draw(st.floats(0.0, 1.0 - averted)),
        at_nan=draw(SHARE),
        extra=draw(st.floats(0.0, 5.0)),
        false_runs=draw(st.floats(0.0, 5.0)),
        false_extra=draw(SHARE),
        false_held=draw(SHARE),
    )


@given(RATE, st.floats(0.0, 100.0), SECONDS, found_outcomes())
def test_more_failures_cost_more_and_never_all_of_the_time(rate, more, notice, found):
    fewer, many = losses(rate, notice, found), losses(rate + more, notice, found)
    assert all(0 <= a <= b * (1 + 1e-9) < 1000 for a, b in zip(fewer, many, strict=True))
    assert fewer.false <= fewer.rescue * (1 + 1e-9)
    assert losses(0.0, notice, found) == (0, 0, 0, 0)


@given(RATE, SECONDS, found_outcomes())
def test_rescue_that_averts_nothing_costs_its_false_rescues(rate, notice, found):
    useless = replace(found, averted=0.0, held=0.0, extra=0.0)
    quiet = replace(useless, false_runs=0.0)
    lost = losses(rate, notice, quiet)
    assert lost.rescue == pytest.approx(lost.quick)
    assert lost.false == 0
    assert losses(rate, notice, useless).rescue >= lost.quick * (1 - 1e-9)
    assert lost_with_rescue(
        averted=0.0, held=0.0, extra=0.0, waiting=notice, unrescued=7.0, false=3.0
    ) == pytest.approx(10.0)


def invented_rows() -> list[dict]:
    """20 failing runs under three policies, 10 that do not fail, one control."""
    rows: list[dict] = [{"run": "c", "policy": "nothing", "control": {"rescue": None}}]
    for n in range(30):
        about = {"run": f"r{n}", "seed": n, "fault": "SIGN_FLIP", "benign": False, "failed": n < 20}
        about |= {"duration": 100, "executed": 200, "actions": 1}
        bad, good = {"end": "finished", "above": 1.0}, {"end": "finished", "above": 0.0}
        rescued = good if n < 16 or n > 20 else good | {"end": "held"} if n != 19 else bad
        rows += [
            about | {"policy": "nothing", "extra": 0} | (bad if n < 20 else good),
            about | {"policy": "restart_at_nan", "extra": 9} | (good if n % 5 == 0 else bad),
            about | {"policy": "rescue", "extra": 30 if n < 20 else 10} | rescued,
        ]
    return rows


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tables by the code of the rescue study, where the cost study reads them."""
    pytest.importorskip("torch")
    from studies.common.renderers import write_tables
    from studies.fault_lab.rescue import tables

    rows, names = invented_rows(), ["nothing", "restart_at_nan", "rescue"]
    folder = tmp_path / "rescue_results"
    made = tables.policies(rows, names, name="rescue", title="t"), tables.harm(rows, names)
    write_tables(made, folder)
    monkeypatch.setattr(training_failures, "RESULTS", folder)
    return folder


def test_golden(results: Path):
    found = training_failures.outcomes()
    assert replace(found, ends=()) == Outcomes(
        averted=pytest.approx(0.8), held=pytest.approx(0.15), at_nan=pytest.approx(0.2),
        extra=pytest.approx(0.3), false_runs=0.5, false_extra=pytest.approx(0.05), false_held=0.1,
    )  # fmt: skip
    # By hand: D 1440, d 120, u 60; L = 720 + 120 + 60 + .8 (3600 + 1440) = 4932 s;
    # f = .5 (.05 * 220 * 10 + .1 * 3660) = 238 s; L' = 300 + .15 * 3660 + .05 * 4932 + f.
    lost = losses(0.1, 3600.0, found)
    seconds = [1800 + 120 + 600 + 3600 + 3600, 4932, 1333.6]
    days = [0.1 * 2048 * each / 86_400 for each in seconds]
    assert lost[:3] == pytest.approx([1000 * x / (1000 + x) for x in days])
    assert lost.false == pytest.approx(lost.rescue * 238 / 1333.6)
    saved = gain(0.1, 3600.0, found)
    assert 0 < saved.low < saved.point < saved.high
    assert saved.point == pytest.approx(lost.quick - lost.rescue)
    assert table(found).shown()[4] == [
        "0.1", "4.9", "1 h", "22.52", "11.56", "3.15", "0.56", "8.40 [5.99, 9.56]",
    ]  # fmt: skip
    assert training_failure_lines(found)[1] == (
        "0.1 failures in 1,000 GPU-days, a person acts after 1 h: 22.52 of 1,000 GPU-days are lost "
        "with hourly saves, 11.56 with asynchronous saves and fast restarts, 3.15 with rescue, "
        "which pays (+8.40 [+5.99, +9.56] GPU-days) before its snapshots: they may take 0.84 % of "
        "a step's time."
    )


def test_tables_that_are_not_as_the_rescue_study_writes_them_are_refused(results: Path):
    path = results / "rescue.csv"
    text = path.read_text()
    path.write_text(text.replace("\nRescue,", "\nOther,"))
    with pytest.raises(ValueError, match=r"rescue\.csv: 'Averted, share' of 'Rescue' is None"):
        training_failures.outcomes()
    path.write_text(text)
    (results / "rescue_harm.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"rescue_harm\.csv"):
        training_failures.outcomes()


def test_the_closed_forms_alone_leave_the_rest_as_it_is(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    committed = ROOT / cost_report.PAGE
    page, out = tmp_path / "page.md", tmp_path / "cost"
    page.write_bytes(committed.read_bytes())
    monkeypatch.setattr(cost_report, "OUT", out)
    assert cost_report.closed_forms(out, page) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "training_failures.csv", "training_failures.md",
    ]  # fmt: skip
    before, after = parts(committed), parts(page)
    ours = {"words training_failures"}
    assert ours == {name for name in after if name.endswith("training_failures")}
    assert {n: t for n, t in after.items() if n not in ours} == {
        n: t for n, t in before.items() if n not in ours
    }
    lines = training_failure_lines(training_failures.outcomes())
    assert after["words training_failures"] == bullets(lines)
