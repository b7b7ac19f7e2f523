"""Verdicts on recorded readings, replayed in real time or at another speed."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from time import monotonic

from rmetric._util.errors import LogError, require
from rmetric.telemetry.lines import TelemetryEvent, read_recording
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import JudgedGpus
from rmetric.telemetry.verdict import GpuVerdict


class ReplayedReadings(JudgedGpus):
    """A `VerdictSource` that replays readings and signs from a JSONL file (see `lines`).

    The first poll starts the clock; each poll processes what is due. Verdicts in the file
    are ignored and computed again, with the recorded times.

    Args:
        path: recording, read completely. A truncated line is skipped.
        speed: recorded seconds per second, above 0; infinity replays all at the first poll.
        config: as of `GpuWatch`.
        record: as of `GpuWatch`.
        clock: current time, seconds; for tests.

    Raises:
        OSError: the file cannot be read.
        LogError: a line is not telemetry, or times decrease; with file and line number.
    """

    def __init__(
        self,
        path: Path | str,
        speed: float = 1.0,
        config: RiskConfig | None = None,
        *,
        record: Callable[[str, TelemetryEvent], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        require("speed", speed, speed > 0, "above 0")
        super().__init__(config, record)
        self._waiting = _read(Path(path))
        self._speed, self._clock = speed, clock
        self._started: float | None = None
        self._next = 0
        self.problem: str | None = None

    @property
    def finished(self) -> bool:
        """All events were replayed."""
        return self._next >= len(self._waiting)

    def poll(self) -> tuple[GpuVerdict, ...]:
        due = self._due()
        while not self.finished and self._waiting[self._next][1].time <= due:
            self.process(*self._waiting[self._next])
            self._next += 1
        return self._verdicts.changed()

    def close(self) -> None:
        self._next = len(self._waiting)

    def _due(self) -> float:
        """Recorded time that corresponds to now."""
        now = self._clock()
        self._started = now if self._started is None else self._started
        if self._speed == inf or not self._waiting:
            return inf
        return self._waiting[0][1].time + (now - self._started) * self._speed


def _read(path: Path) -> list[tuple[str, TelemetryEvent]]:
    found: list[tuple[str, TelemetryEvent]] = []
    for number, node, event in read_recording(path):
        if found and not event.time >= found[-1][1].time:
            after = found[-1][1].time
            raise LogError(path, number, f"time {event.time} after {after}: it must not fall")
        found.append((node, event))
    if not found:
        raise LogError(path, None, "found no readings; lines of READING and SIGN are accepted")
    return found
