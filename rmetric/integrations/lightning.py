"""Monitor and rescue in Lightning 2, by either of its names.

trainer = lightning.Trainer(..., callbacks=[RMetricCallback("run.jsonl")])
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmetric.integrations.lightning_loops import followed
from rmetric.integrations.trainer_callback import MonitorCallback
from rmetric.monitor.gradients import gradients_of, is_sharded, tensor_norms
from rmetric.monitor.step_recorder import unwrapped


def _callback_class() -> Any:
    """Of lightning or pytorch_lightning: the one that is in use, else one that is installed."""
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda n: n not in sys.modules)
    for name in names:
        try:
            return import_module(name).Callback
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("this callback needs Lightning: pip install lightning")


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.optim import Optimizer
else:
    Callback = _callback_class()


class RMetricCallback(MonitorCallback, Callback):
    """Runs a `Monitor` in the training loop of Lightning's Trainer.

    A step is checked in `on_before_optimizer_step`: after backward and after a
    gradient scaler has divided its factor out, before clipping. With automatic
    optimisation the loss of a step is the mean over its micro-batches of what
    `training_step` returned; with manual optimisation it is the sum of what
    `manual_backward` was given since the step before.

    Its weakness: where a module has several optimisers, the first is watched, and
    its steps are the steps of the log; gradient norms are over the whole module.

    Args and attributes are those of `rmetric.integrations.trainer_callback.MonitorCallback`;
    `validation_loss` is the name under which the module logs it, ``val_loss`` by default.

    >>> callback = RMetricCallback("run.jsonl", actions=[print])
    """

    _usual_validation_loss = "val_loss"
    _losses: list[Tensor]  # of the backward passes since the last step
    _norm: Tensor | None  # after the last of them
    _state: dict[str, Any] | None = None  # of a checkpoint, or of the training before

    # -- what Lightning calls

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Refuse to run in the Hugging Face Trainer, which calls this."""
        raise TypeError(
            "this RMetricCallback is of Lightning: in the Hugging Face Trainer pass that of "
            "rmetric.integrations.hugging_face"
        )

    def setup(self, *_: Any, **__: Any) -> None:
        if not isinstance(self, RMetricCallback):  # Lightning calls what it is given, also a class
            raise TypeError("RMetricCallback is a class: pass callbacks=[RMetricCallback()]")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._norm = [], None
        steps = {"total_training_steps": trainer.max_steps} if trainer.max_steps > 0 else {}
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        monitor = self._start_monitor(
            trainer.model,  # type: ignore[arg-type]  # there is one by now
            optimizer,
            scaler=_scaler(trainer),
            schedulers=[
                entry.scheduler
                for entry in trainer.lr_scheduler_configs
                if unwrapped(getattr(entry.scheduler, "optimizer", None)) is unwrapped(optimizer)
            ],
            loader=trainer.train_dataloader,
            autocast=str(trainer.precision).endswith("-mixed"),
            about={
                "model_type": type(trainer.lightning_module).__name__,
                "num_workers": trainer.world_size,
                **steps,
            },
            step=trainer.global_step,
            state=(trainer.global_step and self._state) or {},
        )
        averages = (getattr(c, "_average_model", None) for c in vars(trainer)["callbacks"])
        monitor.ema = next((m for m in averages if m is not None), None)
        self._state = None
        self._follow_with_rescue(followed, trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            self.monitor.paused()  # the workers of a data loader begin
            self.monitor.training.epoch = trainer.current_epoch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.monitor is not None:
            self.monitor.batch_ready(batch)  # the module's forward pass may not be called

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._losses.append(_without_scale(trainer, loss.detach()))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is None or not self.monitor.usable:
            return
        self.monitor.micro_batch()
        if not pl_module.automatic_optimization and not is_sharded(self.monitor.parameters):
            # The step comes after the module's own clipping, if there is any.
            try:
                norm = torch.linalg.vector_norm(tensor_norms(gradients_of(self.monitor.parameters)))
                self._norm = _without_scale(trainer, norm)
            except Exception as error:  # of ours: it costs the monitor, not the training
                self.monitor.disable("on_after_backward", error)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        losses, self._losses = self._losses, []
        norm, self._norm = self._norm, None
        if self.monitor is None or unwrapped(optimizer) is not self.monitor.optimizer:
            return
        loss = torch.stack(losses).sum() if losses else None
        if loss is not None and pl_module.automatic_optimization:
            # Lightning divides by this also where an epoch ends after fewer.
            loss = loss * trainer.accumulate_grad_batches / len(losses)
        self.monitor.check_before_step(loss, gradient_norm=norm)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._should_stop:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pass_validation_loss(trainer.callback_metrics)  # no monitor in the sanity check

    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException | None = None,
    ) -> None:
        if isinstance(self, RMetricCallback):  # see `setup`
            self._end(exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def state_dict(self) -> dict[str, Any]:
        return (self.monitor and self.monitor.state_dict()) or self._state or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    def _end(self, error: BaseException | None = None) -> None:
        if self.monitor is not None:
            self._state = self.monitor.state_dict() or self._state
        super()._end(error)


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _without_scale(trainer: Trainer, value: Tensor) -> Tensor:
    """Divide a value by the factor of the gradient scaler; nothing is read from the device."""
    scaler = _scaler(trainer)
    if scaler is None:
        return value
    unscaled: Tensor = value / scaler.scale(torch.ones((), device=value.device))
    return unscaled
