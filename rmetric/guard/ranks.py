"""CPU collectives of the guard over all ranks, by gloo."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

#: Longest duration of a collective before it raises.
TIMEOUT = timedelta(minutes=30)


def restarts_on_a_shared_store() -> str:
    """Why a restart of the ranks by torchrun may hang, and the remedy; empty if it cannot.

    torchrun gives the ranks its own TCPStore, again at a restart, where they find the addresses
    of the ranks before.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not (restarts and several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        return ""
    return (
        f"torchrun --max-restarts {restarts} restarts the ranks on the TCPStore of the attempt "
        "before, by whose stale addresses the restart may fail or hang in init_process_group: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and start it with --standalone or --rdzv-backend "
        "c10d, or let rmetric supervise restart"
    )


class Ranks:
    """Process group of the guard; a single process needs none.

    Collectives of one group must run in the same order on every rank, so each thread has
    a gloo group of its own, which all ranks create together.
    """

    def __init__(self) -> None:
        self.single_process = not (dist.is_available() and dist.is_initialized())
        alone = self.single_process
        self.group = None if alone else dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.rank = 0 if alone else dist.get_rank(self.group)
        self.size = 1 if alone else dist.get_world_size(self.group)
        self._work: Any = None

    def gather(self, value: T) -> list[T]:
        """All-gather: the values of all ranks, by rank."""
        if self.single_process:
            return [value]
        pickled = pickle.dumps(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        own = torch.tensor([len(pickled)], dtype=torch.int64, device="cpu")
        self._wait(dist.all_gather(sizes, own, group=self.group, async_op=True))
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(pickled.ljust(longest)), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(dist.all_gather(rows, padded, group=self.group, async_op=True))
        return [pickle.loads(row.numpy().tobytes()) for row in rows]

    def broadcast(self, value: T) -> T:
        """Broadcast: the value of rank 0."""
        if self.single_process:
            return value
        pickled = pickle.dumps(value) if self.rank == 0 else b""
        size = torch.tensor([len(pickled)], dtype=torch.int64, device="cpu")
        self._wait(dist.broadcast(size, group=self.group, group_src=0, async_op=True))
        row = torch.frombuffer(bytearray(pickled.ljust(int(size))), dtype=torch.uint8)
        self._wait(dist.broadcast(row, group=self.group, group_src=0, async_op=True))
        return pickle.loads(row.numpy().tobytes())  # type: ignore[no-any-return]

    def maximum(self, values: Sequence[int]) -> list[int]:
        """All-reduce: elementwise maximum over the ranks, on the CPU."""
        if self.single_process:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")  # not the default device
        self._wait(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return [int(number) for number in numbers]

    def _wait(self, work: Any) -> None:
        # A collective that nobody keeps is freed by gloo's thread, with its tensors, for which it
        # takes the interpreter's lock. Where the process ends at that moment, it is aborted.
        work.wait()
        self._work = work
