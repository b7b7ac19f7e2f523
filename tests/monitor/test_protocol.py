"""How the monitor is called: what can never be right is refused, a slip is warned about once."""

import copy
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from rmetric.monitor import Monitor, MonitorConfig
from rmetric.monitor.actions import SkipStep, Stop
from rmetric.monitor.protocol import SLIPS
from rmetric.rescue import Rescue
from tests.monitor.training import batches, make_model, same_weights, squared_error, weights


@pytest.fixture(autouse=True)
def _clock_stands_still(monkeypatch):
    """What is reported may not depend on how long a step takes or waits."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


MODEL = make_model()
OPTIMIZER = sgd(MODEL)


@pytest.mark.parametrize(
    ("model", "optimizer", "settings", "message"),
    [
        (OPTIMIZER, MODEL, {}, r"model is .*SGD.*: a torch module .* Monitor\(model, optimizer\)"),
        (nn.Linear, None, {}, "model is the class Linear: a torch module"),
        (MODEL, make_model(), {}, "optimizer is of Sequential: an optimizer or None"),
        (MODEL, MODEL.parameters(), {}, "optimizer is .*generator.*: an optimizer or None"),
        (MODEL, torch.optim.SGD, {}, "optimizer is the class SGD: an object"),
        (MODEL, None, {"scaler": torch.amp.GradScaler}, "scaler is the class GradScaler"),
        (MODEL, None, {"hardware": dict}, "hardware is the class dict: an object"),
        (MODEL, None, {"hardware": 5}, "hardware is 5: it has no poll"),
        (MODEL, None, {"scaler": 5}, "scaler is 5: it has no scale"),
        (nn.LazyLinear(2), None, {}, "weight has no shape yet: run the model once before"),
        (MODEL, None, {"log": 5}, "log is 5: a path is accepted"),
        (MODEL, None, {"log": ""}, "log is '': a path is accepted"),
        (MODEL, None, {"run_id": 5}, "run_id is 5: a text is accepted"),
        (MODEL, None, {"probe": 5}, "probe is 5: a function that returns a loss"),
        (MODEL, None, {"about": [1]}, r"about is \[1\]: a mapping of JSON values"),
        (MODEL, None, {"about": {"a": MODEL}}, "about is of dict: a mapping of JSON values"),
        (MODEL, None, {"config": {}}, "config is {}: a MonitorConfig is accepted"),
        (MODEL, None, {"config": MonitorConfig}, "config is the class MonitorConfig"),
        (MODEL, None, {"actions": SkipStep()}, r"actions is .*: a list is accepted"),
        (MODEL, None, {"actions": print}, r"actions is .*print.*: a list is accepted"),
        (MODEL, None, {"actions": "log"}, "actions is 'log': a list is accepted"),
        (MODEL, None, {"actions": ["log"]}, "'log' is not an action: an Action or a function"),
        (MODEL, None, {"actions": [Stop]}, r"Stop is a class, .* object, Stop\(\)"),
        (MODEL, None, {"actions": [Rescue]}, r"Rescue is a class, .* object, Rescue\(\)"),
    ],
)
def test_what_can_never_be_right_is_refused_when_it_is_made(model, optimizer, settings, message):
    with pytest.raises(TypeError, match=message):
        Monitor(model, optimizer, **settings)


@pytest.mark.parametrize("state", [5, {"model": {}}], ids=str)
def test_what_is_no_state_is_refused_and_costs_nothing(state):
    monitor = Monitor(make_model())
    with pytest.raises(TypeError, match=r"state is .*: what state_dict gave is accepted"):
        monitor.load_state_dict(state)
    assert monitor.usable


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"detectors": ("isolation_forest",)}, "unknown detector 'isolation_forest'"),
        ({"alert_on": ("gradient_norm",)}, "alert_on names 'gradient_norm'"),
        ({"explosion_factor": 1.0}, "explosion_factor is 1.0"),
        ({"update_every": -1}, "update_every is -1: it must be an int of at least 0"),
        ({"sampled_weights": 0}, "sampled_weights is 0: it must be an int of at least 1"),
        ({"alert_on": "r_metric"}, "alert_on is 'r_metric': a tuple of names is accepted"),
        ({"alert_on": None}, "alert_on is None: a tuple of names is accepted"),
        ({"detectors": "r_metric"}, "detectors is 'r_metric': a tuple of names is accepted"),
        ({"detectors": None}, "detectors is None: a tuple of names is accepted"),
        ({"metric": {}}, "metric is {}: an RMetricConfig"),
        ({"stall_seconds": "5"}, "stall_seconds is '5': it must be finite and above 0"),
        ({"patience": None}, "patience is None: it must be finite and at least 0"),
        ({"step_times": "no"}, "step_times is 'no': it must be True or False"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MonitorConfig(**settings)


WRONG = {
    "vector": (torch.ones(3), r"is a tensor of shape \(3,\): .* such as its mean"),
    "empty": (torch.ones(0), r"is a tensor of shape \(0,\)"),
    "text": ("3.0", "is '3.0': a number or a tensor with one element is accepted"),
    "outputs": ({"loss": torch.tensor(1.0)}, "is {'loss': tensor"),
    "nothing": ({}, "is {}: a number"),
    "class": (float, "is the class float"),
    "list": ([1.0], r"is \[1.0\]"),
}
CALLS = {
    "loss": lambda monitor, value: monitor.check_before_step(value),
    "gradient_norm": lambda monitor, value: monitor.check_before_step(1.0, gradient_norm=value),
    "micro_batch": lambda monitor, value: monitor.micro_batch(value),
    "validation_loss": lambda monitor, value: monitor.evaluated(value),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_number_is_refused_until_a_step_is_checked_and_warned_about_later(
    call, kind, caplog
):
    value, message = WRONG[kind]
    monitor = Monitor(make_model())
    with pytest.raises(TypeError, match=message):
        CALLS[call](monitor, value)
    assert monitor.usable  # it is the caller's slip
    monitor.check_before_step(1.0, gradient_norm=1.0)
    for _ in range(2):
        CALLS[call](monitor, value)
    monitor.check_before_step(2.0, gradient_norm=1.0)
    monitor.close()
    assert monitor.usable
    assert monitor.last.training_loss == 2.0
    assert sum("it counts as missing" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    "loss",
    [3, 3.0, True, np.float32(3), np.array(3.0), torch.tensor(3.0), torch.tensor([[3.0]])],
    ids=repr,
)
def test_every_number_is_accepted(loss):
    monitor = Monitor(make_model())
    monitor.check_before_step(loss, gradient_norm=loss)
    monitor.evaluated(loss)
    monitor.close()
    assert monitor.usable
    assert monitor.last.training_loss == monitor.last.validation_loss == float(loss)


class Loop:
    """A plain loop, with a monitor whose log is in `folder`, or without one."""

    def __init__(self, folder=None, actions=(), **settings):
        self.model = make_model()
        self.optimizer = sgd(self.model)
        self.monitor = None
        if folder is not None:
            self.monitor = Monitor(
                self.model, self.optimizer, log=folder / "run.jsonl", actions=actions, **settings
            )
        torch.manual_seed(7)

    def check(self, loss=None, **more):
        return self.monitor is None or self.monitor.check_before_step(loss, **more)

    def run(self, step, steps=20):
        for number, [batch] in enumerate(batches(steps), start=1):
            step(self, number, batch)
        if self.monitor is not None:
            self.monitor.close()
        return self


def backward(loop, batch):
    loss = squared_error(loop.model, batch)
    loss.backward()
    return loss


def update(loop):
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def right(loop, number, batch):
    loop.check(backward(loop, batch))
    update(loop)


def check_before_backward(loop, number, batch):
    loss = squared_error(loop.model, batch)
    loop.check(loss)
    loss.backward()
    update(loop)


def check_after_zero_grad(loop, number, batch, set_to_none=True):
    loss = backward(loop, batch)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.check(loss)


def check_twice(loop, number, batch):
    loss = backward(loop, batch)
    loop.check(loss)
    loop.check(loss)
    update(loop)


def check_each_micro_batch(loop, number, batch):
    loop.check(backward(loop, batch))
    if number % 5 == 0:
        update(loop)


def no_loss(loop, number, batch):
    backward(loop, batch)
    loop.check()
    update(loop)


def swap_the_optimizer(loop, number, batch, at=12):
    if number == at:
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    right(loop, number, batch)


def use_after_close(loop, number, batch):
    if number == 6 and loop.monitor is not None:
        loop.monitor.close()
    right(loop, number, batch)


def evaluate_a_dict(loop, number, batch):
    right(loop, number, batch)
    if loop.monitor is not None:
        loop.monitor.evaluated({"eval_loss": 1.0})


#: By loop: the slip, and words of its warning.
LOOPS = {
    check_before_backward: ("no_gradients", "step 1 was checked and no parameter had a gradient"),
    check_after_zero_grad: ("no_gradients", "after backward and before zero_grad"),
    partial(check_after_zero_grad, set_to_none=False): ("no_gradients", "other than 0"),
    check_twice: ("twice", "steps 1 and 2 were checked"),
    check_each_micro_batch: ("twice", "after the last micro-batch"),
    no_loss: ("no_loss", "step 1 was checked without a loss"),
    swap_the_optimizer: ("twice", "steps 14 and 15 were checked"),
    partial(swap_the_optimizer, at=1): ("twice", "another optimizer needs a monitor of that one"),
    use_after_close: ("closed", "check_before_step was called after close"),
    evaluate_a_dict: ("argument", "validation_loss is {'eval_loss': 1.0}"),
}


def warnings(caplog):
    return [m for r in caplog.records if (m := r.getMessage()).startswith("rmetric: ")]


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: getattr(step, "func", step).__name__)
def test_a_slip_is_warned_about_once_and_the_weights_are_the_same(step, tmp_path, caplog):
    alone = Loop().run(step)
    caplog.clear()
    loop = Loop(tmp_path).run(step)
    slip, words = LOOPS[step]
    assert loop.monitor.usable
    [message] = warnings(caplog)
    assert words in message
    assert loop.monitor.protocol.slips == {slip}
    assert same_weights(alone.model, loop.model)


@pytest.mark.parametrize("stepped", ["its own", "that of the other model"])
def test_the_optimizer_of_another_model_is_warned_about_at_the_first_step(stepped, caplog):
    loop = Loop()
    other, loop.model = loop.optimizer, copy.deepcopy(loop.model)
    loop.monitor = Monitor(loop.model, other)
    if stepped == "its own":
        loop.optimizer = sgd(loop.model)
    loop.run(right)
    [message] = warnings(caplog)
    assert "none of the optimizer's parameters is one of the model's" in message


SHARED = {
    "log": "run.jsonl is the log of",
    "action": "this Stop is an action of",
    "rescue": "this Rescue is an action of",
}


@pytest.mark.parametrize("shared", [*SHARED, "nothing", "one after the other"])
def test_what_two_open_monitors_share_is_warned_about(shared, tmp_path, caplog):
    action, log = Rescue() if shared == "rescue" else Stop(), tmp_path / "run.jsonl"
    first = Monitor(make_model(), log=log, actions=[action, print])
    if shared == "one after the other":
        first.close()
    elif shared != "log":
        log = tmp_path / "other.jsonl"
    again = Stop() if shared in ("log", "nothing") else action
    Monitor(make_model(), log=log, actions=[again, print]).close()
    first.close()
    assert [SHARED[shared] in text for text in warnings(caplog)] == [True] * (shared in SHARED)


def ask(loop, number, batch):
    loss = backward(loop, batch)
    if number in (2, 3, 5):
        loop.model[0].weight.grad[0, 0] = torch.nan
    if loop.check(loss):
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def accumulated(loop, number, batch):
    for micro in [batch] * 3:
        loop.monitor.micro_batch(backward(loop, micro))
    loop.check()
    update(loop)


def closure(loop, number, batch):
    def again():
        loop.optimizer.zero_grad()
        loss = backward(loop, batch)
        loop.check(loss)
        return loss

    loop.optimizer.step(again)


def clipped(loop, number, batch):
    loss = backward(loop, batch)
    loop.check(loss, gradient_norm=nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
    update(loop)


def saved(loop, number, batch):
    right(loop, number, batch)
    state = loop.monitor.state_dict()
    if number == 2:
        loop.monitor.close()
        loop.monitor = Monitor(loop.model, loop.optimizer)
        loop.monitor.load_state_dict(state)


def own_rule(loop, number, batch):
    loss = backward(loop, batch)
    loop.check(loss)
    if number not in (9, 10, 14):  # for reasons of its own
        loop.optimizer.step()
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("scaler", ["passed", "unknown"])
def test_steps_that_a_scaler_leaves_out_are_no_slip(scaler):
    loop = Loop()
    known = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    loop.monitor = Monitor(loop.model, loop.optimizer, scaler=known if scaler == "passed" else None)
    before = weights(loop.model)
    for [batch] in batches(12):
        loop.optimizer.zero_grad()
        loss = squared_error(loop.model, batch) * 2**6
        known.scale(loss).backward()
        known.unscale_(loop.optimizer)
        loop.check(loss)
        known.step(loop.optimizer)
        known.update()
    loop.monitor.close()
    assert known.get_scale() < 2.0**127
    assert not all(map(torch.equal, before, loop.model.parameters()))
    assert loop.monitor.protocol.slips == set()


@pytest.mark.parametrize("actions", [[], [SkipStep]], ids=["watched", "with an action"])
@pytest.mark.parametrize(
    "step", [right, ask, accumulated, closure, clipped, saved, own_rule], ids=lambda s: s.__name__
)
def test_a_right_loop_gets_no_warning(step, actions, tmp_path):
    loop = Loop(tmp_path, [make() for make in actions]).run(step)
    assert loop.monitor.protocol.slips == set()
    assert loop.monitor.usable


def test_each_slip_has_words_and_a_test():
    tested = {slip for slip, _ in LOOPS.values()}
    elsewhere = {"other_model", "same_log", "shared_action", "never_called"}  # above
    elsewhere |= {"clipped", "unknown_norm"}  # test_measuring, test_distributed
    in_trainers = {"validation_loss"}
    assert tested | elsewhere | in_trainers == set(SLIPS)


#: Read at a step that is asked for: loss and norm, then the update, or each parameter's part in it.
TAKEN, LEFT_OUT = [2, 2], [2, 6]


@pytest.mark.parametrize(
    ("step", "sizes"),
    [(right, [4] * 20), (ask, [*TAKEN, *LEFT_OUT * 2, *TAKEN, *LEFT_OUT, *TAKEN * 15])],
)
def test_a_step_is_read_from_the_device_at_once_unless_it_was_asked_for(
    step, sizes, tmp_path, monkeypatch
):
    """Neither rules nor the protocol read more; non-finite entries of all parameters at once."""
    loop = Loop(tmp_path, config=MonitorConfig(workers_every=0, layers_every=0, forward_every=0))
    loop.optimizer.step()
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        whole = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, _=whole: reads.append(self.numel()) or _(self)
        )
    loop.run(step)
    assert [size for size in reads if size] == sizes


def test_alerts_can_be_sliced_and_are_bounded():
    monitor = Monitor(make_model(), config=MonitorConfig(detectors=()))
    for step in range(1, 4):
        monitor._delivery.report(monitor._delivery.new_alert(step, "stall", "slow"))
    assert [alert.step for alert in monitor.alerts[1:]] == [2, 3]
    for step in range(4, 300):
        monitor._delivery.report(monitor._delivery.new_alert(step, "stall", "slow"))
    assert [alert.step for alert in monitor.alerts[-2:]] == [298, 299]
    assert len(monitor.alerts) == 100
    monitor.close()
