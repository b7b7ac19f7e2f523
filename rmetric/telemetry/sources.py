"""Sources of GPU verdicts behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic, time
from typing import Protocol

from rmetric._util.errors import LogError, require
from rmetric.telemetry.judge import GPU_GONE_EVENTS, Judge
from rmetric.telemetry.lines import GpuVerdict, TelemetryEvent, read_line, read_recording
from rmetric.telemetry.nvml import NvmlEvents
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import RiskConfig


class VerdictSource(Protocol):
    """A source of GPU verdicts. No method blocks or raises, whatever the state of the GPUs."""

    @property
    def problem(self) -> str | None:
        """Reason why the source has no current verdicts; None if it has."""
        return None

    def poll(self) -> tuple[GpuVerdict, ...]:
        """Verdicts that are new or have another `gist` since the last poll, in order."""

    def verdicts(self) -> dict[str, GpuVerdict]:
        """The latest verdict of each GPU, by its `key`."""

    def close(self) -> None:
        """Stop; a second call does nothing."""
        return


class VerdictStore(VerdictSource):
    """A source of what is added to it, the base of others."""

    def __init__(self) -> None:
        self._latest: dict[str, GpuVerdict] = {}
        self._changed: list[GpuVerdict] = []

    def poll(self) -> tuple[GpuVerdict, ...]:
        changed, self._changed = tuple(self._changed), []
        return changed

    def verdicts(self) -> dict[str, GpuVerdict]:
        return dict(self._latest)

    def add(self, verdict: GpuVerdict) -> None:
        before = self._latest.get(verdict.key)
        self._latest[verdict.key] = verdict
        if before is None or before.gist != verdict.gist:
            self._changed.append(verdict)


class JudgedGpus(VerdictStore):
    """Judges of all GPUs, with their verdicts and last readings.

    `record` is called with the node and each event before it is judged.
    """

    def __init__(
        self,
        config: RiskConfig | None = None,
        record: Callable[[str, TelemetryEvent], None] | None = None,
    ) -> None:
        super().__init__()
        self.config = config or RiskConfig()
        self._readings: dict[str, Reading] = {}
        self._record = record
        self._judge = cache(lambda node, gpu: Judge(gpu, node, self.config))

    def readings(self) -> dict[str, Reading]:
        """Last reading of each responding GPU, by the `key` of its verdicts."""
        return dict(self._readings)

    def process(self, node: str, event: TelemetryEvent) -> None:
        if self._record is not None:
            self._record(node, event)
        judge = self._judge(node, event.gpu)
        if isinstance(event, Reading):
            verdict = judge.take(event)
            self._readings[verdict.key] = event
        elif event.kind == "driver_loaded":
            judge.renewed()
            return  # the next reading gives the new state
        else:
            verdict = judge.happened(event.kind, event.time)
            if event.kind in GPU_GONE_EVENTS:
                self._readings.pop(verdict.key, None)
        self.add(verdict)

    def silent(self, node: str, gpu: int, time: float, why: str) -> None:
        """A known GPU no longer sends readings; `why` is the reason."""
        verdict = self._judge(node, gpu).silent(time, why)
        self._readings.pop(verdict.key, None)
        self.add(verdict)


class AllSources:
    """Several sources combined, such as local GPUs and the files of other nodes."""

    def __init__(self, sources: Iterable[VerdictSource]) -> None:
        self._sources = tuple(sources)

    @property
    def problem(self) -> str | None:
        return "; ".join(source.problem for source in self._sources if source.problem) or None

    def poll(self) -> tuple[GpuVerdict, ...]:
        return tuple(verdict for source in self._sources for verdict in source.poll())

    def verdicts(self) -> dict[str, GpuVerdict]:
        return {k: verdict for source in self._sources for k, verdict in source.verdicts().items()}

    def close(self) -> None:
        for source in self._sources:
            source.close()


class GpuWatch(JudgedGpus, AbstractContextManager["GpuWatch"]):
    """A `VerdictSource` of the NVIDIA GPUs of this machine.

    `NvmlEvents` reads them on its own thread; `poll` judges the new readings, which takes
    microseconds.

    Args:
        devices: as of `NvmlEvents`.
        config: configuration of the score; its interval is that of the readings.
        node: name of the node in the verdicts.
        silence: time without readings until a GPU is at risk, seconds, above 0.
        record: called with the node and each event, with times since the epoch.

    Attributes:
        hardware: the `NvmlEvents`, which the monitor accepts as its `hardware`.

    >>> watch = GpuWatch()
    >>> changed = watch.poll()
    >>> watch.close()
    """

    def __init__(
        self,
        devices: Sequence[int | str] | None = None,
        config: RiskConfig | None = None,
        *,
        node: str = "",
        silence: float = 60.0,
        record: Callable[[str, TelemetryEvent], None] | None = None,
    ) -> None:
        require("silence", silence, silence > 0, "above 0 seconds")
        self.node, self._silence = node, silence
        super().__init__(config, record)
        # A constant offset: times of verdicts do not jump when the system clock is set.
        self._epoch = time() - monotonic()
        self._last_event: dict[int, float] = {}
        self.hardware = NvmlEvents(devices, interval=self.config.interval, keep=True)

    @property
    def problem(self) -> str | None:
        return self.hardware.problem

    def poll(self) -> tuple[GpuVerdict, ...]:
        for event in self.hardware.recorded():
            self._last_event[event.gpu] = event.time
            self.process(self.node, replace(event, time=event.time + self._epoch))
        now = monotonic()
        for gpu, last in self._last_event.items():
            if now - last > self._silence + self.config.interval:
                why = self.problem or "no reason is known"
                self.silent(self.node, gpu, now + self._epoch, why)
        return super().poll()

    def close(self) -> None:
        self.hardware.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class ReplayedReadings(JudgedGpus):
    """A `VerdictSource` that judges the readings and signs of a JSONL file again (see `lines`).

    The first poll processes all of them; the verdicts have the recorded times. Verdicts in the file
    are ignored, and so is a truncated line.

    Raises:
        OSError: the file cannot be read.
        LogError: a line is not telemetry, or times decrease; with file and line number.
    """

    def __init__(
        self,
        path: Path | str,
        config: RiskConfig | None = None,
        *,
        record: Callable[[str, TelemetryEvent], None] | None = None,
    ) -> None:
        super().__init__(config, record)
        self._waiting = _read(Path(path))

    def poll(self) -> tuple[GpuVerdict, ...]:
        waiting, self._waiting = self._waiting, []
        for node, event in waiting:
            self.process(node, event)
        return super().poll()


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


class VerdictFiles(VerdictStore):
    """A `VerdictSource` that follows the files ``*.jsonl`` of a folder (see `lines`).

    `rmetric telemetry --run FOLDER` writes FOLDER/telemetry/NODE.jsonl; this reads what
    was added since the last poll. An incomplete line is read later; an invalid one is
    skipped and reported in `problem`. A truncated or replaced file is read from its
    beginning. Limit: the last verdicts of a dead node stay.
    """

    problem: str | None = None

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self._folder = Path(folder)
        #: Inode of each file, and the offset after the last complete line that was read.
        self._places: dict[Path, tuple[int, int]] = {}
        self._closed = False

    def poll(self) -> tuple[GpuVerdict, ...]:
        if not self._closed:
            for path in sorted(self._folder.glob("*.jsonl")):
                self._follow(path)
        return super().poll()

    def close(self) -> None:
        self._closed = True

    def _follow(self, path: Path) -> None:
        try:
            lines = self._new_lines(path)
        except OSError as error:
            self.problem = f"{path}: {error.strerror or error}"
            return
        for line in lines:
            try:
                entry = read_line(line)
            except ValueError as error:
                self.problem = f"{path}: {error}"
                continue
            if entry is not None and isinstance(entry[1], GpuVerdict):
                self.add(entry[1])

    def _new_lines(self, path: Path) -> list[bytes]:
        """Complete lines since the last call."""
        before, place = self._places.get(path, (0, 0))
        with open(path, "rb") as file:
            inode = path.stat().st_ino
            if inode != before or file.seek(0, 2) < place:
                place = 0
            file.seek(place)
            whole, end, _ = file.read().rpartition(b"\n")
        self._places[path] = inode, place + len(whole) + len(end)
        return whole.split(b"\n") if end else []
