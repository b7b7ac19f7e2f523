"""What the table of claims says of case studies."""

from __future__ import annotations

import csv
import html
import json
from pathlib import Path

import pytest

from studies.case_study.summary_sentence import results_of, sentence
from studies.common.real_runs import (
    NOT_MEASURED,
    read_summaries,
    real_runs_rows,
)

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


# -- what docs/case_study.md says of the committed run

ROOT = Path(__file__).resolve().parents[3]
PAGE = " ".join((ROOT / "docs/case_study.md").read_text(encoding="utf-8").split())
RESULTS = ROOT / "results/case_study_cpu_tiny"


SUMMARY = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))


def test_the_page_has_the_sentence_of_the_summary_which_is_that_of_the_logs():
    assert sentence(results_of(SUMMARY)) == SUMMARY["sentence"]
    assert f"> {SUMMARY['sentence']} <!-- end -->" in PAGE
    assert SUMMARY["sentence"] in html.unescape(
        (RESULTS / "case_study.html").read_text(encoding="utf-8")
    )


def test_the_page_says_what_the_summary_says():
    runs = SUMMARY["runs"]
    r = {name: run["r_metric"] for name, run in runs.items()}
    own = {
        name: judged["first_alert_step"] or "none"
        for name, judged in SUMMARY["other_detectors"]["calibrated"].items()
    }
    whole = r["control"]["alerts"]["whole_run"]["alerts"]
    first = r["control"]["first_alert_step"]
    assert f"| control | healthy | {first}, {whole} in all | {own['control']} |" in PAGE
    for name, until, outcome in (
        ("LR_SPIKE", "after_onset", "absorbed"),
        ("LR_RUNAWAY", "onset_to_failure", f"diverged at {runs['LR_RUNAWAY']['failure_step']}"),
    ):
        before, after = (r[name]["alerts"][phase]["alerts"] for phase in ("before_onset", until))
        row = f"{r[name]['first_alert_step']}, {before} / {after} | {own[name]} |"
        assert f"| `{name}` | {outcome} | {row}" in PAGE
    lead = r["LR_RUNAWAY"]["published"]["lead_steps"]
    assert f"first alarm comes at step {first} of every run" in PAGE
    assert f"a lead of {lead} steps in the run that fails" in PAGE
    calibrated = SUMMARY["other_detectors"]["calibrated"]["LR_RUNAWAY"]["causal"]
    assert calibrated["hit"]
    assert f"alarms {calibrated['lead_steps']} steps before the failure" in PAGE


def test_the_page_says_what_the_rows_say():
    with open(RESULTS / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["failure_rate"] for row in rows} == {"0"}
    runaway = {int(row["step"]): row for row in rows if row["run"] == "LR_RUNAWAY"}
    before, then, later = (float(runaway[step]["validation_loss"]) for step in (200, 210, 260))
    assert f"from {before:.2f} to {then:.2f}; it reaches {later:.1f} at step 260" in PAGE
