"""A stalled data loader in the Hugging Face Trainer and in Lightning; the clock is moved."""

import time

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

STEPS, STALLED = 44, 36


class Rows(torch.utils.data.Dataset):
    """Rows of a linear problem; to fetch the first row of a stalled step takes 20 seconds."""

    def __init__(self, monkeypatch, stalled):
        self._real, self._added, self._stalled = time.perf_counter, 0.0, stalled
        monkeypatch.setattr(time, "perf_counter", lambda: self._real() + self._added)
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(2 * STEPS, 4, generator=generator)
        self.fetched = 0

    def wait(self, seconds):
        self._added += seconds

    def __len__(self):
        return len(self._inputs)

    def __getitem__(self, index):
        self.fetched += 1
        if self.fetched == 2 * STALLED - 1 and self._stalled:
            self.wait(20.0)
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


def train_with_hugging_face(folder, rows, pause):
    transformers = pytest.importorskip("transformers")
    from rmetric.integrations.hugging_face import RMetricCallback

    class Pause(transformers.TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            rows.wait(pause)

        def on_save(self, *args, **kwargs):
            rows.wait(pause)

        def on_epoch_begin(self, *args, **kwargs):
            rows.wait(pause)

    callback = RMetricCallback(folder / "run.jsonl")
    evaluated = [{"inputs": torch.ones(4), "labels": torch.ones(())}] * 2
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=STEPS + 8, per_device_train_batch_size=2,
        eval_strategy="steps", eval_steps=29, save_strategy="steps", save_steps=31,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(
        model=Linear(),
        args=arguments,
        train_dataset=rows,
        eval_dataset=evaluated,
        callbacks=[Pause(), callback],
    ).train()
    return callback


def train_with_lightning(folder, rows, pause):
    lightning = pytest.importorskip("lightning.pytorch")
    from rmetric.integrations.lightning import RMetricCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Linear()

        def training_step(self, batch, place):  # it does not call the module's own forward
            return self.model(**batch)["loss"]

        def validation_step(self, batch, place):
            self.log("val_loss", self.model(**batch)["loss"])

        def on_validation_start(self):
            rows.wait(pause)

        def on_train_epoch_start(self):
            rows.wait(pause)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    callback = RMetricCallback(folder / "run.jsonl")
    trainer = lightning.Trainer(
        max_steps=STEPS + 8, callbacks=[callback], accelerator="cpu", logger=False,
        val_check_interval=29, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, num_sanity_val_steps=0, devices=1,
    )  # fmt: skip
    evaluated = [{"inputs": torch.ones(4), "labels": torch.ones(())}] * 2
    loaders = [torch.utils.data.DataLoader(data, batch_size=2) for data in (rows, evaluated)]
    trainer.fit(Module(), *loaders)
    return callback


TRAINERS = [train_with_hugging_face, train_with_lightning]


@pytest.mark.parametrize("train", TRAINERS)
def test_a_stalled_data_loader_is_one_alert(tmp_path, monkeypatch, train):
    callback = train(tmp_path, Rows(monkeypatch, stalled=True), 0.0)
    [(step, reason)] = stalls(callback)
    # Both fetch a batch in advance at most.
    assert STALLED - 1 <= step <= STALLED
    assert "20.0 s waiting for data" in reason


@pytest.mark.parametrize("train", TRAINERS)
def test_evaluations_saves_and_new_epochs_are_no_stall(tmp_path, monkeypatch, train):
    callback = train(tmp_path, Rows(monkeypatch, stalled=False), 30.0)
    assert stalls(callback) == []
    assert callback.monitor.last.data_wait_seconds is not None
