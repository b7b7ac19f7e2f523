"""CPU collectives of the guard over all ranks, by gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """Process group of the guard; a single process needs none.

    Collectives of one group must run in the same order on every rank, so each thread has
    a group of its own.

    Args:
        group: gloo group over all ranks; None creates one, on all ranks together.
        timeout_seconds: longest duration of a collective before it raises.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 1800.0
    ) -> None:
        self.single_process = not (dist.is_available() and dist.is_initialized())
        if group is None and not self.single_process:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.group = group
        self.rank = 0 if self.single_process else dist.get_rank(group)
        self.size = 1 if self.single_process else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """All-gather: the values of all ranks, by rank."""
        if self.single_process:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Broadcast: the value of rank 0."""
        if self.single_process:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def maximum(self, values: Sequence[int]) -> list[int]:
        """All-reduce: elementwise maximum over the ranks, on the CPU."""
        if self.single_process:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")  # not the default device
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in numbers]
