"""Ask the training loop to end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rmetric.monitor.actions.action import Action
from rmetric.monitor.alerts import Alert

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")


class Stop(Action):
    """Sets `monitor.should_stop`, which the training loop looks at after each step.

    Args:
        on: sources of alerts that it reacts to; None for every alert.
    """

    together = True

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if not monitor.should_stop:
            logger.warning("rmetric: the training is asked to stop (%s)", alert)
        monitor.should_stop = True
