"""Measure the parts of a step on the host clock; nothing waits for a device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rmetric.audits.training import OwnHook
from rmetric.monitor.forward import entrances
from rmetric.monitor.stalls import StepTimes

#: What the host is doing: between two steps or two micro-batches, in forward and backward, in
#: the monitor's check, between that and the end of the optimiser's step.
BETWEEN, PASSES, CHECK, OPTIMIZER = range(4)


class StepTimer:
    """Divides the time of each step into its parts.

    A forward pre-hook ends the wait for data, the check ends forward and backward, the optimiser's
    post-step hook ends the optimiser's part. With several ranks, two callbacks at the end of
    backward enclose the wait for the other ranks' gradients, which DistributedDataParallel queues
    between them. Pauses are left out: `pause` marks them, and so do forward passes between two
    steps without gradients, or of whose output no backward pass takes the gradient.

    Its weaknesses: the host's time in a part is not an accelerator's; what the host waits for is in
    `check`. A model that is compiled in place shows no forward pass: the wait for data is then part
    of `forward_backward`, unless the loop calls `batch_ready`. An evaluation of a copy of the model
    is not seen.
    """

    def __init__(self, model: nn.Module, *, several_ranks: bool = False) -> None:
        self._model, self._several_ranks = model, several_ranks
        self._handles: list[Any] = []
        self._trained: set[nn.Module] = set()  # parts
        self.reset()

    def reset(self) -> None:
        """Forget the step under way; the next one has no beginning."""
        self._state, self._mark = BETWEEN, -1.0  # -1: unknown
        self._paused = False
        self._own_end = self._exchange_end = -1.0  # of the backward pass under way
        self._waited: float | None = None  # for the data of the passes under way
        self._passes: list[_Pass] = []  # since that wait
        self._outer: nn.Module | None = None  # of the forward pass under way
        self._open = StepTimes()  # of the step up to its check
        self._last: StepTimes | None = None  # of the step after its check
        self._compilations = compilations()

    def install(self) -> None:
        """Install the hooks; a module that is compiled in place gets none."""
        what, modules = "a hook of the step times", entrances(self._model)
        ends = OwnHook(self._forward_ends, what)
        for of, is_whole in zip(modules, (True, False), strict=True):
            begins = OwnHook(partial(self._forward_begins, is_whole), what)
            self._handles += [
                module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
                for module in of
            ]
        self._handles += [module.register_forward_hook(ends) for module in modules[0]]
        if self._several_ranks:
            trained = [p for p in self._model.parameters() if p.requires_grad]
            for parameter in trained[-1:]:  # its gradient is ready first
                self._handles.append(parameter.register_hook(self._backward_begins))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- the course of a step

    def batch_ready(self) -> None:
        """A forward pass of the training, not of an evaluation, begins."""
        self._begin_passes(reached=True)

    def _begin_passes(self, *, reached: bool = False) -> None:
        if self._state in (BETWEEN, OPTIMIZER):
            now = time.perf_counter()
            known = self._mark >= 0.0 and not self._paused
            self._waited = now - self._mark if known else None
            self._passes, self._outer = [_Pass(now, reached=True)] if reached else [], None
            self._paused, self._state, self._mark = False, PASSES, now
            self._own_end = self._exchange_end = -1.0

    def pause(self) -> None:
        """The time from the last mark to the next forward pass is not the step's."""
        self._paused = True

    def micro_batch(self) -> None:
        """A backward pass has ended; the data of the next micro-batch may be waited for."""
        if self._state == PASSES:
            self._end_passes(time.perf_counter())
            self._state = BETWEEN

    def check_begins(self) -> StepTimes | None:
        """Forward and backward have ended; returns the times of the step before, complete."""
        now = time.perf_counter()
        if self._state == CHECK:  # the check before was broken off
            self._state = OPTIMIZER
        if self._state == PASSES or (self._mark >= 0.0 and not self._paused):
            self._end_passes(now)
        step, self._open = self._open, StepTimes()
        before, self._last = self._last, step
        compiled = compilations()
        step.compiled, self._compilations = compiled != self._compilations, compiled
        self._state, self._mark, self._paused = CHECK, now, False
        return before

    def check_ends(self) -> None:
        now = time.perf_counter()
        if self._last is not None and not self._paused:
            self._last.check = now - self._mark
        self._state, self._mark, self._paused = OPTIMIZER, now, False

    def optimizer_ends(self) -> None:
        now = time.perf_counter()
        if self._state == OPTIMIZER and self._last is not None and not self._paused:
            self._last.optimizer = now - self._mark
        if self._state != CHECK:
            self._state, self._mark = BETWEEN, now

    def finish(self) -> StepTimes | None:
        before, self._last = self._last, None
        return before

    # -- hooks

    def _forward_begins(
        self, whole: bool, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if not torch.is_grad_enabled():
            # A part that is never trained, such as a frozen encoder, belongs to the step.
            if self._state in (BETWEEN, OPTIMIZER) and (whole or module in self._trained):
                self._paused = True
            return
        if self._state == CHECK:
            return
        self._begin_passes()
        if not whole:
            self._trained.add(module)
        elif self._outer is None:
            self._outer = module
            self._passes.append(_Pass(time.perf_counter(), _size(args, kwargs)))

    def _forward_ends(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        if module is self._outer and self._passes:
            self._outer = None
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._passes[-1].reach)

    def _backward_begins(self, gradient: Tensor) -> None:
        with suppress(RuntimeError):  # a backward pass that takes no callbacks
            _at_end_of_backward(self._own_backward_ends)

    def _own_backward_ends(self) -> None:
        self._own_end = time.perf_counter()
        # It runs after the one that DistributedDataParallel queued during the backward pass.
        _at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        self._exchange_end = time.perf_counter()

    def _end_passes(self, now: float) -> None:
        begin, step = self._mark, self._open
        trained = next((n for n, each in enumerate(self._passes) if each.reached), 0)
        if trained:  # those before were an evaluation
            begin, self._waited = self._passes[trained].begin, None
        if self._waited is not None:
            step.data_wait = (step.data_wait or 0.0) + self._waited
        if size := sum(each.size for each in self._passes[trained:]):
            step.size = (step.size or 0.0) + size
        exchange = 0.0
        if self._own_end >= begin and self._exchange_end >= self._own_end:
            exchange = self._exchange_end - self._own_end
            step.exchange = (step.exchange or 0.0) + exchange
        step.forward_backward = (step.forward_backward or 0.0) + now - begin - exchange
        self._mark, self._waited, self._passes = now, None, []
        self._own_end = self._exchange_end = -1.0


@dataclass(slots=True)
class _Pass:
    """A forward pass with gradients: when it began, elements of its input, was it trained."""

    begin: float
    size: int = 0
    reached: bool = False

    def reach(self, gradients: Any) -> None:
        self.reached = True


def _at_end_of_backward(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _tensors(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, Mapping) else output
    values = values if isinstance(output, (Mapping, tuple, list)) else [output]
    return [value for value in values if isinstance(value, Tensor)]


def _size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Elements of the model's input, from the shape alone; 0 where there is no tensor."""
    tokens = kwargs.get("input_ids")
    if isinstance(tokens, Tensor):
        return tokens.numel()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.numel()
    return 0


def compilations() -> int:
    """Graphs that torch.compile has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"].get("total", 0))
