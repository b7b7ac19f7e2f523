"""The callback in Lightning's Trainer: what is of this trainer alone; see also test_trainers."""

import math

import pytest

torch = pytest.importorskip("torch")
package = pytest.importorskip("lightning", minversion="2.0")
from torch import nn  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402

from rmetric import LightningCallback  # noqa: E402
from rmetric.logs import read_log  # noqa: E402
from rmetric.monitor.actions import SkipStep  # noqa: E402
from tests.integrations.trainers import EVERYTHING, lightning, records_of  # noqa: E402
from tests.monitor.training import FEATURES, ROWS, make_model, same_weights  # noqa: E402


def module_class(base):
    class Module(base):
        """A small regression; `nan_at` makes the loss of one batch nan."""

        def __init__(self, nan_at=None):
            super().__init__()
            self.net, self.nan_at = make_model(), nan_at

        def loss_of(self, batch):
            inputs, targets = batch
            return mse_loss(self.net(inputs), targets)

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            return loss * math.nan if self.trainer.global_step + 1 == self.nan_at else loss

        def validation_step(self, batch, batch_idx):
            self.log_dict({"val/nll": self.loss_of(batch), "val_loss": 99.0})

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module


Module = module_class(package.LightningModule)


class Manual(Module):
    """Accumulates two batches and clips, all by itself."""

    def __init__(self, clip=None):
        super().__init__()
        self.automatic_optimization = False
        self.clip, self.norms = clip, []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss_of(batch) / 2)
        if batch_idx % 2 == 1:
            squares = sum(p.grad.double().pow(2).sum() for p in self.parameters())
            self.norms.append(float(squares.sqrt()))
            if self.clip:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimisers(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(FEATURES, 1)
        self.mine = []

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss_of(batch)
        self.mine.append(loss.item())
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.zero_grad()
        self.manual_backward(100.0 + self.critic(batch[0]).pow(2).mean())
        second.step()

    def configure_optimizers(self):
        nets = (self.net, self.critic)
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets], []


def data(batches=50, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS * batches, FEATURES + 1, generator=generator)
    return torch.utils.data.TensorDataset(rows[:, :-1], rows[:, -1:])


def fit(module, folder, callbacks=(), **settings):
    torch.manual_seed(7)
    usual = dict(batch_size=ROWS, evaluated=data(3, seed=2), max_steps=6, limit_val_batches=0)
    lightning(module, data(), folder, callbacks, **usual | settings)
    return module


def watch(folder, **settings):
    return LightningCallback(folder / "run.jsonl", **settings)


def test_a_module_that_clips_in_its_own_way_is_left_alone(tmp_path):
    class OwnClipping(Module):
        def configure_gradient_clipping(self, optimizer, **settings):
            for p in self.parameters():
                p.grad.clamp_(-0.01, 0.01)

    plain = fit(OwnClipping(), tmp_path)
    seen = fit(OwnClipping(), tmp_path, [watch(tmp_path)])
    assert same_weights(plain, seen)
    assert records_of(tmp_path)[0].gradient_norm > 0.2


def test_the_class_itself_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"is a class: pass callbacks=\[LightningCallback\(\)\]"):
        fit(Module(), tmp_path, [LightningCallback])


def test_a_checkpoint_of_the_class_under_its_name_before_is_resumed():
    assert LightningCallback().state_key == "RMetricCallback"
    assert type("Own", (LightningCallback,), {})().state_key == "Own"


@pytest.mark.parametrize("clip", [None, 0.1])
def test_manual_optimisation_is_watched_too(tmp_path, clip):
    plain = fit(Manual(clip), tmp_path)
    seen = fit(Manual(clip), tmp_path, [watch(tmp_path, config=EVERYTHING)])
    assert same_weights(plain, seen)
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r.gradient_norm for r in records] == pytest.approx(seen.norms, rel=1e-6)
    assert all(0.3 < r.training_loss < 3.0 for r in records)
    assert len(records[-1].worker_gradient_norms) == 2
    layers = records[-1].layer_gradient_norms.values()
    whole = math.sqrt(sum(norm * norm for norm in layers))
    assert whole == pytest.approx(records[-1].gradient_norm, rel=1e-5)


def test_of_several_optimisers_the_first_is_watched(tmp_path):
    module = fit(TwoOptimisers(), tmp_path, [watch(tmp_path)], max_steps=8)
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4]
    assert [r.training_loss for r in records] == pytest.approx(module.mine, rel=1e-6)


def test_the_validation_loss_may_have_another_name(tmp_path):
    callback = watch(tmp_path, validation_loss="val/nll")
    fit(Module(), tmp_path, [callback], limit_val_batches=1, val_check_interval=3)
    validated = [r.validation_loss for r in records_of(tmp_path) if r.validation_loss]
    assert len(validated) == 2
    assert max(validated) < 10.0


def test_validating_adds_nothing_fitting_on_goes_on_and_a_new_trainer_begins_anew(tmp_path):
    callback, module = watch(tmp_path), Module()
    settings = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = package.Trainer(max_steps=3, accelerator="cpu", callbacks=[callback], **settings)
    loader = torch.utils.data.DataLoader(data(), ROWS)
    trainer.validate(module, loader, verbose=False)
    assert callback.monitor is None
    trainer.fit(module, loader)
    before = (tmp_path / "run.jsonl").read_bytes()
    trainer.validate(module, loader, verbose=False)
    assert (tmp_path / "run.jsonl").read_bytes() == before
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader)
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    fit(Module(), tmp_path, [callback], max_steps=3)
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3]
    assert len(read_log(tmp_path / "run.jsonl.2").records) == 6


def test_a_step_without_a_loss_is_a_step_all_the_same(tmp_path):
    class SkipsOne(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    plain, seen = fit(SkipsOne(), tmp_path), fit(SkipsOne(), tmp_path, [watch(tmp_path)])
    assert same_weights(plain, seen)
    assert [r.step for r in records_of(tmp_path) if r.training_loss is None] == [3]


def test_the_other_name_of_lightning_takes_the_same_callback(tmp_path):
    other = pytest.importorskip("pytorch_lightning", minversion="2.0")
    module = module_class(other.LightningModule)(nan_at=4)
    callback = watch(tmp_path, actions=[SkipStep()])
    fit(module, tmp_path, [callback], package="pytorch_lightning")
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert math.isnan(records[3].training_loss)
