"""Alarms that are open, by key: from their onset until they end. Pure: no clock, no files."""

from __future__ import annotations

from typing import NamedTuple


class OpenAlarm(NamedTuple):
    """An open alarm: its onset (a step), and its text."""

    since: int
    reason: str


class OpenAlarms:
    """Open alarms of one process.

    An alarm ends by `end`, or, unless it `lasts`, when it was not repeated in `quiet_steps`, at
    least 1.

    >>> alarms = OpenAlarms(quiet_steps=10)
    >>> alarms.open("loss", 120, "loss 9.1", step=125)
    >>> alarms.earliest(130)
    OpenAlarm(since=120, reason='loss 9.1')
    >>> alarms.earliest(135) is None
    True
    """

    def __init__(self, quiet_steps: int) -> None:
        if type(quiet_steps) is not int or quiet_steps < 1:
            raise ValueError(f"quiet_steps is {quiet_steps!r}: it must be an int of at least 1")
        self.quiet_steps = quiet_steps
        #: Each with the step of its last repetition, and whether it lasts.
        self._alarms: dict[str, tuple[OpenAlarm, int, bool]] = {}

    def open(self, key: str, since: int, reason: str, *, step: int, lasts: bool = False) -> None:
        """Open an alarm, or repeat an open one, which keeps its earlier onset and its text."""
        self._expire(step)
        new = OpenAlarm(since, reason)
        alarm, repeated_at, always = self._alarms.get(key, (new, step, lasts))
        alarm = new if since < alarm.since else alarm
        self._alarms[key] = alarm, max(repeated_at, step), always or lasts

    def end(self, key: str | None = None) -> None:
        """End the alarm with this key; None ends all."""
        if key is None:
            self._alarms.clear()
        else:
            self._alarms.pop(key, None)

    def earliest(self, step: int) -> OpenAlarm | None:
        """The open alarm with the earliest onset at `step`; None if none is open."""
        self._expire(step)
        alarms = (alarm for alarm, *_ in self._alarms.values())
        return min(alarms, key=lambda alarm: alarm.since, default=None)

    def _expire(self, step: int) -> None:
        self._alarms = {
            key: (alarm, repeated_at, lasts)
            for key, (alarm, repeated_at, lasts) in self._alarms.items()
            if lasts or step - repeated_at < self.quiet_steps
        }
