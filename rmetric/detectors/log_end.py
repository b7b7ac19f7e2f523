"""End of a log, which no detector sees: missing losses, no updates, a last record that explodes.

Some loggers write nan as null or as a blank, and no later record can confirm the last one.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import Any

from rmetric.detectors.contract import Detector, FollowedLoss
from rmetric.detectors.no_update import ADVICE, NoUpdate
from rmetric.detectors.policy_collapse import PolicyCollapse
from rmetric.records import MissingLosses, Record

#: A last loss explodes from so many times the highest of so many before; so many must be known.
_EXPLOSION_RATIO, _BEFORE, _MIN_LOSSES_BEFORE = 2.0, 20, 5
#: Last losses that are too few for a detector of jumps.
_UNCONFIRMED = 2


class SilentLoss:
    """Finds when a loss that was logged stays away for twice as long as ever before.

    Records that count have a higher step than any since the last loss; a loss of every k-th
    record so has k - 1 between.

    Attributes:
        since: first step at which the loss was due and absent; None while it is logged.
        last: the newest losses.

    >>> silent = SilentLoss()
    >>> for step in range(1, 31):
    ...     silent.update(Record(step=step, training_loss=2.0 if step <= 20 else None))
    >>> silent.since
    21
    """

    def __init__(self) -> None:
        self._followed, self._counted = FollowedLoss(), MissingLosses()
        self.last: deque[float] = deque(maxlen=_BEFORE + _UNCONFIRMED)
        self.since: int | None = None
        self._due = self._last = self._highest = 0

    def update(self, record: Record) -> None:
        step = record.step
        if (loss := self._followed.of(record)) is not None:
            self.last.append(loss)
            if step > self._last:
                self._due = 2 * step - self._last if self._counted.known else step + 1
            self._last, self._highest, self.since = step, step, None
            self._counted.update(logged=True)
        elif step > self._highest:
            self._highest = step
            self._counted.update(logged=False)
            if self._counted.stay_away:
                self.since = self._due

    @property
    def explodes(self) -> bool:
        """True if the last losses are far above those before, and too few for a detector.

        Or far below 0, after none but positive ones.
        """
        for count in range(1, _UNCONFIRMED + 1):
            before, last = list(self.last)[-count - _BEFORE : -count], list(self.last)[-count:]
            if len(before) < _MIN_LOSSES_BEFORE or max(before) <= 0:
                continue
            least = _EXPLOSION_RATIO * max(before)
            if min(last) >= least or (min(before) > 0 and max(last) <= -least):
                return True
        return False


class WithLogEnd:
    """A detector that also alarms where losses stay away or nothing is learnt, and at a log's end.

    What it does not have itself is the detector's.
    """

    def __init__(self, detector: Detector) -> None:
        self._detector, self._losses, self._updates = detector, SilentLoss(), NoUpdate()
        self._policy = PolicyCollapse()
        self._at_end = ""

    def update(self, record: Record) -> WithLogEnd:
        self._detector.update(record)
        self._losses.update(record)
        self._updates.update(record)
        self._policy.update(record)
        self.step = record.step
        return self

    def finish(self, unread: str = "") -> None:
        """No record follows; `unread`: what could not be read of the end, in words."""
        if self._losses.explodes:
            self._at_end = (
                f"the last loss is {self._losses.last[-1]:.4g}, and no later record confirms it: "
                f"keep the checkpoints from before step {self.step}"
            )
        elif unread:
            self._at_end = f"{unread}: check the log"

    @property
    def alarm(self) -> bool:
        return bool(self._alarmed or self._beside)

    @property
    def reason(self) -> str:
        return self._detector.reason if self._alarmed else self._beside

    @property
    def _alarmed(self) -> bool:
        """The detector's alarm; beside a reward the loss counts only where it is not finite."""
        of_loss = self._policy.has_reward and isfinite(self._detector.score)
        return bool(self._detector.alarm) and not of_loss

    @property
    def _beside(self) -> str:
        if self._policy.alarm:
            return self._policy.reason
        if self._losses.since is not None:
            return (
                f"no loss is logged any more, since step {self._losses.since}: check the training, "
                "some loggers write nan as null or as a blank"
            )
        if self._updates.reason:
            return f"{self._updates.reason}: {ADVICE}"
        return self._at_end

    @property
    def verdict(self) -> str:
        return getattr(self._detector, "verdict", "") if self._alarmed else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._detector, name)
