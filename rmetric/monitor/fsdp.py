"""Sharded models (FSDP2): each rank's own gradient, and the norm of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
except ImportError:  # before torch 2.9 a module's reduce-scatter cannot be replaced

    class DefaultReduceScatter:  # type: ignore[no-redef]
        """Base of reduce-scatters that no module takes."""


from rmetric.monitor.gradients import gradients_of, tensor_norms
from rmetric.monitor.pending import Pending
from rmetric.monitor.rank_sync import Exchange
from rmetric.monitor.workers import SAMPLED, GradientListener, WorkerStatistics, of_one_worker

#: A rank is waited for that long at a check; its training waits for it too, in the next forward.
NORM_SECONDS = 60.0


class Shards:
    """The gradient norm of a model of which each rank holds a part.

    No collective, unless the loop clips: the monitors' messages have the squares.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._shares = [share_of_whole(p) for p in self._parameters]
        self._one_share = self._shares[0] if len(set(self._shares)) == 1 else None

    def measure(self, pending: Pending, norm: Tensor | float | None) -> None:
        """The whole norm, where the loop knows it; else that of this rank's part."""
        pending.sharded, pending.moved_share = True, self._one_share
        pending.norm = known_to_all(norm)
        if pending.norm is None:
            norms = tensor_norms(gradients_of(self._parameters))
            if self._one_share is not None:
                norms = norms * self._one_share**0.5
            elif len(norms):  # multiplied one by one: to copy them would wait for the device
                pairs = zip(self._parameters, self._shares, strict=True)
                roots = [share**0.5 for p, share in pairs if p.grad is not None]
                norms = torch.stack(torch._foreach_mul([*norms.unbind()], roots))
            pending.shard_norm = torch.linalg.vector_norm(norms)

    def clip(self, max_norm: float, pending: Pending | None) -> Tensor:
        """torch.nn.utils.clip_grad_norm_, which is a collective; the step then knows its norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if pending is not None:
            pending.norm, pending.shard_norm = norm, None
        return norm


def known_to_all(norm: Tensor | float | None) -> Tensor | float | None:
    """A norm that every rank has; None for one that still has to be summed over them."""
    if not isinstance(norm, DTensor):
        return norm
    return norm.to_local() if all(isinstance(p, Replicate) for p in norm.placements) else None


def share_of_whole(parameter: nn.Parameter) -> float:
    """One over the ranks that hold the same numbers as this one; for sums of squared norms."""
    if not isinstance(parameter, DTensor):
        return 1.0 / dist.get_world_size()
    mesh, copies = parameter.device_mesh, 1
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(dimension)
    return 1.0 / copies


class WholeNorm:
    """Gradient norm of a sharded model before the optimiser's step: sums the ranks' squares.

    All ranks get the same sum by messages of this object's own, so they judge the step alike. A
    rank that leaves sends a last message, so that no other waits for it. Its weakness: a rank that
    is late by more than `NORM_SECONDS` takes a step that the others may leave out; that is
    reported.
    """

    def __init__(self, name: str, join_seconds: float) -> None:
        self._exchange = Exchange(
            3, f"{name}/norm", join_seconds=join_seconds, patience=NORM_SECONDS
        )
        self._problem = ""  # the first one

    @property
    def problem(self) -> str:
        """Why a norm is not known; empty where each was."""
        rest = "no step is skipped without the gradient norm of all ranks"
        return f"{self._problem}; {rest}" if self._problem else ""

    def of_step(self, step: int, norm: float | None) -> float | None:
        """The norm over all ranks from this rank's share of it; None where it cannot be known."""
        exchange, late = self._exchange, "not all ranks are in touch"
        rows = None
        if exchange.active or exchange.wait_joined(exchange.join_seconds):
            late = f"a rank was not at its check of step {step} within {NORM_SECONDS:g} s"
            exchange.take()  # of a rank that was late at the step before
            norm = norm or 0.0
            rows = exchange.take() if exchange.post([step, 0.0, norm * norm]) else None
        if rows is not None and rows[:, 1].any():
            left = exchange.ranks[int(rows[:, 1].argmax())]
            exchange.end(f"the monitor of rank {left} has stopped")
            rows = None
        if rows is None:
            self._problem = self._problem or exchange.problem or late
            return None
        if (rows[:, 0] != step).any():
            return None
        return sqrt(square) if (square := float(rows[:, 2].sum())) >= 0.0 else square

    def leave(self) -> None:
        self._exchange.post([0.0, 1.0, 0.0])
        self._exchange.close()


class OwnShardedGradient(GradientListener):
    """This rank's own gradient, before FSDP2 reduces it; statistics of shape (1,).

    A module's reduce-scatter is replaced by one that measures its input, the rank's whole own
    gradient of that module, and its output, the mean of this rank's shard: the norm is that of the
    whole, the cosine that of the shard. Its weakness: with accumulation FSDP2 reduces each
    micro-batch unless it is set to wait, and the last one alone is measured; with replicas (HSDP)
    the cosine is to the mean of those that share the shards.
    """

    def __init__(self, model: nn.Module, size: int = SAMPLED) -> None:
        super().__init__(model.parameters(), size)
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]

    def _measure_input(self, place: int, own: Tensor, shard: Tensor, group: Any) -> None:
        self._measure(place, own, own.view(-1, shard.numel())[group.rank()])

    def _keep_mean(self, place: int, shard: Tensor) -> None:
        if place in self._parts:
            self._means[place] = self._sample(shard)

    def _install(self) -> Iterable[Any]:
        for place, module in enumerate(self._modules):
            if reduce_scatter_of(module) is not None:
                before = partial(self._quietly, self._measure_input, place)
                after = partial(self._quietly, self._keep_mean, place)
                yield OwnReduceScatter(module, before, after)

    def _statistics(self) -> WorkerStatistics | None:
        own = [part[1] for part in self._parts.values()]
        return of_one_worker(self._parts.values(), own, [self._means[i] for i in self._parts])

    def _forget(self) -> None:
        super()._forget()
        self._means: dict[int, Tensor] = {}


class OwnReduceScatter(DefaultReduceScatter):
    """Reduce-scatter of one module that lets others look at it, around the one that was there.

    `before` is called with the input, the output and the group, `after` with the output, the mean.
    """

    def __init__(
        self,
        module: FSDPModule,
        before: Callable[[Tensor, Tensor, Any], None],
        after: Callable[[Tensor], None] = lambda output: None,
    ) -> None:
        self._module, self._before, self._after = module, before, after
        self._inner = reduce_scatter_of(module)
        module.set_custom_reduce_scatter(self)

    def remove(self) -> None:
        """Restore the one before; where another has replaced ours since, ours does nothing more."""
        if reduce_scatter_of(self._module) is self:
            self._module.set_custom_reduce_scatter(self._inner)
        self._before, self._after = (lambda *_: None), (lambda output: None)

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = self._inner.allocate(*args, **kwargs)
        return tensor

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._before(input_tensor, output_tensor, group)
        work = self._inner(output_tensor, input_tensor, group, *args, **kwargs)
        self._after(output_tensor)
        return work


def reduce_scatter_of(module: FSDPModule) -> Any:
    """Reduce-scatter of this module; None if it has no parameters of its own, or an older torch."""
    if not hasattr(module, "set_custom_reduce_scatter"):
        return None
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group a module, before torch 2.13
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return getattr(groups[0], "_reduce_scatter_comm", None) if len(groups) == 1 else None
