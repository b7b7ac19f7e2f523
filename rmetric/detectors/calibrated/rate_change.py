"""A learning rate that jumped, restarted, or grew beyond its own former peak."""

from __future__ import annotations

from heapq import heappush, heappushpop
from math import inf, log

from rmetric.detectors.calibrated.source import EvidenceSource
from rmetric.detectors.contract import roll_back
from rmetric.records import Record

#: How many times larger or smaller a rate that jumped is, and one that is steady at most.
_JUMP, _STEADY = 1.5, 1.1
_JUMP_RECORDS = 20
#: Records at a rate, or at a larger one, after which a return to it is a restart of the schedule.
_RESTART_RECORDS = 10
#: Records without a new highest rate that make it the former peak, rises in a row beyond it that
#: are growth, and records after which a higher level has become usual.
_HELD, _STEADILY, _NEW_PEAK_RECORDS = 5, 3, 30


class RateChange:
    """The largest jump of the logged learning rate in the last twenty records.

    Only a step out of a steady rate counts, not a warm-up, and only one that nobody announced
    and no action of the monitor made. Of equal jumps the first counts: the rate went up before
    it came back.

    Attributes:
        restarted: whether the last record's rate jumped up to one that the run has had for ten
            records, to a tenth: the schedule began again.

    >>> change = RateChange()
    >>> for step, rate in enumerate((0.001, 0.001, 0.01), start=300):
    ...     change.update(Record(step=step, learning_rate=rate))
    >>> change.words()
    'the learning rate went from 0.001 to 0.01 at step 302'
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._was_steady = False
        self._count = 0
        self.restarted = False
        self._highest: list[float] = []  # a heap of the largest rates so far
        self._jump: list[float] = []  # at which record and step, from and to which rate

    def update(self, record: Record) -> None:
        """Take the next record."""
        self._count += 1
        rate, before = record.learning_rate, self._rate
        announced = bool(record.planned_events)
        if announced or (self._jump and self._count - self._jump[0] >= _JUMP_RECORDS):
            self._jump = []
        self.restarted = False
        if rate is None or not 0 < rate < inf:
            return
        highest = self._highest
        if len(highest) < _RESTART_RECORDS:
            heappush(highest, rate)
        else:
            self.restarted = _JUMP * before < rate <= _STEADY * highest[0]
            heappushpop(highest, rate)
        self._rate = rate
        if before == rate:
            self._was_steady = True
            return
        ratio = _ratio(before, rate) if before else inf
        largest = _ratio(*self._jump[2:]) if self._jump else _JUMP
        if ratio > largest and self._was_steady and not (announced or record.actions):
            self._jump = [self._count, record.step, before, rate]
        self._was_steady = ratio <= _STEADY

    def advice(self) -> str:
        """The action that undoes it; empty if there was none."""
        return f"set the learning rate back to {self._jump[2]:.4g}" if self._jump else ""

    def words(self) -> str:
        """The change of the learning rate in words; empty if there was none."""
        if not self._jump:
            return ""
        _, step, before, rate = self._jump
        return f"the learning rate went from {before:.4g} to {rate:.4g} at step {step}"


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


class RateBeyondPeak(EvidenceSource):
    """A learning rate that grows beyond the highest one of a schedule that no longer rose.

        rate_beyond  log(rate / former peak), the former peak being the highest rate of which five
                     records in a row had none higher; from the third rise in a row above it on

    Jumps do not count, because restarts of a schedule jump, nor do warm-ups. A level that lasts
    for thirty records is the new peak. Logs of the planned rate, without the effect of a fault,
    show nothing here.
    """

    NAMES = ("rate_beyond",)
    LABEL = "learning rate"

    def __init__(self) -> None:
        super().__init__()
        self._rate = self._highest = self._former = self._peak = 0.0
        self._held = self._rises = 0
        self._beyond = False

    def update(self, record: Record) -> None:
        rate = record.learning_rate
        if rate is None or not 0 < rate < inf:
            return
        self._rate = rate
        if rate > self._highest:
            if self._held >= _HELD:
                self._former = self._highest
            self._highest, self._held = rate, 0
            self._rises += 1
            if self._rises >= _STEADILY and self._former > 0:
                self._beyond, self._peak = True, self._former
        else:
            self._held += 1
            self._rises = 0
        self._beyond = self._beyond and self._held < _NEW_PEAK_RECORDS and rate > self._peak
        if self._beyond:
            self.statistics["rate_beyond"] = beyond = log(rate) - log(self._peak)
            self.note("rate_beyond", record.step, beyond, 0.0)
        else:
            super().restart()

    def restart(self) -> None:
        super().restart()
        self._highest = self._former = 0.0
        self._held = self._rises = 0
        self._beyond = False

    def words(self, name: str) -> str:
        return f"learning rate {self._rate:.4g}, its former peak {self._peak:.4g}"

    def advice(self, name: str, since: int) -> str:
        return f"set the learning rate back to {self._peak:.4g} and {roll_back(since)}"
