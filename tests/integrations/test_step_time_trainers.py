"""A stalled data loader in the Hugging Face Trainer and in Lightning; the clock is moved."""

import pytest
import torch
from torch import nn

from tests.integrations import trainers
from tests.monitor.training import Clock

STEPS, STALLED = 44, 50


class Rows(torch.utils.data.Dataset):
    """Rows of a linear problem; to fetch the first row of a stalled step takes 20 seconds."""

    def __init__(self, clock):
        self._clock, self.fetched = clock, 0
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(2 * STEPS, 4, generator=generator)

    def __len__(self):
        return len(self._inputs)

    def __getitem__(self, index):
        self.fetched += 1
        if self.fetched == 2 * STALLED - 1:
            self._clock.wait(20.0)
        return {"inputs": self._inputs[index], "labels": self._inputs[index].sum()}


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs, labels):
        return {"loss": (self.linear(inputs)[:, 0] - labels).square().mean()}


def stalls(callback):
    assert callback.monitor.usable, callback.monitor.problem
    return [(a.step, a.reason) for a in callback.monitor.alerts if a.source == "stall"]


EVALUATED = [{"inputs": torch.ones(4), "labels": torch.ones(())}] * 2


def train_with_hugging_face(folder, rows, pause):
    transformers = pytest.importorskip("transformers")

    class Pause(transformers.TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            pause()

        on_save = on_epoch_begin = on_evaluate

    callback = trainers.make_callback("hugging_face", folder / "run.jsonl")
    trainers.hugging_face(
        Linear(), rows, folder, [Pause(), callback], evaluated=EVALUATED, max_steps=STEPS + 8,
        eval_strategy="steps", eval_steps=29, save_strategy="steps", save_steps=31,
    )  # fmt: skip
    return callback


def train_with_lightning(folder, rows, pause):
    lightning = pytest.importorskip("lightning.pytorch")

    class Pause(lightning.Callback):
        def on_validation_start(self, *_):
            pause()

        on_train_epoch_start = on_validation_start

    callback, net = trainers.make_callback("lightning", folder / "run.jsonl"), Linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    trainers.lightning(
        net, rows, folder, [Pause(), callback], evaluated=EVALUATED, max_steps=STEPS + 8,
        val_check_interval=29, optimizers=(optimizer, None),
    )  # fmt: skip
    return callback


@pytest.mark.parametrize("train", [train_with_hugging_face, train_with_lightning])
def test_a_stalled_data_loader_is_one_alert_and_no_evaluation_save_or_new_epoch_is(
    tmp_path, monkeypatch, train
):
    clock = Clock(monkeypatch)
    callback = train(tmp_path, Rows(clock), lambda: clock.wait(30.0))
    [(step, reason)] = stalls(callback)
    # Both fetch a batch in advance at most.
    assert STALLED - 1 <= step <= STALLED
    assert "20.0 s waiting for data" in reason
    assert callback.monitor.last.data_wait_seconds is not None
