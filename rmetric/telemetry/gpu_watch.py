"""Verdicts on this machine's GPUs, as they are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from rmetric.telemetry.lines import Heard
from rmetric.telemetry.nvml import NvmlEvents
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import Judges
from rmetric.telemetry.verdict import GpuVerdict


class GpuWatch:
    """A `VerdictSource` of the NVIDIA GPUs of this machine.

    `NvmlEvents` reads them in a thread of its own, every `config.interval` seconds;
    whoever polls judges what was read since, which takes microseconds. A GPU of which
    nothing is heard for `silence` seconds, because a call hangs or the driver is away,
    is at risk: training on it can hardly be well, and it is not known to be.

    Args:
        devices: as of `NvmlEvents`.
        quiet: as of `NvmlEvents`.
        config: of the score; its interval is that of the readings.
        node: written into the verdicts.
        silence: seconds, above 0.
        record: called with the node and whatever is heard, with times since the epoch.

    Attributes:
        hardware: the `NvmlEvents`, which the live monitor takes as its `hardware`.

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
        record: Callable[[str, Heard], None] | None = None,
    ) -> None:
        if not silence > 0:
            raise ValueError(f"silence is {silence!r}: it must be above 0 seconds")
        self.node, self._silence = node, silence
        self._judges = Judges(config, record)
        # One offset for good: verdicts do not jump when the machine's clock is set.
        self._epoch = time.time() - monotonic()
        self._last_heard: dict[int, float] = {}
        interval = self._judges.config.interval
        self.hardware = NvmlEvents(devices, interval=interval, quiet=quiet, keep=True)

    @property
    def problem(self) -> str | None:
        return self.hardware.problem

    def poll(self) -> tuple[GpuVerdict, ...]:
        for heard in self.hardware.heard():
            self._last_heard[heard.gpu] = heard.time
            self._judges.hear(self.node, replace(heard, time=heard.time + self._epoch))
        self._notice_silence()
        return self._judges.verdicts.news()

    def verdicts(self) -> dict[str, GpuVerdict]:
        return dict(self._judges.verdicts.latest)

    def readings(self) -> dict[str, Reading]:
        """The last reading of each GPU that is heard of, by the `key` of its verdicts."""
        return dict(self._judges.readings)

    def close(self) -> None:
        self.hardware.close()

    def __enter__(self) -> GpuWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _notice_silence(self) -> None:
        now = monotonic()
        for gpu, last in self._last_heard.items():
            seconds = now - last
            if seconds > self._silence + self._judges.config.interval:
                why = self.hardware.problem or "no reason is known"
                self._judges.silent(self.node, gpu, now + self._epoch, why)
