"""The callback in trainings with the real Trainer: it sees the raw step and changes nothing."""

import json
import logging
import math
import traceback
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.50")
from accelerate.state import AcceleratorState  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from rmetric import RMetric, RMetricConfig  # noqa: E402
from rmetric.integrations.hugging_face import RMetricCallback  # noqa: E402
from rmetric.integrations.hugging_face_trainer import loop_methods  # noqa: E402
from rmetric.logs import read_log  # noqa: E402
from rmetric.monitor import MonitorConfig  # noqa: E402
from rmetric.monitor.actions import SkipStep, Stop  # noqa: E402
from rmetric.monitor.pending import Pending  # noqa: E402
from tests.monitor.training import same_weights  # noqa: E402

torch.set_num_threads(1)
logging.getLogger("accelerate").setLevel(logging.ERROR)

VOCABULARY, LENGTH = 32, 12
FIVE = int(transformers.__version__.split(".")[0]) >= 5
#: Error of the loss in the Trainer's own log, which transformers 4 rounds to four digits.
STOCK = 4e-6 if FIVE else 6e-5
EVERYTHING = MonitorConfig(workers_every=1, layers_every=1, forward_every=1, probe_every=1)


def make_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def examples(count, seed=1, masked=False):
    """Random text; with `masked` each example counts another number of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        if masked:
            labels[: 1 + number % (LENGTH - 2)] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def make_trainer(folder, callbacks=(), *, kind=Trainer, model=None, masked=False, **settings):
    arguments = dict(
        output_dir=str(folder / "out"),
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return kind(
        model=model or make_model(),
        args=TrainingArguments(**arguments | settings),
        train_dataset=examples(200, masked=masked),
        eval_dataset=examples(4, seed=2),
        callbacks=list(callbacks),
    )


def train(folder, callbacks=(), **settings):
    trainer = make_trainer(folder, callbacks, **settings)
    trainer.train()
    return trainer


def watch(folder, **settings):
    return RMetricCallback(folder / "run.jsonl", **settings)


def records_of(folder):
    return read_log(folder / "run.jsonl").records


def entries_of(folder):
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def stock_log(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


class NanAt(TrainerCallback):
    """The logits of one step are nan."""

    def __init__(self, step):
        self.step, self.handle = step, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.handle = model.lm_head.register_forward_hook(lambda *io: io[-1] * math.nan)

    def on_step_end(self, *args, **kwargs):
        if self.handle is not None:
            self.handle.remove()


class RaisesAt(TrainerCallback):
    def __init__(self, step, hook="on_step_end"):
        self.step = step
        setattr(self, hook, self.fail)

    def fail(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("the machine is gone")


def is_finite(model):
    return all(bool(p.isfinite().all()) for p in model.parameters())


# -- training is the same with it and without


@pytest.mark.long
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_weights_come_out_bit_equal(tmp_path, clip, accumulation, bf16):
    settings = dict(max_grad_norm=clip, gradient_accumulation_steps=accumulation, bf16=bf16)
    plain = train(tmp_path, **settings)
    model = make_model()
    fixed = {name: row[None] for name, row in examples(1, seed=5)[0].items()}
    callback = watch(tmp_path, config=EVERYTHING, probe=lambda: model(**fixed).loss)
    seen = train(tmp_path, [callback], model=model, **settings)
    assert callback.monitor.problem is None
    assert same_weights(plain.model, seen.model)
    assert stock_log(plain, "loss") == stock_log(seen, "loss")
    records = records_of(tmp_path)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record.learning_rate
        assert record.update_norm
        assert record.probe_loss
        if record.step > 1:  # a first forward pass may compile
            assert record.activation_headroom > 100
            assert record.attention_logit_max is not None
        assert len(record.worker_gradient_norms or ()) == (4 if accumulation == 4 else 0)


def test_gradient_checkpointing_is_left_alone(tmp_path):
    plain = train(tmp_path, gradient_checkpointing=True)
    callback = watch(tmp_path, config=EVERYTHING)
    seen = train(tmp_path, [callback], gradient_checkpointing=True)
    assert callback.monitor.problem is None
    assert same_weights(plain.model, seen.model)
    assert records_of(tmp_path)[-1].attention_logit_max is not None


# -- what can never be right, and a slip


@pytest.mark.parametrize("make", [lambda kind: kind, lambda kind: kind()], ids=["class", "object"])
def test_the_callback_of_lightning_is_refused(tmp_path, make):
    pytest.importorskip("lightning")
    from rmetric.integrations.lightning import RMetricCallback as OfLightning

    with pytest.raises(TypeError, match=r"pass that of rmetric\.integrations\.hugging_face"):
        make_trainer(tmp_path, [make(OfLightning)])


def test_the_class_itself_is_one_without_a_log_or_actions(tmp_path):
    trainer = train(tmp_path, [RMetricCallback, NanAt(4)])
    [callback] = [
        one for one in trainer.callback_handler.callbacks if isinstance(one, RMetricCallback)
    ]
    assert callback.monitor.last.step == 6
    assert [(alert.step, alert.source) for alert in callback.monitor.alerts] == [(4, "non_finite")]
    assert callback.monitor.log_path is None


@pytest.mark.parametrize(
    "settings",
    [{"actions": [SkipStep]}, {"actions": SkipStep()}, {"config": {}}],
    ids=["a class", "no list", "no config"],
)
def test_wrong_settings_are_refused_when_it_is_made(settings):
    with pytest.raises(TypeError, match=r"SkipStep|config is {}"):
        RMetricCallback(**settings)


def test_an_optimizer_of_another_model_is_told(tmp_path):
    callback, other = watch(tmp_path), make_model()
    trainer = make_trainer(tmp_path, [callback])
    trainer.optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    trainer.train()
    assert callback.monitor.protocol.told == {"other_model"}


def slips(caplog):
    """Warnings about validation losses that never came."""
    return [m for m in caplog.messages if "had the metric" in m]


@pytest.mark.parametrize("steps", [2, 6], ids=["evaluated three times", "evaluated once"])
def test_a_validation_loss_that_never_comes_is_told_once(tmp_path, steps, caplog):
    callback = watch(tmp_path, validation_loss="eval_los")
    trainer = train(tmp_path, [callback], eval_strategy="steps", eval_steps=steps)
    trainer.evaluate()  # after the training
    [message] = slips(caplog)
    assert "'eval_los'" in message
    assert "eval_loss" in message
    assert callback.monitor.protocol.told == {"validation_loss"}


def test_the_losses_of_other_data_sets_may_come_before(tmp_path, caplog):
    callback = watch(tmp_path, validation_loss="eval_second_loss")
    trainer = make_trainer(tmp_path, [callback], eval_strategy="steps", eval_steps=2)
    trainer.eval_dataset = {"first": examples(4, seed=2), "second": examples(4, seed=3)}
    trainer.train()
    trainer.evaluate()
    assert slips(caplog) == []
    assert callback.monitor.protocol.told == set()
    assert sum(record.validation_loss is not None for record in records_of(tmp_path)) == 3


# -- what is logged is the raw step


class Independent(Trainer):
    """Computes each step's loss and gradient norm for itself, the plain way."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not hasattr(self, "seen"):
            self.seen, self.micro = [], []
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        targets = inputs["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        self.micro.append((losses.item(), int((targets != -100).sum())))
        loss = super().training_step(model, inputs, num_items_in_batch)
        if len(self.micro) == self.args.gradient_accumulation_steps:
            squares = sum(p.grad.double().pow(2).sum() for p in model.parameters())
            nats, tokens = map(sum, zip(*self.micro, strict=True))
            self.seen.append((nats / tokens, float(squares.sqrt())))
            self.micro = []
        return loss


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_loss_and_norm_are_the_raw_ones(tmp_path, clip, accumulation, masked):
    trainer = train(
        tmp_path,
        [watch(tmp_path)],
        kind=Independent,
        masked=masked,
        max_grad_norm=clip,
        gradient_accumulation_steps=accumulation,
    )
    records = records_of(tmp_path)
    losses, norms = zip(*trainer.seen, strict=True)
    if FIVE:
        assert [r.training_loss for r in records] == pytest.approx(losses, rel=1e-5)
        assert [r.gradient_norm for r in records] == pytest.approx(norms, rel=1e-5)
    else:  # transformers 4 has a mean of its own; it logs no norm where it does not clip
        assert [r.training_loss for r in records] == pytest.approx(
            stock_log(trainer, "loss"), abs=STOCK
        )
        norms = [r.gradient_norm for r in records]
        if clip:
            assert norms == pytest.approx(stock_log(trainer, "grad_norm"), rel=1e-6)
    assert min(norms) > 0.1  # so that clipping had something to do
    rates, logged = [r.learning_rate for r in records], stock_log(trainer, "learning_rate")
    assert (rates == logged) if FIVE else (rates[1:] == logged[:-1])  # 4 logs the next step's


def test_a_step_that_an_epoch_cuts_short_has_its_whole_loss(tmp_path):
    trainer = make_trainer(
        tmp_path, [watch(tmp_path)], gradient_accumulation_steps=4, per_device_train_batch_size=9
    )
    trainer.train_dataset = examples(45)  # five batches: one step of four, one of one
    trainer.train()
    assert [r.training_loss for r in records_of(tmp_path)] == pytest.approx(
        stock_log(trainer, "loss"), abs=STOCK
    )


def test_label_smoothing_is_part_of_the_loss(tmp_path):
    trainer = train(tmp_path, [watch(tmp_path)], label_smoothing_factor=0.3)
    assert [r.training_loss for r in records_of(tmp_path)] == pytest.approx(
        stock_log(trainer, "loss"), abs=STOCK
    )


class OwnLoss(Trainer):
    """A mean of its own making over each micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = logits.pow(2).mean() + 7.0
        return (loss, logits) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_trainer_with_a_loss_of_its_own(tmp_path, accumulation):
    kind = type("OwnLossHere", (OwnLoss,), {"loss_is_scaled_for_ga": False})
    trainer = make_trainer(
        tmp_path, [watch(tmp_path)], kind=kind, gradient_accumulation_steps=accumulation
    )
    trainer.loss_is_scaled_for_ga = False
    trainer.train()
    losses = [r.training_loss for r in records_of(tmp_path)]
    assert losses == pytest.approx(stock_log(trainer, "loss"), abs=7 * STOCK)
    scale = 1 if FIVE else accumulation  # transformers 4 adds up what it does not scale
    assert 7.0 < losses[-1] / scale < 7.1


class ClipsByItself(Trainer):
    """Never asks the accelerator for a norm."""

    def _clip_grad_norm(self, model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def test_a_trainer_that_clips_by_itself_is_watched_too(tmp_path):
    trainer = train(tmp_path, [watch(tmp_path)], kind=ClipsByItself)
    assert [r.gradient_norm for r in records_of(tmp_path)] == pytest.approx(
        stock_log(trainer, "grad_norm"), rel=1e-6
    )


def test_an_evaluation_belongs_to_its_step(tmp_path):
    trainer = train(tmp_path, [watch(tmp_path)], eval_strategy="steps", eval_steps=2)
    validated = {r.step: r.validation_loss for r in records_of(tmp_path) if r.validation_loss}
    assert list(validated) == [2, 4, 6]
    assert list(validated.values()) == pytest.approx(stock_log(trainer, "eval_loss"))


def test_of_several_evaluations_one_is_chosen(tmp_path):
    trainer = make_trainer(
        tmp_path,
        [watch(tmp_path, validation_loss="eval_two_loss")],
        eval_strategy="steps",
        eval_steps=3,
        eval_on_start=True,
    )
    trainer.eval_dataset = {"one": examples(4, seed=3), "two": examples(4, seed=4)}
    trainer.train()
    validated = {r.step: r.validation_loss for r in records_of(tmp_path) if r.validation_loss}
    assert list(validated) == [3, 6]  # what was before the first step belongs to none
    assert list(validated.values()) == pytest.approx(stock_log(trainer, "eval_two_loss")[1:])


def test_the_log_says_what_ran(tmp_path):
    train(tmp_path, [watch(tmp_path, about={"seed": "mine"})])
    start = entries_of(tmp_path)[0]["config"]
    assert start["experiment_id"] == "run"
    assert (start["model_type"], start["total_training_steps"], start["seed"]) == (
        "llama",
        6,
        "mine",
    )


def test_a_replay_of_the_log_gives_the_same_r(tmp_path):
    train(tmp_path, [watch(tmp_path)], eval_strategy="steps", eval_steps=1)
    metric = RMetric(RMetricConfig.case_study())
    replayed = [metric.update(record).score for record in records_of(tmp_path)]
    logged = [entry["r_metric"] for entry in entries_of(tmp_path) if "r_metric" in entry]
    assert replayed == logged
    assert max(logged) > 0.0


# -- a nan at step 60, under stock settings


@pytest.mark.long
def test_a_nan_at_step_60_is_not_in_the_stock_log_and_is_in_ours(tmp_path):
    trainer = train(tmp_path, [NanAt(60), watch(tmp_path)], max_steps=64)
    assert not is_finite(trainer.model)
    stock = stock_log(trainer, "loss")
    assert len(stock) == 64
    assert all(map(math.isfinite, stock))
    assert stock[59:] == [0.0] * 5
    records = records_of(tmp_path)
    assert math.isfinite(records[58].training_loss)
    assert math.isnan(records[59].training_loss)
    assert math.isnan(records[59].gradient_norm)
    alerts = [entry for entry in entries_of(tmp_path) if entry["event"] == "ALERT"]
    assert [(a["step"], a["source"]) for a in alerts] == [(60, "non_finite")]  # said once


@pytest.mark.long
def test_skipping_the_step_keeps_the_weights_finite(tmp_path):
    callback = watch(tmp_path, actions=[SkipStep()])
    trainer = train(tmp_path, [NanAt(60), callback], max_steps=64)
    assert is_finite(trainer.model)
    records = records_of(tmp_path)
    assert math.isnan(records[59].training_loss)
    assert records[59].update_norm == 0.0
    assert all(math.isfinite(r.training_loss) for r in records[60:])
    assert all(r.update_norm > 0.0 for r in records[60:])
    assert [alert.step for alert in callback.monitor.alerts] == [60]


def test_stop_ends_the_training(tmp_path):
    callback = watch(tmp_path, actions=[SkipStep(), Stop()])
    trainer = train(tmp_path, [NanAt(4), callback], max_steps=64)
    assert trainer.state.global_step == 4
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4]


class HalfPrecision(Trainer):
    """fp16 with a gradient scaler, which accelerate itself only offers on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"


@pytest.fixture
def fresh_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_accelerate")
def test_a_gradient_scaler_is_followed(tmp_path):
    settings = dict(gradient_accumulation_steps=2, max_steps=8, max_grad_norm=0.1)
    full = train(tmp_path / "full", [watch(tmp_path / "full", config=EVERYTHING)], **settings)
    assert full.accelerator.scaler is None
    plain = train(tmp_path, kind=HalfPrecision, **settings)
    callback = watch(tmp_path, config=EVERYTHING)
    seen = train(tmp_path, [callback], kind=HalfPrecision, **settings)
    assert callback.monitor.problem is None
    assert same_weights(plain.model, seen.model)
    assert not same_weights(plain.model, full.model)
    for half, whole in zip(records_of(tmp_path), records_of(tmp_path / "full"), strict=True):
        assert half.training_loss == pytest.approx(whole.training_loss, rel=0.02)
        assert half.gradient_norm == pytest.approx(whole.gradient_norm, rel=0.05)
        assert half.worker_gradient_norms == pytest.approx(whole.worker_gradient_norms, rel=0.05)


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_step_is_skipped_under_a_gradient_scaler_too(tmp_path):
    callback = watch(tmp_path, actions=[SkipStep()])
    trainer = train(tmp_path, [NanAt(4), callback], kind=HalfPrecision, max_steps=8)
    assert is_finite(trainer.model)
    assert [alert.step for alert in callback.monitor.alerts] == [4]
    assert all(r.update_norm > 0.0 for r in records_of(tmp_path) if r.step != 4)


# -- a checkpoint, and the way on from it


def lines_without_time(folder):
    entries = [entry for entry in entries_of(folder) if entry["event"] == "METRICS"]
    return [
        {k: v for k, v in entry.items() if not k.endswith(("_seconds", "memory"))}
        for entry in entries
    ]


@pytest.mark.long
@pytest.mark.parametrize("restore_callbacks", [False, True])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, restore_callbacks):
    settings = dict(
        max_steps=12,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=6,
        gradient_accumulation_steps=2,
        restore_callback_states_from_checkpoint=restore_callbacks,
    )
    config = MonitorConfig(detectors=("loss_z_score",), workers_every=2, layers_every=3)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    uninterrupted = train(whole, [watch(whole, config=config)], **settings)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        train(broken, [watch(broken, config=config), RaisesAt(8)], **settings)
    assert [r.step for r in records_of(broken)] == list(range(1, 9))
    callback = watch(broken, config=config)
    resumed = make_trainer(broken, [callback], model=make_model(seed=9), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert callback.monitor.problem is None
    assert same_weights(uninterrupted.model, resumed.model)
    assert lines_without_time(broken) == lines_without_time(whole)
    assert [entry["step"] for entry in lines_without_time(broken)] == list(range(1, 13))
    assert [e["event"] for e in entries_of(broken)].count("EXPERIMENT_START") == 1
    times = [r.time for r in records_of(broken)]
    assert times == sorted(times)


def test_a_checkpoint_of_a_run_that_was_not_watched_is_gone_on_from(tmp_path):
    settings = dict(max_steps=6, save_strategy="steps", save_steps=3)
    train(tmp_path, **settings)
    resumed = make_trainer(tmp_path, [watch(tmp_path)], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert [r.step for r in records_of(tmp_path)] == [4, 5, 6]


def test_a_checkpoint_of_a_watched_run_is_gone_on_from_without_the_callback(tmp_path):
    settings = dict(max_steps=6, save_strategy="steps", save_steps=3)
    train(tmp_path, [watch(tmp_path)], **settings)
    resumed = make_trainer(tmp_path, restore_callback_states_from_checkpoint=True, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert resumed.state.global_step == 6


# -- it never gets in the way


LOOP_METHODS = {"_run_epoch", "get_batch_samples", "_maybe_log_save_evaluate"}


def is_untouched(trainer):
    names = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    return (
        not {"training_step", *LOOP_METHODS} & set(vars(trainer))
        and "call_event" not in vars(trainer.callback_handler)
        and "clip_grad_norm_" not in vars(trainer.accelerator)
        and "RMetricState" not in names
        and not trainer.model._forward_pre_hooks
    )


def test_an_exception_in_the_monitor_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    def fails(self):
        raise ValueError("this is a bug")

    plain = train(tmp_path)
    monkeypatch.setattr(Pending, "read", fails)
    callback = watch(tmp_path)
    seen = train(tmp_path, [callback])
    assert same_weights(plain.model, seen.model)
    assert not callback.monitor.usable
    assert "this is a bug" in callback.monitor.problem
    said = [r for r in caplog.records if r.name == "rmetric"]
    assert len(said) == 1


def test_a_log_that_cannot_be_written_does_not_end_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    callback = RMetricCallback(tmp_path / "file" / "run.jsonl")
    trainer = train(tmp_path, [callback])
    assert trainer.state.global_step == 6
    assert callback.monitor.last.step == 6


def test_the_trainer_is_as_before_and_can_train_again(tmp_path):
    trainer = make_trainer(tmp_path, [watch(tmp_path)])
    trainer.train()
    assert is_untouched(trainer)
    first = records_of(tmp_path)
    trainer.train()
    assert is_untouched(trainer)
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [r.training_loss for r in read_log(tmp_path / "run.jsonl.1").records] == [
        r.training_loss for r in first
    ]


def test_evaluating_after_the_training_adds_nothing(tmp_path):
    trainer = train(tmp_path, [watch(tmp_path)])
    before = (tmp_path / "run.jsonl").read_bytes()
    trainer.evaluate()
    assert (tmp_path / "run.jsonl").read_bytes() == before


@pytest.mark.parametrize("hook", ["on_step_end", "on_step_begin", "on_pre_optimizer_step"])
def test_a_training_that_raises_leaves_a_whole_log_and_the_trainer_as_before(tmp_path, hook):
    trainer = make_trainer(tmp_path, [watch(tmp_path), RaisesAt(3, hook)])
    with pytest.raises(RuntimeError, match="the machine is gone") as raised:
        trainer.train()
    assert is_untouched(trainer)
    steps = [r.step for r in records_of(tmp_path)]
    assert steps == ([1, 2, 3, 4] if hook == "on_pre_optimizer_step" else [1, 2, 3])
    frames = [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert frames[-1] == "fail"  # nobody's traceback is lost


class OutOfMemory(Trainer):
    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise torch.OutOfMemoryError("out of memory")
        return super().compute_loss(*args, **kwargs)


def test_running_out_of_memory_is_an_event_of_the_last_step(tmp_path):
    trainer = make_trainer(tmp_path, [watch(tmp_path)], kind=OutOfMemory)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert is_untouched(trainer)
    records = records_of(tmp_path)
    assert [r.events and r.events[0].kind for r in records] == [None, "torch_out_of_memory"]


def test_a_training_begun_again_with_smaller_batches_has_a_log_of_its_own(tmp_path):
    class TooLarge(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if len(inputs["input_ids"]) > 3 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    train(
        tmp_path,
        [watch(tmp_path)],
        kind=TooLarge,
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
    )
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [r.step for r in read_log(tmp_path / "run.jsonl.1").records] == [1, 2]


def test_a_callback_may_be_added_later(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(watch(tmp_path))
    trainer.train()
    assert len(records_of(tmp_path)) == 6


def test_without_a_trainer_it_says_so_and_does_nothing(tmp_path, caplog):
    callback = watch(tmp_path)
    callback.on_train_begin(None, None, None)
    callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
    assert "no Trainer" in caplog.text


def test_what_is_no_action_is_refused_at_once():
    with pytest.raises(TypeError, match="no action"):
        RMetricCallback(actions=["stop"])


class CountsItself:
    """A source of hardware events that ends with its training."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.open = True

    def poll(self):
        assert self.open
        return ()

    def close(self):
        self.open = False


def test_each_training_has_its_own_source_of_hardware_events(tmp_path):
    trainer = make_trainer(tmp_path, [watch(tmp_path, hardware=CountsItself)])
    trainer.train()
    trainer.train()
    assert CountsItself.made == 2
    assert all(r.events == () for r in records_of(tmp_path))


def test_the_loop_of_transformers_4_is_followed_part_by_part():
    handler = SimpleNamespace(call_event=print)
    parts = dict(get_batch_samples=print, _maybe_log_save_evaluate=print, callback_handler=handler)
    trainer = SimpleNamespace(**parts)
    assert loop_methods(trainer) == [
        (trainer, "get_batch_samples"),
        (trainer, "_maybe_log_save_evaluate"),
        (handler, "call_event"),
    ]
    trainer._run_epoch = print
    assert loop_methods(trainer) == [(trainer, "_run_epoch")]


class Rewarded(Trainer):
    """Logs as TRL's trainers do."""

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            lost = self.state.global_step > 40
            reward = 0.0 if lost else 0.02 * self.state.global_step
            logs |= {"reward": reward, "kl": 0.01, "memory(GiB)": 20.0}  # memory is no policy's
        super().log(logs, *args, **kwargs)


def test_a_lost_reward_is_logged_and_alarms(tmp_path):
    callback = watch(tmp_path)
    train(tmp_path, [callback], kind=Rewarded, max_steps=50)
    policies = [record.policy for record in records_of(tmp_path)]
    assert policies[9] == {"reward": pytest.approx(0.2), "kl": 0.01}
    assert policies[45] == {"reward": 0.0, "kl": 0.01}
    alerts = [e for e in entries_of(tmp_path) if e.get("source") == "policy"]
    assert [alert["step"] for alert in alerts] == [42]
    assert alerts[0]["reason"].startswith("reward collapsed since step 41, reward 0.79 -> 0")
