"""Costs and failures of the monitor's parts that a training must not pay for."""

import threading
import time
import types
from functools import partial

import pytest
import torch
from torch import nn

from rmetric._util.background import Background
from rmetric.monitor import Monitor, MonitorConfig
from rmetric.monitor import forward as forward_module
from rmetric.monitor.actions import EmergencyCheckpoint
from rmetric.monitor.actions.action import Action
from rmetric.monitor.monitor import _OPEN
from rmetric.monitor.optimizer_steps import OptimizerSteps
from rmetric.monitor.pending import Pending
from rmetric.monitor.stalls import StepTimes
from rmetric.records import Record
from tests.monitor.training import alert, backward_passes, batches, make_model, squared_error


def test_of_shards_the_gradients_stay_until_the_optimizers_own_step():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = OptimizerSteps(model, optimizer, None, lambda: None)
    removers = list(steps.install())
    steps.sharded = True
    before = [p.detach().clone() for p in model.parameters()]
    for _ in backward_passes(model, 3):
        steps.leave_out()
        assert all(p.grad is not None for p in model.parameters())  # clipping is a collective
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for remove in removers:
        remove()


@pytest.mark.parametrize(("micro", "expected"), [(1, [1]), (2, [1, 4, 8])])
def test_one_micro_batch_a_step_is_no_accumulation(micro, expected):
    model = make_model()
    monitor = Monitor(model, config=MonitorConfig(workers_every=4))
    active = []
    for step, micros in enumerate(batches(9, micro), start=1):
        for batch in micros:
            squared_error(model, batch).backward()
            active += [step] if monitor._recorder._workers.active else []
            monitor.micro_batch(1.0)
        monitor.check_before_step()
    monitor.close()
    assert sorted(set(active)) == expected


class Closes(Action):
    closed = False

    def close(self):
        self.closed = True


def test_an_internal_error_does_not_wait_for_the_actions_and_close_does(tmp_path):
    action = Closes()
    monitor = Monitor(make_model(), log=tmp_path / "run.jsonl", actions=[action])
    monitor.check_before_step(1.0)
    monitor._detector_judge = None
    monitor.check_before_step(1.0)
    assert not monitor.usable
    assert not action.closed
    assert monitor in _OPEN  # the end of the script closes it
    monitor.close()
    assert action.closed
    assert monitor not in _OPEN


def test_the_alarm_of_a_drift_is_not_over_while_the_steps_are_slow():
    monitor = Monitor(make_model(), config=MonitorConfig(alert_on=("slow_drift",)))

    def is_open_after(steps, seconds):
        for step in steps:
            pending = Pending.of(Record(step=step))
            pending.times = StepTimes(forward_backward=seconds)
            monitor._step_time_judge.judge(pending)
            monitor._delivery.end_episodes(step)
        return bool(monitor._delivery._episodes.open)

    assert not is_open_after(range(1, 101), 0.1)
    assert is_open_after(range(101, 261), 0.2)
    assert not is_open_after(range(261, 331), 0.1)
    assert len(monitor.alerts) == 1
    monitor.close()


@pytest.fixture
def graphs():
    """Those that its `backend` compiles."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return types.SimpleNamespace(made=made, backend=backend)


def test_the_forward_probes_make_nothing_compile_twice(graphs):
    activation = torch.compile(lambda x: torch.tanh(x) * 2.0, backend=graphs.backend)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 1)

        def forward(self, x):
            return self.linear(activation(x))

    model = Model()
    monitor = Monitor(model, config=MonitorConfig(forward_every=3))
    for _ in backward_passes(model, 7):
        monitor.check_before_step(1.0)
    monitor.close()
    assert len(graphs.made) == 1


def test_a_compiled_step_of_the_optimizer_compiles_nothing_of_the_monitor(graphs):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = torch.compile(optimizer.step, backend=graphs.backend)
    with Monitor(model, optimizer, audits=True) as monitor:
        for _ in backward_passes(model, 6, optimizer):
            monitor.check_before_step(1.0)
            step()
    assert monitor.last.update_norm > 0
    assert len(graphs.made) == 1


def test_attention_logits_are_in_single_precision_under_autocast():
    query = torch.full((1, 2, 3, 64), 100.0, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        largest = forward_module._largest_logit(query, query, query, scale=1.0)
    assert float(largest) == 640_000.0


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_attention_logits_are_bounded_and_change_nothing(monkeypatch, is_causal):
    query, key = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8)
    whole = forward_module._largest_logit(query, key, key, is_causal=is_causal, enable_gqa=True)
    monkeypatch.setattr(forward_module, "LOGITS_AT_ONCE", 4 * 40 * 3)
    sizes = []
    monkeypatch.setattr(
        torch.Tensor, "amax", lambda self: sizes.append(self.numel()) or torch.max(self)
    )
    blocks = forward_module._largest_logit(query, key, key, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(whole, blocks)
    assert max(sizes) == 4 * 40 * 3


def test_a_trainers_own_scheduler_is_in_the_emergency_checkpoint(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    checkpoint = EmergencyCheckpoint(tmp_path)
    monitor = Monitor(model, optimizer, actions=[checkpoint])
    monitor.schedulers = [scheduler]
    monitor.step = monitor.weights_step = 5
    checkpoint(alert(5), monitor)
    monitor.close()
    saved = torch.load(checkpoint.last_good, weights_only=True)
    assert saved["scheduler"]["step_size"] == 3
    assert "random" in saved["left_out"]  # no record came before the alert


def test_a_disk_that_hangs_is_waited_for_once(tmp_path, caplog):
    monitor = Monitor(make_model(), log=tmp_path / "run.jsonl")
    free = threading.Event()
    monitor.background.submit(free.wait)
    monitor.check_before_step(1.0)
    monitor.check_before_step(1.0)
    monitor._log.flush(0.2)
    began = time.monotonic()
    monitor._log.flush(120.0)
    assert time.monotonic() - began < 60.0
    assert sum("disk" in message for message in caplog.messages) == 1
    free.set()
    monitor.close()
    assert (tmp_path / "run.jsonl").read_text().count("METRICS") == 2  # nothing is lost


def test_a_full_queue_takes_no_more_and_nobody_waits(caplog):
    background, release = Background(size=2, what="the page"), threading.Event()
    taken = [background.submit(release.wait) for _ in range(20)]
    assert background.dropped == taken.count(False) >= 17
    began = time.monotonic()
    assert not background.close(0.1)
    assert time.monotonic() - began < 60.0
    assert "the page: not all was written within 0.1 s" in caplog.text
    release.set()


def test_after_an_interrupt_in_an_action_the_state_is_that_before_the_step():
    class Interrupted(Action):
        needs_verdict_now = True

        def __call__(self, alert, monitor):
            raise KeyboardInterrupt

    monitor = Monitor(make_model(), actions=[Interrupted()])
    monitor.check_before_step(1.0, gradient_norm=1.0)
    with pytest.raises(KeyboardInterrupt):
        monitor.check_before_step(float("nan"), gradient_norm=1.0)
    assert monitor.state_dict()["step"] == monitor.weights_step == 1
    monitor.close()


def test_while_the_interpreter_ends_what_is_submitted_runs_at_once(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    background, done = Background(size=1), []
    assert [background.submit(partial(done.append, n)) for n in range(3)] == [True] * 3
    assert background.close()
    assert done == [0, 1, 2]


def test_an_error_of_ours_in_a_method_of_the_trainer_costs_the_monitor_alone(caplog):
    module = pytest.importorskip("rmetric.integrations.hugging_face", exc_type=ImportError)
    callback, owner = module.HuggingFaceCallback(), types.SimpleNamespace(step=lambda: 3)
    callback.monitor = Monitor(make_model())
    callback._follow(owner, "step", lambda *_: 1 / 0)
    assert [owner.step(), owner.step()] == [3, 3]
    assert "division by zero" in callback.monitor.problem
    assert sum("training continues" in message for message in caplog.messages) == 1
    callback.monitor.close()
