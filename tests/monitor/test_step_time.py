"""Stalls, slow ranks and their parts in real trainings; the clock is moved, nothing sleeps long."""

import copy
import json
import logging
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from rmetric.monitor import Monitor, MonitorConfig
from rmetric.monitor.actions import SkipStep, Stop
from tests.monitor.training import (
    Clock,
    batches,
    entries,
    make_model,
    same_weights,
    squared_error,
    twin,
    weights,
)

STEPS, STALLED = 60, 40


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def train(model, clock, *, at=STALLED, between=None, optimizer=None, call=None, **settings):
    """A plain loop over a loader that stalls once."""
    torch.manual_seed(7)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, optimizer, **settings)
    for step, [batch] in enumerate(batches(STEPS), start=1):
        if step == at:
            clock.wait(20.0)
        loss = squared_error(model if call is None else call, batch)
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if between:
            between(step, monitor, model)
        if monitor.should_stop:
            break
    monitor.close()
    assert monitor.usable, monitor.problem
    return monitor


def named(monitor):
    return [(a.step, a.source) for a in monitor.alerts]


def test_a_stall_of_the_data_loader_is_one_alert_that_names_the_part(clock, tmp_path):
    log = tmp_path / "run.jsonl"
    [alert] = train(make_model(), clock, log=log).alerts
    assert (alert.step, alert.source) == (STALLED, "stall")
    assert "20.0 s waiting for data; look at its data loader or storage" in alert.reason
    [logged] = entries(log, "ALERT")
    assert logged["source"] == "stall"
    steps = {line["step"]: line for line in entries(log, "METRICS")}
    assert steps[STALLED]["data_wait_seconds"] == pytest.approx(20.0, abs=1.0)
    assert steps[STALLED]["step_seconds"] == pytest.approx(20.0, abs=1.0)
    assert all(steps[t]["forward_backward_seconds"] > 0.0 for t in range(1, STEPS + 1))
    assert all(steps[t]["optimizer_seconds"] > 0.0 for t in range(1, STEPS + 1))


@pytest.mark.parametrize("part", ["forward_backward", "optimizer"])
def test_a_stall_elsewhere_names_its_part(clock, part):
    model, seen = make_model(), []

    def slow(*_):
        seen.append(1)
        if len(seen) == STALLED:
            clock.wait(20.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if part == "optimizer":
        optimizer.register_step_pre_hook(slow)
    else:
        model[1].register_forward_hook(slow)
    monitor = train(model, clock, at=None, optimizer=optimizer)
    [alert] = monitor.alerts
    assert (alert.step, alert.source) == (STALLED, "stall")
    words = {"forward_backward": "in forward and backward", "optimizer": "in the optimiser's step"}
    assert f"20.0 s {words[part]}" in alert.reason


def test_with_accumulation_the_data_of_each_micro_batch_are_waited_for(clock):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for step, micros in enumerate(batches(STEPS, 2), start=1):
            for place, batch in enumerate(micros):
                if (step, place) == (STALLED, 1):
                    clock.wait(20.0)
                loss = squared_error(model, batch)
                (loss / 2).backward()
                monitor.micro_batch(loss)
            monitor.check_before_step()
            optimizer.step()
            optimizer.zero_grad()
    [alert] = monitor.alerts
    assert alert.step == STALLED
    assert "20.0 s waiting for data" in alert.reason


class Wrapper(nn.Module):
    """What DistributedDataParallel is: a single rank evaluates `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


def unwrapped(model, inputs):
    return model.module(inputs)


def by_parts(model, inputs):
    for part in model.module:
        inputs = part(inputs)
    return inputs


def evaluation(clock, context=torch.no_grad, mode=False, call=nn.Module.__call__):
    def evaluate(step, monitor, model):
        if step % 7 == 0:
            model.train(mode)
            with context():
                for [[inputs, _]] in batches(2):
                    call(model, inputs)
                    clock.wait(30.0)
            model.train()

    return evaluate


#: Whatever an evaluation is called by, no backward pass follows.
EVALUATIONS = [
    partial(evaluation, context=context, mode=mode, call=call)
    for context, mode, call in [
        (torch.no_grad, False, nn.Module.__call__),
        (nullcontext, False, nn.Module.__call__),
        (nullcontext, True, nn.Module.__call__),
        (torch.no_grad, False, unwrapped),
        (torch.no_grad, True, unwrapped),
        (torch.inference_mode, True, unwrapped),
        (nullcontext, False, unwrapped),
        (nullcontext, True, unwrapped),
        (torch.no_grad, True, by_parts),
    ]
]


def half_a_minute(clock, before=lambda monitor: None, after=lambda monitor: None):
    """At two steps, with a call of the monitor before or after it."""

    def pause(step, monitor, model):
        if step in (30, 41):
            before(monitor)
            clock.wait(30.0)
            after(monitor)

    return pause


reported = partial(half_a_minute, after=lambda monitor: monitor.evaluated(2.0))
checkpoint = partial(half_a_minute, before=Monitor.state_dict)
announced = partial(half_a_minute, after=Monitor.paused)


@pytest.mark.parametrize("pause", [*EVALUATIONS, reported, checkpoint, announced])
def test_evaluations_checkpoints_and_announced_pauses_are_no_stall(clock, pause):
    monitor = train(Wrapper(make_model()), clock, at=None, between=pause(clock))
    assert named(monitor) == []
    # A stall elsewhere is still seen.
    monitor = train(Wrapper(make_model()), clock, at=45, between=pause(clock))
    assert named(monitor) == [(45, "stall")]


def two_passes(model, inputs, clock):
    output = model(inputs)
    clock.wait(1.0)
    return output - model(-inputs)


def frozen_part(model, inputs, clock):
    with torch.no_grad():
        inputs = model[0](inputs)
    for part in model[1:]:
        inputs = part(inputs)
    clock.wait(1.0)
    return inputs


@pytest.mark.parametrize("forward", [two_passes, frozen_part])
def test_what_each_step_does_before_its_backward_pass_is_no_evaluation(clock, forward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for [[inputs, _]] in batches(3):
            forward(model, inputs, clock).square().mean().backward()
            monitor.check_before_step()
            optimizer.step()
    assert monitor.last.data_wait_seconds is not None
    assert monitor.last.forward_backward_seconds > 1.0


def test_a_stall_stops_and_skips_nothing_unless_an_action_is_given_its_source(clock):
    plain = make_model()
    watched = twin(plain)
    train(plain, clock, at=None)
    monitor = train(watched, clock, actions=[Stop(), SkipStep()])
    assert same_weights(plain, watched)
    assert not watched._forward_pre_hooks
    assert monitor.step == STEPS
    seen = []
    train(make_model(), clock, actions=[seen.append])
    assert [alert.source for alert in seen] == ["stall"]
    assert train(make_model(), clock, actions=[Stop(on={"stall"})]).step == STALLED + 1


def test_step_times_can_be_switched_off(clock, tmp_path):
    config = MonitorConfig(step_times=False)
    monitor = train(make_model(), clock, log=tmp_path / "run.jsonl", config=config)
    assert named(monitor) == []
    assert "_seconds" not in (tmp_path / "run.jsonl").read_text().replace('"time_seconds"', "")
    assert monitor.model._forward_pre_hooks == {}


def test_a_copy_of_the_model_has_a_hook_that_does_nothing(clock):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(next(batches(1))[0][0])
        assert monitor._timer.check_begins() is None
        assert all(map(torch.equal, weights(copied), weights(model)))


def test_the_state_survives_a_checkpoint(clock):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def go_on(monitor, steps):
        for step in steps:
            if step == 50:
                clock.wait(20.0)
            loss = squared_error(model, next(batches(1, seed=step))[0])
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()

    first = Monitor(model, optimizer)
    go_on(first, range(1, 46))
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = Monitor(model, optimizer)
    second.load_state_dict(state)
    clock.wait(100.0)  # the restart
    go_on(second, range(46, 60))
    assert [a.step for a in second.alerts if a.source == "stall"] == [50]
    assert second._step_time_judge.state_dict() != state["step_times"]
    second.close()
    assert second.usable


def test_a_hook_that_fails_is_reported_once_and_harms_nothing(clock, caplog, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("rmetric.monitor.step_time._size", broken)
    with caplog.at_level(logging.ERROR):
        monitor = train(make_model(), clock, at=None)
    assert monitor.step == STEPS
    words = "a hook of the step times failed and does nothing any more: RuntimeError: broken"
    assert sum(words in message for message in caplog.messages) == 1


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


def compiled_whole(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model


@pytest.mark.parametrize("compile_model", [compiled_whole, compiled_in_place])
@pytest.mark.parametrize("given", ["compiled", "bare"])
def test_a_compiled_model_trains_as_before_and_its_stall_is_seen(clock, compile_model, given):
    bare = Small()
    compiled = compile_model(bare)
    torch._dynamo.reset()
    model = compiled if given == "compiled" else bare
    monitor = train(model, clock, call=compiled, config=MonitorConfig(forward_every=0))
    [alert] = monitor.alerts
    assert (alert.step, alert.source) == (STALLED, "stall")
    if (compile_model, given) == (compiled_whole, "compiled"):
        assert "20.0 s waiting for data" in alert.reason
