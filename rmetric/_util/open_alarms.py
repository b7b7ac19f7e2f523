"""Alarms that are open, by key: from their onset until they end. Pure: no clock, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class OpenAlarm(NamedTuple):
    """An open alarm: its onset (a step), and its text."""

    since: int
    reason: str


@dataclass
class _Entry:
    since: int
    reason: str
    repeated_at: int
    lasts: bool


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
        self._entries: dict[str, _Entry] = {}

    def open(self, key: str, since: int, reason: str, *, step: int, lasts: bool = False) -> None:
        """Open an alarm, or repeat an open one, which keeps its earlier onset and its text.

        One that `lasts` ends only by `end`.
        """
        self._expire(step)
        entry = self._entries.setdefault(key, _Entry(since, reason, step, lasts))
        if since < entry.since:
            entry.since, entry.reason = since, reason
        entry.repeated_at, entry.lasts = max(entry.repeated_at, step), entry.lasts or lasts

    def end(self, key: str | None = None) -> None:
        """End the alarm with this key; None ends all."""
        if key is None:
            self._entries.clear()
        else:
            self._entries.pop(key, None)

    def earliest(self, step: int) -> OpenAlarm | None:
        """The open alarm with the earliest onset at `step`; None if none is open."""
        self._expire(step)
        first = min(self._entries.values(), key=lambda entry: entry.since, default=None)
        return None if first is None else OpenAlarm(first.since, first.reason)

    def _expire(self, step: int) -> None:
        self._entries = {
            key: entry
            for key, entry in self._entries.items()
            if entry.lasts or step - entry.repeated_at < self.quiet_steps
        }
