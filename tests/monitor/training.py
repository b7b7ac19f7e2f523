"""A small real training, with or without the monitor: what the live tests compare."""

import copy
import json
import time
from math import inf, nan
from pathlib import Path

import torch
from torch import nn

from rmetric.monitor import Alert, Monitor, MonitorConfig
from rmetric.monitor.actions import Action

torch.set_num_threads(1)

ROWS, FEATURES = 8, 6


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 1)
    )


def batches(steps, micro=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield [
            (
                torch.randn(ROWS, FEATURES, generator=generator),
                torch.randn(ROWS, 1, generator=generator),
            )
            for _ in range(micro)
        ]


def squared_error(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def backward_passes(model, count, optimizer=None, seed=1):
    """Number and loss of each step, after its backward pass."""
    for step, [batch] in enumerate(batches(count, seed=seed), start=1):
        model.zero_grad() if optimizer is None else optimizer.zero_grad()
        loss = squared_error(model, batch)
        loss.backward()
        yield step, loss


def watched(*actions, **settings):
    """For `train`."""
    settings.setdefault("config", MonitorConfig(explosion_window=6))
    return lambda model, optimizer: Monitor(model, optimizer, actions=actions, **settings)


def times(factor, *steps, first=inf, last=inf):
    """For `train`: the loss is that many times as large at `steps`, or from `first` on."""
    return lambda step, loss: loss * factor if step in steps or first <= step <= last else loss


def nan_at(*steps, **of):
    return times(nan, *steps, **of)


def entries(log, event=None):
    found = [json.loads(line) for line in Path(log).read_text().splitlines()]
    return [entry for entry in found if event in (None, entry["event"])]


def without_time(log, event=None):
    of_time = ("_seconds", "memory")
    return [{k: v for k, v in e.items() if not k.endswith(of_time)} for e in entries(log, event)]


def alert(step=5, source="non_finite", rank=0, since=0):
    reason = "gradient norm is nan"
    return Alert(step=step, source=source, reason=reason, rank=rank, since=since)


class Clock:
    """`time.perf_counter` in milliseconds of its calls and what a test lets pass, no real time."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", self.read)

    def read(self):
        self.wait(0.001)
        return self.now

    def wait(self, seconds):
        self.now += seconds


class Recorder(Action):
    """Records what it is called with."""

    def __init__(self, now=False, on_all_ranks=False, **settings):
        super().__init__(**settings)
        self.needs_verdict_now, self.on_all_ranks = now, on_all_ranks
        self.alerts, self.calls, self.episodes = [], [], []

    def __call__(self, alert, monitor):
        self.alerts.append(alert)
        self.calls.append((monitor.step, alert.step, alert.source, alert.rank))

    def ended(self, episode, monitor):
        self.episodes.append(episode)


def train(
    model,
    make_monitor=None,
    *,
    steps=30,
    micro=1,
    clip=None,
    spoil=None,
    loss_of=squared_error,
    optimizer=None,
    ask=False,
):
    """Train `model` in place; return the monitor, closed, or None.

    `spoil(step, loss)` may return another loss; with `ask` a step is taken only
    where the verdict is good.
    """
    torch.manual_seed(7)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = make_monitor(model, optimizer) if make_monitor else None
    for step, micros in enumerate(batches(steps, micro), start=1):
        optimizer.zero_grad()
        for batch in micros:
            loss = loss_of(model, batch)
            loss = spoil(step, loss) if spoil else loss
            (loss / micro).backward()
            if monitor and micro > 1:
                monitor.micro_batch(loss)
        go_on = monitor.check_before_step(loss if micro == 1 else None) if monitor else True
        if clip and monitor:
            monitor.clip_grad_norm_(clip)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if not ask or go_on:
            optimizer.step()
        if monitor and monitor.should_stop:
            break
    if monitor:
        monitor.close()
    return monitor


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def flat(tensors):
    """All in one vector, of shards the whole: a collective."""
    with torch.no_grad():
        whole = [getattr(t, "full_tensor", t.detach)() for t in tensors]
        return torch.cat([tensor.flatten() for tensor in whole])


def flat_weights(model):
    return flat(model.parameters())


def same_weights(first, second):
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def flat_gradient(model):
    return flat(p.grad for p in model.parameters() if p.grad is not None)


def twin(model):
    return copy.deepcopy(model)
