"""The callback in real trainings with Lightning: it sees the raw step and changes nothing."""

import json
import logging
import math
import warnings

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning", minversion="2.0")
from torch import nn  # noqa: E402
from torch.nn.functional import mse_loss, scaled_dot_product_attention  # noqa: E402

from rmetric.integrations.lightning import RMetricCallback  # noqa: E402
from rmetric.logs import read_log  # noqa: E402
from rmetric.monitor import MonitorConfig  # noqa: E402
from rmetric.monitor.actions import SkipStep, Stop  # noqa: E402
from rmetric.monitor.pending import Pending  # noqa: E402
from tests.monitor.training import FEATURES, ROWS, make_model, same_weights  # noqa: E402

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
warnings.filterwarnings("ignore", module="pytorch_lightning")

EVERYTHING = MonitorConfig(workers_every=1, layers_every=1, forward_every=1, probe_every=1)


def module_class(base):
    class Module(base):
        """A small regression; `nan_at` makes the loss of one batch nan."""

        def __init__(self, nan_at=None):
            super().__init__()
            self.net = make_model()
            self.nan_at = nan_at

        def loss_of(self, batch):
            inputs, targets = batch
            return mse_loss(self.net(inputs), targets)

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            return loss * math.nan if self.trainer.global_step + 1 == self.nan_at else loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss_of(batch))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module


Module = module_class(lightning.LightningModule)


class Independent(Module):
    """Computes each step's loss and gradient norm for itself, the plain way."""

    def __init__(self):
        super().__init__()
        self.net.eval()  # no dropout: the same loss twice
        self.seen, self.micro = [], []

    def training_step(self, batch, batch_idx):
        self.net.eval()
        loss = super().training_step(batch, batch_idx)
        self.micro.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        squares = sum(p.grad.double().pow(2).sum() for p in self.parameters())
        self.seen.append((sum(self.micro) / len(self.micro), float(squares.sqrt())))
        self.micro = []


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
            self.norms.append(
                float(sum(p.grad.double().pow(2).sum() for p in self.parameters()).sqrt())
            )
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


def loader(batches=200, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS * batches, FEATURES + 1, generator=generator)
    data = torch.utils.data.TensorDataset(rows[:, :-1], rows[:, -1:])
    return torch.utils.data.DataLoader(data, ROWS)


def make_trainer(callbacks=(), trainer=lightning.Trainer, **settings):
    arguments = dict(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    return trainer(callbacks=list(callbacks), **arguments | settings)


def fit(module, callbacks=(), *, batches=200, ckpt_path=None, **settings):
    trainer = make_trainer(callbacks, **settings)
    torch.manual_seed(7)
    trainer.fit(module, loader(batches), loader(3, seed=2), ckpt_path=ckpt_path)
    return module


def watch(folder, **settings):
    return RMetricCallback(folder / "run.jsonl", **settings)


def records_of(folder):
    return read_log(folder / "run.jsonl").records


def entries_of(folder):
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def is_finite(module):
    return all(bool(p.isfinite().all()) for p in module.parameters())


# -- training is the same with it and without


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_weights_come_out_bit_equal(tmp_path, clip, accumulation, precision):
    settings = dict(
        gradient_clip_val=clip, accumulate_grad_batches=accumulation, precision=precision
    )
    plain = fit(Module(), **settings)
    module = Module()
    fixed = next(iter(loader(1, seed=5)))
    callback = watch(tmp_path, config=EVERYTHING, probe=lambda: module.loss_of(fixed))
    seen = fit(module, [callback], **settings)
    assert callback.monitor.problem is None
    assert same_weights(plain, seen)
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record.learning_rate == 1e-2
        assert record.update_norm
        assert record.probe_loss
        if record.step > 1:  # a first forward pass may compile
            assert record.activation_headroom > 100
        assert len(record.worker_gradient_norms or ()) == (4 if accumulation == 4 else 0)


# -- what can never be right, and a slip


@pytest.mark.parametrize("make", [lambda kind: kind, lambda kind: kind()], ids=["class", "object"])
def test_the_callback_of_the_other_trainer_is_refused(make):
    pytest.importorskip("transformers")
    from rmetric.integrations.hugging_face import RMetricCallback as OfTheTrainer

    with pytest.raises(TypeError, match=r"pass that of rmetric\.integrations\.lightning"):
        fit(Module(), [make(OfTheTrainer)])


def test_the_class_itself_is_refused():
    with pytest.raises(TypeError, match=r"is a class: pass callbacks=\[RMetricCallback\(\)\]"):
        fit(Module(), [RMetricCallback])


def test_an_optimizer_of_another_model_is_told(tmp_path):
    class OfAnother(Module):
        def configure_optimizers(self):
            return torch.optim.AdamW(make_model().parameters(), lr=1e-2)

    callback = watch(tmp_path)
    fit(OfAnother(), [callback])
    assert callback.monitor.protocol.told == {"other_model"}


@pytest.mark.parametrize("every", [1, 3], ids=["evaluated twice", "evaluated once"])
def test_a_validation_loss_that_never_comes_is_told_once(tmp_path, every, caplog):
    callback = watch(tmp_path, validation_loss="valid/loss")
    settings = dict(limit_val_batches=1.0, check_val_every_n_epoch=every, num_sanity_val_steps=2)
    fit(Module(), [callback], batches=2, **settings)
    [message] = [m for m in caplog.messages if "had the metric" in m]
    assert "'valid/loss'" in message
    assert "val_loss" in message


# -- what is logged is the raw step


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_loss_and_norm_are_the_raw_ones(tmp_path, clip, accumulation):
    module = fit(
        Independent(),
        [watch(tmp_path)],
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulation,
    )
    records = records_of(tmp_path)
    losses, norms = zip(*module.seen, strict=True)
    assert [r.training_loss for r in records] == pytest.approx(losses, rel=1e-6)
    assert [r.gradient_norm for r in records] == pytest.approx(norms, rel=1e-6)
    assert min(norms) > 0.1  # so that clipping had something to do


def test_a_step_that_an_epoch_cuts_short_has_its_whole_loss(tmp_path):
    module = fit(Independent(), [watch(tmp_path)], accumulate_grad_batches=4, batches=5)
    assert [r.training_loss for r in records_of(tmp_path)] == pytest.approx(
        [loss for loss, _ in module.seen], rel=1e-6
    )


def test_a_module_that_clips_in_its_own_way_is_left_alone(tmp_path):
    class OwnClipping(Module):
        def configure_gradient_clipping(self, optimizer, **settings):
            for p in self.parameters():
                p.grad.clamp_(-0.01, 0.01)

    plain = fit(OwnClipping())
    seen = fit(OwnClipping(), [watch(tmp_path)])
    assert same_weights(plain, seen)
    assert records_of(tmp_path)[0].gradient_norm > 0.2


@pytest.mark.parametrize("clip", [None, 0.1])
def test_manual_optimisation_is_watched_too(tmp_path, clip):
    plain = fit(Manual(clip))
    seen = fit(Manual(clip), [watch(tmp_path, config=EVERYTHING)])
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
    module = fit(TwoOptimisers(), [watch(tmp_path)], max_steps=8)
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4]
    assert [r.training_loss for r in records] == pytest.approx(module.mine, rel=1e-6)


def test_an_evaluation_belongs_to_its_step_and_the_sanity_check_to_none(tmp_path):
    class Remembers(Module):
        validated = ()

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                losses = [float(self.loss_of(batch)) for batch in loader(3, seed=2)]
                self.validated = (*self.validated, sum(losses) / 3)

    module = fit(
        Remembers(),
        [watch(tmp_path)],
        limit_val_batches=3,
        val_check_interval=2,
        num_sanity_val_steps=2,
    )
    records = {r.step: r.validation_loss for r in records_of(tmp_path) if r.validation_loss}
    assert list(records) == [2, 4, 6]
    assert list(records.values()) == pytest.approx(module.validated, rel=1e-6)


def test_the_validation_loss_may_have_another_name(tmp_path):
    class OtherName(Module):
        def validation_step(self, batch, batch_idx):
            self.log_dict({"val/nll": self.loss_of(batch), "val_loss": 99.0})

    callback = watch(tmp_path, validation_loss="val/nll")
    fit(OtherName(), [callback], limit_val_batches=1, val_check_interval=3)
    validated = [r.validation_loss for r in records_of(tmp_path) if r.validation_loss]
    assert len(validated) == 2
    assert max(validated) < 10.0


def test_gradient_checkpointing_and_attention_are_left_alone(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(FEATURES, 3 * FEATURES)

        def forward(self, x):
            return scaled_dot_product_attention(*self.project(x).chunk(3, dim=-1))

    class Attends(Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Attention() for _ in range(2))

        def loss_of(self, batch):
            hidden = batch[0][None, None]
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return mse_loss(self.net(hidden[0, 0]), batch[1])

    plain = fit(Attends())
    callback = watch(tmp_path, config=EVERYTHING)
    seen = fit(Attends(), [callback])
    assert callback.monitor.problem is None
    assert same_weights(plain, seen)
    assert records_of(tmp_path)[-1].attention_logit_max is not None


def half_precision():
    kind = lightning.pytorch.plugins.precision.MixedPrecision
    return kind("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))


def test_under_a_gradient_scaler_loss_and_norm_are_those_without_its_factor(tmp_path):
    plain = fit(Module(), plugins=[half_precision()], accumulate_grad_batches=2)
    callback = watch(tmp_path, config=EVERYTHING)
    seen = fit(Module(), [callback], plugins=[half_precision()], accumulate_grad_batches=2)
    assert callback.monitor.problem is None
    assert same_weights(plain, seen)
    fit(Module(), [watch(tmp_path / "full", config=EVERYTHING)], accumulate_grad_batches=2)
    for half, full in zip(records_of(tmp_path), records_of(tmp_path / "full"), strict=True):
        assert half.training_loss == pytest.approx(full.training_loss, rel=0.05)
        assert half.gradient_norm == pytest.approx(full.gradient_norm, rel=0.05)
        assert half.worker_gradient_norms == pytest.approx(full.worker_gradient_norms, rel=0.05)


def test_a_step_is_skipped_under_a_gradient_scaler_too(tmp_path):
    callback = watch(tmp_path, actions=[SkipStep()])
    module = fit(Module(nan_at=4), [callback], plugins=[half_precision()], max_steps=8)
    assert is_finite(module)
    assert [alert.step for alert in callback.monitor.alerts] == [4]
    assert all(r.update_norm > 0.0 for r in records_of(tmp_path) if r.step != 4)


# -- a nan at step 60


def test_a_nan_at_step_60_reaches_the_weights_and_is_in_the_log(tmp_path):
    module = fit(Module(nan_at=60), [watch(tmp_path)], max_steps=64)
    assert not is_finite(module)
    records = records_of(tmp_path)
    assert math.isfinite(records[58].training_loss)
    assert math.isnan(records[59].training_loss)
    assert math.isnan(records[59].gradient_norm)
    alerts = [entry for entry in entries_of(tmp_path) if entry["event"] == "ALERT"]
    assert [(a["step"], a["source"]) for a in alerts] == [(60, "non_finite")]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_skipping_the_step_keeps_the_weights_finite(tmp_path, clip):
    callback = watch(tmp_path, actions=[SkipStep()])
    module = fit(Module(nan_at=60), [callback], max_steps=64, gradient_clip_val=clip)
    assert is_finite(module)
    records = records_of(tmp_path)
    assert math.isnan(records[59].training_loss)
    assert records[59].update_norm == 0.0
    assert all(math.isfinite(r.training_loss) for r in records[60:])
    assert all(r.update_norm > 0.0 for r in records[60:])


def test_stop_ends_the_training(tmp_path):
    callback = watch(tmp_path, actions=[SkipStep(), Stop()])
    trainer = make_trainer([callback], max_steps=64)
    trainer.fit(Module(nan_at=4), loader())
    assert trainer.global_step == 4
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4]


# -- a checkpoint, and the way on from it


class RaisesAt(lightning.pytorch.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            raise RuntimeError("the machine is gone")


def lines_without_time(folder):
    entries = [entry for entry in entries_of(folder) if entry["event"] == "METRICS"]
    return [
        {k: v for k, v in entry.items() if not k.endswith(("_seconds", "memory"))}
        for entry in entries
    ]


def without_dropout(module):
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


@pytest.mark.parametrize("every", [{"every_n_train_steps": 6}, {"every_n_epochs": 1}])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, every):
    config = MonitorConfig(detectors=("loss_z_score",), workers_every=2, layers_every=3)

    def run(name, *more, ckpt_path=None):
        folder = tmp_path / name
        saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, "last", **every)
        callbacks = [watch(folder, config=config), *more, saves]
        module = without_dropout(Module())
        settings = dict(enable_checkpointing=True, limit_val_batches=3, val_check_interval=6)
        fit(
            module,
            callbacks,
            batches=12,  # an epoch is six steps
            max_steps=12,
            accumulate_grad_batches=2,
            ckpt_path=ckpt_path,
            **settings,
        )
        return module, callbacks[0]

    whole, _ = run("whole")
    with pytest.raises(RuntimeError, match="the machine is gone"):
        run("broken", RaisesAt(8))
    assert [r.step for r in records_of(tmp_path / "broken")] == list(range(1, 9))
    resumed, callback = run("broken", ckpt_path=str(tmp_path / "broken" / "last.ckpt"))
    assert callback.monitor.problem is None
    assert same_weights(whole, resumed)
    assert lines_without_time(tmp_path / "broken") == lines_without_time(tmp_path / "whole")
    assert [line["step"] for line in lines_without_time(tmp_path / "broken")] == list(range(1, 13))


def test_a_checkpoint_of_a_run_that_was_not_watched_is_gone_on_from(tmp_path):
    trainer = make_trainer(max_steps=3)
    trainer.fit(Module(), loader())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    fit(Module(), [watch(tmp_path)], ckpt_path=tmp_path / "three.ckpt")
    assert [r.step for r in records_of(tmp_path)] == [4, 5, 6]


def test_fitting_on_with_the_same_trainer_goes_on_in_the_log(tmp_path):
    trainer = make_trainer([watch(tmp_path)], max_steps=3)
    module = Module()
    trainer.fit(module, loader())
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader())
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_new_trainer_begins_anew(tmp_path):
    callback = watch(tmp_path)
    fit(Module(), [callback], max_steps=4)
    fit(Module(), [callback], max_steps=3)
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3]
    assert len(read_log(tmp_path / "run.jsonl.1").records) == 4


# -- it never gets in the way


def test_an_exception_in_the_monitor_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    def fails(self):
        raise ValueError("this is a bug")

    plain = fit(Module())
    monkeypatch.setattr(Pending, "read", fails)
    callback = watch(tmp_path)
    seen = fit(Module(), [callback])
    assert same_weights(plain, seen)
    assert "this is a bug" in callback.monitor.problem
    assert len([r for r in caplog.records if r.name == "rmetric"]) == 1


def test_validating_outside_of_a_training_adds_nothing(tmp_path):
    callback = watch(tmp_path)
    trainer = make_trainer([callback], limit_val_batches=2)
    trainer.validate(Module(), loader(3, seed=2), verbose=False)
    assert callback.monitor is None
    trainer.fit(Module(), loader())
    before = (tmp_path / "run.jsonl").read_bytes()
    trainer.validate(Module(), loader(3, seed=2), verbose=False)
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_a_training_that_raises_leaves_a_whole_log_and_no_hook(tmp_path):
    module = Module()
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(module, [watch(tmp_path), RaisesAt(3)])
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not any(p._backward_hooks for p in module.parameters())


def test_a_step_without_a_loss_is_a_step_all_the_same(tmp_path):
    class SkipsOne(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    plain, seen = fit(SkipsOne()), fit(SkipsOne(), [watch(tmp_path)])
    assert same_weights(plain, seen)
    assert [r.training_loss is None for r in records_of(tmp_path)] == [
        False, False, True, False, False, False,
    ]  # fmt: skip


def test_the_other_name_of_lightning_takes_the_same_callback(tmp_path):
    other = pytest.importorskip("pytorch_lightning", minversion="2.0")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    callback = watch(tmp_path, actions=[SkipStep()])
    module = module_class(other.LightningModule)(nan_at=4)
    fit(module, [callback], trainer=other.Trainer)
    assert is_finite(module)
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert math.isnan(records[3].training_loss)


def test_what_is_no_action_is_refused_at_once():
    with pytest.raises(TypeError, match="no action"):
        RMetricCallback(actions=["stop"])
