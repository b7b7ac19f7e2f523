"""Steps that change nothing: a gradient, a rate or an update that is exactly 0."""

from __future__ import annotations

from rmetric.records import Record

#: Text of an alarm beside the reason.
ADVICE = "nothing is learnt; look at the loss, the frozen weights and the schedule"
#: Records in a row, and how many times the longest row before that ended.
_MIN_ZERO_RECORDS, _TIMES = 5, 3
_FROZEN_WORDS = {
    "gradient_norm": "the gradient norm is",
    "learning_rate": "the learning rate is",
    "update_norm": "the updates of the weights are",
}


class NoUpdate:
    """Alarms where a quantity that an update is made of was above 0 and stays exactly 0.

    Five records in a row are needed, and more than three times the longest such row before: where
    the reward of all answers is equal, say, the gradient is 0 now and then. A quantity that was
    never above 0 counts after twenty records. What was last a number of one digit, such as 0.0001,
    may have been rounded to 0 and does not count.

    Attributes:
        reason: in words; empty without an alarm.
        since: first step of the present row; 0 without an alarm.
    """

    def __init__(self) -> None:
        self.reason, self.since = "", 0
        self._rows = {name: _Row() for name in _FROZEN_WORDS}

    def update(self, record: Record) -> None:
        """Take the next record; one of a step that was left out changes nothing."""
        if record.skipped:
            return
        self.reason, self.since = "", 0
        for name, words in _FROZEN_WORDS.items():
            if name == "learning_rate" and record.update_norm:
                continue  # it is that of the first group, and others are trained
            row = self._rows[name]
            row.take(record.step, getattr(record, name))
            if row.is_long and not self.reason:
                self.reason, self.since = f"{words} exactly 0 since step {row.first}", row.first

    def restart(self) -> None:
        """The training went back to an earlier step."""
        self.reason, self.since = "", 0
        for row in self._rows.values():
            row.length = 0


class _Row:
    def __init__(self) -> None:
        self.first = self.length = self._longest = 0
        self._was_above, self._last = False, 0.0

    def take(self, step: int, value: float | None) -> None:
        if value is None:
            return
        if value == 0:
            self.first = self.first if self.length else step
            self.length += 1
        else:
            self._longest = max(self._longest, self.length if self._was_above else 0)
            self.length, self._was_above, self._last = 0, True, value

    @property
    def is_long(self) -> bool:
        needed = max(_MIN_ZERO_RECORDS, _TIMES * self._longest + 1)
        long = self.length >= (needed if self._was_above else 4 * _MIN_ZERO_RECORDS)
        return long and not _has_one_digit(self._last)


def _has_one_digit(value: float) -> bool:
    return value != 0 and float(f"{value:.0e}") == value
