"""Memory and waits for data that the monitor measures by itself."""

import time

import pytest
import torch

from rmetric._util.host_memory import resident_memory
from rmetric.evaluation import judge_run
from rmetric.monitor import Monitor, MonitorConfig
from rmetric.monitor.actions import SkipStep
from rmetric.monitor.step_recorder import memory_in_use
from rmetric.readers import read_log
from rmetric.records import Record
from tests.monitor.training import alert, entries, make_model, train, watched


def test_memory_stands_in_the_log(tmp_path):
    config = MonitorConfig(memory_every=10)
    log = tmp_path / "run.jsonl"
    train(make_model(), watched(log=log, config=config), steps=25)
    found = {e["step"]: e["memory"] for e in entries(log, "METRICS") if "memory" in e}
    assert sorted(found) == [1, 10, 20]
    for memory in found.values():
        assert 1e7 < memory["host"] < memory["host_limit"]


def test_resident_memory_is_read_in_bytes(tmp_path):
    assert resident_memory(tmp_path) is None
    before, block = resident_memory(), torch.ones(16_000_000)
    assert resident_memory() - before > 0.8 * 4 * len(block)


def test_a_leak_is_one_alert_with_the_step_of_its_end(monkeypatch, tmp_path):
    steps = iter(range(1, 1_000))
    monkeypatch.setattr(
        "rmetric.monitor.step_recorder.memory_in_use",
        lambda _: {"host": 1e9 + 1e7 * next(steps), "host_limit": 2e9},
    )
    log, alerts, config = tmp_path / "run.jsonl", [], MonitorConfig(memory_every=1, detectors=())
    train(make_model(), watched(alerts.append, log=log, config=config), steps=60)
    assert [alert.source for alert in alerts] == ["memory"]
    assert "ends about step 100: look for what keeps" in alerts[0].reason
    assert [entry["source"] for entry in entries(log, "ALERT")] == ["memory"]


def test_no_action_that_changes_the_training_reacts_to_memory():
    assert not SkipStep().handles(alert(source="memory"))
    assert SkipStep(on={"memory"}).handles(alert(source="memory"))


def test_an_input_bound_training_says_so_at_its_end(tmp_path):
    log = tmp_path / "run.jsonl"

    def slow(model, batch):
        inputs, targets = batch
        time.sleep(0.004)
        return ((model(inputs) - targets) ** 2).mean()

    train(make_model(), watched(log=log), steps=40, loss_of=slow)
    [entry] = entries(log, "INPUT_BOUND")
    assert entry["reason"].startswith("input-bound: ")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_is_what_torch_has_allocated():
    weight = torch.zeros(1_000_000, device="cuda")
    before = memory_in_use([weight])
    block = torch.zeros(100_000_000, device="cuda")
    after = memory_in_use([weight])
    assert after["device"] - before["device"] == pytest.approx(4 * len(block), rel=0.01)
    assert after["device_limit"] == pytest.approx(before["device_limit"], rel=0.05)
    assert Record(1, memory=after).memory["device"] < after["device_limit"]


@pytest.mark.parametrize("course", ["chance", "reward", "learns"])
def test_a_training_that_learns_nothing_says_so_once_at_its_end(tmp_path, caplog, course):
    log = tmp_path / "run.jsonl"
    with Monitor(make_model(), log=log) as monitor:
        for step in range(120):
            loss = 2.302585 + 1e-4 * (step % 3) if course == "chance" else 3.0 - step / 60
            if course == "reward":
                monitor.policy({"reward": 0.2, "reward_std": 0.1})
            monitor.check_before_step(torch.tensor(loss), gradient_norm=1.0)
    found = [entry["reason"] for entry in entries(log, "LEARNS_NOTHING")]
    assert not entries(log, "ALERT")
    verdict = judge_run(read_log(log).run.records)
    if course == "learns":
        assert not found
        assert verdict.kind == "healthy"
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{verdict.text}; {verdict.detail.split(';')[0]}")
        assert sum("LEARNS NOTHING" in message for message in caplog.messages) == 1
