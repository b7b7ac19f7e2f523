"""Changes that a rescue makes in a training: planned settings, and zero gradients of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rmetric.monitor.fsdp import OwnReduceScatter, reduce_scatter_of
from rmetric.monitor.gradients import is_sharded
from rmetric.rescue.snapshot import assign_in_place, settings_of


class PlannedSettings:
    """Settings of the optimiser's groups (betas, eps, weight_decay, lr) as they were planned.

    The learning rate is the last one of a scheduler that has one for each group, else that of the
    snapshot. Its weakness: settings that a loop changes by itself, without a scheduler, are put
    back too.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._groups = settings_of(optimizer) if optimizer is not None else []

    def use(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def set(self, schedulers: Iterable[Any]) -> None:
        """Set all groups; without effect if the number of groups has changed."""
        if self._optimizer is None or len(self._groups) != len(self._optimizer.param_groups):
            return
        rates = self._rates(schedulers)
        for place, group in enumerate(self._optimizer.param_groups):
            rate = {} if rates is None else {"lr": rates[place]}
            assign_in_place(group, self._groups[place] | rate)

    def state_dict(self) -> list[dict[str, Any]]:
        """The planned settings that are numbers, as plain values."""
        plain = [{k: plain_value(value) for k, value in group.items()} for group in self._groups]
        return [{k: value for k, value in group.items() if value is not None} for group in plain]

    def load_state_dict(self, groups: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` gave; the settings that it lacks stay as they are.

        Without effect if the number of groups has changed.
        """
        if len(groups) == len(self._groups):
            for group, planned in zip(self._groups, groups, strict=True):
                values = {k: tuple(v) if isinstance(v, list) else v for k, v in planned.items()}
                assign_in_place(group, values)

    def _rates(self, schedulers: Iterable[Any]) -> list[Any] | None:
        for scheduler in schedulers:
            if hasattr(scheduler, "get_last_lr"):
                rates = list(scheduler.get_last_lr())
                if len(rates) == len(self._groups):
                    return rates
        return None


def plain_value(value: Any) -> Any:
    """A setting as a number or a list of numbers; None for what is neither."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        numbers = [plain_value(item) for item in value]
        return None if None in numbers else numbers
    return None


class WorkersOut:
    """Scales this rank's gradient before it is averaged: to 0, or to what makes the mean right.

    Each parameter has a hook that scales what backward adds to its gradient; under FSDP2 the input
    of the reduce-scatter is scaled. `most` are left out at a time; ValueError where that is all.
    """

    def __init__(
        self, model: nn.Module, parameters: list[Any], rank: int, ranks: int, most: int
    ) -> None:
        if 1 < ranks <= most:
            words = f"most_out is {most} with {ranks} ranks"
            raise ValueError(f"{words}: it must be at most {ranks - 1}")
        self._model, self._parameters = model, parameters
        self._rank, self.ranks = rank, ranks
        self._removers: list[Callable[[], Any]] = []
        self.out: frozenset[int] = frozenset()

    @property
    def factor(self) -> float:
        if self._rank in self.out:
            return 0.0
        return self.ranks / (self.ranks - len(self.out))

    @property
    def left(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.out]

    def set(self, out: Collection[int]) -> None:
        """Leave these ranks out from the next backward pass on."""
        new = frozenset(out)
        if new == self.out:
            return
        self.remove()
        self.out = new
        if new:
            self._install()

    def remove(self) -> None:
        for remove in self._removers:
            remove()
        self._removers, self.out = [], frozenset()

    def _install(self) -> None:
        if not is_sharded(self._parameters):
            trained = (parameter for parameter in self._parameters if parameter.requires_grad)
            self._removers = [parameter.register_hook(self._scaled).remove for parameter in trained]
            return
        modules = [m for m in self._model.modules() if isinstance(m, FSDPModule)]
        if not all(hasattr(module, "set_custom_reduce_scatter") for module in modules):
            raise RuntimeError(
                f"torch {torch.__version__} cannot leave a worker out under FSDP2: it has no "
                "set_custom_reduce_scatter (2.13 has)"
            )
        self._removers = [
            OwnReduceScatter(module, lambda own, *_: own.copy_(self._scaled(own))).remove
            for module in modules
            if reduce_scatter_of(module) is not None
        ]

    def _scaled(self, gradient: Tensor) -> Tensor:
        # A gradient that is not finite is not finite times 0.
        return gradient * self.factor if self.factor else gradient.new_zeros(gradient.shape)
