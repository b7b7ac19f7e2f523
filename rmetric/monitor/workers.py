"""Each worker's own gradient before it is averaged: norms, cosines, non-finite entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rmetric.monitor.gradients import plain, tensor_norm, tensor_norms

SAMPLED = 2**16  # gradient entries that a cosine is taken over
TOGETHER = 2**28  # bytes of gradients that are kept, to be measured by few kernels

Measured = tuple[Tensor, Tensor]  # norm, sample of the entries


class WorkerStatistics(NamedTuple):
    """One number a worker, each a tensor of shape (workers,)."""

    norms: Tensor  # L2, of the worker's own gradient
    cosines: Tensor  # to the mean over all workers; nan where either is zero or not finite
    #: Parts of the gradient with entries that are nan or inf, by their norms: to count the entries
    #: would take another two passes over the gradient.
    non_finite: Tensor


@torch.no_grad()
def cosines_to_mean(gradients_WD: Tensor) -> Tensor:
    """Cosine of each row to the mean of all rows, shape (workers,)."""
    return _cosines(gradients_WD, gradients_WD.mean(dim=0))


def _cosines(gradients_WD: Tensor, mean_D: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(gradients_WD, dim=-1) * torch.linalg.vector_norm(mean_D)
    cosines: Tensor = (gradients_WD @ mean_D) / lengths  # 0/0 is nan: no direction, no cosine
    return cosines


class GradientListener:
    """Measures gradients in hooks that exist from `start` to `stop`, on measured steps only.

    A norm and an evenly spaced sample of `size` entries are kept; cosines are those of the samples.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], size: int = SAMPLED) -> None:
        self._parameters = list(parameters)
        self._stride = max(1, sum(p.numel() for p in self._parameters if p.requires_grad) // size)
        self._handles: list[Any] = []  # of the hooks; each has `remove`
        self._error: Exception | None = None
        self._forget()

    @property
    def active(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        """Install the hooks; the next backward pass is the first to be measured."""
        self._forget()
        self._handles.extend(self._install())

    @torch.no_grad()
    def stop(self) -> WorkerStatistics | None:
        """Statistics since `start`; None where there are none. Raises what a hook raised."""
        self.remove()
        error, self._error = self._error, None
        if error is not None:
            raise error
        found = self._statistics()
        self._forget()
        return found

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _install(self) -> Iterable[Any]:
        raise NotImplementedError

    def _statistics(self) -> WorkerStatistics | None:
        raise NotImplementedError

    def _forget(self) -> None:
        self._parts: dict[int, Measured] = {}  # by the place of the parameter or module

    @torch.no_grad()
    def _quietly(self, measure: Callable[..., None], *args: Any) -> None:
        """An exception must not end the backward pass: it is kept, and `stop` raises it."""
        if self._error is None and self.active:
            try:
                measure(*args)
            except Exception as error:
                self._error = error

    def _measure(self, place: int, gradient: Tensor, sampled: Tensor | None = None) -> None:
        """Measure one part of the gradient; the entries are those of `sampled`, if it is given."""
        norm = tensor_norm(plain(gradient.detach()))
        self._parts[place] = norm, self._sample(gradient if sampled is None else sampled)

    def _sample(self, gradient: Tensor) -> Tensor:
        """A copy: the gradient is accumulated and reduced in its place."""
        return self._spread(plain(gradient.detach())).to(torch.float32, copy=True)

    def _spread(self, dense: Tensor) -> Tensor:
        return dense.flatten()[:: self._stride]


class MicroBatchWorkers(GradientListener):
    """Takes each micro-batch of an accumulated step for a worker.

    A hook on every parameter sees the gradient of one backward pass before it is added to the
    others, and keeps it until `TOGETHER` bytes are there, which few kernels measure. Norms are
    scaled to what each micro-batch would have been alone: its loss is assumed to be divided by
    their number.

    Its weakness: micro-batches share the weights and the machine: no sick machine shows here.
    """

    _kept: dict[int, Tensor]  # gradients that are not measured yet, by the place of the parameter

    def next(self) -> None:
        self._quietly(self._measure_kept)
        if self._parts:
            self._micro_batches.append(self._parts)
            self._parts = {}

    def _install(self) -> Iterable[Any]:
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                hook = partial(self._quietly, self._keep, place)
                yield parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def _keep(self, place: int, gradient: Tensor) -> None:
        self._kept[place] = dense = plain(gradient.detach())
        self._kept_bytes += dense.nbytes
        if self._kept_bytes >= TOGETHER:
            self._measure_kept()

    def _measure_kept(self) -> None:
        kept = self._kept
        self._kept, self._kept_bytes = {}, 0
        if kept:
            norms = tensor_norms([*kept.values()]).unbind()
            spread = [self._spread(dense).float() for dense in kept.values()]
            where = spread[0].device
            together = torch.cat([sample.to(where) for sample in spread])
            samples = torch.split(together, [*map(len, spread)])
            self._parts.update(zip(kept, zip(norms, samples, strict=True), strict=True))

    def _statistics(self) -> WorkerStatistics | None:
        if len(self._micro_batches) < 2:
            return None
        rows = _aligned(
            [{i: part[1] for i, part in parts.items()} for parts in self._micro_batches]
        )
        if rows is None:
            return None
        whole = [_whole(parts.values()) for parts in self._micro_batches]
        norms, non_finite = map(torch.stack, zip(*whole, strict=True))
        return WorkerStatistics(norms * len(whole), cosines_to_mean(rows), non_finite)

    def _forget(self) -> None:
        super()._forget()
        self._micro_batches: list[dict[int, Measured]] = []
        self._kept, self._kept_bytes = {}, 0


class OwnGradient(GradientListener):
    """This rank's own gradient before DistributedDataParallel averages it, of shape (1,).

    A hook on every parameter runs once its gradient is accumulated: before the reduction, and after
    the micro-batches under `no_sync` are summed. The reduced gradient stays bit for bit the same.
    (A communication hook in place of the default divides in another place, and there can be only
    one.)

    Its weakness: a gradient that a loop averages itself is compared with the mean only where it
    does so before the check; else the cosine is to itself.
    """

    def _install(self) -> Iterable[Any]:
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                hook = partial(self._quietly, self._measure_accumulated, place)
                yield parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _measure_accumulated(self, place: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._measure(place, parameter.grad)

    def _sample(self, gradient: Tensor) -> Tensor:
        if gradient.is_sparse:  # it has other entries after the reduction
            return torch.zeros(0, device=gradient.device)
        return super()._sample(gradient)

    def _statistics(self) -> WorkerStatistics | None:
        own, means = [], []
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad and parameter.grad is not None:
                mean = self._sample(parameter.grad)
                means.append(mean)
                # A parameter that only other ranks used is zero here.
                measured = self._parts.get(place)
                own.append(torch.zeros_like(mean) if measured is None else measured[1])
        return of_one_worker(self._parts.values(), own, means)


def of_one_worker(
    parts: Collection[Measured], own: list[Tensor], mean: list[Tensor]
) -> WorkerStatistics | None:
    """Statistics of one rank, each of shape (1,); None where nothing was measured.

    `own` and `mean` are samples of its gradient and of the mean over the ranks, part by part.
    """
    if not parts:
        return None
    cosine = _cosines(torch.cat(own), torch.cat(mean)) if own else torch.tensor(torch.nan)
    norm, non_finite = _whole(parts)
    return WorkerStatistics(norm.reshape(1), cosine.reshape(1), non_finite.reshape(1))


def _whole(parts: Collection[Measured]) -> tuple[Tensor, Tensor]:
    """Norm of the whole gradient, and the number of its parts that are not finite."""
    norms = torch.stack([norm for norm, _ in parts])
    return torch.linalg.vector_norm(norms), torch.count_nonzero(~norms.isfinite())


def _aligned(samples: list[dict[int, Tensor]]) -> Tensor | None:
    """One row a micro-batch, zero where it did not use a parameter (an expert, say).

    None where samples of a parameter differ in length, as those of sparse gradients do.
    """
    known = {place: sample for row in samples for place, sample in row.items()}
    if any(len(sample) != len(known[place]) for row in samples for place, sample in row.items()):
        return None
    blank = {place: torch.zeros_like(known[place]) for place in sorted(known)}
    rows = [torch.cat([row.get(place, zero) for place, zero in blank.items()]) for row in samples]
    return torch.stack(rows) if rows and blank else None
