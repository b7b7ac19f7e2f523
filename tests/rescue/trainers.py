"""A small training under each trainer that is disturbed once, and a rescue that goes back."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from rmetric.monitor import MonitorConfig
from rmetric.rescue import RescueConfig
from tests.integrations import trainers
from tests.monitor.training import flat_weights

FEATURES, ROWS, EPOCH, EPOCHS = 5, 4, 18, 3
STEPS = EPOCH * EPOCHS
#: Of a step in the second epoch; the snapshot that it calls for is one of the first.
SMALL = RescueConfig(every=5, probation=5, far=20, quiet=5, observe=5)
#: Without the rule on explosions, which would leave the wrong steps out.
MONITOR = MonitorConfig(explosion_factor=1e9)


class Net(nn.Module):
    """A regression with dropout, whose target is wrong at some executed steps.

    Attributes:
        seen: the first number of each batch, in the order of the executed steps.
    """

    def __init__(self, wrong=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)
        )
        self.wrong, self.seen = wrong, []

    def forward(self, inputs, labels):
        wrong = False
        if self.training:
            self.seen.append(float(inputs[0, 0]))
            wrong = len(self.seen) in self.wrong
        loss = nn.functional.mse_loss(self.layers(inputs).float(), -9 * labels if wrong else labels)
        return {"loss": loss}


class Rows(torch.utils.data.Dataset):
    """Rows that draw random numbers in the training's own process."""

    def __init__(self, count):
        self.numbers = torch.randn(count, FEATURES + 1, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        row = self.numbers[index]
        inputs = row[:-1].clone()
        inputs[1:] += 0.01 * torch.randn(FEATURES - 1)
        return {"inputs": inputs, "labels": row[-1:]}


class Stream(IterableDataset):
    """The same without a length and without positions."""

    def __init__(self, count):
        self.rows = Rows(count)

    def __iter__(self):
        return (self.rows[i] for i in range(len(self.rows)))


@dataclass
class Planted:
    """Evidence at steps of the monitor, one after the other; in place of the detector's."""

    evidence: list = field(default_factory=list)

    def __call__(self, detector, step):
        if self.evidence and self.evidence[0].step == step:
            return self.evidence.pop(0)
        return None


@dataclass
class Outcome:
    """Of one training."""

    weights: torch.Tensor
    steps: int
    seen: list
    history: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # (event, step, epoch)
    folder: object = None


def noting(callback, hooks, place):
    """The callback, which keeps the event of each hook with the `place` of its arguments."""
    callback.calls = []
    for hook, event in hooks.items():
        note = lambda *words, _=event, **__: callback.calls.append((_, *place(*words)))  # noqa: E731
        setattr(callback, hook, note)
    return callback


def in_trainer(name, notes, net, folder, actions, *, data=None, half=False, **settings):
    """The trainer after its training, watched unless `actions` is None."""
    own = dict(config=MONITOR, actions=actions)
    watched = [] if actions is None else [trainers.make_callback(name, folder / "run.jsonl", **own)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return trainers.TRAINERS[name](
        net, data or Rows(ROWS * EPOCH), folder, [notes, *watched], batch_size=ROWS,
        optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)),
        evaluated=Rows(ROWS), precision="fp16" if half else "32", **settings,
    )  # fmt: skip


def skip_without_the_loop():
    from transformers import Trainer

    if not hasattr(Trainer, "_run_epoch"):
        pytest.skip("rescue needs the loop of transformers 5.5.4 or newer")


def hugging_face(folder, actions=None, *, wrong=(), **settings):
    from transformers import TrainerCallback

    if actions is not None:
        skip_without_the_loop()
    hooks = {"on_step_end": "step", "on_evaluate": "evaluate", "on_epoch_end": "epoch"}
    notes = noting(TrainerCallback(), hooks, lambda _, state, *__: (state.global_step, state.epoch))
    net = Net(wrong)
    usual = dict(logging_steps=1, num_train_epochs=EPOCHS)
    trainer = in_trainer("hugging_face", notes, net, folder, actions, **usual | settings)
    history = [row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row]
    return Outcome(
        flat_weights(net), trainer.state.global_step, net.seen, history, notes.calls, folder / "out"
    )


def lightning(folder, actions=None, *, wrong=(), data=None, **settings):
    import lightning as package

    hooks = {"on_train_batch_end": "step", "on_validation_end": "evaluate"}
    hooks["on_train_epoch_end"] = "epoch"
    notes = noting(package.Callback(), hooks, lambda of, *_: (of.global_step, of.current_epoch))
    package.seed_everything(42, verbose=False)
    net = Net(wrong)
    usual = dict(max_epochs=EPOCHS, shuffle=not isinstance(data, IterableDataset))
    trainer = in_trainer("lightning", notes, net, folder, actions, data=data, **usual | settings)
    return Outcome(flat_weights(net), trainer.global_step, net.seen, calls=notes.calls)
