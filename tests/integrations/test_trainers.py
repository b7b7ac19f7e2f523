"""The callbacks in trainings with the real trainers: they see the raw step and change nothing."""

import math

import pytest
import torch
from torch import nn

import rmetric
from rmetric.monitor import MonitorConfig
from rmetric.monitor.actions import SkipStep, Stop
from rmetric.monitor.pending import Pending
from tests.integrations.trainers import CALLBACKS, EVERYTHING, TRAINERS, make_callback, records_of
from tests.monitor.training import FEATURES, ROWS, entries, make_model, same_weights, without_time

pytest.importorskip("transformers", minversion="4.50")
pytest.importorskip("lightning", minversion="2.0")
both = pytest.mark.parametrize("trainer", TRAINERS)


class Net(nn.Module):
    """A small regression that computes each step's loss and gradient norm for itself.

    Attributes:
        seen: loss and norm of each step, before it is clipped.
        evaluated: the losses of evaluations.
    """

    def __init__(self, nan_at=None, raises_at=None, dropout=True, other=None):
        super().__init__()
        self.net = make_model()
        if not dropout:
            self.net[2].p = 0.0
        self.nan_at, self.raises_at = nan_at, raises_at
        self.micro, self.squares, self.passes, self.seen, self.evaluated = [], {}, 0, [], []
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.note)
        self.optimizer = torch.optim.AdamW((other or self).parameters(), lr=1e-2)
        self.optimizer.register_step_post_hook(self.note_step)  # Lightning: backward is inside

    def note(self, parameter):
        self.squares[parameter] = float(parameter.grad.double().pow(2).sum())

    def note_step(self, *_):
        self.seen.append((sum(self.micro) / len(self.micro), sum(self.squares.values()) ** 0.5))
        self.micro = []

    def forward(self, inputs, labels):
        loss = nn.functional.mse_loss(self.net(inputs).float(), labels)
        if not self.training:
            self.evaluated.append(loss.item())
            return {"loss": loss}
        self.passes += 1
        if self.passes == self.raises_at:
            raise RuntimeError("the machine is gone")
        self.micro.append(loss.item())
        return {"loss": loss * math.nan if self.passes == self.nan_at else loss}


def rows(batches, seed=1):
    numbers = torch.randn(
        ROWS * batches, FEATURES + 1, generator=torch.Generator().manual_seed(seed)
    )
    return [{"inputs": row[:-1], "labels": row[-1:]} for row in numbers]


def fit(
    trainer, folder, callbacks=(), net=None, *, max_steps=6, clip=None, accumulation=1,
    batches=100, evaluate=None, save=None, resume=False, **settings,
):  # fmt: skip
    """The net and the trainer; evaluates and saves every so many steps, or each `epoch`."""
    net = net or Net()
    resume_from = None
    if trainer == "hugging_face":
        own = dict(max_grad_norm=clip or 0.0, gradient_accumulation_steps=accumulation)
        own |= dict(logging_steps=1, per_device_eval_batch_size=ROWS)
        own |= dict(eval_strategy="steps", eval_steps=evaluate) if evaluate else {}
        own |= dict(save_strategy="epoch" if save == "epoch" else "steps") if save else {}
        own |= dict(save_steps=save) if isinstance(save, int) else {}
        resume_from = resume or None
    else:
        own = dict(gradient_clip_val=clip, accumulate_grad_batches=accumulation)
        own |= dict(limit_val_batches=3 if evaluate else 0, num_sanity_val_steps=2)
        own |= dict(val_check_interval=evaluate * accumulation) if evaluate else {}
        if save:
            from lightning.pytorch.callbacks import ModelCheckpoint

            every = dict(every_n_epochs=1) if save == "epoch" else dict(every_n_train_steps=save)
            callbacks = [*callbacks, ModelCheckpoint(folder / "saved", "last", **every)]
            own["enable_checkpointing"] = True
            resume_from = folder / "saved" / "last.ckpt" if resume else None
    torch.manual_seed(7)
    done = TRAINERS[trainer](
        net, rows(batches), folder, callbacks, optimizers=(net.optimizer, None), batch_size=ROWS,
        evaluated=rows(3, seed=2), max_steps=max_steps, resume=resume_from, **own | settings,
    )  # fmt: skip
    return net, done


def watch(trainer, folder, **settings):
    return make_callback(trainer, folder / "run.jsonl", **settings)


@both
@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_weights_come_out_bit_equal(tmp_path, trainer, clip, accumulation, precision):
    settings = dict(clip=clip, accumulation=accumulation, precision=precision)
    plain, _ = fit(trainer, tmp_path, **settings)
    net, [fixed] = Net(), torch.utils.data.DataLoader(rows(1, seed=5), ROWS)
    callback = watch(trainer, tmp_path, config=EVERYTHING, probe=lambda: net(**fixed)["loss"])
    fit(trainer, tmp_path, [callback], net, **settings)
    assert callback.monitor.problem is None
    assert same_weights(plain, net)
    assert plain.seen == net.seen
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record.learning_rate
        assert record.update_norm
        assert record.probe_loss
        if record.step > 1:  # a first forward pass may compile
            assert record.activation_headroom > 100
        assert len(record.worker_gradient_norms or ()) == (4 if accumulation == 4 else 0)
    assert records[0].learning_rate == 1e-2


@both
@pytest.mark.parametrize("make", [lambda kind: kind, lambda kind: kind()], ids=["class", "object"])
def test_the_callback_of_the_other_trainer_is_refused(tmp_path, trainer, make):
    [other] = CALLBACKS.keys() - {trainer}
    with pytest.raises(TypeError, match=rf"takes rmetric\.{CALLBACKS[trainer]}"):
        fit(trainer, tmp_path, [make(getattr(rmetric, CALLBACKS[other]))])


@both
@pytest.mark.parametrize(
    "settings",
    [{"actions": [SkipStep]}, {"actions": SkipStep()}, {"config": {}}, {"actions": ["stop"]},
     {"about": {"a": torch}}, {"hardware": 5}],
    ids=["a class", "no list", "no config", "no action", "no JSON", "no source"],
)  # fmt: skip
def test_wrong_settings_are_refused_when_it_is_made(trainer, settings):
    words = r"SkipStep|config is {}|not an action|about is|hardware is"
    with pytest.raises(TypeError, match=words):
        make_callback(trainer, **settings)


@both
def test_hardware_events_that_cannot_be_had_cost_themselves_alone(tmp_path, trainer, caplog):
    callback = watch(trainer, tmp_path, hardware=lambda: 1 / 0)
    fit(trainer, tmp_path, [callback])
    assert callback.monitor.last.step == 6
    assert "rmetric: going on without hardware events: division by zero" in caplog.messages


@both
def test_an_optimizer_of_another_model_is_warned_about(tmp_path, trainer):
    callback = watch(trainer, tmp_path)
    fit(trainer, tmp_path, [callback], Net(other=make_model()))
    assert callback.monitor.protocol.slips == {"other_model"}


@both
@pytest.mark.parametrize("evaluate", [2, 6], ids=["evaluated three times", "evaluated once"])
def test_a_validation_loss_that_never_comes_is_logged_once(tmp_path, trainer, evaluate, caplog):
    callback = watch(trainer, tmp_path, validation_loss="no/loss")
    fit(trainer, tmp_path, [callback], evaluate=evaluate)
    [message] = [m for m in caplog.messages if "had the metric" in m]
    assert "'no/loss'" in message
    assert {"hugging_face": "eval_loss", "lightning": "val_loss"}[trainer] in message
    assert callback.monitor.protocol.slips == {"validation_loss"}


@both
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_loss_and_norm_are_the_raw_ones(tmp_path, trainer, clip, accumulation):
    batches = 5 if accumulation == 4 else 100  # each second step is then of one batch
    net, _ = fit(
        trainer, tmp_path, [watch(trainer, tmp_path)],
        clip=clip, accumulation=accumulation, batches=batches,
    )  # fmt: skip
    records = records_of(tmp_path)
    losses, norms = zip(*net.seen, strict=True)
    assert [r.training_loss for r in records] == pytest.approx(losses, rel=1e-6)
    assert [r.gradient_norm for r in records] == pytest.approx(norms, rel=1e-6)
    assert min(norms) > 0.1  # so that clipping had something to do


@both
def test_an_evaluation_belongs_to_its_step_and_a_sanity_check_to_none(tmp_path, trainer):
    net, _ = fit(trainer, tmp_path, [watch(trainer, tmp_path)], evaluate=2)
    validated = {r.step: r.validation_loss for r in records_of(tmp_path) if r.validation_loss}
    means = torch.tensor(net.evaluated[-9:]).reshape(3, 3).mean(dim=1)
    assert list(validated) == [2, 4, 6]
    assert list(validated.values()) == pytest.approx(means.tolist(), rel=1e-6)


@both
def test_under_a_gradient_scaler_loss_and_norm_are_those_without_its_factor(tmp_path, trainer):
    settings = dict(accumulation=2, max_steps=8, clip=0.1)
    plain, _ = fit(trainer, tmp_path, precision="fp16", **settings)
    callback = watch(trainer, tmp_path, config=EVERYTHING)
    seen, _ = fit(trainer, tmp_path, [callback], precision="fp16", **settings)
    assert callback.monitor.problem is None
    assert same_weights(plain, seen)
    folder = tmp_path / "full"
    full, _ = fit(trainer, folder, [watch(trainer, folder, config=EVERYTHING)], **settings)
    assert not same_weights(plain, full)
    for half, whole in zip(records_of(tmp_path), records_of(folder), strict=True):
        assert half.training_loss == pytest.approx(whole.training_loss, rel=0.05)
        assert half.gradient_norm == pytest.approx(whole.gradient_norm, rel=0.05)
        assert half.worker_gradient_norms == pytest.approx(whole.worker_gradient_norms, rel=0.05)


@both
@pytest.mark.parametrize("precision", ["32", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_skipping_the_step_keeps_the_weights_finite(tmp_path, trainer, clip, precision):
    callback = watch(trainer, tmp_path, actions=[SkipStep()])
    settings = dict(clip=clip, precision=precision, max_steps=64)
    net, _ = fit(trainer, tmp_path, [callback], Net(nan_at=60), **settings)
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    records = records_of(tmp_path)
    assert math.isnan(records[59].training_loss)
    assert not records[59].update_norm  # None where a scaler leaves the step out
    assert all(math.isfinite(r.training_loss) for r in records[60:])
    assert all(r.update_norm > 0.0 for r in records[60:])
    assert [alert.step for alert in callback.monitor.alerts] == [60]


@both
def test_stop_ends_the_training(tmp_path, trainer):
    callback = watch(trainer, tmp_path, actions=[SkipStep(), Stop()])
    _, done = fit(trainer, tmp_path, [callback], Net(nan_at=4), max_steps=64)
    assert (done.state if trainer == "hugging_face" else done).global_step == 4
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4]


@both
@pytest.mark.parametrize("save", [6, "epoch"])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, trainer, save):
    config = MonitorConfig(detectors=("loss_z_score",), workers_every=2, layers_every=3)
    settings = dict(max_steps=12, accumulation=2, evaluate=3, save=save)
    settings["batches"] = 12  # an epoch is six steps
    if trainer == "hugging_face":
        settings["restore_callback_states_from_checkpoint"] = save == "epoch"

    def run(name, net, **more):
        callback = watch(trainer, tmp_path / name, config=config)
        fit(trainer, tmp_path / name, [callback], net, **settings, **more)
        return net, callback

    whole, _ = run("whole", Net(dropout=False))
    with pytest.raises(RuntimeError, match="the machine is gone"):
        run("broken", Net(dropout=False, raises_at=17))
    assert [r.step for r in records_of(tmp_path / "broken")] == list(range(1, 9))
    resumed, callback = run("broken", Net(dropout=False), resume=True)
    assert callback.monitor.problem is None
    assert same_weights(whole, resumed)
    log, other = (tmp_path / name / "run.jsonl" for name in ("broken", "whole"))
    assert without_time(log, "METRICS") == without_time(other, "METRICS")
    assert [line["step"] for line in entries(log, "METRICS")] == list(range(1, 13))
    assert len(entries(log, "EXPERIMENT_START")) == 1
    times = [r.time for r in records_of(tmp_path / "broken")]
    assert times == sorted(times)


@both
def test_a_checkpoint_of_a_run_that_was_not_watched_is_gone_on_from(tmp_path, trainer):
    fit(trainer, tmp_path, max_steps=3, save=3)
    fit(trainer, tmp_path, [watch(trainer, tmp_path)], save=3, resume=True)
    assert [r.step for r in records_of(tmp_path)] == [4, 5, 6]


@both
def test_an_exception_in_the_monitor_does_not_end_the_training(
    tmp_path, trainer, monkeypatch, caplog
):
    def fails(self):
        raise ValueError("this is a bug")

    plain, _ = fit(trainer, tmp_path)
    monkeypatch.setattr(Pending, "read", fails)
    callback = watch(trainer, tmp_path)
    seen, _ = fit(trainer, tmp_path, [callback])
    assert same_weights(plain, seen)
    assert not callback.monitor.usable
    assert "this is a bug" in callback.monitor.problem
    assert len([r for r in caplog.records if r.name == "rmetric"]) == 1


@both
def test_a_training_that_raises_leaves_a_whole_log_and_no_hook(tmp_path, trainer):
    net = Net(raises_at=4)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(trainer, tmp_path, [watch(trainer, tmp_path)], net)
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    assert not any(p._backward_hooks for p in net.parameters())
