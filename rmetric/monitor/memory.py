"""Host and device memory that a training has in use, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rmetric._util.host_memory import available_to_rank, resident_memory


class MemoryInUse:
    """Reads the memory of this process, without waiting for a device.

    What it shares with its data loaders' workers counts through the limit alone.

    Args:
        parameters: of the model; the device is that of the first.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._device = next((p.device for p in parameters if p.device.type == "cuda"), None)

    def measure(self) -> dict[str, float] | None:
        """The value of `Record.memory`; None where the system tells nothing."""
        found: dict[str, float] = {}
        resident, available = resident_memory(), available_to_rank()
        if resident is not None:
            found["host"] = resident
            if available is not None:
                found["host_limit"] = resident + available
        if self._device is not None:
            free, _ = torch.cuda.mem_get_info(self._device)
            found["device"] = torch.cuda.memory_allocated(self._device)
            found["device_limit"] = torch.cuda.memory_reserved(self._device) + free
        return found or None
