"""Monitor and rescue in Lightning 2, by either of its names.

trainer = lightning.Trainer(..., callbacks=[LightningCallback("run.jsonl")])
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmetric.integrations.trainer_callback import MonitorCallback, replaced
from rmetric.monitor.gradients import gradients_of, is_sharded, tensor_norms
from rmetric.monitor.monitor import Monitor
from rmetric.monitor.step_recorder import unwrapped
from rmetric.rescue.action import Rescue
from rmetric.rescue.data_position import DataPosition
from rmetric.rescue.recent_batches import host_random_state


def _callback_class() -> Any:
    """Callback of lightning or pytorch_lightning: of the imported one, else of an installed one."""
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


class LightningCallback(MonitorCallback, Callback):
    """Runs a `Monitor` in the training loop of Lightning's Trainer.

    A step is checked in `on_before_optimizer_step`: after backward and after a gradient scaler has
    divided its factor out, before clipping. Its loss is the mean over its micro-batches of what
    `training_step` returned; with manual optimisation the sum of what `manual_backward` was given.
    Its weakness: of several optimisers the first is watched; gradient norms are over the whole
    module.

    Args and attributes are those of `rmetric.integrations.trainer_callback.MonitorCallback`;
    `validation_loss` is the name under which the module logs it, ``val_loss`` by default.

    >>> callback = LightningCallback("run.jsonl", actions=[print])
    """

    _usual_validation_loss = "val_loss"
    _losses: list[Tensor]  # of the backward passes since the last step
    _norm: Tensor | None  # after the last of them
    _state: dict[str, Any] | None = None  # of a checkpoint, or of the training before

    @property
    def state_key(self) -> str:
        """Key of its state in a checkpoint; older checkpoints have that of this class."""
        return "RMetricCallback" if type(self) is LightningCallback else super().state_key

    # -- what Lightning calls

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Refuse to run in the Hugging Face Trainer, which calls this."""
        raise TypeError("Hugging Face's Trainer takes rmetric.HuggingFaceCallback instead")

    def setup(self, *_: Any, **__: Any) -> None:
        if not isinstance(self, LightningCallback):  # Lightning calls a class that it is given, too
            raise TypeError("LightningCallback is a class: pass callbacks=[LightningCallback()]")

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
            except Exception as error:  # an error of ours must not end the training
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
        self, trainer: Trainer, pl_module: Any, exception: BaseException | None = None
    ) -> None:
        if isinstance(self, LightningCallback):  # see `setup`
            self._end(exception)

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


RMetricCallback = LightningCallback  # its name before, in scripts of users


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _without_scale(trainer: Trainer, value: Tensor) -> Tensor:
    """Divide a value by the factor of the gradient scaler; nothing is read from the device."""
    scaler = _scaler(trainer)
    if scaler is None:
        return value
    unscaled: Tensor = value / scaler.scale(torch.ones((), device=value.device))
    return unscaled


@contextmanager
def followed(rescue: Rescue, trainer: Any, monitor: Monitor) -> Iterator[None]:
    """Within it, a rescue can set the loops of this Trainer back.

    Lightning reads all counters of its loops after each batch. So they are set back there, at the
    end of `on_advance_end`; an epoch that had begun begins again.
    """
    loops = TrainerLoops(rescue, trainer, monitor)
    epoch_loop = trainer.fit_loop.epoch_loop
    with ExitStack() as stack:
        stack.callback(loops.leave_fetcher)
        stack.enter_context(replaced(epoch_loop, "on_run_start", loops.on_run_start))
        stack.enter_context(replaced(epoch_loop, "on_advance_end", loops.on_advance_end))
        rescue.data = loops
        yield


class TrainerLoops(DataPosition):
    """Position of Lightning's Trainer in its steps and data, for `Rescue`."""

    def __init__(self, rescue: Rescue, trainer: Any, monitor: Monitor) -> None:
        super().__init__(rescue)
        self.monitor, self._trainer = monitor, trainer
        self._fit, self._loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._on_run_start = self._loop.on_run_start
        self._on_advance_end = self._loop.on_advance_end
        self._fetcher: Any = None
        self._class: type = object  # its own
        self._inner: Callable[[], Any] = list
        self._newest = 0  # epoch of the newest pass over the data
        self._boundary: int | None = None  # global step of the last boundary

    # -- in place of the loop's methods

    def on_run_start(self, fetcher: Any) -> None:
        self._use(fetcher)
        self._on_run_start(fetcher)
        if self._boundary is None:
            self._act()

    def on_advance_end(self, fetcher: Any) -> None:
        self._on_advance_end(fetcher)
        if self._trainer.global_step != self._boundary and not self._loop._should_accumulate():
            self._act()

    def _act(self) -> None:
        self.at_boundary(self.monitor.weights_step, last=self._is_last_step())
        self._boundary = self._trainer.global_step
        if self.monitor.should_stop:
            self._trainer.should_stop = True

    def _is_last_step(self) -> bool:
        """True if the training ends after this batch; an epoch is over at its last one."""
        trainer = self._trainer
        if 0 <= trainer.max_steps <= trainer.global_step:
            return True
        last = trainer.max_epochs is not None and trainer.max_epochs <= trainer.current_epoch + 1
        return bool(last and trainer.max_epochs >= 0 and self._loop._num_ready_batches_reached())

    # -- the position

    def loop_state(self) -> dict[str, Any]:
        return {
            "progress": [progress.state_dict() for progress in self._progress()],
            "stepped": self._loop._batches_that_stepped,
            "callbacks": [copy.deepcopy(callback.state_dict()) for callback in self._callbacks()],
        }

    def set_loop_state(self, loop: Mapping[str, Any]) -> None:
        for progress, state in zip(self._progress(), loop["progress"], strict=True):
            progress.load_state_dict(copy.deepcopy(state))
        self._loop._batches_that_stepped = loop["stepped"]
        for callback, state in zip(self._callbacks(), loop["callbacks"], strict=True):
            if state:
                callback.load_state_dict(copy.deepcopy(state))
        for callback in self._trainer.checkpoint_callbacks:
            if hasattr(callback, "_last_global_step_saved"):
                callback._last_global_step_saved = 0  # else the same step is not saved again

    def _progress(self) -> list[Any]:
        loop = self._loop
        return [
            self._fit.epoch_progress,
            loop.batch_progress,
            loop.scheduler_progress,
            loop.automatic_optimization.optim_progress,
            loop.manual_optimization.optim_step_progress,
            loop.val_loop.batch_progress,
        ]

    def _callbacks(self) -> list[Any]:
        """The callbacks with a state of their own, without those that write checkpoints."""
        writers = self._trainer.checkpoint_callbacks
        return [
            callback
            for callback in self._trainer.callbacks
            if not isinstance(callback, MonitorCallback) and all(callback is not w for w in writers)
        ]

    # -- the batches

    def _use(self, fetcher: Any) -> None:
        """Pass the batches of this fetcher through here; Lightning may make another one."""
        if fetcher is self._fetcher:
            return
        self.leave_fetcher()
        epoch = self._trainer.current_epoch
        # For the first epoch the pass has begun; for a later one it is about to.
        self._newest = epoch - 1 if epoch > 0 else 0
        self._epoch_drawn = epoch
        self.keeps_batches = not hasattr(fetcher, "_dataloader_idx")
        if self.keeps_batches:
            # The loop calls iter() and next(), which look a method up in the class alone.
            self._fetcher, self._class = fetcher, type(fetcher)
            fetcher.__class__ = _passing(self, type(fetcher))

    def leave_fetcher(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.__class__ = self._class

    def begin(self, begin: Callable[[], Any]) -> None:
        """Begin the pass of the present epoch, if it has not begun before a return."""
        epoch = self._trainer.current_epoch
        if epoch <= self._newest:
            self.pass_repeated(epoch)
            return
        before = host_random_state()
        begin()
        self._newest = epoch
        self.pass_begun(epoch, before)

    def fetch(self, fetcher: Any, inner: Callable[[], Any]) -> Any:
        """The next batch; sets what the fetcher counts to what the loop counts."""
        self._inner = inner
        fetcher.done = False  # it is asked for a batch: the loop has not done them all
        kept = self.next_batch()
        fetcher.done = kept.ended
        if fetcher.length is not None:
            fetcher.fetched = self._loop.batch_progress.current.ready + 1
            fetcher.done = fetcher.fetched >= fetcher.length
        return kept.value

    def draw(self) -> Any:
        """The fetcher's next batch; a pass that was cut short is followed by another."""
        try:
            return self._inner()
        except StopIteration:
            if not self.short or self._fetcher.length is None:
                raise
        self._epoch_drawn, self._in_epoch = self._epoch_drawn + 1, 0
        self._fetcher.iterator = iter(self._fetcher.combined_loader)
        self._fetcher.done = False
        return self._inner()

    def ended(self) -> bool:
        return bool(self._fetcher.done)


def _passing(loops: TrainerLoops, kind: Any) -> Any:
    """A class of fetchers like this one that passes its batches through `loops`."""

    class Passing(kind):  # type: ignore[misc]
        def __iter__(self) -> Any:
            loops.begin(super().__iter__)
            return self

        def __next__(self) -> Any:
            return loops.fetch(self, super().__next__)

    return Passing
