"""What a log states of the metric: R, its alarms, its weights, signals normalised already."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from io import BytesIO
from math import isnan, nan
from pathlib import Path

import pytest

from rmetric import HardwareEvent, Record, RMetric, RMetricConfig, Run
from rmetric.cli import replay as command
from rmetric.log_entries import stated_alarm
from rmetric.logs import LogError, metrics_line, run_lines
from rmetric.metric import reason_for
from rmetric.readers import open_log, read_log
from rmetric.readers.columns import STATED, choose_columns
from rmetric.readers.names import TARGETS
from rmetric.replay.scored_run import score_run
from rmetric.reporting.page.traces import trace_of_stated
from rmetric.reporting.replay_report import Replayed, replay_logs
from tests.authors_data import AUTHORS, needs_authors_logs, seed_1
from tests.reporting.page.pages import Found

WEIGHTS = {"w1_lambda": 0.0, "w2_sigma_sq": 0.5, "w3_delta_l": 0.78}
NORMS = ("lambda_norm", "sigma_sq_norm", "delta_l_norm")


def log(path, *lines, end="EXPERIMENT_SUCCESS", first=None, **config):
    """A log in the authors' shape at `path`; `lines` are what METRICS hold beside the step."""
    entries = [{"event": "EXPERIMENT_START", "config": config} | (first or {})]
    steps = range(100, 100 * len(lines) + 1, 100)
    entries += [{"step": s, "event": "METRICS"} | m for s, m in zip(steps, lines, strict=True)]
    entries += [{"step": 100 * len(lines), "event": end}] if end else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def only_r(*scores):
    return [{"r_metric": score} for score in scores]


def read(path, **mapping):
    return read_log(path, mapping).run


def replayed(tmp_path, *paths) -> tuple[Replayed, list[dict]]:
    result = replay_logs(list(paths), tmp_path / "out", most_plots=None)
    assert not result.failed
    folders = [tmp_path / "out" / row["folder"] for row in result.rows]
    return result, [json.loads((f / "summary.json").read_text()) for f in folders]


def own(path, records):
    """The run of a log of ours at `path`."""
    lines = run_lines(Run(id="own", records=records), RMetricConfig())
    path.write_bytes(b"".join(lines))
    return read(path)


def noted(notes, words):
    return any(words in note for note in notes)


@pytest.mark.parametrize(
    ("alerts", "step", "alarm"),
    [
        ({"r_metric": True}, 7, True),
        ({"r_metric": False}, 7, False),
        ({"r_metric": 400}, 400, True),
        ({"r_metric": 400.0}, 400, True),
        ({"r_metric": 400}, 500, None),
        ({"r_metric": 400}, 300, None),
        ({"r_metric": 0}, 0, None),
        ({"r_metric": 0}, 5, None),
        ({"r_metric": None}, 5, None),
        ({"loss_spike": 3}, 5, None),
        ({}, 5, None),
        (None, 5, None),
    ],
)
def test_a_step_says_that_the_line_of_that_step_is_alarmed_and_nothing_of_others(
    alerts, step, alarm
):
    assert stated_alarm({"step": step, "alerts": alerts}) is alarm


@pytest.mark.parametrize("nonsense", ["yes", -1, 1.5, [], nan])
def test_an_alarm_that_is_neither_flag_nor_step_is_refused_with_what_is_accepted(nonsense):
    with pytest.raises(ValueError, match=r"'r_metric': found .*true, false or a step is accepted"):
        stated_alarm({"step": 1, "alerts": {"r_metric": nonsense}})


def test_r_alone_is_shown_as_stated_and_ours_is_undefined(tmp_path):
    path = log(tmp_path / "a.jsonl", *only_r(0.0, 0.9, 0.1, 0.6), experiment_id="a")
    result, (summary,) = replayed(tmp_path, path)
    assert (summary["max_r"], summary["max_r_step"], summary["verdicts"]) == (None, None, None)
    assert summary["stated"]["max_r"] == 0.9
    assert summary["stated"]["first_alert_step"] == 200
    assert summary["stated"]["num_alerts"] == 2
    assert summary["stated"]["verdicts"]["published"]["false_alarm"]
    assert noted(summary["notes"], "R cannot be recomputed")
    assert noted(summary["notes"], "R is undefined")
    (row,) = result.rows
    assert (row["max_r"], row["first_alert_step"]) == ("", "")
    assert (row["stated_first_alert_step"], row["stated_num_alerts"]) == (200, 2)
    with open(tmp_path / "out" / "a" / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["r_metric"] + r["alert"] for r in rows] == [""] * 4
    assert [(r["stated_score"], r["stated_alarm"]) for r in rows] == [
        ("0.0", "0"), ("0.9", "1"), ("0.1", "0"), ("0.6", "1")
    ]  # fmt: skip
    assert (tmp_path / "out" / "a" / "case_study.png").is_file()


@pytest.mark.parametrize(
    ("config", "threshold", "first", "words"),
    [
        ({}, 0.57, 200, "above 0.57, the paper's threshold, as the log states none"),
        ({"alert_thresholds": {"r_metric": 0.8}}, 0.8, 300, "above 0.8, the threshold that the"),
        ({"alert_thresholds": {"r_metric": "high"}}, 0.57, 200, "the paper's threshold"),
        ({"alert_thresholds": {"r_metric": 10**400}}, 0.57, 200, "the paper's threshold"),
        ({"alert_thresholds": None}, 0.57, 200, "the paper's threshold"),
    ],
)
def test_stated_r_alarms_above_the_stated_threshold_else_the_paper_s_and_says_which(
    tmp_path, config, threshold, first, words
):
    scored = score_run(read(log(tmp_path / "a.jsonl", *only_r(0.57, 0.6, 0.9), **config)))
    assert scored.stated.threshold == threshold
    assert trace_of_stated(scored).alarm_steps == [first]
    assert noted(scored.notes, words)


def test_a_record_without_r_ends_no_stated_alarm_and_begins_none(tmp_path):
    path = log(tmp_path / "a.jsonl", *only_r(0.9), {}, *only_r(0.9, 0.1), {}, *only_r(nan))
    scored = score_run(read(path))
    assert scored.stated.alarms == [True, True, True, False, False, False]
    assert trace_of_stated(scored).alarm_steps == [100]
    assert scored.stated.highest == 0.9


def test_an_r_that_is_no_number_is_an_error_of_its_line(tmp_path):
    path = log(tmp_path / "a.jsonl", *only_r(0.1, "high"))
    with pytest.raises(LogError, match=r"line 3: 'r_metric': found 'high'; a number.* is accepted"):
        read(path)


def test_where_the_log_states_our_r_the_page_says_so_in_a_sentence(tmp_path):
    records = [Record(step=s, validation_loss=3.0 - s / 9) for s in range(1, 9)]
    own(tmp_path / "own.jsonl", records)
    _, (summary,) = replayed(tmp_path, tmp_path / "own.jsonl")
    assert summary["stated"]["equals_ours"]
    assert summary["stated"]["first_alert_step"] == summary["first_alert_step"]
    found = Found((tmp_path / "out" / "own" / "report.html").read_text())
    assert "The log states the same R." in found.text
    assert "R, as stated" not in [panel["title"] for panel in found.data["panels"]]


def test_the_console_separates_stated_alarms_from_ours_and_undefined_from_none(tmp_path, capsys):
    only = log(tmp_path / "a.jsonl", *only_r(0.1, 0.9, 0.1, 0.9), experiment_id="a")
    quiet = log(tmp_path / "b.jsonl", *only_r(0.1, 0.2), experiment_id="b")
    result, _ = replayed(tmp_path, only, quiet)
    assert command.report(result, tmp_path / "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "2 runs: 2 cannot tell; 0 alarmed (calibrated detector, nothing to judge by in 2), "
        "0 alarmed (R-Metric as published, undefined in 2), 1 alarmed by R as their logs state it"
    )
    assert lines[1].startswith("a: CANNOT TELL: no loss is logged")
    assert lines[2].endswith(": none; nothing is logged that it watches")
    assert "as its log states: R alarms at step 200, the first of 2" in lines[3]
    assert "as its log states: R has no alarm" in lines[6]


@pytest.mark.parametrize("names", [tuple(WEIGHTS), ("lambda", "sigma_sq", "delta_l")])
def test_stated_weights_and_threshold_are_the_settings_of_the_metric(tmp_path, names):
    weights = dict(zip(names, WEIGHTS.values(), strict=True))
    config = {"r_metric_weights": weights, "alert_thresholds": {"r_metric": 0.6, "x": 3}}
    path = log(tmp_path / "a.jsonl", {"validation_loss": 3.0}, {"validation_loss": 2.0}, **config)
    settings = score_run(read(path)).settings
    assert settings.name == "as logged"
    assert settings.config == RMetricConfig.simulation(
        weights=(0.0, 0.5, 0.78), threshold=0.6, variant="authors_average"
    )
    assert score_run(read(path), "simulation").config == RMetricConfig()


def test_an_ablation_with_stated_weights_weighs_one_signal(tmp_path):
    path = log(tmp_path / "a.jsonl", {}, r_metric_weights=WEIGHTS, METRIC_MODE="SIGMA_ONLY")
    assert score_run(read(path)).config.weights == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"w1_lambda": 0.1}, "w2_sigma_sq is missing"),
        (WEIGHTS | {"w1_lambda": "much"}, "found 'much'; a number"),
        (WEIGHTS | {"w3_delta_l": -1}, "must be finite, at least 0"),
        (dict.fromkeys(WEIGHTS, 0), "at least one must be above 0"),
        ([0.1, 0.2, 0.3], "a JSON object is accepted"),
        (dict.fromkeys(WEIGHTS, 10**400), "a number"),
    ],
)
def test_weights_that_make_no_sense_are_not_used_and_that_is_noted(tmp_path, weights, problem):
    run = read(log(tmp_path / "a.jsonl", {"validation_loss": 3.0}, r_metric_weights=weights))
    scored = score_run(run)
    assert scored.config == RMetricConfig()
    (note,) = [note for note in run.notes if "r_metric_weights" in note]
    assert "were not used" in note
    assert problem in note


def test_a_stated_n_is_taken_where_the_signal_has_no_value_of_its_own():
    metric = RMetric()
    metric.update(Record(step=1, gradient_variance_normalised=0.5, loss_drift_normalised=1.0))
    assert metric.normalised == (0.0, 0.5, 1.0)
    assert metric.score == 0.45 * 0.5 + 0.70
    assert all(map(isnan, metric.raw))
    assert metric.sources == (None, "logged_normalised", "logged_normalised")
    assert "σ² 0.23 (n = 0.5 as the log states it)" in metric.reason
    metric.update(Record(step=2))
    assert metric.normalised == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("better", "of"),
    [
        (Record(step=1, failure_rate=2.0), 0),
        (Record(step=1, time=1.0, events=(HardwareEvent(0.5, "x"),)), 0),
        (Record(step=1, gradient_variance=2.0), 1),
        (Record(step=1, worker_gradient_norms=(1.0, 2.0)), 1),
        (Record(step=1, loss_drift=2.0), 2),
        (Record(step=1, validation_loss=2.0), 2),
    ],
)
def test_a_stated_n_is_not_taken_beside_a_value_nor_after_one(better, of):
    norms = {f"{name}_normalised": 0.8 for name in RMetric().raw._fields}
    metric = RMetric().update(replace(better, **norms))
    assert metric.normalised[of] == 0.0
    if metric.raw[of] == metric.raw[of]:
        metric.update(Record(step=2, **norms))
        assert metric.normalised[of] == 0.0
        assert metric.sources[of] is None


def test_one_norm_over_time_is_not_mixed_with_a_stated_n():
    stated = Record(step=1, gradient_norm=1.0, gradient_variance_normalised=0.3)
    metric = RMetric().update(stated)
    assert metric.sources.gradient_variance == "logged_normalised"
    metric.update(Record(step=2, gradient_norm=9.0))
    assert (metric.sources.gradient_variance, metric.normalised[1]) == (None, 0.3)


@pytest.mark.parametrize(("stated", "taken"), [(nan, 0.0), (-1.0, 0.0), (7.0, 1.0), (0.4, 0.4)])
def test_a_stated_n_stays_from_0_to_1(stated, taken):
    metric = RMetric().update(Record(step=1, loss_drift_normalised=stated))
    assert metric.normalised.loss_drift == taken


def test_the_norms_of_a_log_that_lacks_the_signals_are_read(tmp_path):
    lines = [{"sigma_sq_norm": n, "delta_l_norm": 1 - n} for n in (0.0, 0.25, 1.0)]
    path = log(tmp_path / "a.jsonl", *lines)
    for records in (read(path).records, [record for _, record in open_log(path)]):
        assert [r.gradient_variance_normalised for r in records] == [0.0, 0.25, 1.0]
        assert [r.loss_drift_normalised for r in records] == [1.0, 0.75, 0.0]
        assert [r.failure_rate_normalised for r in records] == [None] * 3
    scored = score_run(read(path))
    assert scored.variance_source == "logged_normalised"
    assert [score.score for score in scored.scores] == [0.70, 0.45 * 0.25 + 0.70 * 0.75, 0.45]
    assert noted(scored.notes, "σ² is taken normalised, as the log states it")


@pytest.mark.parametrize("preset", [None, "case_study"])
@pytest.mark.parametrize("headless", [False, True])
def test_the_norms_that_our_own_logs_repeat_are_no_statements(tmp_path, preset, headless):
    records = [
        Record(
            step=s,
            validation_loss=3.0 - s / 9 if s % 3 == 0 else None,
            worker_gradient_norms=(1.0, 1.0 + s % 5) if s % 2 == 0 else None,
        )
        for s in range(1, 30)
    ]
    path, runs = tmp_path / "own.jsonl", []
    own(path, records)
    entries = list(map(json.loads, path.read_text().splitlines()[headless:]))
    without = [{k: v for k, v in entry.items() if k not in NORMS} for entry in entries]
    for these in (entries, without):
        path.write_text("".join(json.dumps(entry) + "\n" for entry in these))
        runs.append(read(path))
    assert runs[0].records == runs[1].records
    scores = [score_run(run, preset).scores for run in runs]
    assert repr(scores[0]) == repr(scores[1])


def test_a_log_of_ours_keeps_the_norms_that_somebody_else_stated(tmp_path):
    records = [Record(step=s, gradient_variance_normalised=s / 8) for s in range(1, 8)]
    run = own(tmp_path / "own.jsonl", records)
    assert run.records == records
    assert noted(run.notes, "equals the logged r_metric at all 7 records")
    entry = json.loads(metrics_line(records[0], RMetric().update(records[0])))
    assert entry["sigma_sq_source"] == "logged_normalised"
    assert "sigma_sq" not in entry


def test_the_reason_of_an_alarm_names_no_signal_that_was_never_seen():
    metric = RMetric().update(Record(step=1, loss_drift_normalised=1.0))
    reason = reason_for(metric.config, metric.raw, metric.normalised, metric.score)
    assert "parts: ΔL 0.70 (n = 1 as the log states it): roll back" in reason


HEADER = "step,train_loss,r_metric,lambda,lambda_norm,sigma_sq,sigma_sq_norm,delta_l,delta_l_norm"
ROWS = "10,3.0,0.0,0.1,0,2.0,0,0.0,0\n20,2.0,0.78,0.1,0,1.0,0,1.5,1\n30,2.5,0.2,0.1,0,4.0,1,0.2,0\n"


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_table_s_stated_signals_and_r_are_read(tmp_path, form):
    path = tmp_path / f"metrics.{form}"
    rows = [line.split(",") for line in ROWS.splitlines()]
    if form == "csv":
        path.write_text(f"{HEADER}\n{ROWS}")
    else:
        names = HEADER.split(",")
        entries = [dict(zip(names, map(json.loads, row), strict=True)) for row in rows]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    run = read(path)
    assert [r.stated_score for r in run.records] == [0.0, 0.78, 0.2]
    assert [r.gradient_variance for r in run.records] == [2.0, 1.0, 4.0]
    assert [r.loss_drift for r in run.records] == [0.0, 1.5, 0.2]
    assert [r.failure_rate for r in run.records] == [0.1] * 3
    assert [r.loss_drift_normalised for r in run.records] == [0.0, 1.0, 0.0]
    scored = score_run(run)
    assert trace_of_stated(scored).alarm_steps == [20]
    assert scored.scores[1].score == 0.70  # ΔL as stated, and not of the training loss


def test_every_stated_target_has_a_field_of_the_record_and_can_be_mapped(tmp_path):
    columns = {target: f"c{i}" for i, target in enumerate(STATED)}
    header = ",".join(["step", "loss", *columns.values()])
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\n1,2.0,{','.join('0.5' for _ in columns)}\n")
    (record,) = read(path, **columns).records
    assert {getattr(record, TARGETS[target].field) for target in STATED} == {0.5}


def test_a_column_lambda_is_the_failure_rate_only_beside_the_metric_s_others():
    assert "lambda" not in choose_columns(["step", "loss", "lambda"], {}).by_target
    assert "lambda" in choose_columns(["step", "loss", "lambda", "sigma_sq"], {}).by_target
    assert "lambda" in choose_columns(["step", "loss", "lambda"], {"lambda": "lambda"}).by_target


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_table_of_r_alone_is_a_log(tmp_path, name):
    text = "step,r_metric\n1,0.1\n2,0.9\n"
    if name.endswith("l"):
        text = '{"step": 1, "r_metric": 0.1}\n{"step": 2, "r_metric": 0.9}\n'
    (tmp_path / name).write_text(text)
    scored = score_run(read(tmp_path / name))
    assert trace_of_stated(scored).alarm_steps == [2]
    assert not scored.is_defined


def test_the_scores_of_a_replay_are_no_log(tmp_path):
    replayed(tmp_path, log(tmp_path / "a.jsonl", *only_r(0.1, 0.9), experiment_id="a"))
    with pytest.raises(LogError, match="the scores that a replay wrote"):
        read_log(tmp_path / "out" / "a" / "scores.csv")


def test_two_files_with_one_id_are_told_apart_by_their_file_everywhere(tmp_path, capsys):
    paths = [
        log(tmp_path / folder / "run.jsonl", *only_r(0.1, 0.9), experiment_id="twin")
        for folder in ("one", "two")
    ]
    # Some file systems take both for one name.
    paths.append(log(tmp_path / "three.jsonl", *only_r(0.1), experiment_id="Twin"))
    paths.append(log(tmp_path / "other.jsonl", *only_r(0.1), experiment_id="other"))
    result, summaries = replayed(tmp_path, *paths)
    assert [row["folder"] for row in result.rows] == ["twin", "twin-2", "Twin-3", "other"]
    note = f"an earlier log has the same run id: {paths[0]} is in twin, this one, {paths[1]}, in tw"
    assert [noted(summary["notes"], note) for summary in summaries] == [False, True, False, False]
    command.report(result, tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": CANNOT TELL")[0] for line in lines[1:13:3]] == [
        f"twin ({paths[0]})", f"twin ({paths[1]})", "Twin", "other"
    ]  # fmt: skip
    index = Found((tmp_path / "out" / "index.html").read_text())
    assert str(paths[0]) in index.text
    assert str(paths[1]) in index.text
    assert str(paths[3]) not in index.text
    assert "run.jsonl" in Found((tmp_path / "out" / "twin" / "report.html").read_text()).text


@needs_authors_logs
def test_the_74_alarms_that_seed_1_states_are_counted(tmp_path, capsys):
    for name, text in seed_1().items():
        if name.startswith("logs_FULL_METRIC/"):
            (tmp_path / Path(name).name).write_bytes(text)
    result = replay_logs(sorted(tmp_path.iterdir()), tmp_path / "out", most_plots=0)
    assert (len(result.rows), result.failed) == (180, [])
    alarmed = [row for row in result.rows if row["stated_first_alert_step"] != ""]
    assert len(alarmed) == 74
    assert sum(row["outcome"] == "failed" for row in alarmed) == 72
    assert {row["max_r"] for row in result.rows} == {""}
    command.report(result, tmp_path / "out")
    assert "74 alarmed by R as their logs state it" in capsys.readouterr().out


@needs_authors_logs
def test_r_of_the_shipped_logs_comes_back_to_the_last_bit_and_alarms_where_they_say():
    same = []
    for path in sorted(AUTHORS.glob("JSONL_run_*.jsonl")):
        scored = score_run(read(path))
        assert scored.settings.name == "as logged"
        assert scored.variance_source == "logged_normalised"
        same += [
            score.score == stated
            for score, stated in zip(scored.scores, scored.stated.scores, strict=True)
        ]
        entries = map(json.loads, BytesIO(path.read_bytes()))
        alarmed = [entry["step"] for entry in entries if stated_alarm(entry)]
        assert alarmed == trace_of_stated(scored).alarm_steps[:1]
    assert (sum(same), len(same)) == (105, 105)


@needs_authors_logs
def test_the_shipped_case_study_is_replayed_from_its_stated_signals_beside_its_stated_r():
    scored = score_run(read(AUTHORS / "metrics.csv"))
    assert [score.step for score in scored.scores] == list(range(10, 100, 10))
    assert scored.stated.scores[2] == 0.78
    assert trace_of_stated(scored).alarm_steps == [30, 80]
    assert scored.variance_source == "logged"
    assert scored.scores[2].raw.loss_drift == 1.9227378368377686
    assert scored.scores[2].score == 0.70
