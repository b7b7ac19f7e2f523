"""The report: outcomes, verdicts, the plot and the page (of the committed logs), and claims."""

import json
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.evaluation import Trace, trace
from rmetric.logs import read_log
from rmetric.records import Record, Truth
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import trace_of_r_metric
from rmetric.reporting.style import TEXT_WIDTH, style
from studies.case_study.plot import plot_twins
from studies.case_study.report import judgement, table_of, truth_of, verdict
from studies.common.real_runs import read_summaries, real_runs_rows

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "results/case_study_cpu_tiny"
SUMMARY = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scored() -> dict[str, ScoredRun]:
    paths = {name: RESULTS / f"{run['id']}.jsonl" for name, run in SUMMARY["runs"].items()}
    return {name: score_run(read_log(path)) for name, path in paths.items()}


def test_the_page_has_the_table_of_the_summary_and_says_what_the_logs_say(scored):
    page = (ROOT / "docs/case_study.md").read_text(encoding="utf-8")
    assert table_of(SUMMARY) in page
    for name, run in scored.items():
        assert judgement(run, trace_of_r_metric(run)) == SUMMARY["runs"][name]["r_metric"]
    assert {score.raw.failure_rate for run in scored.values() for score in run.scores} == {0.0}
    losses = {record.step: record.validation_loss for record in scored["LR_RUNAWAY"].run.records}
    before, then, later = (losses[step] for step in (200, 210, 260))
    sentence = f"from {before:.2f} to {then:.2f}; it reaches {later:.1f} at step 260"
    assert sentence in " ".join(page.split())


@pytest.fixture(scope="module")
def calibrated(scored) -> dict[str, Trace]:
    return {name: trace("calibrated", run.run) for name, run in scored.items()}


def test_the_plot_has_the_calibrated_score_its_threshold_and_its_first_alarm(scored, calibrated):
    with style():
        figure = plot_twins(scored, calibrated)
    of_calibrated = figure.axes[-len(scored) :]  # the lowest row, a column for each run
    assert len(figure.axes) == 3 * len(scored)
    labelled = [axes for axes in figure.axes if axes.get_ylabel() == "calibrated"]
    assert labelled == of_calibrated[:1]
    for axes, name in zip(of_calibrated, scored, strict=True):
        result = calibrated[name]
        curve, threshold, marker, *_ = axes.lines
        assert np.array_equal(curve.get_ydata(), result.scores, equal_nan=True)
        assert set(threshold.get_ydata()) == {1.0}
        firsts = [] if result.first_alert is None else [result.first_alert]
        assert list(marker.get_xdata()) == firsts
        shaded = axes.collections[0].get_paths()  # one interval in a run with a fault
        assert len(shaded) == len(firsts)
        low, high = axes.get_ylim()
        assert low < 0 < 1 < np.nanmax(result.scores) < high or np.nanmax(result.scores) < 1 < high
    assert len({axes.get_ylim() for axes in of_calibrated}) == 1
    sizes = [text.get_fontsize() for axes in figure.axes for text in (
        axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *axes.get_xticklabels(),
        *axes.get_yticklabels(), *figure.legends[0].get_texts(),
    )]  # fmt: skip
    assert min(sizes) >= 7.0  # points, at the width that it is printed at
    assert figure.get_size_inches()[0] == TEXT_WIDTH


@pytest.mark.parametrize(
    ("failure", "first", "expected"),
    [
        (230, None, "missed"),
        (None, None, "no alarm"),
        (230, 199, "199: false alarm"),
        (230, 200, "200: 30 steps ahead"),
        (230, 229, "229: 1 step ahead"),
        (230, 230, "230: too late"),
        (None, 199, "199: false alarm"),
        (None, 200, "200: on a fault that was absorbed"),
    ],
)
def test_the_verdict_is_that_of_the_causal_rule(failure, first, expected):
    run = {"onset_step": 200, "failure_step": failure}
    assert verdict(run, first) == expected
    # Without a fault each alarm is false, also where the run fails by itself.
    control = verdict(run | {"onset_step": None}, first)
    assert control == (expected if first is None else f"{first}: false alarm")


# -- what counts as a failure; the definitions themselves are those of the simulator

INJECTED = Truth(fault="LR_SPIKE", severity=15.0, onset_step=50, duration_steps=20)
losses = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30)


def evaluated(*values: float) -> list[Record]:
    return [Record(step=10 * i, validation_loss=value) for i, value in enumerate(values, 1)]


def trained(*values: float, since: int = 1) -> list[Record]:
    return [Record(step=i, training_loss=value) for i, value in enumerate(values, since)]


@given(losses)
def test_a_falling_loss_fails_by_no_definition_and_a_twin_is_never_degraded(values):
    falling = evaluated(*sorted(values, reverse=True))
    worse = evaluated(*(value + 1.0 for value in sorted(values, reverse=True)))
    assert truth_of(Truth(), falling, None).outcome == "healthy"
    assert truth_of(INJECTED, falling, worse).outcome == "absorbed"
    itself = truth_of(INJECTED, evaluated(*values), evaluated(*values))
    assert itself.failure_kind in (None, "diverged")


@pytest.mark.parametrize(
    ("records", "twin", "kind", "step"),
    [
        # The median of three is up from the second high value on.
        (evaluated(3, 2, 1, 1, 1, 2, 2, 2, 2), None, "diverged", 70),
        (evaluated(3, 2, 1, 2, 2, 2, 1, 1, 1), None, None, None),
        (evaluated(5.5, 3.2, 2.5), None, None, None),  # it still falls fast
        (evaluated(3, 2, 1, *[1.05] * 4), evaluated(3, 2, 1, *[0.9] * 4), "degraded", 50),
        (trained(*[2.0] * 59, *[nan] * 4), trained(*[2.0] * 63), "non_finite", 60),
        (trained(*[2.0] * 59, *[inf] * 4), None, "non_finite", 60),
        # It ended early, and is compared as far as it goes.
        ([*evaluated(3, 2), *trained(nan, since=25)], evaluated(3, 2, 1, 1), "non_finite", 25),
        # One strange loss that is gone again, and a gradient that overflows.
        ([*evaluated(3), Record(step=11, training_loss=nan, gradient_norm=inf),
          Record(step=20, validation_loss=2.0, gradient_norm=inf)], None, None, None),
    ],
)  # fmt: skip
def test_what_became_of_a_run(records, twin, kind, step):
    truth = truth_of(INJECTED, records, twin)
    assert (truth.failure_kind, truth.failure_step) == (kind, step)
    assert truth.outcome == ("failed" if kind else "absorbed")


# -- what the table of claims says of case studies

F1, CAUSAL_F1, LEAD, COST = range(4)
MEASURED, NUMBER, VERDICT = 2, 3, 4


def judged(*, hit: bool, false_alarm: bool, lead: int | None = None) -> dict:
    minutes = None if lead is None else lead / 10
    return {"hit": hit, "false_alarm": false_alarm, "lead_steps": lead, "lead_minutes": minutes}


def a_run(outcome: str, published: dict, causal: dict, seconds: float = 5.0, percent: float = 0.5):
    cost = {"seconds_per_step": seconds, "monitoring_percent": percent}
    return {
        "outcome": outcome, "cost": cost, "r_metric": {"published": published, "causal": causal}
    }  # fmt: skip


def rows(**runs: dict) -> list:
    settings = {"model": "Qwen", "fault": "LR_SPIKE"}
    return real_runs_rows([{"device": {"name": "Tesla T4"}, "settings": settings, "runs": runs}])


NOTHING = judged(hit=False, false_alarm=False)
ALARM = judged(hit=False, false_alarm=True)
CONTROL = a_run("healthy", NOTHING, NOTHING)


def test_an_alarm_before_the_fault_is_a_hit_by_one_rule_and_two_runs_confirm_nothing():
    early = a_run("failed", judged(hit=True, false_alarm=False, lead=300), ALARM)
    found = rows(fault=early, control=CONTROL)
    assert found[F1][MEASURED].startswith("1.00")
    assert (found[F1][NUMBER], found[F1][VERDICT]) == (2, "undecided")
    assert found[CAUSAL_F1][MEASURED].startswith("0.00")
    assert found[LEAD][MEASURED] == "no hit"
    hit = judged(hit=True, false_alarm=False, lead=25)
    assert "2.5" in rows(fault=a_run("failed", hit, hit))[LEAD][MEASURED]
    assert rows(control=a_run("healthy", ALARM, ALARM))[F1][VERDICT] == "nothing failed"


@pytest.mark.parametrize(
    ("seconds", "percent", "verdict"),
    [(5.0, 0.5, "below"), (5.0, 3.0, "above"), (0.05, 40.0, "no claim")],
)
def test_a_model_too_small_to_compare_claims_nothing_of_the_cost(seconds, percent, verdict):
    control = a_run("healthy", NOTHING, NOTHING, seconds, percent)
    assert rows(control=control)[COST][VERDICT] == verdict


def test_only_finished_runs_count_and_in_the_order_of_the_folders(tmp_path: Path):
    done, begun = {"runs": {"control": CONTROL}}, {"runs": {"control": {"id": "x"}}}
    for folder, content in {"case_study_t4": done, "case_study_b": begun, "other": done}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "summary.json").write_text(json.dumps(content))
    assert read_summaries(tmp_path) == [done]
    assert read_summaries(tmp_path / "nowhere") == []
