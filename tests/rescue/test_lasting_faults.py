"""A lasting fault, in every trainer: the end is no worse than without rescue, or it is held.

Rates that leave their scheduler's are set back before a step is taken: the run is its twin.
"""

from functools import partial

import pytest
import torch
from torch import nn

from rmetric.monitor import Monitor
from rmetric.rescue import Rescue, RescueConfig
from tests.integrations import trainers
from tests.rescue.trainers import skip_without_the_loop

FEATURES, ROWS, STEPS = 6, 16, 80
#: Nats, here of a squared error, that rescue may cost.
COSTS = 0.02
RATES = ("rate", "rate_runaway", "rate_zero")
FAULTS = (*RATES, "ascent", "gradient_zero", "labels", "not_finite")


class Data(torch.utils.data.Dataset):
    """Rows of a noisy linear function."""

    def __init__(self, seed=1, noise=0.3):
        source = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(ROWS * STEPS, FEATURES, generator=source)
        drawn = torch.randn(ROWS * STEPS, 1, generator=source)
        self.labels = self.inputs.sum(1, keepdim=True) + noise * drawn

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Net(nn.Module):
    """A linear regression with a fault from an executed step on."""

    def __init__(self, fault, onset, duration=10**9):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, 1)
        self.fault, self.onset, self.end = fault, onset, onset + duration
        self.executed, self.optimizer = 0, None
        for param in self.layer.parameters():
            param.register_hook(self.changed)

    @property
    def acts(self):
        return self.onset <= self.executed < self.end

    def changed(self, gradient):
        factor = {"ascent": -0.5, "gradient_zero": 0.0}.get(self.fault) if self.acts else None
        return gradient if factor is None else gradient * factor

    def forward(self, inputs, labels):
        if self.training:
            self.executed += 1
            if self.acts:
                factors = {"rate": 50, "rate_zero": 0,
                           "rate_runaway": 1.5 ** (self.executed - self.onset + 2)}  # fmt: skip
                for group in self.optimizer.param_groups if self.fault in factors else ():
                    group["lr"] = group["lr"] * factors[self.fault]
                if self.fault == "labels":
                    labels = 3 * torch.randn(labels.shape)
        loss = nn.functional.mse_loss(self.layer(inputs), labels)
        if self.training and self.acts and self.fault == "not_finite":
            loss = loss * torch.nan
        return {"loss": loss}

    def settings(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.0)
        factor = lambda step: 1 - step / STEPS  # noqa: E731
        return self.optimizer, torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)


def plain(net, rescue, folder):
    optimizer, scheduler = net.settings()
    loader = torch.utils.data.DataLoader(Data(), batch_size=ROWS)
    batches = enumerate(loader, start=1)
    if rescue is not None:
        rescue.scheduler = scheduler
        monitor = Monitor(net, optimizer, actions=[rescue])
        batches = rescue.steps(loader, STEPS)
    for _, batch in batches:
        loss = net(**batch)["loss"]
        loss.backward()
        if rescue is not None:
            monitor.check_before_step(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if rescue is not None:
        monitor.close()


def in_trainer(name, net, rescue, folder, **settings):
    callbacks = [] if rescue is None else [trainers.make_callback(name, actions=[rescue])]
    settings |= dict(optimizers=net.settings(), batch_size=ROWS)
    trainers.TRAINERS[name](net, Data(), folder, callbacks, **settings)


def hugging_face(net, rescue, folder):
    if rescue is not None:
        skip_without_the_loop()
    in_trainer("hugging_face", net, rescue, folder, num_train_epochs=1, max_grad_norm=0)


lightning = partial(in_trainer, "lightning", max_epochs=1, shuffle=True)
TRAINERS = {"plain": plain, "hugging_face": hugging_face, "lightning": lightning}


def trained(trainer, folder, fault=None, onset=10**9, *, rescued=False, **more):
    """Squared error on rows of its own, the weights, and the rescue."""
    torch.manual_seed(3)
    net = Net(fault, onset, **more)
    rescue = None
    if rescued:
        rescue = Rescue(RescueConfig(every=10), hold_folder=folder / "held")
    TRAINERS[trainer](net, rescue, folder)
    other = Data(seed=2, noise=0.0)
    with torch.no_grad():
        error = nn.functional.mse_loss(net.layer(other.inputs), other.labels).item()
    return error, [param.tolist() for param in net.parameters()], rescue


@pytest.mark.parametrize("onset", [5, 30])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_end_is_no_worse_than_without_rescue_or_it_is_held(trainer, fault, onset, tmp_path):
    alone, _, _ = trained(trainer, tmp_path / "alone", fault, onset)
    error, weights, rescue = trained(trainer, tmp_path, fault, onset, rescued=True)
    assert not rescue.problem
    assert rescue.held or not error > alone + COSTS, rescue.decisions
    if fault in RATES:
        twin = trained(trainer, tmp_path / "twin")
        assert weights == twin[1]
        assert [entry["action"] for entry in rescue.decisions] == ["set_back"]
    if fault == "gradient_zero":
        assert "the gradient norm is exactly 0 since step " in rescue.held["reason"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_idle_rescue_changes_no_bit(trainer, tmp_path):
    rescued = trained(trainer, tmp_path, rescued=True)
    assert rescued[1] == trained(trainer, tmp_path)[1]
    assert rescued[2].decisions == []


@pytest.mark.parametrize("trainer", TRAINERS)
def test_there_is_a_snapshot_before_the_first_step(trainer, tmp_path):
    found = trained(trainer, tmp_path, "not_finite", 2, rescued=True, duration=4)
    decisions = [(entry["action"], entry["to"]) for entry in found[2].decisions]
    assert decisions == [("leave_out", None)] * 3 + [("go_back", 0)]
    assert found[1] == trained(trainer, tmp_path / "twin")[1]
