"""One small training under each trainer, with bad steps put in: what the actions' contract runs."""

import dataclasses
from math import isfinite

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rmetric.logs import read_log
from rmetric.monitor import Monitor, MonitorConfig
from tests.integrations.trainers import TRAINERS, make_callback, make_scaler
from tests.monitor.ranks import on_ranks
from tests.monitor.training import flat_weights

FEATURES, ROWS, STEPS, RATE = 6, 8, 36, 0.01
#: Off the cadence of ten steps, on it, and a finite gradient that is far too large.
NAN_OFF, NAN_ON, EXPLOSION = 13, 20, 28
BAD = {NAN_OFF: "nan", NAN_ON: "nan", EXPLOSION: "explosion"}
CONFIG = MonitorConfig(explosion_window=8, join_seconds=20.0, patience=10.0)


class Net(nn.Module):
    """A regression whose gradient is bad at the steps of `bad`; its loss is a number at all."""

    def __init__(self, bad=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 1))
        self.bad, self.step = bad or {}, 0

    def forward(self, inputs, labels):
        loss = nn.functional.mse_loss(self.layers(inputs).float(), labels)
        if self.training:
            self.step += 1
            kind = self.bad.get(self.step)
            if kind == "nan":  # the derivative of a root at 0, times 0
                loss = loss + (self.layers[0].weight.sum() * 0.0).sqrt()
            elif kind == "explosion":
                loss = loss + 1e3 * (loss - loss.detach())
        return {"loss": loss}


def rows(rank=0):
    generator = torch.Generator().manual_seed(100 + rank)
    numbers = torch.randn(ROWS * STEPS, FEATURES + 1, generator=generator)
    return [{"inputs": row[:-1], "labels": row[-1:]} for row in numbers]


def batches(rank=0):
    for rows_of_step in zip(*[iter(rows(rank))] * ROWS, strict=True):
        yield {key: torch.stack([row[key] for row in rows_of_step]) for key in rows_of_step[0]}


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def share(step):
    """Of the rate, after so many steps of the schedule."""
    return 1.0 / (1.0 + 0.05 * step)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


@dataclasses.dataclass
class Outcome:
    """Of one training, as plain values.

    Attributes:
        weights: all of them, at the end.
        steps: that were taken or left out.
        records: from the log.
        slips: of the loop, as the monitor reported them.
    """

    weights: list
    steps: int
    usable: bool = True
    records: list = dataclasses.field(default_factory=list)
    slips: list = dataclasses.field(default_factory=list)

    @property
    def finite(self):
        return all(map(isfinite, self.weights))


def outcome(weights, steps, monitor, log):
    made = Outcome(weights.tolist(), steps)
    if monitor is not None:
        made.usable = monitor.usable
        made.slips = sorted(monitor.protocol.slips)
        if log.exists():
            made.records = read_log(log).records
    return made


# -- loops; `left_out` is by hand, `actions` by a monitor


def plain(folder, actions=None, left_out=(), kind="plain", rank=0):
    """`kind`: plain, bf16, ddp, fsdp2, or how a GradScaler is used."""
    scaled = kind.startswith("scaler")
    net = model = Net(BAD)
    if kind == "ddp":
        model = DistributedDataParallel(net)
    elif kind == "fsdp2":
        fully_shard(net)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    scaler = make_scaler(enabled=scaled)
    monitor, log = None, folder / f"rank{rank}.jsonl"
    if actions is not None:
        known = {"scaler": scaler} if "passed" in kind else {}
        for action in actions:
            if hasattr(action, "scheduler"):
                action.scheduler = scheduler
        monitor = Monitor(model, optimizer, log=log, config=CONFIG, actions=actions, **known)
        if dist.is_initialized():
            monitor.wait_for_ranks(20.0)
            dist.barrier()
    for step, batch in enumerate(batches(rank), start=1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        early = kind.endswith("unscaled early")
        if early:
            scaler.unscale_(optimizer)
        if monitor is not None:
            monitor.check_before_step(loss)
        if kind.endswith("unscaled late"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if step not in left_out:
            scaler.step(optimizer)
        elif scaled and kind.endswith("never unscaled"):
            scaler.unscale_(optimizer)
        scaler.update()
        scheduler.step()
        if monitor is not None and monitor.should_stop:
            break
    if monitor is not None:
        monitor.close()
    return outcome(flat_weights(model), step, monitor, log)


def hugging_face(folder, actions=None, left_out=(), precision="32"):
    from transformers import Trainer, TrainerCallback

    class LeaveOut(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step + 1 in left_out:
                model.zero_grad(set_to_none=True)

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    own = dict(kind=InOrder, logging_strategy="no")
    return in_trainer("hugging_face", LeaveOut, folder, actions, precision, own)


def lightning(folder, actions=None, left_out=(), precision="32"):
    from lightning import Callback

    class LeaveOut(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step + 1 in left_out:
                module.zero_grad(set_to_none=True)

    return in_trainer("lightning", LeaveOut, folder, actions, precision, {})


def in_trainer(name, leave_out, folder, actions, precision, own):
    log, model = folder / "rank0.jsonl", Net(BAD)
    callback = make_callback(name, log, config=CONFIG, actions=actions or ())
    optimizer = make_optimizer(model)
    trainer = TRAINERS[name](
        model, rows(), folder, [leave_out()] + ([] if actions is None else [callback]),
        optimizers=(optimizer, make_scheduler(optimizer)), batch_size=ROWS, max_steps=STEPS,
        precision=precision, **own,
    )  # fmt: skip
    steps = (trainer.state if name == "hugging_face" else trainer).global_step
    return outcome(flat_weights(model), steps, callback.monitor, log)


def with_actions(train, folder, make, **settings):
    """Without `make` the bad steps are left out by hand."""
    if make is None:
        return train(folder, None, tuple(BAD), **settings)
    return train(folder, make(folder), **settings)


def on_one_rank(rank, folder, kind, makers):
    """The outcome by action's name of each training; one launch runs all."""
    found = {}
    for name, make in makers.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        found[name] = with_actions(plain, place, make, kind=kind, rank=rank)
        dist.barrier()
    return found


def on_two_ranks(folder, kind, makers):
    return on_ranks(on_one_rank, folder, kind, makers, ranks=2, seconds=90.0)
