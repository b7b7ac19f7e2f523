"""Each worker's own gradient before it is averaged: norms, cosines, non-finite entries."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rmetric.monitor.gradients import non_finite_entries, plain, tensor_norms

SAMPLED = 2**16  # gradient entries that a cosine is taken over


class WorkerStatistics(NamedTuple):
    """One number a worker, each a tensor of shape (workers,).

    Attributes:
        norms: L2 norm of the worker's own gradient.
        cosines: to the mean over all workers; nan where either is zero or not finite.
        non_finite: entries that are nan or inf.
    """

    norms: Tensor
    cosines: Tensor
    non_finite: Tensor


@torch.no_grad()
def worker_statistics(gradients_WD: Tensor) -> WorkerStatistics:
    """Of the workers' whole gradients, shape (workers, parameters)."""
    norms = torch.linalg.vector_norm(gradients_WD, dim=1)
    non_finite = (~gradients_WD.isfinite()).sum(dim=1)
    return WorkerStatistics(norms, cosines_to_mean(gradients_WD), non_finite)


@torch.no_grad()
def cosines_to_mean(gradients_WD: Tensor) -> Tensor:
    """Cosine of each row to the mean of all rows, shape (workers,)."""
    mean = gradients_WD.mean(dim=0)
    lengths = torch.linalg.vector_norm(gradients_WD, dim=1) * torch.linalg.vector_norm(mean)
    return (gradients_WD @ mean) / lengths  # 0/0 is nan: no direction, no cosine


@torch.no_grad()
def cosine(one_D: Tensor, other_D: Tensor) -> Tensor:
    """Of the angle between two gradients, a scalar; nan where either is zero or not finite."""
    return (one_D @ other_D) / (torch.linalg.vector_norm(one_D) * torch.linalg.vector_norm(other_D))


class MicroBatchWorkers:
    """Takes each micro-batch of an accumulated step for a worker.

    A hook on every parameter sees the gradient of one backward pass before it is
    added to the others. Only a norm and an evenly spaced sample of entries are
    kept, so memory does not grow with the model; cosines are those of the
    samples. Hooks exist from `start` to `stop`, on the steps that are looked at.

    Its weakness: micro-batches share the weights and the machine, so they
    disagree through their data alone. No sick machine shows here.

    Args:
        parameters: all that get gradients.
        size: entries sampled for the cosines.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], size: int = SAMPLED) -> None:
        self._parameters = list(parameters)
        whole = sum(p.numel() for p in self._parameters if p.requires_grad)
        self._stride = max(1, whole // size)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._error: Exception | None = None
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by the parameter's place
        self._norms: list[Tensor] = []
        self._non_finite: list[Tensor] = []
        self._samples: list[dict[int, Tensor]] = []

    @property
    def several(self) -> bool:
        """True if more than one micro-batch came since `start`."""
        return len(self._norms) > 1

    @property
    def active(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        """Listen, from the next backward pass on."""
        self._forget()
        self._handles = [
            p.register_hook(partial(self._take, place))
            for place, p in enumerate(self._parameters)
            if p.requires_grad
        ]

    def next(self) -> None:
        """A micro-batch's backward pass has ended."""
        if self._parts:
            norms, non_finite, samples = zip(*self._parts.values(), strict=True)
            self._norms.append(torch.linalg.vector_norm(torch.stack(norms)))
            self._non_finite.append(torch.stack(non_finite).sum())
            self._samples.append(dict(zip(self._parts, samples, strict=True)))
            self._parts = {}

    def stop(self) -> WorkerStatistics | None:
        """Statistics of the micro-batches since `start`; None for fewer than two.

        Scaled to what each would have been alone: a loss that is divided by the
        number of micro-batches is taken for granted. Raises what went wrong in a
        hook, where nothing may be raised.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        error, self._error = self._error, None
        if error is not None:
            raise error
        norms, non_finite, rows = self._norms, self._non_finite, _aligned(self._samples)
        self._forget()
        if len(norms) < 2 or rows is None:
            return None
        cosines = cosines_to_mean(rows)
        return WorkerStatistics(torch.stack(norms) * len(norms), cosines, torch.stack(non_finite))

    def _forget(self) -> None:
        self._parts, self._norms, self._non_finite, self._samples = {}, [], [], []

    @torch.no_grad()
    def _take(self, place: int, gradient: Tensor) -> None:
        if self._error is not None:
            return
        try:
            gradient = plain(gradient.detach())
            norm = tensor_norms([gradient])[0]
            sample = gradient.flatten()[:: self._stride].to(torch.float32, copy=True)
            self._parts[place] = norm, non_finite_entries(gradient), sample
        except Exception as error:  # must not end the backward pass
            self._error = error


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
