"""Sinks with a store of their own, on the real libraries: trackio and MLflow."""

import math
import sys

import pytest

from rmetric.monitor.actions import MLflow, SkipStep, Trackio, WandB
from tests.monitor.training import make_model, nan_at, train, watched

HOLD = {"step": 31, "action": "hold", "reason": "held at step 20"}


def watch(sink):
    """A training of 30 steps with a NaN at 12 and, at its end, a decision of a rescue."""
    made = {}

    def make(model, optimizer):
        made["monitor"] = monitor = watched(sink, SkipStep())(model, optimizer)
        close = monitor.close

        def decide_and_close():
            sink.decided(HOLD, monitor)
            close()

        monitor.close = decide_and_close
        return monitor

    train(make_model(), make, spoil=nan_at(12))
    return made["monitor"]


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("trackio", reason="trackio is not installed")


def test_trackio_has_records_alerts_and_decisions(trackio):
    from trackio.sqlite_storage import SQLiteStorage

    with pytest.raises(ValueError, match=r"call trackio\.init\(\) first"):
        Trackio()
    run = trackio.init(
        project="rmetric-test", name="a", embed=False, auto_log_gpu=False, auto_log_cpu=False
    )
    monitor = watch(Trackio())
    run.finish()
    rows = SQLiteStorage.get_logs("rmetric-test", "a")
    losses = {row["step"]: row["rmetric/training_loss"] for row in rows if "rmetric/step" in row}
    assert [*losses] == [*range(1, 31)]
    assert math.isnan(losses[12])
    assert losses[30] == pytest.approx(monitor.last.training_loss)
    assert [row["rmetric/rescue_decisions/hold"] for row in rows
            if "rmetric/rescue_decisions/hold" in row] == [1]  # fmt: skip
    alerts = {alert["title"]: alert for alert in trackio.Api().alerts("rmetric-test")}
    assert {title: (a["level"], a["step"]) for title, a in alerts.items()} == {
        "rmetric: non_finite": ("error", 12),
        "rmetric: rescue hold": ("error", 29),  # the newest complete record
    }
    assert alerts["rmetric: non_finite"]["text"].startswith("step 12")


def test_mlflow_has_records_as_metrics_and_alerts_as_tags(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    with pytest.raises(ValueError, match=r"call mlflow\.start_run\(\) first"):
        MLflow()
    experiment = mlflow.create_experiment("rmetric", artifact_location=str(tmp_path))
    monkeypatch.setattr("rmetric.monitor.actions.dashboards._LARGEST_BATCH", 7)
    with mlflow.start_run(experiment_id=experiment) as run:
        monitor = watch(MLflow())
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "rmetric/training_loss")
    losses = {metric.step: metric.value for metric in history}
    assert sorted(losses) == [*range(1, 31)]
    assert math.isnan(losses[12])
    assert losses[30] == pytest.approx(monitor.last.training_loss)
    data = client.get_run(run.info.run_id).data
    assert data.metrics["rmetric/rescue_decisions/hold"] == 1
    assert data.tags["rmetric.alert.non_finite"].startswith("step 12")
    assert data.tags["rmetric.rescue.hold"] == "step 31: rescue: held at step 20"


@pytest.mark.parametrize("sink", [Trackio, MLflow, WandB])
def test_a_library_that_is_not_installed_is_named(sink, monkeypatch):
    package = sink.__name__.lower()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{sink.__name__} needs the Python package {package}"):
        sink()
