"""Verdicts on readings that were recorded, in the time they took or in another."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from time import monotonic

from rmetric._util.errors import LogError
from rmetric.telemetry.lines import Heard, read_recording
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import Judges
from rmetric.telemetry.verdict import GpuVerdict


class PlayedReadings:
    """A `VerdictSource` that plays readings and signs from a JSONL file (see `lines`).

    The first poll starts the clock; each hands on what is due by then. Verdicts in the
    file are passed over: they are made anew. Their times are those recorded.

    Args:
        path: of the recording, which is read whole. Raises OSError where it cannot be,
            LogError with file and line for what is no telemetry or goes back in time. A line
            that a kill cut off is passed over.
        speed: recorded seconds a second, above 0; infinity plays all at the first poll.
        config, record: as of `GpuWatch`.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        path: Path | str,
        speed: float = 1.0,
        config: RiskConfig | None = None,
        *,
        record: Callable[[str, Heard], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if not speed > 0:
            raise ValueError(f"speed is {speed!r}: it must be above 0")
        self._judges = Judges(config, record)
        self._waiting = _read(Path(path))
        self._speed, self._clock = speed, clock
        self._started: float | None = None
        self._next = 0
        self.problem: str | None = None

    @property
    def finished(self) -> bool:
        """Whether everything was played."""
        return self._next >= len(self._waiting)

    def poll(self) -> tuple[GpuVerdict, ...]:
        due = self._due()
        while not self.finished and self._waiting[self._next][1].time <= due:
            self._judges.hear(*self._waiting[self._next])
            self._next += 1
        return self._judges.verdicts.news()

    def verdicts(self) -> dict[str, GpuVerdict]:
        return dict(self._judges.verdicts.latest)

    def readings(self) -> dict[str, Reading]:
        """As of `GpuWatch`."""
        return dict(self._judges.readings)

    def close(self) -> None:
        self._next = len(self._waiting)

    def _due(self) -> float:
        """Up to which recorded time things have happened by now."""
        now = self._clock()
        self._started = now if self._started is None else self._started
        if self._speed == inf or not self._waiting:
            return inf
        return self._waiting[0][1].time + (now - self._started) * self._speed


def _read(path: Path) -> list[tuple[str, Heard]]:
    found: list[tuple[str, Heard]] = []
    for number, node, heard in read_recording(path):
        if found and not heard.time >= found[-1][1].time:
            after = found[-1][1].time
            raise LogError(path, number, f"time {heard.time} after {after}: it must not fall")
        found.append((node, heard))
    if not found:
        raise LogError(path, None, "found no readings; lines of READING and SIGN are accepted")
    return found
