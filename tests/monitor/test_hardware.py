"""What NVML reports stands in the log of a real training, and counts in λ."""

import json
import os
import subprocess
import sys
import time

import pytest

from rmetric.logs import read_log
from rmetric.metric import RMetric
from rmetric.monitor import Monitor
from rmetric.records import HardwareEvent
from tests.monitor.training import make_model, train
from tests.telemetry.fake_nvml import SOURCE, build, environment_of


class StandIn:
    def __init__(self, available, events=()):
        self.available, self.events = available, events
        self.start = time.monotonic() - 300.0

    def poll(self):
        events, self.events = self.events, ()
        return events  # and no `close`, which a source need not have


def events_logged(hardware, folder):
    log = folder / "run.jsonl"
    train(make_model(), lambda m, o: Monitor(m, o, log=log, hardware=hardware), steps=4)
    return [record.events for record in read_log(log).records]


def test_a_source_that_cannot_be_read_is_not_a_source_without_events(tmp_path):
    lost = HardwareEvent(1.0, "gpu_lost", 0)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert events_logged(StandIn(True), tmp_path / "a") == [()] * 4
    assert events_logged(StandIn(False, (lost,)), tmp_path / "b") == [(lost,), None, None, None]


def test_a_source_that_began_before_the_run_is_given_the_runs_clock(tmp_path):
    hardware = StandIn(True)
    before = time.monotonic()
    events_logged(hardware, tmp_path)
    assert hardware.start >= before


TRAINING = """
import sys, time
from rmetric.monitor import Monitor
from rmetric.telemetry.sources import GpuWatch
from rmetric.telemetry.risk import RiskConfig
from tests.monitor.training import make_model, train

watch = GpuWatch(config=RiskConfig(interval=0.005))
assert watch.hardware.ready(30.0), watch.problem
make = lambda model, optimizer: Monitor(model, optimizer, log=sys.argv[1], hardware=watch.hardware)
train(make_model(), make, steps=30, spoil=lambda step, loss: time.sleep(0.02) or loss)
for verdict in watch.poll():
    print(verdict.gpu, verdict.level, verdict.action)
"""


def test_a_watch_feeds_a_trainings_log_and_lambda_and_judges_its_gpus(tmp_path):
    build(tmp_path)
    history = [(10, 0, "xid", 13), (20, 0, "xid", 94), (30, 1, "ecc_uncorrected", 2)]
    log = tmp_path / "run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(log)],
        env=os.environ | environment_of(tmp_path, history, gpus=2),
        cwd=SOURCE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "0 risk restart_application\n" in done.stdout
    assert "1 fatal drain\n" in done.stdout
    records = read_log(log).records
    events = [event for record in records for event in record.events]
    assert [(event.kind, event.worker) for event in events] == [
        ("application_xid_13", 0),
        ("xid_94", 0),
        ("ecc_uncorrected", 1),
    ]
    metric = RMetric().update_all(records)
    assert metric.raw.failure_rate == pytest.approx(2 * 3600.0 / records[-1].time)
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["lambda"] == pytest.approx(metric.raw.failure_rate)
