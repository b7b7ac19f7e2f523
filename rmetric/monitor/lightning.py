"""The monitor in Lightning 2, by either of its names.

trainer = lightning.Trainer(..., callbacks=[RMetricCallback("run.jsonl")])
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmetric.monitor.actions.action import Action, as_action
from rmetric.monitor.alerts import Alert
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.gradients import gradients_of, is_sharded, tensor_norms, total_norm
from rmetric.monitor.monitor import Hardware, Monitor, unwrapped

logger = logging.getLogger("rmetric")


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


class RMetricCallback(Callback):
    """Watches what Lightning's Trainer does, and says when something is wrong.

    A step is checked in `on_before_optimizer_step`: after backward and after a
    gradient scaler has divided its factor out, before clipping. With automatic
    optimisation the loss of a step is the mean over its micro-batches of what
    `training_step` returned; with manual optimisation it is the sum of what
    `manual_backward` was given since the step before.

    Its weakness: where a module has several optimisers, the first is watched, and
    its steps are the steps of the log; gradient norms are over the whole module.

    Args:
        log: JSONL file; None for none.
        config: see `MonitorConfig`.
        actions: what to do on an alert; a plain function is called with it.
        hardware: where hardware events come from, or what makes such a source when
            a training begins, such as the class `NvmlEvents`; None where none are logged.
        probe: returns the loss on a small fixed batch.
        run_id: names the run in the log; by default the log's own name.
        validation_loss: under what name the module logs it, nats per token.
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
        validation_loss: str = "val_loss",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
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
        self._losses: list[Tensor] = []  # of the backward passes since the last step
        self._norm: Tensor | None = None  # after the last of them
        self._state: dict[str, Any] = {}  # of a checkpoint, or of the training before

    # -- what Lightning calls

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._norm = [], None
        self.monitor = monitor = self._new_monitor(trainer)
        if self._state and trainer.global_step:
            monitor.load_state_dict(self._state)
        else:
            monitor.step = monitor.weights_step = trainer.global_step
        self._state = {}

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._losses.append(_without_scale(trainer, loss.detach()))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is None:
            return
        self.monitor.micro_batch()
        if not pl_module.automatic_optimization and not is_sharded(self.monitor.parameters):
            # The step comes after the module's own clipping, if there is any.
            norm = total_norm(tensor_norms(gradients_of(self.monitor.parameters)))
            self._norm = _without_scale(trainer, norm)

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
        if self.monitor is not None and self.monitor.should_stop:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self._validation_loss)
        if self.monitor is not None and value is not None:  # none yet in the sanity check
            self.monitor.evaluated(value)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end(exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def state_dict(self) -> dict[str, Any]:
        return (self.monitor and self.monitor.state_dict()) or self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    # -- a training begins and ends

    def _new_monitor(self, trainer: Trainer) -> Monitor:
        about: dict[str, Any] = {
            "model_type": type(trainer.lightning_module).__name__,
            "num_workers": trainer.world_size,
        }
        if trainer.max_steps > 0:
            about["total_training_steps"] = trainer.max_steps
        return Monitor(
            trainer.model,  # type: ignore[arg-type]  # there is one by now
            trainer.optimizers[0] if trainer.optimizers else None,
            scaler=_scaler(trainer),
            hardware=self._hardware() if callable(self._hardware) else self._hardware,
            about=about | self._about,
            **self._settings,  # type: ignore[arg-type]
        )

    def _end(self, error: BaseException | None = None) -> None:
        if self.monitor is not None:
            self._state = self.monitor.state_dict() or self._state
            self.monitor.__exit__(type(error) if error else None, error, None)


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _without_scale(trainer: Trainer, value: Tensor) -> Tensor:
    """Divide a value by the factor of the gradient scaler; nothing is read from the device."""
    scaler = _scaler(trainer)
    if scaler is None:
        return value
    return value / scaler.scale(torch.ones((), device=value.device))
