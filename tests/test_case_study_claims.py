"""What the table of claims says of case studies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rmetric.reporting.real_runs import (
    NOT_MEASURED,
    read_summaries,
    real_runs_rows,
    real_runs_table,
)
from rmetric.reporting.renderers import to_markdown

F1, CAUSAL_F1, LEAD, COST = range(4)
MEASURED, NUMBER, VERDICT = 2, 3, 4


def judged(*, hit: bool, false_alarm: bool, lead: int | None = None) -> dict:
    minutes = None if lead is None else lead / 10
    return {
        "hit": hit, "false_alarm": false_alarm, "lead_steps": lead, "lead_minutes": minutes
    }  # fmt: skip


def run(outcome: str, published: dict, causal: dict, seconds: float = 5.0, percent: float = 0.5):
    cost = {"seconds_per_step": seconds, "monitoring_percent": percent}
    return {
        "outcome": outcome, "cost": cost, "r_metric": {"published": published, "causal": causal}
    }  # fmt: skip


def summary(**runs: dict) -> dict:
    return {
        "device": {"name": "Tesla T4"},
        "settings": {"model": "Qwen", "fault": "LR_SPIKE"},
        "runs": runs,
    }


NOTHING = judged(hit=False, false_alarm=False)
ALARM = judged(hit=False, false_alarm=True)
EARLY = summary(  # alarms before its fault, and never in the control
    fault=run("failed", judged(hit=True, false_alarm=False, lead=300), ALARM),
    control=run("healthy", NOTHING, NOTHING),
)


def test_without_a_case_study_nothing_is_claimed():
    assert {row[MEASURED] for row in real_runs_rows([])} == {NOT_MEASURED}
    assert {row[NUMBER] for row in real_runs_rows([])} == {None}


def test_an_alarm_before_the_fault_is_a_hit_by_one_rule_and_not_by_the_other():
    rows = real_runs_rows([EARLY])
    assert rows[F1][MEASURED].startswith("1.00")
    assert rows[F1][NUMBER] == 2
    assert rows[CAUSAL_F1][MEASURED].startswith("0.00")
    assert rows[LEAD][MEASURED] == "no hit"


def test_two_runs_confirm_nothing():
    assert real_runs_rows([EARLY])[F1][VERDICT] == "undecided"


def test_where_nothing_failed_there_is_no_f1_to_compare():
    healthy = summary(control=run("healthy", ALARM, ALARM))
    assert real_runs_rows([healthy])[F1][VERDICT] == "nothing failed"


def test_a_lead_is_counted_within_the_time_from_fault_to_failure():
    hit = judged(hit=True, false_alarm=False, lead=25)
    rows = real_runs_rows([summary(fault=run("failed", hit, hit))])
    assert "2.5" in rows[LEAD][MEASURED]


@pytest.mark.parametrize(
    ("seconds", "percent", "verdict"),
    [(5.0, 0.5, "below"), (5.0, 3.0, "above"), (0.05, 40.0, "no claim")],
)
def test_a_model_too_small_to_compare_claims_nothing_of_the_cost(seconds, percent, verdict):
    one = summary(control=run("healthy", NOTHING, NOTHING, seconds, percent))
    assert real_runs_rows([one])[COST][VERDICT] == verdict


def test_only_finished_runs_count_and_in_the_order_of_the_folders(tmp_path: Path):
    begun = summary(control={"id": "x"})
    for folder, content in {"case_study_t4": EARLY, "case_study_b": begun, "other": EARLY}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "summary.json").write_text(json.dumps(content))
    assert read_summaries(tmp_path) == [EARLY]
    assert read_summaries(tmp_path / "nowhere") == []


def test_the_same_summaries_give_the_same_bytes():
    assert to_markdown(real_runs_table([EARLY])) == to_markdown(real_runs_table([EARLY]))
    for row in real_runs_table([EARLY, EARLY]).rows:
        assert len(row) == 6
