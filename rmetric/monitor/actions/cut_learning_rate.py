"""Lower the learning rate."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from rmetric.monitor.actions.action import Action
from rmetric.monitor.alerts import Alert

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

#: Of a parameter group; schedulers keep the last three there.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
#: Of a scheduler, one value a parameter group.
BASE_RATES = ("base_lrs", "max_lrs")


class CutLearningRate(Action):
    """Multiplies the learning rate by `factor`, and the schedule ahead with it.

        lr ← max(factor · lr, floor)

    What changes: ``lr`` of every parameter group of the optimiser, and by the
    same ratio what a scheduler computes the next rates from: ``initial_lr``,
    ``max_lr`` and ``min_lr`` of the group, ``base_lrs`` and ``max_lrs`` of
    `scheduler` and of those inside it. A scheduler that is not passed in and
    computes its rates anew at each step (LambdaLR, and so most of
    transformers') takes the cut back at the next step.

    The cut is announced to the monitor as a planned event.

    Args:
        factor: above 0, below 1.
        floor: no rate is cut below it.
        wait: steps before it may cut again, at least 1.
        scheduler: the learning-rate scheduler, where there is one.
        on: sources of alerts that it reacts to; None for every alert.
    """

    together = True

    def __init__(
        self,
        factor: float = 0.5,
        floor: float = 0.0,
        *,
        wait: int = 100,
        scheduler: Any = None,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        if not 0.0 < factor < 1.0:
            raise ValueError(f"factor is {factor}: it must be above 0 and below 1")
        if not floor >= 0.0:
            raise ValueError(f"floor is {floor}: it must be at least 0")
        if wait < 1:
            raise ValueError(f"wait is {wait}: it must be at least 1 step")
        self.factor, self.floor, self.wait, self.scheduler = factor, floor, wait, scheduler
        self._last_cut: int | None = None

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if self._last_cut is not None and 0 <= monitor.step - self._last_cut < self.wait:
            return
        self._last_cut = monitor.step
        groups = monitor.optimizer.param_groups
        before = float(groups[0]["lr"])
        ratios = [self._ratio(float(group["lr"])) for group in groups]
        for group, ratio in zip(groups, ratios, strict=True):
            for name in RATES:
                if name in group:
                    group[name] = _scaled(group[name], ratio)
        for scheduler in _with_inner(self.scheduler):
            for name in BASE_RATES:
                if hasattr(scheduler, name):
                    scaled = map(_scaled, getattr(scheduler, name), ratios)
                    setattr(scheduler, name, list(scaled))
        change = f"cut from {before:g} to {float(groups[0]['lr']):g}"
        logger.warning("rmetric: learning rate %s (%s)", change, alert)
        monitor.planned("learning_rate", change)

    def _ratio(self, rate: float) -> float:
        if rate <= self.floor:
            return 1.0 if rate > 0.0 else self.factor  # 0 is where a warm-up begins
        return max(self.factor, self.floor / rate)


def _scaled(rate: Any, ratio: float) -> Any:
    if isinstance(rate, torch.Tensor):  # of a capturable optimiser, which holds on to it
        return rate.mul_(ratio)
    return rate * ratio


def _with_inner(scheduler: Any) -> list[Any]:
    if scheduler is None:
        return []
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(found for one in inner for found in _with_inner(one))]
