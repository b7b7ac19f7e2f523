"""The callback in the Trainer: what is of this trainer alone; see also test_trainers."""

import math
import traceback
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.50")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback  # noqa: E402

from rmetric import HuggingFaceCallback  # noqa: E402
from rmetric.integrations.hugging_face_loop import loop_methods  # noqa: E402
from rmetric.logs import read_log  # noqa: E402
from tests.integrations.trainers import EVERYTHING, hugging_face_trainer, records_of  # noqa: E402
from tests.monitor.training import entries, same_weights  # noqa: E402

VOCABULARY, LENGTH = 32, 12
FIVE = int(transformers.__version__.split(".")[0]) >= 5
#: Error of the loss in the Trainer's own log, which transformers 4 rounds to four digits.
STOCK = 4e-6 if FIVE else 6e-5


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


def make_trainer(folder, callbacks=(), *, model=None, masked=False, **settings):
    usual = dict(max_steps=6, learning_rate=1e-2, logging_steps=1, evaluated=examples(4, seed=2))
    data = examples(200, masked=masked)
    return hugging_face_trainer(model or make_model(), data, folder, callbacks, **usual | settings)


def train(folder, callbacks=(), **settings):
    trainer = make_trainer(folder, callbacks, **settings)
    trainer.train()
    return trainer


def watch(folder, **settings):
    return HuggingFaceCallback(folder / "run.jsonl", **settings)


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


def test_gradient_checkpointing_is_left_alone(tmp_path):
    plain = train(tmp_path, gradient_checkpointing=True)
    callback = watch(tmp_path, config=EVERYTHING)
    seen = train(tmp_path, [callback], gradient_checkpointing=True)
    assert callback.monitor.problem is None
    assert same_weights(plain.model, seen.model)
    assert records_of(tmp_path)[-1].attention_logit_max is not None


def test_the_class_itself_is_one_without_a_log_or_actions(tmp_path):
    trainer = train(tmp_path, [HuggingFaceCallback, NanAt(4)])
    hooks = trainer.callback_handler.callbacks
    [callback] = [hook for hook in hooks if isinstance(hook, HuggingFaceCallback)]
    assert callback.monitor.last.step == 6
    assert [(alert.step, alert.source) for alert in callback.monitor.alerts] == [(4, "non_finite")]
    assert callback.monitor.log_path is None


def test_report_to_names_it(tmp_path):
    trainer = train(tmp_path, report_to="rmetric")
    log = read_log(tmp_path / "out" / "rmetric.jsonl")
    assert [record.step for record in log.records] == [*range(1, 7)]
    assert same_weights(trainer.model, train(tmp_path / "plain").model)


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


@pytest.mark.parametrize("accumulation", [1, 4])
def test_loss_and_norm_are_those_of_the_tokens_that_count(tmp_path, accumulation):
    settings = dict(max_grad_norm=0.1, gradient_accumulation_steps=accumulation, masked=True)
    trainer = train(tmp_path, [watch(tmp_path)], kind=Independent, **settings)
    records = records_of(tmp_path)
    losses, norms = zip(*trainer.seen, strict=True)
    if FIVE:
        assert [r.training_loss for r in records] == pytest.approx(losses, rel=1e-5)
    else:  # transformers 4 has a mean of its own
        losses, norms = stock_log(trainer, "loss"), stock_log(trainer, "grad_norm")
        assert [r.training_loss for r in records] == pytest.approx(losses, abs=STOCK)
    assert [r.gradient_norm for r in records] == pytest.approx(norms, rel=1e-5)
    rates, logged = [r.learning_rate for r in records], stock_log(trainer, "learning_rate")
    assert (rates == logged) if FIVE else (rates[1:] == logged[:-1])  # 4 logs the next step's


class OwnLoss(Trainer):
    """A mean of its own making over each micro-batch; never asks the accelerator for a norm."""

    def _clip_grad_norm(self, model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = logits.pow(2).mean() + 7.0
        return (loss, logits) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_trainer_with_a_loss_and_a_clipping_of_its_own(tmp_path, accumulation):
    trainer = make_trainer(
        tmp_path, [watch(tmp_path)], kind=OwnLoss, gradient_accumulation_steps=accumulation
    )
    trainer.loss_is_scaled_for_ga = False
    trainer.train()
    records = records_of(tmp_path)
    losses = [r.training_loss for r in records]
    assert losses == pytest.approx(stock_log(trainer, "loss"), abs=7 * STOCK)
    scale = 1 if FIVE else accumulation  # transformers 4 adds up what it does not scale
    assert 7.0 < losses[-1] / scale < 7.1
    norms = stock_log(trainer, "grad_norm")
    assert [r.gradient_norm for r in records] == pytest.approx(norms, rel=1e-6)


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


def test_a_checkpoint_of_a_watched_run_is_gone_on_from_without_the_callback(tmp_path):
    settings = dict(max_steps=6, save_strategy="steps", save_steps=3)
    train(tmp_path, [watch(tmp_path)], **settings)
    resumed = make_trainer(tmp_path, restore_callback_states_from_checkpoint=True, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert resumed.state.global_step == 6


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


def test_the_log_says_what_ran_and_the_trainer_is_as_before_and_can_train_again(tmp_path):
    callback = watch(tmp_path, hardware=CountsItself, about={"seed": "mine"})
    trainer = make_trainer(tmp_path, [callback])
    trainer.train()
    assert is_untouched(trainer)
    start = entries(tmp_path / "run.jsonl")[0]["config"]
    assert start["experiment_id"] == "run"
    names = ("model_type", "total_training_steps", "seed")
    assert [start[name] for name in names] == ["llama", 6, "mine"]
    before = (tmp_path / "run.jsonl").read_bytes()
    trainer.evaluate()
    assert (tmp_path / "run.jsonl").read_bytes() == before
    trainer.train()
    assert is_untouched(trainer)
    assert [r.step for r in records_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run.jsonl.1").read_bytes() == before
    assert CountsItself.made == 2
    assert all(r.events == () for r in records_of(tmp_path))


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


def test_without_a_trainer_it_says_so_and_does_nothing(tmp_path, caplog):
    callback = watch(tmp_path)
    callback.on_train_begin(None, None, None)
    callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
    assert "no Trainer" in caplog.text


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
    alerts = [e for e in entries(tmp_path / "run.jsonl") if e.get("source") == "policy"]
    assert [alert["step"] for alert in alerts] == [42]
    assert alerts[0]["reason"].startswith("reward collapsed since step 41, reward 0.79 -> 0")
