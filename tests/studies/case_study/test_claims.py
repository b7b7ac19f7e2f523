"""What the table of claims says of case studies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rmetric.logs import read_log
from rmetric.replay.scored_run import score_run
from studies.case_study.report import table_of
from studies.common.real_runs import read_summaries, real_runs_rows

F1, CAUSAL_F1, LEAD, COST = range(4)
MEASURED, NUMBER, VERDICT = 2, 3, 4


def judged(*, hit: bool, false_alarm: bool, lead: int | None = None) -> dict:
    minutes = None if lead is None else lead / 10
    return {"hit": hit, "false_alarm": false_alarm, "lead_steps": lead, "lead_minutes": minutes}


def run(outcome: str, published: dict, causal: dict, seconds: float = 5.0, percent: float = 0.5):
    cost = {"seconds_per_step": seconds, "monitoring_percent": percent}
    return {
        "outcome": outcome, "cost": cost, "r_metric": {"published": published, "causal": causal}
    }  # fmt: skip


def rows(**runs: dict) -> list:
    settings = {"model": "Qwen", "fault": "LR_SPIKE"}
    return real_runs_rows([{"device": {"name": "Tesla T4"}, "settings": settings, "runs": runs}])


NOTHING = judged(hit=False, false_alarm=False)
ALARM = judged(hit=False, false_alarm=True)
CONTROL = run("healthy", NOTHING, NOTHING)


def test_an_alarm_before_the_fault_is_a_hit_by_one_rule_and_two_runs_confirm_nothing():
    early = run("failed", judged(hit=True, false_alarm=False, lead=300), ALARM)
    found = rows(fault=early, control=CONTROL)
    assert found[F1][MEASURED].startswith("1.00")
    assert (found[F1][NUMBER], found[F1][VERDICT]) == (2, "undecided")
    assert found[CAUSAL_F1][MEASURED].startswith("0.00")
    assert found[LEAD][MEASURED] == "no hit"
    hit = judged(hit=True, false_alarm=False, lead=25)
    assert "2.5" in rows(fault=run("failed", hit, hit))[LEAD][MEASURED]
    assert rows(control=run("healthy", ALARM, ALARM))[F1][VERDICT] == "nothing failed"


@pytest.mark.parametrize(
    ("seconds", "percent", "verdict"),
    [(5.0, 0.5, "below"), (5.0, 3.0, "above"), (0.05, 40.0, "no claim")],
)
def test_a_model_too_small_to_compare_claims_nothing_of_the_cost(seconds, percent, verdict):
    one = run("healthy", NOTHING, NOTHING, seconds, percent)
    assert rows(control=one)[COST][VERDICT] == verdict


def test_only_finished_runs_count_and_in_the_order_of_the_folders(tmp_path: Path):
    done, begun = {"runs": {"control": CONTROL}}, {"runs": {"control": {"id": "x"}}}
    for folder, content in {"case_study_t4": done, "case_study_b": begun, "other": done}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "summary.json").write_text(json.dumps(content))
    assert read_summaries(tmp_path) == [done]
    assert read_summaries(tmp_path / "nowhere") == []


# -- what docs/case_study.md says of the committed run

ROOT = Path(__file__).resolve().parents[3]
PAGE = " ".join((ROOT / "docs/case_study.md").read_text(encoding="utf-8").split())
RESULTS = ROOT / "results/case_study_cpu_tiny"


SUMMARY = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))


def test_the_page_has_the_table_of_the_summary():
    assert table_of(SUMMARY) in (ROOT / "docs/case_study.md").read_text(encoding="utf-8")


def test_the_page_says_what_the_logs_say():
    logs = {name: read_log(RESULTS / f"{run['id']}.jsonl") for name, run in SUMMARY["runs"].items()}
    for log in logs.values():
        assert {score.raw.failure_rate for score in score_run(log).scores} == {0.0}
    losses = {record.step: record.validation_loss for record in logs["LR_RUNAWAY"].records}
    before, then, later = (losses[step] for step in (200, 210, 260))
    assert f"from {before:.2f} to {then:.2f}; it reaches {later:.1f} at step 260" in PAGE
