"""Base class of the actions that draw records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from rmetric._util.background import Background
from rmetric.monitor.actions.action import Action, rank
from rmetric.monitor.actions.scalars import scalars
from rmetric.monitor.alerts import Alert
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor


logger = logging.getLogger("rmetric")

FINISH_SECONDS = 5.0


class Dashboard(Action):
    """Hands records and alerts to a writer in the background; the first rank alone does.

    What fails there is reported once, and nothing more is written. It has a
    thread of its own: a writer that does not keep up costs its own drawings.
    """

    def __init__(self, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        self._background = Background()
        self._failed = self._behind = False

    def record(self, record: Record, monitor: Monitor) -> None:
        values = scalars(record, monitor.metric)
        self._submit(lambda: self.draw(values, record.step))

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self._submit(lambda: self.add_alert(alert))

    def close(self) -> None:
        self._submit(self.finish)
        self._background.close(FINISH_SECONDS)

    def draw(self, values: dict[str, float], step: int) -> None:
        """Write the numbers of one step."""
        raise NotImplementedError

    def add_alert(self, alert: Alert) -> None:
        """Write an alert."""
        raise NotImplementedError

    def finish(self) -> None:
        """Nothing more will come."""

    def _submit(self, write: Callable[[], None]) -> None:
        if rank() != 0 or self._background.submit(self._unless_failed(write)) or self._behind:
            return
        self._behind = True
        logger.error("rmetric: %s does not keep up; some steps are left out", type(self).__name__)

    def _unless_failed(self, write: Callable[[], None]) -> Callable[[], None]:
        def attempt() -> None:
            if self._failed:
                return
            try:
                write()
            except Exception:
                self._failed = True
                raise

        return attempt
