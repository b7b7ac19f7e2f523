"""torchtitan's metrics, on a stand-in with the interface of its release 0.3.0."""

from __future__ import annotations

import inspect
import math
import sys
from types import SimpleNamespace

import pytest

from rmetric.integrations.torchtitan import watch
from tests.integrations.test_startup import put_package, python, run, steps_of  # noqa: F401
from tests.monitor.training import entries

STAND_IN = """
from types import SimpleNamespace

class MetricsProcessor:
    def __init__(self, pipeline=False):
        self.parallel_dims, self.calls = SimpleNamespace(pp_enabled=pipeline), []

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        self.calls.append(step)

    def log_validation(self, loss, step, extra_metrics=None):
        self.calls.append("validation")

    def close(self):
        self.calls.append("close")

class Trainer:
    def __init__(self):
        schedule = SimpleNamespace(pipeline_parallel_schedule="1F1B")
        self.config = SimpleNamespace(parallelism=schedule)
        self.metrics_processor = MetricsProcessor()

    def train(self):
        for step in range(1, 7):
            self.metrics_processor.log(step, 3.0, 3.1, 1.0, extra_metrics={"lr": 1e-3})
        self.metrics_processor.close()
        print(self.metrics_processor.calls)
"""


@pytest.fixture
def titan():
    names: dict = {}
    exec(STAND_IN, names)
    return SimpleNamespace(**names)


def test_what_is_logged_is_judged_and_recorded_at_its_own_steps(titan, tmp_path):
    processor, alerts = titan.MetricsProcessor(), []
    assert watch(processor, tmp_path / "a.jsonl", actions=[alerts.append]) is not None
    assert watch(processor) is None  # once is enough
    for step in range(10, 1210, 10):
        processor.log(step, 3.0 - step / 1e4, 3.0, 1.0 if step < 1200 else 90.0)
        if step == 500:
            processor.log_validation(loss=2.5, step=step)
    processor.log(1210, math.nan, 3.0, 1.0)
    processor.close()
    assert processor.calls[-3:] == [1200, 1210, "close"]
    records = {line["step"]: line for line in entries(tmp_path / "a.jsonl", "METRICS")}
    assert [*records] == [*range(10, 1220, 10)]
    assert (records[500]["validation_loss"], records[500]["gradient_norm"]) == (2.5, 1.0)
    assert [(a.step, a.source) for a in alerts] == [
        (1200, "gradient_explosion"), (1210, "non_finite")
    ]  # fmt: skip


def test_ranks_without_the_loss_are_left_alone(titan, tmp_path, monkeypatch, caplog):
    processor = titan.MetricsProcessor(pipeline=True)
    assert watch(processor, tmp_path / "a.jsonl") is None
    assert "the pipeline schedule 1F1B" in caplog.text
    assert watch(processor, tmp_path / "b.jsonl", pp_schedule="ZBVZeroBubble") is not None
    monkeypatch.setattr("rmetric.integrations.torchtitan.rank", lambda: 1)
    assert watch(titan.MetricsProcessor(), tmp_path / "c.jsonl") is None
    processor.log(1, 3.0, 3.0, 1.0)
    processor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["b.jsonl"]


def test_rmetric_run_watches_a_training_of_torchtitan(run, tmp_path):  # noqa: F811
    put_package(tmp_path, "torchtitan", STAND_IN)
    script = "from torchtitan.trainer import Trainer; Trainer().train()"
    done = run("--rescue", "--", sys.executable, "-c", script, PYTHONPATH=str(tmp_path))
    assert done.stdout == "[1, 2, 3, 4, 5, 6, 'close']\n", done.stderr
    assert "torchtitan cannot go back" in done.stderr
    assert f"rmetric: log {tmp_path / 'rmetric.jsonl'}\n" in done.stderr
    assert steps_of(tmp_path / "rmetric.jsonl") == [*range(1, 7)]


def test_the_published_processor_has_the_interface_of_the_stand_in(titan):
    metrics = pytest.importorskip("torchtitan.components.metrics")
    for name in ("log", "log_validation", "close"):
        real = inspect.signature(getattr(metrics.MetricsProcessor, name)).parameters
        assert [*real] == [*inspect.signature(getattr(titan.MetricsProcessor, name)).parameters]
