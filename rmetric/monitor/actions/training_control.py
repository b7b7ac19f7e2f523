"""Actions that change the training: skip a step, cut the learning rate, stop."""

from __future__ import annotations

import logging
from collections.abc import Collection
from math import log
from typing import TYPE_CHECKING, Any

import torch

from rmetric._util.errors import as_number, require
from rmetric.monitor.actions.action import Action
from rmetric.monitor.alerts import Alert
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

#: Of a parameter group; schedulers keep the last three there.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
#: Of a scheduler, one value a parameter group.
BASE_RATES = ("base_lrs", "max_lrs")


class Stop(Action):
    """Sets `monitor.should_stop`, which the training loop looks at after each step.

    Args:
        on: sources of alerts that it reacts to; None for every alert.
    """

    on_all_ranks = True

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if not monitor.should_stop:
            logger.warning("rmetric: the training is asked to stop (%s)", alert)
        monitor.should_stop = True


class SkipStep(Action):
    """Leaves the step at hand out: its gradients are dropped, so the optimiser changes nothing.

    The batch is used up and the schedule of the learning rate continues. After `limit` steps in a
    row it reports that and skips no more until a step has passed without an alert: a run that only
    skips is not training.

    An alert of a detector is about the step before, which is taken already: it leaves nothing out,
    unless `on` names the detector. Then the next step is left out for it, though that one may be
    good. A GradScaler goes on, and adjusts its scale, as if the optimiser had been called. With
    several ranks it acts on what is equal on all of them at that step, the reduced gradient.

    Args:
        limit: steps left out in a row, at least 1.
        on: sources of alerts that it reacts to; None for every alert on the step at hand.
    """

    needs_verdict_now = True
    on_all_ranks = True

    def __init__(self, limit: int = 10, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        require("limit", limit, as_number(limit) >= 1, "at least 1 step")
        self.limit = limit
        self._in_a_row = 0
        self._last_alert: int | None = None  # step of it

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if self.on is None and alert.step <= monitor.weights_step:
            return
        if alert.step != self._last_alert:
            follows = self._last_alert is not None and alert.step == self._last_alert + 1
            self._in_a_row = self._in_a_row + 1 if follows else 1
            self._last_alert = alert.step
        if self._in_a_row <= self.limit:
            monitor.leave_step_out()
        elif self._in_a_row == self.limit + 1:
            logger.error("rmetric: %d steps in a row were skipped; no more are", self.limit)


class CutLearningRate(Action):
    """Multiplies the learning rate by `factor`, and the schedule ahead with it.

        lr ← max(factor · lr, floor)

    What changes: ``lr`` of every parameter group, and by the same ratio what a scheduler computes
    the next rates from: ``initial_lr``, ``max_lr`` and ``min_lr`` of the group, ``base_lrs`` and
    ``max_lrs`` of `scheduler` and of those inside it. In a loop of your own, a scheduler that is
    not passed in and computes its rates anew at each step (LambdaLR, and so most of transformers')
    takes the cut back: one warning reports that.

    The cut stands in `Record.actions`. It is no planned event: an alarm under way goes on.

    Args:
        factor: above 0, below 1.
        floor: no rate is cut below it.
        wait: steps before it may cut again, at least 1.
        scheduler: the learning-rate scheduler, where there is one; None for the trainer's own.
        on: sources of alerts that it reacts to; None for every alert.
    """

    on_all_ranks = True

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
        require("factor", factor, 0.0 < as_number(factor) < 1.0, "above 0 and below 1")
        require("floor", floor, as_number(floor) >= 0.0, "at least 0")
        require("wait", wait, as_number(wait) >= 1, "at least 1 step")
        self.factor, self.floor, self.wait, self.scheduler = factor, floor, wait, scheduler
        self._last_cut: int | None = None
        self._ratio_of_cut = 1.0
        self._rate: tuple[int, float] | None = None  # step of the last record and its rate

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
        known = monitor.schedulers if self.scheduler is None else [self.scheduler]
        for scheduler in (found for each in known for found in _with_inner(each)):
            for name in BASE_RATES:
                if hasattr(scheduler, name):
                    scaled = map(_scaled, getattr(scheduler, name), ratios)
                    setattr(scheduler, name, list(scaled))
        change = f"cut from {before:g} to {float(groups[0]['lr']):g}"
        logger.warning("rmetric: learning rate %s (%s)", change, alert)
        self._ratio_of_cut = ratios[0]
        self._rate = monitor.weights_step + 1, float(groups[0]["lr"])
        monitor.acted(f"learning rate {change}")

    def record(self, record: Record, monitor: Monitor) -> None:
        """Report it once if a scheduler has taken the last cut back."""
        if self._rate is None or record.learning_rate is None or record.step <= self._rate[0]:
            return
        before, rate = self._rate[1], record.learning_rate
        self._rate = record.step, rate
        shrunk = -log(self._ratio_of_cut)
        if shrunk and before > 0.0 < rate and _near(log(rate / before), shrunk):
            self._rate = None
            logger.warning(
                "rmetric: the learning rate is back at %g at step %d: a scheduler has undone the "
                "cut. Pass it in as CutLearningRate(scheduler=...)",
                rate,
                record.step,
            )

    def _ratio(self, rate: float) -> float:
        if rate <= self.floor:
            return 1.0 if rate > 0.0 else self.factor  # 0 is where a warm-up begins
        return max(self.factor, self.floor / rate)


def _scaled(rate: Any, ratio: float) -> Any:
    if isinstance(rate, torch.Tensor):  # of a capturable optimiser, which holds on to it
        return rate.mul_(ratio)
    return rate * ratio


def _near(rise: float, whole: float) -> bool:
    """True if a rise, in logarithms, is the whole one but for a step of the schedule."""
    return abs(rise - whole) < min(0.1, whole / 2)


def _with_inner(scheduler: Any) -> list[Any]:
    """The scheduler, those that it chains, and the one that a trainer's wrapper holds."""
    if scheduler is None:
        return []
    inner = [*getattr(scheduler, "_schedulers", ()), getattr(scheduler, "scheduler", None)]
    return [scheduler, *(found for each in inner for found in _with_inner(each))]
