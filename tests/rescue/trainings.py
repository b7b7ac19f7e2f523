"""A small training that a rescue follows: plain, on two ranks, sharded; with bad steps put in."""

import random
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rmetric.monitor import Monitor, MonitorConfig
from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue.policy import Evidence
from tests.monitor import training

torch.set_num_threads(1)

STEPS = 40
SMALL = RescueConfig(every=5, probation=5, far=20)
#: By executed steps: three are left out, the fourth goes back.
NANS = range(23, 27)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


def make_optimizer(name, parameters):
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def make_loader(rank=0):
    source = torch.Generator().manual_seed(5 + rank)
    data = TensorDataset(torch.randn(72, 6, generator=source), torch.randn(72, 1, generator=source))
    return DataLoader(data, batch_size=4, shuffle=True)


def parts(rescue=None):
    """Model, optimiser and monitor of a loop of one's own, made of `a_step`."""
    model = make_model()
    optimizer = make_optimizer("sgd", model.parameters())
    return model, optimizer, Monitor(model, optimizer, actions=[] if rescue is None else [rescue])


def a_step(model, optimizer, monitor, batch):
    inputs, labels = batch
    loss = nn.functional.mse_loss(model(inputs), labels)
    loss.backward()
    monitor.check_before_step(loss)
    optimizer.step()
    optimizer.zero_grad()


def seed():
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002


def bad(at, *, since=None, times=1, kind="unknown", worker=None):
    """A stand-in for the calibrated detector: evidence at the record of a step, so often."""
    left = {at: times}

    def evidence_of(detector, step):
        if not left.get(step):
            return None
        left[step] -= 1
        onset = step if since is None else since
        return Evidence(step=step, since=onset, kind=kind, words="it is bad", worker=worker)

    return evidence_of


def instead_of_detector(evidence_of):
    if evidence_of is None:
        return nullcontext()
    return patch("rmetric.rescue.judgement.evidence_of", evidence_of)


def train(
    rescue=None,
    *,
    kind="plain",
    rank=0,
    optimizer="adamw",
    scaled=False,
    per_step=1,
    loader=None,
    nans=(),
    evidence_of=None,
    log=None,
    at=None,
    steps=STEPS,
    others=(),
    **settings,
):
    """Train; without a rescue nothing is bad. Returns what came of it, as plain values.

    `nans`: executed steps with a loss that is no number. `at(executed, step, model, optimizer)`
    runs before each forward pass.
    """
    net = model = make_model()
    if kind == "ddp":
        model = DistributedDataParallel(net)
    elif kind == "fsdp2":
        net = model = nn.Sequential(net[0], nn.Dropout(0.2), net[3])
        fully_shard(model)
    optimizer = make_optimizer(optimizer, model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled, growth_interval=7)
    loader = make_loader(rank) if loader is None else loader
    seed()
    torch.manual_seed(7 + rank)
    monitor = None
    if rescue is not None:
        rescue.scheduler = scheduler
        config = MonitorConfig(join_seconds=20.0, patience=5.0)
        monitor = Monitor(
            model, optimizer, log=log, actions=[*others, rescue], config=config,
            scaler=scaler if scaled else None, **settings,
        )  # fmt: skip
        if dist.is_initialized():
            monitor.wait_for_ranks(20.0)
            dist.barrier()
        batches = rescue.steps(loader, steps, per_step=per_step)
    else:
        batches = Rescue().steps(loader, steps, per_step=per_step)
    executed, taken = 0, []
    with instead_of_detector(evidence_of):
        for step, batch in batches:
            executed += 1
            taken.append(step)
            if at is not None:
                at(executed, step, model, optimizer)
            for inputs, labels in [batch] if per_step == 1 else batch:
                noise = random.random() + np.random.rand()  # noqa: NPY002
                loss = nn.functional.mse_loss(model(inputs + 0.01 * noise), labels)
                if executed in nans:
                    loss = loss * torch.nan
                scaler.scale(loss / per_step).backward()
            if scaled:
                scaler.unscale_(optimizer)
            if monitor is not None:
                monitor.check_before_step(loss)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    return {
        "weights": flat(net),
        "taken": taken,
        "rate": scheduler.get_last_lr(),
        "scale": scaler.get_scale(),
        "random": (random.random(), float(np.random.rand()), torch.rand(1).item()),  # noqa: NPY002
        "decisions": [] if rescue is None else rescue.decisions,
        "problem": "" if rescue is None else rescue.problem,
        "usable": monitor is None or monitor.usable,
    }


def flat(model):
    return training.flat(t.float() for t in model.state_dict().values()).tolist()


def same(first, second):
    keys = ("weights", "rate", "scale", "random")
    return {key: first[key] == second[key] for key in keys} == dict.fromkeys(keys, True)


def actions(outcome):
    return [entry["action"] for entry in outcome["decisions"]]
