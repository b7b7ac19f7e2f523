"""Rescue in the Hugging Face Trainer (from transformers 5.5.4): its loop and its data, set back."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from rmetric.integrations.trainer_callback import replaced
from rmetric.rescue.data_position import DataPosition
from rmetric.rescue.recent_batches import host_random_state

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor
    from rmetric.rescue.action import Rescue

logger = logging.getLogger("rmetric")

#: Numbers that the Trainer keeps of its own loop, beside its state.
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
#: Parts of the Trainer's state that a training does not change, or that are treated one by one.
_NOT_SET_BACK = {"log_history", "stateful_callbacks"}


class RMetricState(TrainerCallback, ExportableState):
    """Keeps the monitor's state in the Trainer's checkpoints; exists while a training runs.

    It is not HuggingFaceCallback itself: with `restore_callback_states_from_checkpoint` the Trainer
    makes such callbacks anew from what it saved, and actions cannot be saved. Its name is a key in
    the checkpoints.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self._monitor.state_dict()}


def loop_methods(trainer: Trainer) -> list[tuple[Any, str]]:
    """Methods through which an exception leaves the steps, or what lies between them.

    The loop of transformers before 5.5 has no method for an epoch: there the batches,
    the callbacks and the evaluations are followed, and an exception of the optimiser itself is not
    seen.
    """
    if hasattr(trainer, "_run_epoch"):
        return [(trainer, "_run_epoch")]
    methods = ("get_batch_samples", "_maybe_log_save_evaluate")
    parts = [(trainer, name) for name in methods if hasattr(trainer, name)]
    return [*parts, (trainer.callback_handler, "call_event")]


@contextmanager
def followed(rescue: Rescue, trainer: Trainer, monitor: Monitor) -> Iterator[None]:
    """Within it, a rescue can set the loop of this Trainer back.

    The loop counts its steps in local variables, which nobody can set back. So the repeated steps
    are made inside `get_batch_samples`, with which it begins each step: there the Trainer's own
    `_run_epoch` runs them, from the batch of the snapshot up to the one at which the loop stands.
    Then the loop's own counters are right again.
    """
    for name in ("_run_epoch", "get_batch_samples"):
        if not hasattr(trainer, name):
            logger.error(
                "rmetric: the Trainer of transformers %s has no %s: rescue cannot go back; it "
                "needs transformers 5.5.4 or newer", transformers.__version__, name,
            )  # fmt: skip
            yield
            return
    loop = TrainerLoop(rescue, trainer, monitor)
    with ExitStack() as stack:
        stack.enter_context(replaced(trainer, "_run_epoch", loop.run_epoch))
        stack.enter_context(replaced(trainer, "get_batch_samples", loop.get_batch_samples))
        rescue.data = loop
        yield


class _CaughtUp(BaseException):
    """The repeated steps have reached the one at which the Trainer's own loop stands."""


class _WentBack(BaseException):
    """A rescue has set the training back once more during repeated steps."""


class _Rest(int):
    """Batches in the rest of an epoch; `_run_epoch` divides by it as by the whole epoch."""

    begun: int
    whole: int

    @classmethod
    def of(cls, whole: int, begun: int) -> _Rest:
        rest = cls(whole - begun)
        rest.whole, rest.begun = whole, begun
        return rest

    def __rtruediv__(self, batches: float) -> float:
        return (self.begun + batches) / self.whole


class TrainerLoop(DataPosition):
    """Position of a Trainer in its steps and data, for `Rescue`."""

    def __init__(self, rescue: Rescue, trainer: Trainer, monitor: Monitor) -> None:
        super().__init__(rescue)
        self.monitor, self._trainer = monitor, trainer
        self._run_epoch: Any = trainer._run_epoch
        self._get_batch_samples: Any = trainer.get_batch_samples
        self._signature = inspect.signature(self._run_epoch)
        self._epoch_arguments: dict[str, Any] = {}  # of the Trainer's own call
        self._epoch, self._updates = 0, 0  # the position: epoch, steps made in it
        self._live: Iterator[Any] | None = None  # the loader's, of the newest epoch
        self._before = host_random_state()
        self._passes = 0  # over the data beyond those of the schedule
        self._acted: int | None = None  # step of the last boundary
        self._until: tuple[int, int | None] | None = None  # repeated steps end here

    # -- in place of the Trainer's methods

    def run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Run an epoch; at the end of the training, also what a rescue repeats then."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._epoch_arguments = dict(arguments)
        self._epoch, self._updates = arguments["epoch"], _resumed_updates(self._trainer, arguments)
        self._live, self._before = None, host_random_state()
        result = self._run_epoch(*args, **kwargs)
        state = self._trainer.state
        while state.global_step >= state.max_steps and self._back(last=True):
            self._repeat((arguments["epoch"], None))
        return result

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """Batches of the next step, where a rescue may go back before."""
        here, trainer = (self._epoch, self._updates), self._trainer
        if self._until is None:
            if self._live is None:
                self._live = epoch_iterator
                self.pass_begun(self._epoch, self._before, self.resumed_place())
                resumed = self._epoch_arguments.get("resume_from_checkpoint") is not None
                # The Trainer sets the random state of a checkpoint in mid-epoch after this draw.
                if resumed and self._updates:
                    return self._batches(num_batches, *args)
            while self._back():
                self._repeat(here)
        else:
            if self._until == here:
                raise _CaughtUp
            if self._updates == 0:
                self.pass_repeated(self._epoch)
            if self._back():
                raise _WentBack
        if trainer.control.should_training_stop:  # held, or stopped during repeated steps
            return [], None
        return self._batches(num_batches, *args)

    # -- the position

    def loop_state(self) -> dict[str, Any]:
        trainer = self._trainer
        names = [item.name for item in fields(trainer.state) if item.name not in _NOT_SET_BACK]
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "epoch": self._epoch,
            "updates": self._updates,
            "state": {name: getattr(trainer.state, name) for name in names},
            "logged": len(trainer.state.log_history),
            "sums": {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
            "loss": loss.clone() if isinstance(loss, Tensor) else None,
            "callbacks": [dict(callback.state()["attributes"]) for callback in self._callbacks()],
        }

    def set_loop_state(self, loop: Mapping[str, Any]) -> None:
        trainer = self._trainer
        self._epoch, self._updates = loop["epoch"], loop["updates"]
        for name, value in loop["state"].items():
            setattr(trainer.state, name, value)
        best = trainer.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():  # rotated away since
            trainer.state.best_model_checkpoint = trainer.state.best_metric = None
        del trainer.state.log_history[loop["logged"] :]
        for name, value in loop["sums"].items():
            setattr(trainer, name, value)
        if loop["loss"] is not None:
            with torch.no_grad():
                trainer._tr_loss.copy_(loop["loss"])
        for callback, attributes in zip(self._callbacks(), loop["callbacks"], strict=True):
            vars(callback).update(attributes)

    def _callbacks(self) -> list[Any]:
        """The callbacks with a state of their own, such as the patience of an early stop."""
        return [
            callback
            for callback in self._trainer.callback_handler.callbacks
            if isinstance(callback, ExportableState) and not isinstance(callback, RMetricState)
        ]

    def resumed_place(self) -> int:
        args = self._trainer.args
        return 0 if args.ignore_data_skip else self._updates * args.gradient_accumulation_steps

    # -- the repeated steps

    def _back(self, *, last: bool = False) -> bool:
        """Act between two steps; true if the training went back."""
        if self.monitor.weights_step == self._acted:  # a stream without data: no step was made
            return False
        went_back = self.at_boundary(self.monitor.weights_step, last=last)
        self._acted = self.monitor.weights_step
        if self.monitor.should_stop:
            self._trainer.control.should_training_stop = True
            return False
        return went_back

    def _repeat(self, until: tuple[int, int | None]) -> None:
        """Make the steps again from the restored position up to a later one."""
        trainer = self._trainer
        trainer.control.should_training_stop = trainer.control.should_epoch_stop = False
        self._until = until
        try:
            while True:
                with suppress(_WentBack):
                    with suppress(_CaughtUp):
                        self._run_rest(until)
                    return
        finally:
            self._until = None
            self._epoch = until[0]

    def _run_rest(self, until: tuple[int, int | None]) -> None:
        trainer, own = self._trainer, self._epoch_arguments
        per_step, epoch = trainer.args.gradient_accumulation_steps, self._epoch
        while epoch <= until[0]:
            begun = self._updates
            rest = {
                "epoch": epoch,
                "train_dataloader": (),  # the batches come from `get_batch_samples`
                "steps_in_epoch": _Rest.of(own["steps_in_epoch"], begun * per_step),
                "num_update_steps_per_epoch": own["num_update_steps_per_epoch"] - begun,
                "resume_from_checkpoint": None,
            }
            if (epoch, begun) == until:
                return
            before = trainer.state.global_step
            self._run_epoch(**own | rest)
            if trainer.state.global_step == before and not self.monitor.should_stop:
                trainer.control.should_training_stop = False  # the end of a stream's pass
            if trainer.control.should_training_stop or epoch == until[0]:
                return
            epoch += 1
            self._epoch, self._updates = epoch, 0
            trainer.control = trainer.callback_handler.on_epoch_begin(
                trainer.args, trainer.state, trainer.control
            )

    # -- the batches

    def _batches(self, num_batches: int, *args: Any) -> Any:
        result = self._get_batch_samples(self._kept_batches(), num_batches, *args)
        self._updates += 1
        return result

    def _kept_batches(self) -> Iterator[Any]:
        stream = not has_length(self._epoch_arguments["train_dataloader"])
        # The end of a stream is that of the epoch.
        while not (stream and self.next_place()["epoch"] > self._epoch):
            try:
                batch = self.next_batch()
            except StopIteration:
                return
            yield batch.value

    def draw(self) -> Any:
        """The loader's next batch; a pass that was cut short by skipping is followed by another."""
        if self._live is None:
            raise StopIteration
        try:
            return next(self._live)
        except StopIteration:
            loader = self._epoch_arguments["train_dataloader"]
            if not (self.short and bool(has_length(loader))):
                raise
        self._passes += 1
        epoch = self._trainer.state.num_train_epochs - 1 + self._passes
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        self._epoch_drawn, self._in_epoch = epoch, 0
        self._live = iter(loader)
        return next(self._live)


def _resumed_updates(trainer: Trainer, arguments: Mapping[str, Any]) -> int:
    """Steps of this epoch that a resumed training skips."""
    if arguments["resume_from_checkpoint"] is None or trainer.args.ignore_data_skip:
        return 0
    if arguments["epoch"] != arguments["epochs_trained"]:
        return 0
    skipped: int = arguments["steps_trained_in_current_epoch"]
    return skipped // trainer.args.gradient_accumulation_steps
