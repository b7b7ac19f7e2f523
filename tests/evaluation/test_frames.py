"""Runs, studies and tables as pandas DataFrames."""

from __future__ import annotations

import pandas as pd
import pytest

from rmetric.evaluation import Study, read_study
from rmetric.evaluation.study import OF_RUN
from rmetric.records import HardwareEvent, Record, Run
from tests.evaluation.synthetic_study import write_study


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


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    return read_study(write_study(tmp_path_factory.mktemp("study")))


def test_a_study_has_a_row_for_each_record_of_each_run(study):
    frame = study.to_frame()
    assert list(frame)[: len(OF_RUN) + 2] == [*OF_RUN, "r_metric", "alarm"]
    assert len(frame) == sum(len(run.records) for runs in study.runs.values() for run in runs)
    for mode, runs in study.runs.items():
        of_mode = frame[frame["mode"] == mode]
        for run, stated in zip(runs, study.stated[mode], strict=True):
            rows = of_mode[of_mode["run"] == run.id]
            assert rows["step"].tolist() == [record.step for record in run.records]
            assert rows["r_metric"].tolist() == [entry.score for entry in stated]
            assert rows["alarm"].tolist() == [entry.alarm for entry in stated]
            assert set(rows["fault"]) == {run.truth.fault}
            assert set(rows["architecture"]) == {run.config["model_type"]}
            assert set(rows["outcome"]) == {run.truth.outcome}
            assert set(rows["failure_step"].dropna()) == {run.truth.failure_step} - {None}
