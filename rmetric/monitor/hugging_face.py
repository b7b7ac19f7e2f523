"""The monitor in the Hugging Face Trainer (transformers 5).

trainer = Trainer(..., callbacks=[RMetricCallback("run.jsonl")])
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, cast

from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from rmetric.monitor.actions.action import Action, as_action
from rmetric.monitor.alerts import Alert
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.monitor import Hardware, Monitor

logger = logging.getLogger("rmetric")


class RMetricCallback(TrainerCallback):
    """Watches what the Trainer does, and says when something is wrong.

    The Trainer shows its callbacks neither the loss of a step nor the gradient
    norm before clipping, and leaves a loss that is nan out of its own log. So
    while a training runs, `trainer.training_step` and
    `trainer.accelerator.clip_grad_norm_` are followed on that one trainer: what
    they return is what the monitor takes. When the training ends or raises, both
    are as before.

        loss of a step = Σ over its micro-batches of what training_step returned

    which is what the Trainer adds up, too: each is already divided by the number
    of micro-batches, or of tokens in all of them.

    Its weakness: under DeepSpeed the optimiser's step is part of the backward
    pass, so a step is checked after it was made.

    Args:
        log: JSONL file; None for none.
        config: see `MonitorConfig`.
        actions: what to do on an alert; a plain function is called with it.
        hardware: where hardware events come from, or what makes such a source when
            a training begins, such as the class `NvmlEvents`; None where none are logged.
        probe: returns the loss on a small fixed batch.
        run_id: names the run in the log; by default the log's own name.
        validation_loss: of an evaluation's metrics the one to take, nats per token;
            with several evaluation datasets ``eval_<name>_loss``.
        about: further keys for the log's description of the run.

    Attributes:
        monitor: of the training under way, or the last one; None before the first.

    >>> callback = RMetricCallback("run.jsonl", actions=[print])
    """

    def __init__(
        self,
        log: Path | str | None = None,
        *,
        config: MonitorConfig | None = None,
        actions: Iterable[Action | Callable[[Alert], None]] = (),
        hardware: Hardware | Callable[[], Hardware] | None = None,
        probe: Callable[[], Tensor] | None = None,
        run_id: str | None = None,
        validation_loss: str = "eval_loss",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.monitor: Monitor | None = None
        self._settings = dict(
            log=log,
            config=config,
            actions=[as_action(action) for action in actions],
            probe=probe,
            run_id=run_id or (Path(log).stem if log else "run"),
        )
        self._hardware, self._about = hardware, dict(about or {})
        self._validation_loss = validation_loss
        self._loss: Tensor | None = None  # of the step's micro-batches so far
        self._checked = False
        self._training = ExitStack()

    # -- what the Trainer calls

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._end()  # of a training that broke off unseen
        trainer = calling_trainer()
        if trainer is None:
            logger.error("rmetric: no Trainer calls this callback: nothing is watched")
            return
        self._loss, self._checked = None, False
        self.monitor = monitor = self._training.enter_context(self._new_monitor(trainer))
        _go_on(monitor, state)
        self._follow(trainer)
        self._training.enter_context(_saving(trainer, monitor))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if not self._checked:  # clipped by other means than the accelerator's
            self._check(None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._checked = False
        if self.monitor is not None and self.monitor.should_stop:
            control.should_training_stop = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        value = (metrics or {}).get(self._validation_loss)
        if self.monitor is not None and value is not None:
            self.monitor.evaluated(value)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end()

    # -- a training begins, goes on and ends

    def _new_monitor(self, trainer: Trainer) -> Monitor:
        config = getattr(trainer.model, "config", None)
        about = {
            "model_type": getattr(config, "model_type", type(trainer.model).__name__),
            "num_workers": trainer.args.world_size,
            "total_training_steps": trainer.state.max_steps,
            "seed": trainer.args.seed,
        }
        return Monitor(
            trainer.model_wrapped,
            trainer.optimizer,
            scaler=trainer.accelerator.scaler,
            hardware=self._hardware() if callable(self._hardware) else self._hardware,
            about=about | self._about,
            **self._settings,  # type: ignore[arg-type]
        )

    def _follow(self, trainer: Trainer) -> None:
        follow = self._training.enter_context
        step = self._ends_with(self._takes_loss(trainer.training_step))
        follow(replaced(trainer, "training_step", step))
        clip = self._checks(trainer.accelerator.clip_grad_norm_)
        follow(replaced(trainer.accelerator, "clip_grad_norm_", clip))
        if hasattr(trainer, "_run_epoch"):  # the steps, and all that lies between them
            follow(replaced(trainer, "_run_epoch", self._ends_with(trainer._run_epoch)))

    def _takes_loss(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(training_step)
        def followed(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            part = loss.detach()
            self._loss = part if self._loss is None else self._loss + part
            if self.monitor is not None:
                self.monitor.micro_batch()
            return loss

        return followed

    def _checks(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def followed(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            if not self._checked:
                self._check(norm)
            return norm

        return followed

    def _check(self, norm: Any) -> None:
        self._checked, loss, self._loss = True, self._loss, None
        if self.monitor is not None:
            self.monitor.check_before_step(loss, gradient_norm=norm)

    def _ends_with(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def followed(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except BaseException as error:
                self._end(error)
                raise

        return followed

    def _end(self, error: BaseException | None = None) -> None:
        if error is None:
            self._training.close()
        else:
            self._training.__exit__(type(error), error, error.__traceback__)


class RMetricState(TrainerCallback, ExportableState):
    """Has the Trainer keep the monitor's state in its checkpoints; there while a training runs.

    It is not RMetricCallback itself, because with
    `restore_callback_states_from_checkpoint` the Trainer makes such callbacks anew
    from what it saved, and actions cannot be saved.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self._monitor.state_dict()}


@contextmanager
def _saving(trainer: Trainer, monitor: Monitor) -> Iterator[None]:
    saver = RMetricState(monitor)
    _kept(trainer.state)[RMetricState.__name__] = {}  # filled at each checkpoint
    trainer.add_callback(saver)
    try:
        yield
    finally:
        trainer.pop_callback(saver)


def _go_on(monitor: Monitor, state: TrainerState) -> None:
    """After the step of the checkpoint that the Trainer resumes from, if it does."""
    kept = _kept(state).get(RMetricState.__name__, {}).get("attributes", {})
    if kept.get("step") == state.global_step:
        monitor.load_state_dict(kept)
    else:
        monitor.step = monitor.weights_step = state.global_step


def _kept(state: TrainerState) -> dict[str, Any]:
    """State of the callbacks in a checkpoint, by the name of their class."""
    return cast(dict[str, Any], state.stateful_callbacks)


def calling_trainer() -> Trainer | None:
    """The Trainer that has just called; it does not say so itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """A method of this one object is another one inside."""
    before = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if vars(owner).get(name) is method:  # else somebody follows it in turn
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
