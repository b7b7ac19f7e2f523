"""The planned settings of an optimiser, set again before each step."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from rmetric.rescue.snapshot import settings_of


class PlannedSettings:
    """Settings of the optimiser's groups (betas, eps, weight_decay, lr) as they were planned.

    The learning rate is the last one of a scheduler that has one for each group. Without such a
    scheduler it is that of the snapshot.

    Its weakness: settings that a loop changes by itself, without a scheduler, are put back too.

    Args:
        optimizer: the optimiser itself; None for none.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._groups = settings_of(optimizer) if optimizer is not None else []

    def use(self, groups: list[dict[str, Any]]) -> None:
        """Take the settings of a snapshot for the planned ones."""
        self._groups = groups

    def set(self, schedulers: Iterable[Any]) -> None:
        """Set all groups; without effect if the number of groups has changed."""
        if self._optimizer is None or len(self._groups) != len(self._optimizer.param_groups):
            return
        rates = self._rates(schedulers)
        for place, group in enumerate(self._optimizer.param_groups):
            planned = dict(self._groups[place])
            if rates is not None:
                planned["lr"] = rates[place]
            for key, value in planned.items():
                assign(group, key, value)

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
                for key, value in planned.items():
                    assign(group, key, tuple(value) if isinstance(value, list) else value)

    def _rates(self, schedulers: Iterable[Any]) -> list[Any] | None:
        for scheduler in schedulers:
            if hasattr(scheduler, "get_last_lr"):
                rates = list(scheduler.get_last_lr())
                if len(rates) == len(self._groups):
                    return rates
        return None


def assign(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set a setting; one that is a tensor, which a compiled optimiser holds on to, in its place."""
    if isinstance(settings.get(key), Tensor):
        settings[key].fill_(value)
    else:
        settings[key] = copy.deepcopy(value)


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
