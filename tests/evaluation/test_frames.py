"""Runs, studies and tables as pandas DataFrames."""

from __future__ import annotations

import io
from math import nan

import pandas as pd
import pytest

from rmetric.evaluation import Estimate, Study, read_study
from rmetric.evaluation.study import OF_RUN
from rmetric.records import HardwareEvent, Record, Run
from studies.common.renderers import to_csv
from studies.common.table import Column, Table
from tests.evaluation.synthetic_study import make_runs, write_study


def test_a_run_has_a_row_for_each_record_and_a_column_for_each_logged_field():
    records = [
        Record(step=1, training_loss=3.0, worker_gradient_norms=(1.0, 2.0), skipped=True),
        Record(step=5, training_loss=None, events=(HardwareEvent(4.0, "xid"),)),
    ]
    frame = Run(id="a", records=records).to_frame()
    assert list(frame) == ["step", "training_loss", "worker_gradient_norms", "skipped", "events"]
    assert frame["step"].tolist() == [1, 5]
    assert frame["training_loss"].isna().tolist() == [False, True]
    assert frame["worker_gradient_norms"][0] == (1.0, 2.0)
    assert frame["events"][1] == records[1].events
    assert frame["skipped"].tolist() == [True, pd.NA]


def test_a_run_without_records_is_an_empty_frame():
    frame = Run(id="a", records=[]).to_frame()
    assert list(frame) == ["step"]
    assert len(frame) == 0


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    write_study(folder, make_runs(num_repetitions=1))
    return read_study(folder)


def test_a_study_has_a_row_for_each_record_of_each_run(study):
    frame = study.to_frame()
    assert list(frame)[: len(OF_RUN) + 2] == [*OF_RUN, "r_metric", "alarm"]
    assert len(frame) == sum(len(run.records) for runs in study.runs.values() for run in runs)
    for mode, runs in study.runs.items():
        of_mode = frame[frame["mode"] == mode]
        for run, stated in zip(runs, study.stated[mode], strict=True):
            rows = of_mode[of_mode["run"] == run.id]
            assert rows["step"].tolist() == [record.step for record in run.records]
            assert rows["r_metric"].tolist() == [one.score for one in stated]
            assert rows["alarm"].tolist() == [one.alarm for one in stated]
            assert set(rows["fault"]) == {run.truth.fault}
            assert set(rows["architecture"]) == {run.config["model_type"]}
            assert set(rows["outcome"]) == {run.truth.outcome}
            assert set(rows["failure_step"].dropna()) == {run.truth.failure_step} - {None}


def test_the_frame_of_a_study_counts_the_failures_that_its_runs_state(study):
    frame = study.to_frame()
    ends = frame[frame["mode"] == "FULL_METRIC"].groupby("run")["outcome"].first()
    assert (ends == "failed").sum() == sum(run.truth.failed for run in study.reference)


TABLE = Table(
    name="t",
    number=1,
    title="Of every kind of cell",
    columns=tuple(Column(label=label) for label in ("Name", "n", "Share", "F1", "Mixed")),
    rows=[
        ("a", 3, 0.25, Estimate(0.5, 0.25, 0.75), "no hit"),
        ("b", None, nan, None, 2.0),
        ("c", 10**7, 1.0, Estimate(nan, nan, nan), None),
    ],
)


def test_a_table_keeps_its_numbers_and_splits_its_intervals():
    frame = TABLE.to_frame()
    assert list(frame) == ["Name", "n", "Share", "F1", "F1 low", "F1 high", "Mixed"]
    kinds = [str(kind) for kind in frame.dtypes]
    assert kinds == ["object", "Int64", "float64", "float64", "float64", "float64", "object"]
    assert frame["n"].tolist() == [3, pd.NA, 10**7]
    assert frame["F1 low"][0] == 0.25
    assert frame["F1 high"].isna().tolist() == [False, True, True]
    assert frame["Mixed"].tolist() == ["no hit", 2.0, None]


def test_a_table_has_the_columns_and_the_numbers_of_its_csv():
    written = pd.read_csv(io.StringIO(to_csv(TABLE)))
    frame = TABLE.to_frame()
    assert list(written) == list(frame)
    for name in ("n", "Share", "F1", "F1 low", "F1 high"):
        expected = frame[name].astype("float64")
        pd.testing.assert_series_equal(written[name].astype("float64"), expected, rtol=1e-5)


def test_a_table_without_rows_is_an_empty_frame_with_its_columns():
    empty = Table(name="t", number=0, title="", columns=TABLE.columns, rows=[])
    assert list(empty.to_frame()) == ["Name", "n", "Share", "F1", "Mixed"]
    assert len(empty.to_frame()) == 0
