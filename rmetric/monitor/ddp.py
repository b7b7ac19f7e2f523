"""This rank's own gradient, before DistributedDataParallel averages it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from rmetric.monitor.gradients import non_finite_entries, plain, tensor_norms, total_norm
from rmetric.monitor.workers import SAMPLED, WorkerStatistics, cosine


class OwnGradient:
    """Norm, non-finite entries and a sample of what this rank alone has found.

    A hook on every parameter runs once its gradient is accumulated. That is
    before DistributedDataParallel hands the gradient over, and it sees the sum
    of the micro-batches under `no_sync`. The communication stays as it is,
    a hook of the user's on it too: the reduced gradient is bit for bit the same
    with and without us, for any number of ranks. (A communication hook in place
    of the default divides in another place, and there can be only one.) The
    mean is looked at when the step is checked. Hooks exist from `start` to
    `stop`, on the steps that are looked at.

    Its weakness: what a loop averages itself, and before it calls the check, is
    seen; what it averages afterwards is not, and the cosine is then to itself.

    Args:
        parameters: all that get gradients.
        size: entries sampled for the cosine.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], size: int = SAMPLED) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        whole = sum(p.numel() for p in self._parameters)
        self._stride = max(1, whole // size)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._own: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._error: Exception | None = None

    @property
    def active(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        """Listen, from the next backward pass on."""
        self._own = {}
        for index, parameter in enumerate(self._parameters):
            hook = partial(self._take, index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @torch.no_grad()
    def stop(self) -> WorkerStatistics | None:
        """Of the gradient since `start`, each of shape (1,); None where there was none.

        Raises what went wrong in a hook, where nothing may be raised.
        """
        self.remove()
        own, self._own = self._own, {}
        if self._error is not None:
            raise self._error
        if not own:
            return None
        norms, non_finite, _ = zip(*own.values(), strict=True)
        return WorkerStatistics(
            total_norm(torch.stack(norms)).reshape(1),
            self._cosine_to_mean(own).reshape(1),
            torch.stack(non_finite).sum().reshape(1),
        )

    def remove(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take(self, index: int, parameter: Tensor) -> None:
        if parameter.grad is None or self._error is not None:
            return
        try:
            gradient = plain(parameter.grad.detach())
            sample = self._sample(parameter.grad)
            self._own[index] = tensor_norms([gradient])[0], non_finite_entries(gradient), sample
        except Exception as error:  # must not end the backward pass
            self._error = error

    def _sample(self, gradient: Tensor) -> Tensor:
        if gradient.is_sparse:  # which has other entries after the reduction
            return torch.zeros(0, device=gradient.device)
        # A copy: the reduction writes the mean to the same place.
        return plain(gradient.detach()).flatten()[:: self._stride].to(torch.float32, copy=True)

    def _cosine_to_mean(self, own: dict[int, tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Over all that the mean has; a parameter that this rank did not use is zero here."""
        own_parts, mean_parts = [], []
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            mean = self._sample(parameter.grad)
            mean_parts.append(mean)
            own_parts.append(own[index][2] if index in own else torch.zeros_like(mean))
        if not mean_parts:
            return torch.tensor(torch.nan)
        return cosine(torch.cat(own_parts), torch.cat(mean_parts))
