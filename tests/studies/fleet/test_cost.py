"""What a guard is worth: the study, its tables, figure and page; training failures, rescued."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.common.markers import parts
from studies.fleet import cost, cost_report, faults, training_failures
from studies.fleet.__main__ import main
from studies.fleet.closed_form import lost_with_rescue
from studies.fleet.cost import Measured, a_job, measure
from studies.fleet.cost_tables import break_even
from studies.fleet.guarded_job import SHARES, replicate
from studies.fleet.job_settings import DAY, FailurePredictor, FleetJob
from studies.fleet.training_failures import Outcomes, gain, losses, table
from studies.fleet.writing import bullets, refresh

pytest.importorskip("simpy")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def short_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MOST_FAILURES", 1.0)
    monkeypatch.setattr(cost, "LEAST_FAILURES", 0.05)
    monkeypatch.setattr(cost, "MOST_SAVES", 5.0)


def test_a_job_saves_at_young_daly_in_whole_steps() -> None:
    job = a_job(16_384, "synchronous")
    assert job.fleet.seconds_between_failures == pytest.approx(1.8 * 3600, rel=0.01)
    assert job.saves.interval_seconds == 1250  # 1248 s at 1.8 h and 120 s
    assert a_job(16_384, "asynchronous").saves.interval_seconds == 510
    assert a_job(8, "synchronous", interval=3600.0).saves.interval_seconds == 3600


@pytest.mark.usefixtures("short_jobs")
def test_processes_do_not_change_what_comes_out() -> None:
    jobs = [a_job(2048, "asynchronous", FailurePredictor(recall=0.5)), a_job(16_384, "synchronous")]
    alone, together = (measure(jobs, 3, processes) for processes in (1, 2))
    for job in jobs:
        by_hand = [replicate(job, seed).ettr for seed in range(3)]
        assert alone[job].ettr_S.tolist() == together[job].ettr_S.tolist() == by_hand


def test_gains_are_taken_seed_by_seed() -> None:
    shares = {name: np.zeros(3) for name in SHARES}
    base = Measured(np.array([0.2, 0.5, 0.8]), shares)
    better = Measured(base.ettr_S + 0.01, shares)
    assert better.gain(base) == pytest.approx((1.0, 1.0, 1.0))
    # Student's t for 2 degrees of freedom is 4.303.
    half = 4.3027 * 0.3 / np.sqrt(3)
    assert base.ettr == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-4)


def test_break_even_is_where_hits_and_false_alarms_are_worth_the_same() -> None:
    """With a gain of 3 points by all hits and a loss of 1 by four false alarms to a failure."""
    shares = {name: np.zeros(4) for name in SHARES}

    def get(job: FleetJob) -> Measured:
        change = 0.03 * job.predictor.recall
        change -= 0.01 * (job.predictor.false_alarms_per_gpu_day > 0)
        return Measured(np.full(4, 0.8 + change), shares)

    mtbf = a_job(2048, "synchronous").fleet.seconds_between_failures
    found = break_even(get, 2048, "synchronous")
    assert found.hit == pytest.approx((0.03 * mtbf,) * 3)
    assert found.alarm == pytest.approx((0.01 * mtbf / 4,) * 3)
    assert found.rare == pytest.approx(120 * (0.75**2 * 0.25 + 0.75**3 / 3))
    assert found.paid_for == pytest.approx((0.03 * mtbf / found.rare,) * 3)


@pytest.mark.usefixtures("short_jobs")
def test_the_command_leaves_the_same_bytes_twice(tmp_path: Path) -> None:
    folders = [tmp_path / name / "cost" for name in "ab"]
    for folder in folders:
        assert main(["cost", "--out", str(folder), "--replications", "2", "--jobs", "1"]) == 0
    names = sorted(path.name for path in folders[0].iterdir())
    assert "when_emergency_saves_pay.png" in names
    assert "provenance.json" in names
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    about = json.loads((folders[0] / "provenance.json").read_text())
    assert about["replications"] == 2
    for path in folders[0].glob("*.csv"):
        header, *rows = csv.reader(path.read_text().splitlines())
        assert rows
        assert {len(row) for row in rows} == {len(header)}


def test_our_own_predictors_are_marked_where_they_are_measured(tmp_path: Path) -> None:
    assert [point.name for point in cost_report.measured_points(tmp_path)] == ["504 B200"]
    path = tmp_path / cost_report.RISK
    path.parent.mkdir()
    header = "Predictor,GPU failures announced (%),False alarms a GPU-day\n"
    path.write_text(header + "Always on,10,9\nScore at 0.95 with rules,50,0.001\n")
    ours = cost_report.measured_points(tmp_path)[1]
    # Of 419 interruptions 262 were failures of a GPU.
    assert ours == ("our rules", pytest.approx(0.5 * 262 / 419), 0.001)
    path.write_text("Predictor,Something\nx,1\n")
    with pytest.raises(ValueError, match="is not as"):
        cost_report.measured_points(tmp_path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_page_links_every_table_and_is_filled_with_sentences_of_the_results(tmp_path):
    sentences = cost_report.sentences(lambda job: cost_report.PLACEHOLDER)
    text = (ROOT / cost_report.PAGE).read_text(encoding="utf-8")
    for path in (ROOT / cost_report.OUT).glob("*.md"):
        assert f"/{path.name})" in text, path.name
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    refresh(page, cost_report.OUT, (cost_report.FIGURE, cost_report.CAPTION_OF_COST), sentences)
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"<!-- begin (words \w+) -->", text)
    assert len(shown) >= 5
    assert all(sentences[name] in text for name in shown)
    page.write_text("<!-- begin table nothing -->\n<!-- end -->", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot fill 'table nothing'"):
        refresh(page, cost_report.OUT, (cost_report.FIGURE, cost_report.CAPTION_OF_COST), sentences)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Node a relapses after 2 days, b has overlapping faults, c never ends, d at once."""
    path, faults_of = tmp_path / "trace.json", "a1,4 a6,7 a15,16 b2,5 b3,10 c8 d40,40"
    path.write_text(json.dumps([
        {"event_time": time, "event_type": kind, "node_id": fault[0]}
        for fault in faults_of.split()
        for time, kind in zip(fault[1:].split(","), ("fault_start", "fault_end"), strict=False)
    ]))  # fmt: skip
    return path


def test_a_trace_is_read_as_repairs_and_relapses(trace: Path) -> None:
    found = faults.read_faults(trace)
    assert [seconds / DAY for seconds in found["repairs"]] == [3, 3, 1, 1, 0]
    assert found["relapse_gaps"] == (2 * DAY,)
    assert found["relapse_share"] == 1 / 4  # of d's the trace does not see a week
    trace.write_text("[]")
    with pytest.raises(ValueError, match=r"trace.json: 0 repairs, 0 relapses: too few"):
        faults.read_faults(trace)


def test_the_same_trace_gives_the_same_table(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FLEET_SIZES", (64,))
    monkeypatch.setattr(faults, "CLOCK_DAYS", 30.0)
    for name in "xy":
        assert main(["faults", str(trace), "--out", str(trace.parent / name), "--jobs", "1"]) == 0
    first, other = ((trace.parent / name / "faults.csv").read_bytes() for name in "xy")
    assert first == other
    assert len(first.splitlines()) == 1 + len(faults.SPARE_SHARES)


# -- GPU-days lost to failures of the training itself, with and without rescue

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
    assert cost_report.training_failure_lines(found)[1] == (
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


def test_the_closed_forms_alone_leave_the_rest_as_it_is(results, tmp_path, monkeypatch):
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
    lines = cost_report.training_failure_lines(training_failures.outcomes())
    assert after["words training_failures"] == bullets(lines)
