"""Where hardware events come from: NVML on a GPU, nowhere on a processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from rmetric.monitor.step_recorder import Hardware
from rmetric.records import HardwareEvent


class NoHardware:
    """A machine whose hardware reports nothing; λ is 0 on it, and known to be."""

    def poll(self) -> tuple[HardwareEvent, ...]:
        return ()

    def close(self) -> None:
        """Nothing to end."""


def hardware_of(device: str) -> tuple[Hardware | None, str]:
    """The source of hardware events on `device`, ``cuda`` or ``cpu``, and what it is in words.

    None where there is a GPU that cannot be asked: then nothing is logged of it,
    which is not the same as nothing having happened.
    """
    if device == "cpu":
        return NoHardware(), "no GPU: no hardware events, λ is 0"
    from rmetric.telemetry.nvml import NvmlEvents

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    events = NvmlEvents(devices=[f"GPU-{uuid}"])
    if events.ready():
        return events, "NVML: Xids, ECC errors, row remaps, throttling, temperature"
    problem = events.problem
    events.close()
    return None, f"λ is not logged: {problem}"


def readings_of(hardware: Hardware | None) -> list[dict[str, Any]]:
    """What the GPU says of itself now, by names with their units; empty without one."""
    readings: Sequence[Any] = getattr(hardware, "readings", tuple)()
    return [
        {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(reading).items()
            if value is not None
        }
        for reading in readings
    ]
