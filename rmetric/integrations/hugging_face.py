"""Monitor, rescue and guard in the Hugging Face Trainer (transformers 4.50 or newer).

trainer = Trainer(..., callbacks=[HuggingFaceCallback("run.jsonl"), GuardCallback()])
trainer.train(resume_from_checkpoint=newest_checkpoint(trainer.args.output_dir))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from rmetric.integrations.hugging_face_guard import GuardCallback, newest_checkpoint
from rmetric.integrations.hugging_face_loop import RMetricState, followed, loop_methods
from rmetric.integrations.trainer_callback import MonitorCallback, replaced
from rmetric.monitor.optimizer_steps import caller_of_class
from rmetric.readers.columns import POLICY, columns_among

__all__ = ["GuardCallback", "HuggingFaceCallback", "newest_checkpoint"]

logger = logging.getLogger("rmetric")


class HuggingFaceCallback(MonitorCallback, TrainerCallback):
    """Runs a `Monitor` in the Trainer's own training loop.

    The Trainer shows its callbacks neither the loss of a step nor the gradient norm before
    clipping, and leaves a loss that is nan out of its log. So while a training runs, its
    `training_step` and `accelerator.clip_grad_norm_` are followed: the monitor takes what they
    return. When the training ends or raises, both are as before.

        loss of a step = Σ over its micro-batches of what training_step returned

    as the Trainer adds it up: each is divided by the number of micro-batches, or of tokens in all
    of them. Its weakness: under DeepSpeed the optimiser's step is part of the backward pass, so a
    step is checked after it was made.

    Args and attributes are those of `rmetric.integrations.trainer_callback.MonitorCallback`;
    `validation_loss` is ``eval_loss`` by default, and with several datasets ``eval_<name>_loss``.

    >>> callback = HuggingFaceCallback("run.jsonl", actions=[print])
    """

    _usual_validation_loss = "eval_loss"
    _loss: Tensor | None = None  # of the step's micro-batches so far
    _checked = False

    # -- what the Trainer calls

    def setup(self, *_: Any, **__: Any) -> None:
        """Refuse to run in Lightning, which calls this."""
        raise TypeError("Lightning's Trainer takes rmetric.LightningCallback instead")

    #: Lightning asks for these beside it, and shows what the last one raises.
    state_key, on_exception = "HuggingFaceCallback", setup

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._end()  # of a training that broke off unseen
        trainer = caller_of_class(Trainer)  # callbacks are not passed it
        if trainer is None:
            logger.error("rmetric: no Trainer calls this callback: nothing is watched")
            return
        self._loss, self._checked = None, False
        callbacks = cast(dict[str, Any], state.stateful_callbacks)  # by the name of the class
        kept = callbacks.get(RMetricState.__name__, {}).get("attributes", {})
        config = getattr(trainer.model, "config", None)
        monitor = self._start_monitor(
            trainer.model_wrapped,
            trainer.optimizer,
            scaler=trainer.accelerator.scaler,
            schedulers=[trainer.lr_scheduler],
            loader=trainer.callback_handler.train_dataloader,
            autocast=args.bf16 or args.fp16,
            about={
                "model_type": getattr(config, "model_type", type(trainer.model).__name__),
                "num_workers": trainer.args.world_size,
                "total_training_steps": trainer.state.max_steps,
                "seed": trainer.args.seed,
            },
            step=state.global_step,
            state=kept if kept.get("step") == state.global_step else {},
        )
        self._follow(trainer, "training_step", self._take_loss, self._take_batch)
        self._follow(trainer.accelerator, "clip_grad_norm_", self._check)
        self._follow_with_rescue(followed, trainer)
        for owner, name in loop_methods(trainer):
            self._follow(owner, name)
        saver = RMetricState(monitor)
        callbacks[RMetricState.__name__] = {}  # filled at each checkpoint
        trainer.add_callback(saver)
        self._training.callback(trainer.pop_callback, saver)

    def on_epoch_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if self.monitor is not None:
            self.monitor.paused()  # the workers of a data loader begin
            self.monitor.training.epoch = int(state.epoch or 0)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._take(self._check, None)  # clipped by other means than the accelerator's

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._checked = False
        if self._should_stop:
            control.should_training_stop = True

    def on_evaluate(self, *_: Any, metrics: dict[str, float] | None = None, **__: Any) -> None:
        self._pass_validation_loss(metrics or {})

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Record what TRL's trainers log beside the loss: reward, KL divergence, length, ..."""
        logged = logs or {}
        columns = columns_among(tuple(logged), POLICY)
        if self.monitor is not None and self.monitor.is_open and "reward" in columns:
            self.monitor.policy({target: logged[name] for target, name in columns.items()})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end()

    # -- the methods that are followed

    def _follow(
        self,
        owner: Any,
        name: str,
        take: Callable[[Any], None] = lambda result: None,
        given: Callable[[Any], None] = lambda arguments: None,
    ) -> None:
        """Call `given` with the arguments of this method, and `take` with what it returns.

        An exception of the method ends the monitor.
        """
        method = getattr(owner, name)

        @wraps(method)
        def observed(*args: Any, **kwargs: Any) -> Any:
            try:
                self._take(given, args)
                result = method(*args, **kwargs)
                self._take(take, result)
            except BaseException as error:
                self._end(error)
                raise
            return result

        self._training.enter_context(replaced(owner, name, observed))

    def _take(self, take: Callable[[Any], None], result: Any) -> None:
        """Call `take`; an exception in it disables the monitor, and the training continues."""
        try:
            take(result)
        except Exception as error:
            if self.monitor is not None and self.monitor.usable:
                self.monitor.disable("a followed method", error)

    def _take_batch(self, arguments: tuple[Any, ...]) -> None:
        if self.monitor is not None and len(arguments) > 1:
            self.monitor.audit_batch(arguments[1])

    def _take_loss(self, loss: Tensor) -> None:
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if self.monitor is not None:
            self.monitor.micro_batch()

    def _check(self, norm: Any = None) -> None:
        """Check the step, once; the first norm of a step is the one before clipping."""
        if self._checked or self.monitor is None:
            return
        self._checked, loss, self._loss = True, self._loss, None
        self.monitor.check_before_step(loss, gradient_norm=norm)


class ReportTo(HuggingFaceCallback):
    """What ``report_to="rmetric"`` adds: its log is rmetric.jsonl in ``output_dir``."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._settings["log"] = Path(args.output_dir or ".") / "rmetric.jsonl"
        super().on_train_begin(args, state, control)


INTEGRATION_TO_CALLBACK["rmetric"] = ReportTo
RMetricCallback = HuggingFaceCallback  # its name before, in scripts of users
