"""Bind gloo to the address of a simulated node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

#: torch takes no options for gloo from its callers, though the constructor has them.
TORCH: Any = distributed_c10d
GLOO: Any = ProcessGroupGloo


@contextlib.contextmanager
def bound_to(address: str) -> Iterator[None]:
    """Process groups made meanwhile listen at `address`; "" leaves it to torch.

    Who connects has the address that the kernel gives it, on one machine 127.0.0.1.
    """
    if not address:
        yield
        return

    class Bound(ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = GLOO._Options()
            options._timeout = timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            options._threads = 2
            super().__init__(store, rank, size, options)

    TORCH.ProcessGroupGloo = Bound
    try:
        yield
    finally:
        TORCH.ProcessGroupGloo = ProcessGroupGloo
