"""Reading a study: what is taken, what is skipped and reported, what is refused."""

from __future__ import annotations

import json
import re
from math import isnan
from pathlib import Path

import pytest

from rmetric.detectors import DETECTORS
from rmetric.evaluation import (
    Study,
    UnusableStudy,
    evaluate,
    f1_difference,
    judge,
    read_study,
    trace_all,
)
from studies.paper.analysis import OF_THE_METRIC, Analysis
from studies.paper.figures.threshold_curves import threshold_sweep
from tests.authors_data import needs_authors_logs, seed_1
from tests.evaluation.synthetic_study import make_runs, write_study

NAME = "Llama-3-8B_LR_SPIKE_r00.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_study(tmp_path)


def log(folder: Path, mode: str = "FULL_METRIC") -> Path:
    return folder / f"logs_{mode}" / NAME


def metric_alone(study: Study) -> Analysis:
    """Without the others: the logs state nothing of them, and forests are slow."""
    stating = [name for name, e in DETECTORS.items() if e.kind in ("metric", "ablation")]
    traces = {name: trace_all(name, study.runs[DETECTORS[name].mode]) for name in stating}
    return Analysis(study=study, traces=traces)


def rewrite(where: Path, change) -> None:
    """Change the entries of a log, or of all logs in a folder."""
    for path in where.rglob("*.jsonl") if where.is_dir() else [where]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in change(lines)))


def test_every_run_of_every_mode_is_read_whole_and_none_skipped(folder):
    study = read_study(folder)
    assert study.num_logs == 60
    written = {run.id: run for run in make_runs()}
    assert {run.id for run in study.reference} == written.keys()
    assert (study.missing, study.skipped) == ([], [])
    for run in study.reference:
        assert run.records == written[run.id].records
        assert run.truth == written[run.id].truth


def test_a_mode_that_lacks_a_run_is_compared_on_those_it_shares(folder):
    min((folder / "logs_SIGMA_ONLY").iterdir()).unlink()
    study = read_study(folder)
    shared = [run for run in study.reference if run.id in {r.id for r in study.runs["SIGMA_ONLY"]}]
    ours, theirs = study.paired("SIGMA_ONLY")
    assert [study.reference[i] for i in ours] == shared
    assert [study.runs["SIGMA_ONLY"][i].id for i in theirs] == [run.id for run in shared]
    assert len(shared) == 14
    names = ("r_metric_sigma", "r_metric")
    alone = f1_difference(*(judge(shared, trace_all(n, shared), "causal_unlatched") for n in names))
    found = metric_alone(study).f1_difference("r_metric_sigma", "causal_unlatched")
    assert found == alone
    assert found.point != 0


def test_the_digest_speaks_of_names_and_bytes_and_not_of_the_folder(folder):
    twin = write_study(folder / "twin")
    digest = read_study(folder).digest
    assert read_study(twin).digest == digest
    rewrite(log(twin), lambda lines: [lines[0] | {"note": "changed"}, *lines[1:]])
    assert read_study(twin).digest != digest


def test_a_folder_without_logs_says_what_is_accepted(tmp_path):
    with pytest.raises(UnusableStudy, match=r"no usable log in logs_FULL_METRIC/\*\.jsonl"):
        read_study(tmp_path)


def test_a_mode_that_is_not_there_is_named_and_its_detector_left_out(tmp_path):
    study = read_study(write_study(tmp_path, make_runs()[:1], ("FULL_METRIC", "SIGMA_ONLY")))
    assert study.missing == ["LAMBDA_ONLY", "DELTA_L_ONLY"]
    assert "r_metric_sigma" in Analysis.of(study).traces
    assert "r_metric_lambda" not in Analysis.of(study).traces


#: What stands in the log instead, or is made of what stood there, and the reason that is kept.
SPOILT = {
    "cut in the middle of a line": (lambda content: content[: len(content) // 2], ""),
    "cut before its last line": (lambda content: content[: content[:-1].rindex(b"\n") + 1], ""),
    "nothing": (b"", ""),
    "a line that is no JSON": (b"{]\n", "line 1"),
    "a binary file": (bytes(range(256)) * 8, "line 1"),
    "a step cost that is no number": (
        b'{"event":"EXPERIMENT_START","config":{"seconds_per_step":"five"}}\n'
        b'{"event":"EXPERIMENT_SUCCESS"}\n', "seconds_per_step"),
    "an R that is no number": (b'{"step":1,"event":"METRICS","r_metric":[1]}\n'
        b'{"event":"EXPERIMENT_SUCCESS"}\n', "r_metric"),
    "a failure without a step": (b'{"event":"EXPERIMENT_FAILURE"}\n', "at which step"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "says"), SPOILT.values(), ids=SPOILT.keys())
def test_a_spoilt_log_is_skipped_by_name_and_the_others_and_the_reason_kept(folder, content, says):
    path = log(folder)
    path.write_bytes(content(path.read_bytes()) if callable(content) else content)
    study = read_study(folder)
    assert len(study.reference) == 14
    [skipped] = study.skipped
    assert str(path) in skipped
    assert re.search(f"{NAME}.*{says}", skipped)


def test_a_run_that_ended_before_its_first_evaluation_still_counts(folder):
    rewrite(log(folder), lambda lines: [line for line in lines if line["event"] != "METRICS"])
    study = read_study(folder)
    assert len(study.reference) == 15
    scores = evaluate(study.reference, trace_all("always", study.reference), "published")
    assert (scores.num_failed, scores.misses) == (6, 1)


def test_two_logs_of_one_run_id_are_both_kept_and_named_by_their_files(folder):
    copy = log(folder).with_name("again.jsonl")
    copy.write_bytes(log(folder).read_bytes())
    study = read_study(folder)
    assert len(study.reference) == 16
    assert {"again", NAME[:-6]} <= {run.id for run in study.reference}
    assert len({run.id for run in study.reference}) == 16


def stated_only(lines):
    """As the authors' simulator logs: R and nothing that it is made of."""
    for entry in lines:
        if entry["event"] == "METRICS":
            kept = {name: entry[name] for name in ("step", "event", "r_metric")}
            entry.clear()
            entry.update(kept)
        entry.pop("format_version", None)
        entry.get("config", {}).pop("metric_settings", None)
        entry.get("config", {}).pop("alert_thresholds", None)
    return lines


def test_the_threshold_that_a_log_states_counts_for_its_own_r(tmp_path):
    def deaf(lines):
        stated_only(lines)[0]["config"]["alert_thresholds"] = {"r_metric": 5.0}
        return lines

    write_study(tmp_path, modes=("FULL_METRIC",))
    rewrite(tmp_path, deaf)
    analysis = Analysis.of(read_study(tmp_path), OF_THE_METRIC)
    assert analysis.scores("r_metric", "published").hits == 0


def test_r_that_is_stated_counts_where_nothing_else_is_logged(folder):
    bare = write_study(folder / "bare")
    rewrite(bare, stated_only)
    whole, stated = (Analysis.of(read_study(path), OF_THE_METRIC) for path in (folder, bare))
    assert stated.disagreements == []
    for name in whole.traces:
        for protocol in ("published", "causal"):
            assert stated.scores(name, protocol) == whole.scores(name, protocol)
    assert stated.weight_grids == {}


def test_what_is_not_logged_is_undefined_and_not_nought(tmp_path):
    write_study(tmp_path, modes=("FULL_METRIC",))
    rewrite(tmp_path, stated_only)
    analysis = Analysis.of(read_study(tmp_path))
    for name in ("isolation_forest", "loss_rise", "gradient_norm", "r_metric_first_loss"):
        scores = analysis.scores(name, "published")
        assert not scores.measured
        assert isnan(scores.f1.point)
        assert isnan(analysis.f1_difference(name, "published").point)
    assert analysis.scores("never", "published").f1.point == 0


def test_the_settings_that_a_log_states_are_used(folder):
    def other(lines):
        lines[0]["config"]["metric_settings"]["threshold"] = 5.0
        for entry in lines:
            entry.pop("alerts", None)
        return lines

    rewrite(folder / "logs_FULL_METRIC", other)
    analysis = Analysis.of(read_study(folder), OF_THE_METRIC)
    assert analysis.scores("r_metric", "published").hits == 0
    assert analysis.weight_grids["published"].outcomes.hit.sum() == 0


@pytest.mark.parametrize("step_of", ["first", "wrong"])
def test_an_alert_may_be_the_step_of_the_first(folder, step_of):
    def numbered(lines):
        first = None
        for entry in lines:
            if entry["event"] == "METRICS":
                if entry["alerts"]["r_metric"] and first is None:
                    first = entry["step"]
                entry["alerts"] = {} if first is None else {"r_metric": first}
                if step_of == "wrong":
                    entry["alerts"] = {"r_metric": 50}
        assert first is not None
        assert first > 50
        return lines

    rewrite(log(folder), numbered)
    study = read_study(folder)
    assert study.skipped == []
    assert len(metric_alone(study).disagreements) == (step_of == "wrong")


@needs_authors_logs
def test_the_authors_own_study_scores_as_published(tmp_path):
    for name, content in seed_1().items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    study = read_study(tmp_path)
    analysis = Analysis.of(study, OF_THE_METRIC)
    scores = analysis.scores("r_metric", "published")
    assert (scores.hits, scores.false_alarms, scores.misses) == (72, 2, 0)
    assert round(scores.f1.point, 3) == 0.986
    assert round(scores.lead_minutes.point, 1) == 5.7
    assert (study.skipped, analysis.disagreements) == ([], [])
    sweep = threshold_sweep(
        study.reference, analysis.traces["r_metric"], [0.40, 0.45, 0.50, 0.55, 0.60, 0.65, 0.70],
        "published",
    )  # fmt: skip
    assert sweep.f1.round(3).tolist() == [0.661, 0.679, 0.973, 0.986, 0.993, 0.993, 0.986]


def lie_about_r(lines):
    lines[5]["r_metric"] += 0.01
    return lines


def lie_about_the_alert(lines):
    lines[5]["alerts"]["r_metric"] = not lines[5]["alerts"]["r_metric"]
    return lines


def state_nothing(lines):
    return [{k: v for k, v in line.items() if k not in ("r_metric", "alerts")} for line in lines]


@pytest.mark.parametrize(
    ("change", "mode", "named"),
    [
        (list, "FULL_METRIC", []),
        (state_nothing, "FULL_METRIC", []),
        (lie_about_r, "SIGMA_ONLY", ["logs_SIGMA_ONLY", "step 250", "recomputed"]),
        (lie_about_the_alert, "FULL_METRIC", ["the alert is"]),
    ],
)
def test_what_a_log_states_of_r_and_is_not_so_is_named(folder, change, mode, named):
    rewrite(log(folder, mode), change)
    found = metric_alone(read_study(folder)).disagreements
    assert len(found) == bool(named)
    assert all(words in found[0] for words in named)


def test_the_forests_are_the_same_in_any_number_of_processes():
    runs = make_runs()[:4]
    serial, parallel = (trace_all("isolation_forest", runs, num_processes=n) for n in (1, 2))
    for ours, theirs in zip(serial, parallel, strict=True):
        assert ours.run_id == theirs.run_id
        assert (ours.scores == theirs.scores).all()
