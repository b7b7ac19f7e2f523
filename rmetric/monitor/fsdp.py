"""Sharded models (FSDP2): each rank's own gradient, and the norm of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate

from rmetric.monitor.gradients import gradients_of, non_finite_entries, tensor_norms, total_norm
from rmetric.monitor.pending import Pending
from rmetric.monitor.workers import SAMPLED, WorkerStatistics, cosine


class Shards:
    """The gradient norm of a model of which each rank holds a part.

    Nothing here is a collective unless the loop itself asks for clipping, so no
    rank waits for another's monitor: the squares of the parts travel with the
    monitors' messages and are added up there.

    Args:
        parameters: of the model.
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
            pairs = zip(self._parameters, self._shares, strict=True)
            roots = [share**0.5 for p, share in pairs if p.grad is not None]
            norms = tensor_norms(gradients_of(self._parameters))
            pending.shard_norm = total_norm(norms * torch.tensor(roots, device=norms.device))

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
    """One over the ranks that hold the same numbers as this one does.

    The squares of the norms, times these shares, add up over the ranks to the
    square of the whole norm.
    """
    if not isinstance(parameter, DTensor):
        return 1.0 / dist.get_world_size()
    mesh, copies = parameter.device_mesh, 1
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(dimension)
    return 1.0 / copies


class OwnReducedGradient:
    """Norm, non-finite entries and a sample of what this rank alone has found.

    FSDP2 lets a module's reduce-scatter be replaced. Ours looks at what goes in,
    which is the rank's whole own gradient of that module, calls the one that
    was there, and looks at what comes out: the mean, of this rank's shard. So
    the norm is that of the whole gradient, the cosine that of the shard.

    Its weakness: with accumulation FSDP2 reduces each micro-batch unless it is
    told to wait, and then the last one alone is seen. With replicas (HSDP) the
    cosine is to the mean of those that share the shards.

    Args:
        model: whose modules `fully_shard` was applied to.
        size: entries sampled for the cosine.
    """

    def __init__(self, model: nn.Module, size: int = SAMPLED) -> None:
        self.active = False
        self._error: Exception | None = None
        self._own: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        whole = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._stride = max(1, whole // size)
        self._listeners = [
            (module, _Listener(self, _reduce_scatter_of(module)))
            for module in model.modules()
            if isinstance(module, FSDPModule) and _reduce_scatter_of(module) is not None
        ]
        for module, listener in self._listeners:
            module.set_custom_reduce_scatter(listener)

    def start(self) -> None:
        """Listen, from the next backward pass on."""
        self._own, self.active = {}, True

    @torch.no_grad()
    def stop(self) -> WorkerStatistics | None:
        """Of the gradient since `start`, each of shape (1,); None where there was none."""
        self.active = False
        own, self._own = self._own, {}
        if self._error is not None:
            raise self._error
        if not own:
            return None
        norms, non_finite, shards, means = zip(*own.values(), strict=True)
        return WorkerStatistics(
            total_norm(torch.stack(norms)).reshape(1),
            cosine(torch.cat(shards), torch.cat(means)).reshape(1),
            torch.stack(non_finite).sum().reshape(1),
        )

    def remove(self) -> None:
        """Put back what was there, where nobody has put something else there since."""
        for module, listener in self._listeners:
            if _reduce_scatter_of(module) is listener:
                module.set_custom_reduce_scatter(listener.inner)

    @torch.no_grad()
    def measure(self, own: Tensor, shard: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Before the reduction; None where it failed, or nobody wants to know."""
        if not self.active or self._error is not None:
            return None
        try:
            sample = shard[:: self._stride].to(torch.float32, copy=True)
            return tensor_norms([own])[0], non_finite_entries(own), sample
        except Exception as error:  # must not end the backward pass
            self._error = error
            return None

    @torch.no_grad()
    def keep(self, module: int, own: tuple[Tensor, Tensor, Tensor], mean: Tensor) -> None:
        """After it."""
        try:
            self._own[module] = (*own, mean[:: self._stride].to(torch.float32, copy=True))
        except Exception as error:
            self._error = error


class _Listener(DefaultReduceScatter):
    """A reduce-scatter that shows what goes in and what comes out."""

    def __init__(self, listening: OwnReducedGradient, inner: Any) -> None:
        self.listening, self.inner = listening, inner

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **kwargs: Any
    ) -> Any:
        shard = input_tensor.view(-1, output_tensor.numel())[group.rank()]
        own = self.listening.measure(input_tensor, shard)
        work = self.inner(output_tensor, input_tensor, group, *args, **kwargs)
        if own is not None:
            self.listening.keep(id(self), own, output_tensor)
        return work


def _reduce_scatter_of(module: FSDPModule) -> Any:
    """Reduce-scatter of this module; None if it has no parameters of its own."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    return groups[0]._reduce_scatter_comm if len(groups) == 1 else None
