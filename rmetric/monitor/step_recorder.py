"""Measure one training step on the device, without waiting for the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rmetric._util.host_memory import available_to_rank, resident_memory
from rmetric.monitor.actions.action import is_distributed
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.forward import ForwardProbes, is_compiled
from rmetric.monitor.gradients import (
    WeightSample,
    gradients_of,
    is_sharded,
    layer_names,
    local,
    tensor_norms,
)
from rmetric.monitor.pending import Pending
from rmetric.monitor.step_time import compilations
from rmetric.monitor.workers import GradientListener, MicroBatchWorkers, OwnGradient
from rmetric.records import HardwareEvent, Record

logger = logging.getLogger("rmetric")


class Hardware(Protocol):
    """A source of hardware events, such as `rmetric.telemetry.nvml.NvmlEvents`."""

    def poll(self) -> Sequence[HardwareEvent]: ...

    def close(self) -> None: ...


class EventCollector:
    """Hardware events since the last step, on the run's clock, which continues after a restart."""

    def __init__(self, hardware: Hardware | None) -> None:
        self.hardware = hardware
        self._start, self._offset = time.monotonic(), 0.0
        self._reported: list[HardwareEvent] = []

    def now(self) -> float:
        """Seconds since the beginning of the run."""
        return round(self._offset + time.monotonic() - self._start, 6)

    def resume(self, seconds: float) -> None:
        self._offset, self._start = seconds, time.monotonic()

    def report(self, kind: str, worker: int | None = None) -> None:
        self._reported.append(HardwareEvent(self.now(), kind, worker))

    def take(self) -> tuple[HardwareEvent, ...] | None:
        """The events of a step; None if there is nothing that could have observed any."""
        events, self._reported = self._reported, []
        if self.hardware is None:
            return tuple(events) or None
        try:
            if hasattr(self.hardware, "start"):
                self.hardware.start = self._start  # it may have begun before the run did
            polled = self.hardware.poll()
        except Exception as error:
            logger.error("rmetric: going on without hardware events: %s", error)
            self.hardware = None
            return tuple(events) or None
        events += [replace(event, time=event.time + self._offset) for event in polled]
        # A source that cannot be read has not observed the absence of events.
        is_read = getattr(self.hardware, "available", True)
        return tuple(events) if events or is_read else None


def memory_in_use(parameters: Iterable[Tensor]) -> dict[str, float] | None:
    """The value of `Record.memory`; None where the system reports none. Waits for no device.

    What the process shares with its data loaders' workers counts through the limit alone.
    """
    found: dict[str, float] = {}
    resident, available = resident_memory(), available_to_rank()
    if resident is not None:
        found["host"] = resident
        if available is not None:
            found["host_limit"] = resident + available
    device = next((p.device for p in parameters if p.device.type == "cuda"), None)
    if device is not None:
        free, _ = torch.cuda.mem_get_info(device)
        found["device"] = torch.cuda.memory_allocated(device)
        found["device_limit"] = torch.cuda.memory_reserved(device) + free
    return found or None


class StepRecorder:
    """Measures a step between its backward pass and the optimiser's step.

    The measurements stay on the device in a `Pending`. `arm` installs the hooks that the next step
    needs and no others.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        config: MonitorConfig,
        *,
        scaler: Any = None,
        hardware: Hardware | None = None,
        probe: Callable[[], Tensor] | None = None,
    ) -> None:
        self.events = EventCollector(hardware)
        self.parameters = list(model.parameters())
        self.planned: list[str] = []
        self.changes: list[str] = []  # by the monitor's actions, from the next step on
        self.norm_handed_over = False
        self._model, self._optimizer, self._config = model, optimizer, config
        self.scaler, self._probe = scaler, probe  # whose factor is in what backward returns
        self._own: GradientListener | None = None  # this rank's own gradient
        self._shards: Any = None
        self.removers: list[Callable[[], Any]] = []
        self.sees_updates = False  # `after_optimizer` is called
        self._shared_norm: Tensor | None = None  # of the unclipped gradients: clipping uses it
        self._sampled = False  # the weights before this step are remembered
        self._micro_losses: list[Any] = []
        self._micro_batches = 0  # of the present step
        self._accumulates = True  # not known before the first step

    def install(self) -> None:
        if is_distributed() and is_sharded(self.parameters):
            from rmetric.monitor import fsdp  # the sharded part of torch is slow to import

            # Before all that may fail on one rank alone: clipping is a collective.
            self._shards = fsdp.Shards(self.parameters)
        names = [name for name, _ in self._model.named_parameters()]
        self._layers = dict(zip(map(id, self.parameters), layer_names(names), strict=True))
        self._sample = WeightSample(self.parameters, self._config.sampled_weights)
        self._workers = MicroBatchWorkers(self.parameters)
        compiled = any(map(is_compiled, self._model.modules()))
        self._forward = None if compiled else ForwardProbes(self._model)
        self._compilations = compilations()  # of others, before this training
        if is_distributed():
            self._own = OwnGradient(self.parameters)
        if self._shards is not None:
            self._own = fsdp.OwnShardedGradient(self._model)
            if self._probe is not None:
                self._probe = None
                logger.warning("rmetric: no fixed batch: sharded models run on all ranks or none")
        self.removers = [part.remove for part in (self._workers, self._own, self._forward) if part]

    def arm(self, step: int, *, ranks_connected: bool) -> None:
        self._workers.remove()
        if self._own is not None:
            self._own.remove()
        if is_due(step, self._config.workers_every):
            if self._own is not None and ranks_connected:
                self._own.start()
            elif self._accumulates:
                self._workers.start()
        if self._forward is not None and self._config.forward_every > 0:
            self._forward.remove()
            # Not at the first step: what the model compiles there would be compiled once more
            # without the mode that intercepts attention.
            if step > 1 and (step == 2 or step % self._config.forward_every == 0):
                self._forward.arm(attention=compilations() == self._compilations)

    def add_micro_batch(self, loss: Tensor | float | None) -> None:
        if loss is not None:
            self._micro_losses.append(_copied(loss))
        self._micro_batches += 1
        if self._workers.active:
            self._workers.next()

    def measure(
        self, step: int, loss: Tensor | float | None, gradient_norm: Tensor | float | None
    ) -> Pending:
        """Measure a step; without a loss, it is the mean of the micro-batches."""
        record = Record(step=step, time=self.events.now(), learning_rate=self.learning_rate)
        record.events = self.events.take()
        if is_due(step, self._config.memory_every):
            record.memory = memory_in_use(self.parameters)
        if self.planned:
            record.planned_events, self.planned = tuple(self.planned), []
        if self.changes:
            record.actions, self.changes = tuple(self.changes), []
        self.norm_handed_over = gradient_norm is not None
        pending = Pending(record, self._loss_of_step(loss))
        self._measure_gradients(pending, gradient_norm)
        if self._forward is not None and self._forward.armed:
            pending.measured |= self._forward.take()
        if self._probe is not None and is_due(step, self._config.probe_every):
            pending.measured["probe"] = self._probe_loss()
        if self.sees_updates and is_due(step, self._config.update_every):
            # Here and not in a hook on step(): a closure's backward runs inside of that.
            self._sample.remember()
            self._sampled = True
        return pending

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the first parameter group; None without an optimiser."""
        groups = getattr(self._optimizer, "param_groups", None)
        return float(groups[0]["lr"]) if groups else None

    @property
    def sharded(self) -> bool:  # each of several ranks holds a part of the model
        return self._shards is not None

    def after_optimizer(self, pending: Pending | None) -> None:
        """The optimiser has moved the weights: measure the update of that step."""
        self._shared_norm = None
        if pending is not None:
            moved = self._sample.moved() if self._sampled else None
            if moved is not None:
                pending.measured["update"], pending.measured["parameter"] = moved
            pending.send()
        self._sampled = False

    def clip(self, max_norm: float, pending: Pending | None, *, active: bool) -> Tensor:
        """Clip as `Monitor.clip_grad_norm_` does; not `active` reuses nothing of `pending`."""
        if self._shards is not None:
            norm_of_all: Tensor = self._shards.clip(max_norm, pending if active else None)
            return norm_of_all
        norm, self._shared_norm = self._shared_norm, None
        if norm is None or not active:
            return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return norm

    def locate_non_finite(self, pending: Pending) -> None:
        """Count the non-finite entries and name their first layer; reads from the device."""
        present = [p for p in self.parameters if p.grad is not None]
        if not present:
            pending.record.non_finite_gradients = 0
            return
        sums = [(~gradient.isfinite()).sum() for gradient in gradients_of(present)]
        counts = torch.stack([total.to(sums[0].device) for total in sums]).tolist()
        pending.record.non_finite_gradients = total = sum(counts)
        if total:
            layers = (self._layers[id(p)] for p, bad in zip(present, counts, strict=True) if bad)
            pending.where = f"{total} entries are not finite, first in {next(layers)}"

    def _loss_of_step(self, loss: Tensor | float | None) -> Tensor | float | None:
        losses, self._micro_losses = self._micro_losses, []
        if loss is not None:
            return _copied(loss)
        return sum(losses) / len(losses) if losses else None

    def _measure_gradients(self, pending: Pending, norm: Tensor | float | None) -> None:
        self._shared_norm = None
        self._accumulates, self._micro_batches = self._micro_batches > 1, 0
        for name, listener in (("worker", self._workers), ("own", self._own)):
            if listener is not None and listener.active:
                pending.measured |= self._statistics(name, listener)
        if self._shards is not None:
            self._shards.measure(pending, norm)
            return
        norm = local(norm)  # of FSDP2 on one rank, which holds the whole
        layers_due = is_due(pending.record.step, self._config.layers_every)
        if norm is None or layers_due:
            present = [p for p in self.parameters if p.grad is not None]
            norms = tensor_norms(gradients_of(present))
            if layers_due and present:
                pending.measured["tensor_norms"] = norms
                pending.layers = [self._layers[id(p)] for p in present]
            if norm is None and present:
                norm = self._shared_norm = torch.linalg.vector_norm(norms)
        pending.norm = norm

    def _statistics(self, prefix: str, listener: GradientListener) -> dict[str, Tensor]:
        found = listener.stop()
        if found is None:
            return {}
        if self.scaler is not None:  # backward returns the gradient times its factor
            factor = self.scaler.scale(found.norms.new_ones(()))
            found = found._replace(norms=found.norms / factor)
        return {f"{prefix}_{name}": value for name, value in found._asdict().items()}

    def _probe_loss(self) -> Tensor | None:
        assert self._probe is not None
        modes = [(m, m.training) for m in self._model.modules()]
        try:
            self._model.eval()
            devices = {p.device.index for p in self.parameters if p.device.type == "cuda"}
            with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
                return self._probe().detach()
        finally:
            for module, mode in modes:
                module.training = mode


def is_due(step: int, every: int) -> bool:
    """True if a measurement of this cadence is made at `step`; the first step is one."""
    return every > 0 and (step % every == 0 or step == 1)


def unwrapped(optimizer: Any) -> Any:
    """The optimiser itself, without the wrappers that trainers put around it."""
    while not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            return optimizer
        optimizer = inner
    return optimizer


def _copied(loss: Tensor | float) -> Tensor | float:
    """A copy: a captured graph writes the next loss to the same place."""
    return loss.detach().clone() if isinstance(loss, Tensor) else float(loss)
