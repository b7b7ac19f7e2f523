"""Rescue in Lightning 2, by either of its names: its loops and its data, set back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rmetric.integrations.replaced import replaced
from rmetric.integrations.trainer_callback import MonitorCallback
from rmetric.rescue.data_position import DataPosition
from rmetric.rescue.recent_batches import host_random_state

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor
    from rmetric.rescue.action import Rescue


@contextmanager
def followed(rescue: Rescue, trainer: Any, monitor: Monitor) -> Iterator[None]:
    """Within it, a rescue can set the loops of this Trainer back.

    Lightning keeps all counters of its loops in objects, and reads them after each batch to
    decide how to go on. So they are set back after a batch, between the end of `on_advance_end`
    and the next one, and the loops go on from there; an epoch that had begun begins again.
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
    """Position of Lightning's Trainer in its steps and data, for `Rescue`.

    Args:
        rescue: its `boundary` is called between two steps.
        trainer: that trains.
        monitor: whose steps are counted.
    """

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
        """Restore the class of the fetcher."""
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
