"""The monitor in a real training: it sees the raw step, and it never gets in the way."""

import gc
import json
import logging
import re
import subprocess
import sys
import time
from math import isnan, nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rmetric import RMetric, RMetricConfig
from rmetric.logs import read_log
from rmetric.monitor import Monitor, MonitorConfig, pending
from rmetric.monitor.actions import SkipStep
from rmetric.monitor.monitor import _OPEN
from rmetric.monitor.pending import Transfer
from rmetric.monitor.rules import StepRules
from tests.monitor.training import (
    backward_passes,
    batches,
    entries,
    flat_gradient,
    make_model,
    nan_at,
    same_weights,
    squared_error,
    times,
    train,
    watched,
    weights,
    without_time,
)

EVERYTHING = MonitorConfig(
    workers_every=1, layers_every=1, forward_every=1, probe_every=1, explosion_window=10
)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_weights_come_out_bit_equal(tmp_path, micro, clip):
    plain, seen = make_model(), make_model()
    train(plain, micro=micro, clip=clip)
    fixed = next(batches(1, seed=9))[0]

    probe = lambda: squared_error(seen, fixed)  # noqa: E731
    make = watched(log=tmp_path / "run.jsonl", config=EVERYTHING, probe=probe)
    monitor = train(seen, make, micro=micro, clip=clip)
    assert monitor.problem is None
    assert same_weights(plain, seen)


def test_a_scaler_that_is_switched_off_excuses_nothing():
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, scaler=scaler, actions=[SkipStep()])
    _, loss = next(backward_passes(model, 1))
    model[0].weight.grad[0, 0] = float("nan")
    assert not monitor.check_before_step(loss)
    scaler.step(optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_update_is_that_of_the_step_where_backward_runs_inside_of_it(tmp_path):
    model = make_model().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, log=tmp_path / "run.jsonl")
    for [batch] in batches(5):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = squared_error(model, batch)
            loss.backward()
            monitor.check_before_step(loss)
            return loss

        optimizer.step(closure)
    monitor.close()
    records = read_log(tmp_path / "run.jsonl").records
    assert [r.step for r in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record.update_norm == pytest.approx(0.1 * record.gradient_norm, rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"fullgraph": True}])
@pytest.mark.parametrize("given", ["compiled", "bare"])
def test_a_model_that_is_compiled_before_or_after_the_monitor_is_made_trains_on(
    tmp_path, given, settings
):
    torch._dynamo.reset()
    model, alone = make_model(), make_model()
    train(alone, steps=5)
    compiled = torch.compile(model, backend="eager", **settings)
    make = watched(log=tmp_path / "run.jsonl", config=EVERYTHING)
    loss_of = lambda _, batch: squared_error(compiled, batch)  # noqa: E731
    monitor = train(model if given == "bare" else compiled, make, steps=5, loss_of=loss_of)
    assert monitor.problem is None
    assert same_weights(alone, model)
    assert monitor.last.gradient_norm is not None
    if given == "compiled":
        assert monitor.last.activation_headroom is None  # not to be had without compiling anew


def test_it_records_the_raw_step(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    expected = []
    with Monitor(model, optimizer, log=tmp_path / "run.jsonl", run_id="raw") as monitor:
        for step, loss in backward_passes(model, 5, optimizer):
            before = torch.cat([w.flatten() for w in weights(model)])
            norm = flat_gradient(model).norm().item()
            monitor.check_before_step(loss)
            monitor.clip_grad_norm_(0.1)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            after = torch.cat([w.flatten() for w in weights(model)])
            if step == 3:
                monitor.evaluated(loss)
            moved = (after - before).norm().item()
            expected.append((loss.item(), norm, rate, moved, after.norm().item()))
    run = read_log(tmp_path / "run.jsonl")
    assert run.id == "raw"
    assert [r.step for r in run.records] == [1, 2, 3, 4, 5]
    for record, (loss, norm, rate, moved, size) in zip(run.records, expected, strict=True):
        assert record.training_loss == pytest.approx(loss, rel=1e-6)
        assert record.gradient_norm == pytest.approx(norm, rel=1e-6)
        assert record.learning_rate == pytest.approx(rate)
        assert record.update_norm == pytest.approx(moved, rel=1e-5)
        assert record.parameter_norm == pytest.approx(size, rel=1e-6)
    assert [r.step for r in run.records if r.validation_loss is not None] == [3]


@pytest.mark.parametrize("order", ["clip first", "clip twice", "ask first"])
def test_clipping_in_any_order_clips_alike(order):
    gradients = []
    for monitored in (False, True):
        model = make_model().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        monitor = Monitor(model, optimizer) if monitored else None
        for step, [batch] in enumerate(batches(3), start=1):
            optimizer.zero_grad()
            (10**step * squared_error(model, batch)).backward()
            clips = ["check", "clip", "clip" if order == "clip twice" else ""]
            for call in reversed(clips) if order == "clip first" else clips:
                if call == "clip" and monitor:
                    monitor.clip_grad_norm_(0.1)
                elif call == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                elif call == "check" and monitor:
                    verdict = monitor.check_before_step(1.0)
                    assert order != "ask first" or verdict
            gradients.append(flat_gradient(model))
            optimizer.step()
    for plain, seen in zip(gradients[:3], gradients[3:], strict=True):
        assert torch.equal(plain, seen)


def test_micro_batches_stand_in_for_workers(tmp_path):
    config = MonitorConfig(workers_every=1)
    monitor = train(
        make_model(), watched(log=tmp_path / "run.jsonl", config=config), steps=3, micro=4
    )
    assert monitor.problem is None
    for record in read_log(tmp_path / "run.jsonl").records:
        assert len(record.worker_gradient_norms) == len(record.worker_gradient_cosines) == 4
        assert record.non_finite_gradients == 0
    assert monitor.metric.variance_source == "workers"


def test_what_is_switched_off_is_not_measured():
    off = {f"{name}_every": 0 for name in ("update", "workers", "layers", "forward", "probe")}
    monitor = train(make_model(), watched(config=MonitorConfig(**off)), steps=3, micro=2)
    last = monitor.last
    assert last.gradient_norm is not None
    for name in ("update_norm", "parameter_norm", "worker_gradient_norms", "layer_gradient_norms"):
        assert getattr(last, name) is None
    assert last.activation_headroom is None


def test_the_log_holds_the_metric_that_replay_computes(tmp_path):
    model, log = make_model(), tmp_path / "run.jsonl"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer, log=log) as monitor:
        for _, loss in backward_passes(model, 40, optimizer):
            monitor.check_before_step(loss)
            monitor.evaluated(loss)
            optimizer.step()
    metric = RMetric(RMetricConfig.case_study())
    for record, line in zip(read_log(log).records, entries(log, "METRICS"), strict=True):
        assert metric.update(record).score == line["r_metric"]
    assert metric.score > 0


def test_a_nan_is_known_counted_and_located_before_it_reaches_the_weights(tmp_path):
    model, log = make_model(), tmp_path / "run.jsonl"
    monitor = train(model, watched(log=log), spoil=nan_at(20), ask=True, steps=30)
    assert all(p.isfinite().all() for p in model.parameters())
    [alert] = monitor.alerts
    assert alert.step == 20
    entries_in_all = sum(p.numel() for p in monitor.parameters)
    assert f"{entries_in_all} entries are not finite, first in 0" in alert.reason
    assert [(e["step"], e["source"]) for e in entries(log, "ALERT")] == [(20, "non_finite")]
    record = read_log(log).records[19]
    assert isnan(record.training_loss)
    assert record.non_finite_gradients == entries_in_all


def test_a_loop_that_does_not_ask_gets_the_alert_a_step_later():
    at = []

    def spoil(step, loss):
        at.extend([step] * len(made[0].alerts))
        return nan_at(20)(step, loss)

    made = []
    make = lambda *args: made.append(watched()(*args)) or made[0]  # noqa: E731
    monitor = train(make_model(), make, spoil=spoil, steps=25)
    assert [alert.step for alert in monitor.alerts] == [20]
    assert at[0] == 22, "the check of step 21 has raised it"


def test_by_default_r_raises_no_alert():
    assert "r_metric" not in MonitorConfig().alert_on
    config = MonitorConfig(alert_on=("r_metric",))
    monitor = Monitor(make_model(), config=config)
    for step in range(1, 30):
        monitor.check_before_step(1.0, gradient_norm=1.0)
        monitor.evaluated(2.0 if step < 20 else 3.0)
    monitor.close()
    assert [(a.source, a.step) for a in monitor.alerts] == [("r_metric", 20)]
    assert "ΔL 0.70" in monitor.alerts[0].reason


@pytest.mark.parametrize("cut", [1, 7, 15])
def test_a_resumed_run_leaves_the_log_of_one_that_was_not_stopped(tmp_path, cut):
    config = MonitorConfig(detectors=("gradient_norm",), alert_on=("non_finite", "gradient_norm"))

    def run(path, first, last, state=None, keep_going=0):
        monitor = Monitor(make_model(), log=path, config=config)
        if state is not None:
            monitor.load_state_dict(state)
        saved = None
        for step in range(first, last + keep_going + 1):
            monitor.check_before_step(1.0 / step, gradient_norm=10.0 if step == 9 else 1.0)
            monitor.evaluated(2.0 + 0.1 * (step % 4))
            if step == last:
                saved = json.loads(json.dumps(monitor.state_dict()))
        monitor.close()
        return saved

    run(tmp_path / "whole.jsonl", 1, 20)
    state = run(tmp_path / "run.jsonl", 1, cut, keep_going=3)  # went on a little before it died
    run(tmp_path / "run.jsonl", cut + 1, 20, state)

    assert without_time(tmp_path / "run.jsonl") == without_time(tmp_path / "whole.jsonl")
    assert (tmp_path / "run.jsonl.1").exists()  # what was measured before is not lost


def test_the_state_does_not_grow():
    config = MonitorConfig(metric=RMetricConfig.case_study(component_window=20))
    monitor = Monitor(make_model(), config=config)
    sizes = []
    for step in range(400):
        monitor.check_before_step(1.0 + step % 7, gradient_norm=1.0 + step % 5)
        monitor.evaluated(2.0 + step % 3)
        sizes.append(len(json.dumps(monitor.state_dict())))
    assert max(sizes[300:]) < 1.1 * max(sizes[100:200])


def test_an_exception_inside_is_reported_once_and_training_goes_on(monkeypatch, caplog, tmp_path):
    plain, seen = make_model(), make_model()
    train(plain)

    def fail(self, *_):
        raise RuntimeError("boom")

    monkeypatch.setattr(StepRules, "update", fail)
    with caplog.at_level(logging.ERROR, "rmetric"):
        monitor = train(seen, watched(log=tmp_path / "run.jsonl"))
    assert not monitor.usable
    assert "boom" in monitor.problem
    assert sum("training continues" in message for message in caplog.messages) == 1
    assert same_weights(plain, seen)
    assert monitor.check_before_step(1.0).ok


@pytest.mark.parametrize("where", ["a/file/run.jsonl", "folder"])
def test_a_log_that_cannot_be_written_costs_the_log(tmp_path, where, caplog):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("in the way too")
    (tmp_path / "folder.1").mkdir()

    plain, seen = make_model(), make_model()
    train(plain)

    def make_monitor(model, optimizer):
        monitor = Monitor(model, optimizer, log=tmp_path / where)
        original = monitor.check_before_step

        def check(loss):
            monitor._log.write(b"", now=True)
            time.sleep(0.002)
            return original(loss)

        monitor.check_before_step = check
        return monitor

    monitor = train(seen, make_monitor)
    assert monitor.usable
    assert monitor.step == 30
    assert same_weights(plain, seen)
    assert sum("without the log" in message for message in caplog.messages) == 1


def test_hardware_that_is_lost_does_not_end_anything(caplog):
    def fail():
        raise OSError("GPU is lost")

    plain, seen = make_model(), make_model()
    train(plain)
    monitor = train(seen, watched(hardware=SimpleNamespace(poll=fail, close=fail)))
    assert monitor.usable
    assert monitor.step == 30
    assert same_weights(plain, seen)
    assert monitor.last.events is None  # not known is not the same as none
    assert sum("GPU is lost" in message for message in caplog.messages) == 1


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 6, sparse=True)
        self.wave = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight  # tied
        self.never = nn.Linear(3, 3)  # gets no gradient
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x):
        h = self.table(x.argmax(-1)) + self.second(self.first(x))
        return (self.frozen(h) * self.wave.abs()).sum(-1, keepdim=True)


def test_frozen_sparse_complex_tied_and_empty_parameters(tmp_path):
    def adam(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)

    plain, seen = Odd(), Odd()
    train(plain, optimizer=adam(plain))
    monitor = train(
        seen, watched(log=tmp_path / "run.jsonl", config=EVERYTHING), optimizer=adam(seen), micro=1
    )
    assert monitor.problem is None
    assert same_weights(plain, seen)
    assert monitor.last.gradient_norm > 0
    again = Odd()
    assert train(again, watched(config=EVERYTHING), optimizer=adam(again), micro=2).problem is None


def test_a_model_without_parameters_or_gradients():
    with Monitor(nn.ReLU()) as monitor:
        monitor.check_before_step(1.0)
    assert monitor.problem is None
    assert monitor.last.gradient_norm is None
    model = make_model()
    with Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        model.zero_grad(set_to_none=True)
        monitor.check_before_step(1.0)
        assert monitor.clip_grad_norm_(1.0) == 0.0
    assert monitor.problem is None


def test_an_optimizer_that_is_none_of_torch_s():
    optimizer = SimpleNamespace(param_groups=({"lr": 0.1},))
    with Monitor(make_model(), optimizer) as monitor:
        monitor.check_before_step(1.0)
    assert monitor.problem is None
    assert monitor.last.learning_rate == 0.1
    assert monitor.last.update_norm is None


def test_calls_in_an_odd_order_and_verdicts_that_are_read_late_do_no_harm():
    with Monitor(make_model()) as monitor:
        verdicts = [monitor.check_before_step(1.0, gradient_norm=1.0) for _ in range(4)]
        assert all(verdicts)
        assert monitor.state_dict()["step"] == 4
    monitor = Monitor(make_model())
    monitor.evaluated(1.0)
    monitor.micro_batch(1.0)
    monitor.state_dict()
    monitor.close()
    monitor.close()
    assert monitor.check_before_step(1.0).ok
    assert monitor.state_dict() == {}
    assert monitor.problem is None


def test_the_fixed_batch_is_seen_in_evaluation_mode_and_leaves_the_modes():
    model = make_model()
    model[2].eval()  # one module that the user had set apart
    fixed = next(batches(1, seed=9))[0]
    modes = []

    def probe():
        modes.append([m.training for m in model.modules()])
        return squared_error(model, fixed)

    monitor = Monitor(model, probe=probe, config=MonitorConfig(probe_every=1))
    monitor.check_before_step(1.0)
    monitor.close()
    assert monitor.last.probe_loss == pytest.approx(
        squared_error(model.eval(), fixed).item(), rel=1e-5
    )
    assert not any(modes[0])


def test_weights_that_were_moved_to_other_memory_are_still_watched():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    for step, _ in backward_passes(model, 4, optimizer):
        if step == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        monitor.check_before_step(1.0)
        optimizer.step()
    monitor.close()
    assert monitor.last.update_norm > 0


def test_a_script_that_raises_still_leaves_its_log(tmp_path):
    script = f"""
import torch
from rmetric.monitor import Monitor
model = torch.nn.Linear(2, 1)
monitor = Monitor(model, log={str(tmp_path / "run.jsonl")!r})
for step in range(5):
    monitor.check_before_step(1.0)
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == 3
    assert len(read_log(tmp_path / "run.jsonl").records) == 5


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_the_transfer_of_a_step_begins_before_the_next_backward_pass(monkeypatch, with_optimizer):
    course = []

    class Noted(Transfer):
        def __init__(self, values):
            self.of_device = any(isinstance(value, torch.Tensor) for value in values.values())
            course.extend(["sent"] * self.of_device)
            super().__init__(values)

        def received(self):
            course.extend(["read"] * self.of_device)
            return super().received()

    monkeypatch.setattr(pending, "Transfer", Noted)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer if with_optimizer else None)
    for [batch] in batches(3):  # the forward passes of the second are measured too
        loss = squared_error(model, batch)
        loss.backward()
        course.append("backward")
        monitor.check_before_step(loss)
        optimizer.step()
    monitor.close()
    assert " ".join(course) == "backward sent backward read sent backward read sent read"


def test_a_monitor_that_was_closed_is_not_kept_for_the_end():
    model = make_model()
    monitor, forgotten = Monitor(model), Monitor(model)
    assert {monitor, forgotten} <= set(_OPEN)
    monitor.close()
    del forgotten
    gc.collect()
    assert monitor not in _OPEN
    assert not any(left.model is model for left in _OPEN)


def raised(monitor):
    return [(alert.step, alert.source) for alert in monitor.alerts]


def test_an_explosion_just_before_does_not_hide_what_drifts_after_it():
    received = []
    monitor = train(make_model(), watched(received.append), steps=90, spoil=times(1000, first=80))
    [alert] = [alert for alert in monitor.alerts if alert.source == "calibrated"]
    assert raised(monitor)[0] == (80, "gradient_explosion")
    assert 80 <= alert.step <= 82
    assert alert.since == 80
    assert received == [monitor.alerts[0]], "it belongs to the same episode"


def test_a_nan_that_the_rule_reported_is_not_reported_again():
    monitor = train(make_model(), watched(), steps=40, spoil=nan_at(first=20))
    assert raised(monitor)[0] == (20, "non_finite")
    assert not [alert for alert in monitor.alerts if alert.source == "calibrated"]


def test_a_nan_does_not_hide_what_comes_after_it():
    """The step is left out, so the weights live on; then the loss breaks for another reason."""

    def spoil(step, loss):
        return loss * nan if step == 76 else loss * 1000 if step >= 78 else loss

    make = watched(SkipStep(), config=MonitorConfig(explosion_factor=1e9))
    monitor = train(make_model(), make, steps=90, spoil=spoil)
    assert raised(monitor)[0] == (76, "non_finite")
    [alert] = [alert for alert in monitor.alerts if alert.source == "calibrated"]
    assert 78 <= alert.step <= 80
    assert "training loss" in alert.reason


def test_the_end_of_an_alarm_is_logged_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, logger="rmetric"):
        config = MonitorConfig(explosion_factor=1e9)
        train(make_model(), watched(config=config), steps=110, spoil=times(1000, first=80, last=89))
    [line] = [r.getMessage() for r in caplog.records if "alarm is over" in r.getMessage()]
    assert re.search("the calibrated alarm is over: the (loss|new level) [a-z]+", line)


def test_thresholds_of_ones_own_are_taken_and_broken_ones_refused(tmp_path):
    own = tmp_path / "mine.json"
    limits = {"alone": {"loss_jump": 1e9}, "together": {}, "full_scale": {}}
    own.write_text(json.dumps(limits))
    config = MonitorConfig(thresholds=own, explosion_factor=1e9)
    monitor = train(make_model(), watched(config=config), steps=90, spoil=times(1000, first=80))
    assert not monitor.alerts
    own.write_text("[]")
    with pytest.raises(ValueError, match="threshold"):
        MonitorConfig(thresholds=own)
