"""Hands out the batches of a loop of the user's own, which a rescue can set back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rmetric.monitor.actions.action import is_distributed
from rmetric.rescue.data_position import LoaderPosition

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor
    from rmetric.rescue.action import Rescue

logger = logging.getLogger("rmetric")

_UNCHECKED = 100  # batches in a row that a loop may leave out, once it has checked a step


class OwnLoop:
    """The course of `Rescue.steps`.

    Args:
        rescue: its `boundary` is called between two steps.
        position: of the data.
        total: steps of the schedule.
    """

    def __init__(self, rescue: Rescue, position: LoaderPosition, total: int) -> None:
        self._rescue, self._position, self._total = rescue, position, total
        self._step = self._begun = 0  # step of the newest batches, and before the first ones
        self._used = 0  # steps' batches, by now
        self._unchecked = 0  # of them in a row

    def steps(self) -> Iterator[tuple[int, Any]]:
        """The number of each step, and its batch or batches."""
        position, dry = self._position, False
        self._rescue.data = position
        while True:
            self._rescue.boundary(last=dry or self._step >= self._total)
            if self._is_over():
                return
            if not dry:
                self._warn()
            try:
                batches = position.of_step(self._step + 1)
            except StopIteration:
                # Of several ranks another one may have data left.
                if dry or self._step == 0 or is_distributed():
                    self._report_missing()
                    return
                dry = True
                continue
            dry = False
            self._step, self._used = self._step + 1, self._used + 1
            monitor = self._rescue.monitor
            checked = None if monitor is None else monitor.step
            if monitor is not None:
                for batch in batches:
                    monitor.audit_batch(batch)
            yield self._step, batches if position.per_step > 1 else batches[0]
            self._require_check(monitor, checked)

    def _is_over(self) -> bool:
        monitor = self._rescue.monitor
        if monitor is not None and monitor.is_open:
            if monitor.should_stop:
                return True
            self._step = monitor.weights_step
        if not self._used:
            self._begun = self._step
        return self._step >= self._total

    def _warn(self) -> None:
        """Warn of a first batch that is not that of its step, and of a rescue without monitor."""
        if self._used == 0 and self._step and not self._position.restores_itself:
            logger.warning(
                "rmetric: rescue.steps begins at step %d with the first batch of the loader; "
                "after a restart the loader must be set to its place before",
                self._step + 1,
            )
        if self._used == 1 and self._rescue.monitor is None:
            logger.warning(
                "rmetric: no monitor has this rescue, so it does nothing: pass it as "
                "Monitor(..., actions=[rescue])"
            )

    def _report_missing(self) -> None:
        again = self._used - (self._step - self._begun)
        logger.warning(
            "rmetric: rescue.steps ends at step %d of %d with the data: %d steps are missing%s",
            self._step,
            self._total,
            self._total - self._step,
            f". The batches of {again} went into steps that were made again: pass a "
            "loader that can be iterated again, not an iterator"
            if again
            else "",
        )

    def _require_check(self, monitor: Monitor | None, checked: int | None) -> None:
        """Raise RuntimeError where the monitor has checked none of the steps: they have no end."""
        idle = monitor is not None and monitor.is_open and monitor.step == checked
        self._unchecked = self._unchecked + 1 if idle else 0
        if self._unchecked > (_UNCHECKED if self._used > 1 else 0):
            raise RuntimeError(
                f"rescue.steps handed out step {self._step} and the monitor did not check it: call "
                "monitor.check_before_step(loss) in each step, after backward and before the "
                "optimizer's step"
            )
