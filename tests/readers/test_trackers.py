"""Logs of experiment trackers; `trackers.tar.xz` was written by MLflow 3.17, trackio 0.43 and Comet
3.58, and has other paths and names of users."""

from __future__ import annotations

import csv
import json
import sqlite3
import tarfile
from math import isnan
from pathlib import Path

import pytest

from rmetric._util.errors import LogError
from rmetric.evaluation import judge_run
from rmetric.readers import UnknownFormat, find_logs, read_log


@pytest.fixture(scope="module")
def trackers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trackers")
    with tarfile.open(Path(__file__).with_name("trackers.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_the_folder_of_an_mlflow_run_is_one_log(trackers):
    logs = [log for log in find_logs([trackers / "mlruns"]) if log.is_dir()]
    assert len(logs) == 3
    runs = {run.id.rpartition("__")[2]: run for log in logs for run in read_log(log).runs}
    assert len(runs["good"].records) == 60
    assert runs["good"].records[9].validation_loss == pytest.approx(2.77, abs=0.1)
    assert runs["good"].records[9].gradient_norm is not None
    assert judge_run(runs["good"].records).kind == "healthy"
    assert judge_run(runs["bad"].records).text == "NOT FINITE from step 45 to the end"
    text = "DIVERGED at step 26: never came back, in cls_loss"
    assert judge_run(runs["parts"].records).text == text
    [one] = find_logs([next(logs[0].glob("metrics/train/*"))])
    assert one == logs[0]


@pytest.mark.parametrize(
    ("name", "run", "since"),
    [("trackio.db", "trackio__bad", 45), ("mlflow.db", "mlflow__bad", 30),
     ("messages.json", "messages", 30)],
)  # fmt: skip
def test_databases_and_the_messages_of_comet(trackers, name, run, since):
    log = read_log(trackers / name)
    [bad] = [one for one in log.runs if one.id.endswith(run)]
    assert judge_run(bad.records).text == f"NOT FINITE from step {since} to the end"
    assert isnan(bad.records[-1].training_loss)
    assert bad.records[0].step == 1
    assert not any("zero bytes" in note for note in bad.notes)


def test_another_database_is_no_log_and_a_damaged_one_an_error(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (step INTEGER, loss REAL)")
    with pytest.raises(UnknownFormat, match="without the metrics of trackio or of MLflow"):
        read_log(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(LogError, match=r"no SQLite file that can be read|without the metrics"):
        read_log(path)


LONG = [("train_loss", step, 3.0 - step / 20) for step in range(1, 41)]
LONG += [("val_loss", step, 2.9) for step in (10, 20, 30)]


def exports(folder):
    """One table as it is exported: MLflow's two ways, Comet's, and torchtitan's trace."""
    rows = [
        {"key": name, "value": value, "timestamp": 1, "step": step} for name, step, value in LONG
    ]
    (folder / "history.json").write_text(json.dumps(rows))
    with open(folder / "plot.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["run_id", *rows[0]])
        writer.writeheader()
        writer.writerows({"run_id": run, **row} for run in ("a", "b") for row in rows)
    comet = [
        {"metricName": name, "metricValue": str(value), "step": step, "epoch": None}
        for name, step, value in LONG
    ]
    comet.insert(0, {"metricName": "sys.ram", "metricValue": "3", "step": None, "epoch": None})
    trace = [
        {
            "rank": 0,
            "step": step,
            "log_type_name": "metric_value",
            "event_name": name,
            "value": value,
        }
        for name, step, value in LONG
    ]
    trace.insert(0, {"step": 1, "log_type_name": "fwd_bwd_end", "value": 12.5})
    for name, entries in (("comet.jsonl", comet), ("trace.jsonl", trace)):
        (folder / name).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


@pytest.mark.parametrize("name", ["history.json", "plot.csv", "comet.jsonl", "trace.jsonl"])
def test_a_table_in_long_form_is_a_record_a_step(tmp_path, name):
    exports(tmp_path)
    runs = read_log(tmp_path / name).runs
    assert len(runs) == (2 if name == "plot.csv" else 1)
    for run in runs:
        assert [record.step for record in run.records] == [*range(1, 41)]
        assert run.records[9].training_loss == 2.5
        assert [r.step for r in run.records if r.validation_loss == 2.9] == [10, 20, 30]


def test_rows_with_a_name_and_a_loss_are_no_long_form(tmp_path):
    path = tmp_path / "run.jsonl"
    rows = [{"name": "a", "value": 1, "step": step, "loss": 3.0 - step} for step in range(3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [record.training_loss for record in read_log(path).run.records] == [3.0, 2.0, 1.0]
