"""Ask the guard for a checkpoint: sharded, on all ranks, filtered by its policy."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rmetric.monitor.actions.action import Action
from rmetric.monitor.alerts import Alert

if TYPE_CHECKING:
    from rmetric.guard.guard import Guard
    from rmetric.monitor.monitor import Monitor


class AskGuard(Action):
    """On an alert, asks a `rmetric.guard.guard.Guard`, which decides at the next boundary.

    Any rank may ask: all of them save the same step. One source of alerts that goes on
    being alarmed asks once until another checkpoint is durable. Weights that are no longer
    finite make no good checkpoint: the guard says so, and the one before stays.

    `EmergencyCheckpoint` is the one for a single process without a guard.

    Args:
        guard: of the same training.
        fatal: sources whose alerts skip the filter on the gap since the last checkpoint.
        on: sources of alerts that it reacts to; None for every alert.
    """

    def __init__(
        self, guard: Guard, *, fatal: Collection[str] = (), on: Collection[str] | None = None
    ) -> None:
        super().__init__(on=on)
        if isinstance(fatal, str):
            raise ValueError(f"fatal is {fatal!r}: it must be a collection of alert sources")
        self.guard, self.fatal = guard, frozenset(fatal)

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self.guard.request(
            "alarm", str(alert), fatal=alert.source in self.fatal, key=f"alarm of {alert.source}"
        )
