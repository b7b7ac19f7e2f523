"""Monitor action that requests a checkpoint from the guard."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rmetric.monitor.actions.action import Action
from rmetric.monitor.alerts import SEVERE, Alert, Episode

if TYPE_CHECKING:
    from rmetric.guard.guard import Guard
    from rmetric.monitor.monitor import Monitor


class AskGuard(Action):
    """On an alert, requests a checkpoint from the guard, which decides at the next step.

    An episode of alarms requests once, and once more if a source of `fatal` joins, or
    ``non_finite`` if `fatal` is empty. Weights that are not finite are rejected with a message,
    and the previous checkpoint stays.

    Checkpoints from the step before the alarm's onset on are marked suspect until the alarm
    ends: the loss of a step is that of the weights after the step before, so those weights may
    be damaged already.

    `EmergencyCheckpoint` is the action for a single process without a guard.

    Args:
        guard: guard of the same training.
        fatal: sources whose alerts skip the filter on the gap since the last checkpoint.
        on: sources of alerts that trigger it; None for every alert.
    """

    def __init__(
        self, guard: Guard, *, fatal: Collection[str] = (), on: Collection[str] | None = None
    ) -> None:
        super().__init__(on=on)
        if isinstance(fatal, str):
            raise ValueError(f"fatal is {fatal!r}: it must be a collection of alert sources")
        self.guard, self.fatal = guard, frozenset(fatal)
        self.severe = self.fatal or SEVERE

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        fatal, key = alert.source in self.fatal, f"alarm of {alert.source}"
        # How far its step numbers are ahead of the monitor's; -1: it processes a step after that.
        ahead = self.guard.last_step - monitor.step
        since = max(0, alert.since - 1 + (0 if ahead == -1 else ahead))
        self.guard.request("alarm", str(alert), fatal=fatal, key=key, since=since, lasts=True)

    def ended(self, episode: Episode, monitor: Monitor) -> None:
        """The episode ended: later checkpoints are clean again."""
        for source in episode.sources:
            self.guard.clear_alarm(f"alarm of {source}")
