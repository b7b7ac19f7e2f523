"""Verdicts on this machine's GPUs, as they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic, time

from rmetric._util.errors import require
from rmetric.telemetry.lines import TelemetryEvent
from rmetric.telemetry.nvml import NvmlEvents
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import JudgedGpus
from rmetric.telemetry.verdict import GpuVerdict


class GpuWatch(JudgedGpus):
    """A `VerdictSource` of the NVIDIA GPUs of this machine.

    `NvmlEvents` reads them on its own thread every `config.interval` seconds; `poll` judges
    the new readings, which takes microseconds. A GPU without readings for `silence` seconds,
    because a call hangs or the driver is unavailable, is at risk.

    Args:
        devices: as of `NvmlEvents`.
        config: configuration of the score; its interval is that of the readings.
        node: name of the node in the verdicts.
        quiet: as of `NvmlEvents`.
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
        quiet: float = 60.0,
        silence: float = 60.0,
        record: Callable[[str, TelemetryEvent], None] | None = None,
    ) -> None:
        require("silence", silence, silence > 0, "above 0 seconds")
        self.node, self._silence = node, silence
        super().__init__(config, record)
        # A constant offset: times of verdicts do not jump when the system clock is set.
        self._epoch = time() - monotonic()
        self._last_event: dict[int, float] = {}
        self.hardware = NvmlEvents(devices, interval=self.config.interval, quiet=quiet, keep=True)

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
                why = self.hardware.problem or "no reason is known"
                self.silent(self.node, gpu, now + self._epoch, why)
        return self._verdicts.changed()

    def close(self) -> None:
        self.hardware.close()

    def __enter__(self) -> GpuWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
