"""Leave out the step at hand, so that its gradient never reaches the weights."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from rmetric.monitor.actions.action import Action
from rmetric.monitor.alerts import Alert

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")


class SkipStep(Action):
    """Drops the gradients of the step at hand: the optimiser then changes nothing.

    Weights and optimiser state stay as they are; the batch is used up and the
    schedule of the learning rate goes on. After `limit` steps in a row it skips
    no more and says so, until a step has passed without an alert: a run that
    only skips is not training.

    An alert of the rules is about the step at hand. One of a detector is about
    the step before, and the next one is left out for it.

    With several ranks it acts on what all of them see alike at that step, the
    gradient after it was reduced; otherwise their weights would part.

    Args:
        limit: steps left out in a row, at least 1.
        on: sources of alerts that it reacts to; None for every alert.
    """

    needs_verdict_now = True
    together = True

    def __init__(self, limit: int = 10, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        if limit < 1:
            raise ValueError(f"limit is {limit}: it must be at least 1 step")
        self.limit = limit
        self._in_a_row = 0
        self._last_alert: int | None = None  # step of it

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if alert.step != self._last_alert:
            follows = self._last_alert is not None and alert.step == self._last_alert + 1
            self._in_a_row = self._in_a_row + 1 if follows else 1
            self._last_alert = alert.step
        if self._in_a_row <= self.limit:
            _drop_gradients(monitor)
        elif self._in_a_row == self.limit + 1:
            logger.error("rmetric: %d steps in a row were skipped; no more are", self.limit)


def _drop_gradients(monitor: Monitor) -> None:
    scaler = monitor.scaler
    # A scaler that has not looked at the gradients yet fails where it finds none.
    in_use = scaler is not None and scaler.is_enabled()
    if in_use and not scaler._found_inf_per_device(monitor.optimizer):
        scaler.unscale_(monitor.optimizer)
    monitor.model.zero_grad(set_to_none=True)
    if monitor.optimizer is not None:  # it may move more than the model
        monitor.optimizer.zero_grad(set_to_none=True)
