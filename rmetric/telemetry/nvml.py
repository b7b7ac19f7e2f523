"""Hardware events from NVIDIA's management library; the only importer of pynvml."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic

from rmetric._util.errors import require
from rmetric.records import HardwareEvent
from rmetric.telemetry.nvml_library import GpuGone, NvmlClosed, NvmlLibrary
from rmetric.telemetry.reading import Changes, GpuSign, Reading
from rmetric.telemetry.xid import xid_kind

HUNG_AFTER_SECONDS = 10.0
MOST_MEANWHILE = 100  # Xids taken before the readings that they came during
WAIT_SECONDS = 1.0  # of one wait for an Xid, which ends it: bounds how long `close` takes
EVENTS_KEPT = 10_000  # of those that nobody has polled for; likewise of recorded events


class NvmlEvents(AbstractContextManager["NvmlEvents"]):
    """Hardware events of this machine's NVIDIA GPUs, read in a thread of its own.

    Risen counters and new states are events (see `Changes`), and an Xid is one at once. No method
    raises or blocks: without library, driver or GPU, or while a call hangs, `available` is False,
    `problem` gives the reason, and NVML is opened again every `interval`.

    Args:
        devices: GPUs to watch, as indices (as nvidia-smi counts) or beginnings of
            UUIDs; None: those of CUDA_VISIBLE_DEVICES, or all where it is not set.
            A GPU that two processes watch has every event twice.
        interval: seconds between readings, above 0.
        quiet: seconds without it after which an incident may count again, at least 0.
        keep: keep every reading and sign for `recorded`.

    Attributes:
        start: the run's beginning on `time.monotonic`'s clock, which the times of
            events count from; may be set before a poll.

    >>> with NvmlEvents() as hardware:
    ...     events = hardware.poll()

    Source: NVIDIA, NVML API reference. Limits: a state that begins and ends between two
    readings is missed, except Xids; a machine that dies at once reports nothing; a worker
    is the index of its GPU.
    """

    def __init__(
        self,
        devices: Sequence[int | str] | None = None,
        interval: float = 10.0,
        quiet: float = 60.0,
        keep: bool = False,
    ) -> None:
        require("interval", interval, interval > 0, "above 0 seconds")
        require("quiet", quiet, quiet >= 0, "at least 0 seconds")
        listed = not isinstance(devices, str) and isinstance(devices, Sequence | None)
        if not listed or not all(isinstance(device, int | str) for device in devices or ()):
            raise ValueError(f"devices are {devices!r}: a list of GPU indices or UUIDs is needed")
        self.start = monotonic()
        self._devices, self._interval = devices, interval
        self._gpus: list[int] = []
        self._changes = defaultdict[int, Changes](partial(Changes, quiet))
        self._events: deque[tuple[float, str, int]] = deque(maxlen=EVENTS_KEPT)
        self._recorded: deque[Reading | GpuSign] = deque(maxlen=EVENTS_KEPT if keep else 0)
        self._driver_away = False
        self._readings: tuple[Reading, ...] = ()
        self._problem: str | None = "NVML has not answered yet"
        self._called_at: float | None = None  # when the call in progress began
        self._closed, self._settled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmetric-nvml", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the machine is out of threads
            self._problem = str(error)

    @property
    def available(self) -> bool:
        return bool(self._readings) and self._hung_seconds() is None

    @property
    def problem(self) -> str | None:
        """Reason why some or all GPUs do not respond; None if all do."""
        hung = self._hung_seconds()
        return self._problem if hung is None else f"NVML has not answered for {hung:.0f} s"

    def poll(self) -> tuple[HardwareEvent, ...]:
        """Events since the last poll; never blocks."""
        waiting = [self._events.popleft() for _ in range(len(self._events))]
        return tuple(HardwareEvent(time - self.start, kind, gpu) for time, kind, gpu in waiting)

    def recorded(self) -> tuple[Reading | GpuSign, ...]:
        """Readings and signs since the last call; never blocks. See `keep`."""
        return tuple(self._recorded.popleft() for _ in range(len(self._recorded)))

    def readings(self) -> tuple[Reading, ...]:
        """Latest reading of each responding GPU."""
        return self._readings if self.available else ()

    def ready(self, timeout: float = 5.0) -> bool:
        """Wait at most `timeout` seconds for the first answer; True if a GPU responds."""
        self._settled.wait(timeout)
        return self.available

    def close(self) -> None:
        """Stop the thread; a hanging call is not waited for."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * WAIT_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hung_seconds(self) -> float | None:
        called_at = self._called_at
        seconds = 0.0 if called_at is None else monotonic() - called_at
        return seconds if seconds > HUNG_AFTER_SECONDS else None

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._watch()
            except Exception as error:  # nothing may reach the training
                self._problem = str(error) or type(error).__name__
                self._driver_away |= getattr(error, "driver_away", False)
            self._readings, self._called_at = (), None
            self._settled.set()
            self._closed.wait(self._interval)

    def _watch(self) -> None:
        """Read and listen until NVML breaks, which raises, or this is closed."""
        self._called_at = monotonic()
        try:
            import pynvml
        except ImportError:
            raise NvmlClosed("the Python package nvidia-ml-py is not installed") from None
        library = NvmlLibrary(pynvml)
        try:
            if self._driver_away:
                self._driver_away, now = False, monotonic()
                self._recorded.extend(
                    GpuSign(gpu=g, time=now, kind="driver_loaded") for g in self._gpus
                )
            self._gpus = self._gpus or library.find(self._devices)
            while not self._closed.is_set():
                until = monotonic() + self._interval
                self._read(library)
                self._settled.set()
                self._listen(library, until)
            self._problem = "closed"
        finally:
            library.close()

    def _read(self, library: NvmlLibrary) -> None:
        readings, problems = [], []
        recorded: list[Reading | GpuSign] = []
        began = monotonic()
        library.count()
        for gpu in self._gpus:
            now = self._called_at = monotonic()
            changes = self._changes[gpu]
            try:
                reading = library.read(gpu, now)
            except GpuGone as gone:
                problems.append(str(gone))
                kinds = changes.gone(gone.kind, now)
                recorded.append(GpuSign(gpu=gpu, time=now, kind=gone.kind))
            else:
                readings.append(reading)
                kinds = changes.update(reading)
                recorded.append(reading)
            self._events.extend((now, kind, gpu) for kind in kinds)
        # An Xid that came meanwhile goes before: it may explain what the readings count.
        for _ in range(MOST_MEANWHILE):
            if not self._take_xid(library, 0.0, began):
                break
        self._recorded.extend(recorded)
        self._readings, self._problem = tuple(readings), "; ".join(problems) or None

    def _listen(self, library: NvmlLibrary, until: float) -> None:
        """Take Xids until the next reading is due; one that waits even if it is due now."""
        while not self._closed.is_set():
            now = self._called_at = monotonic()
            self._take_xid(library, min(max(until - now, 0.0), WAIT_SECONDS))
            if monotonic() >= until:
                return

    def _take_xid(self, library: NvmlLibrary, seconds: float, time: float | None = None) -> bool:
        """Wait for an Xid, and take it as of `time` or of now; whether there was one."""
        found = library.next_xid(seconds, otherwise=self._closed.wait)
        if found is None:
            return False
        gpu, kind = found[0], xid_kind(found[1])
        now = monotonic() if time is None else time
        if self._changes[gpu].begins(kind, now):
            self._events.append((now, kind, gpu))
        self._recorded.append(GpuSign(gpu=gpu, time=now, kind=kind))
        return True
