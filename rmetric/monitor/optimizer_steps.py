"""Calls of the optimiser's step: leave one out safely, find the GradScaler that makes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

#: Calls between a scaler's step and the optimiser's, wrappers of trainers included.
_FRAMES = 16


class OptimizerSteps:
    """Follows the optimiser's step, and leaves the next one out without harm to a GradScaler.

    A scaler must find gradients when it looks for overflows, and it may look only once a step.
    So while a scaler may still look, the gradients stay until the optimiser's own step begins, and
    are dropped there. The same holds for a sharded model, where clipping is a collective that every
    rank must call with gradients. Otherwise they are dropped at once: inside of a step that was
    called with a closure that is the only way. `after` is called after each step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, scaler: Any, after: Callable[[], None]
    ) -> None:
        self.scaler = scaler  # or the one that was found to call the optimiser's step
        self.sharded = False  # each of several ranks holds a part of the model
        self._model, self._optimizer, self._after_step = model, optimizer, after
        self.hooked = self.inside = self._seen = False
        self.leaves_out = False  # the next call of the optimiser's step
        self.made = 0  # steps, where they are followed (`hooked`)

    def install(self) -> Iterator[Callable[[], Any]]:
        """Follow the optimiser's step; yield the functions that remove the hooks."""
        if hasattr(self._optimizer, "register_step_pre_hook"):
            # Not compiled where the step is.
            before, after = map(torch.compiler.disable, (self._before, self._after))
            yield self._optimizer.register_step_pre_hook(before).remove
            yield self._optimizer.register_step_post_hook(after).remove
            self.hooked = True

    def leave_out(self) -> None:
        """Leave the step at hand out: the optimiser changes neither weights nor its state."""
        keep = self.sharded or is_scaling(self.scaler) or not self._seen
        if self.hooked and not self.inside and keep:
            self.leaves_out = True
        else:
            self._drop_gradients()

    def _before(self, *_: Any) -> None:
        self.inside = True
        if not self._seen:
            self._seen = True
            scaler = caller_of_class(torch.amp.GradScaler, _FRAMES)
            self.scaler = self.scaler or (scaler if is_scaling(scaler) else None)
        if self.leaves_out:
            self.leaves_out = False
            self._drop_gradients()

    def _after(self, *_: Any) -> None:
        self.inside = False
        self.made += 1
        self._after_step()

    def _drop_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)
        if self._optimizer is not None:  # it may move more than the model
            self._optimizer.zero_grad(set_to_none=True)


def is_scaling(scaler: Any) -> bool:
    """True if the scaler is enabled, and so overflows on purpose now and then."""
    return scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled())


def caller_of_class(kind: type, frames: int = sys.maxsize) -> Any:
    """The nearest object of a class that is calling, within so many frames; None for none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frames > 0:
        if isinstance(caller := frame.f_locals.get("self"), kind):
            return caller
        frame, frames = frame.f_back, frames - 1
    return None


def scaler_of(optimizer: Any) -> Any:
    """The GradScaler that a wrapper around the optimiser holds, as accelerate's does; else None."""
    while optimizer is not None:
        scaler = getattr(optimizer, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):
            return scaler
        optimizer = getattr(optimizer, "optimizer", None)
    return None
