"""The ranks of a training, as far as the guard speaks with them: on the CPU, by gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """A group of its own for the words of the guard; one process needs none.

    Collectives of one group must come in the same order everywhere, so whatever runs in
    another thread has another group.

    Args:
        group: a gloo group over all ranks; None makes one, which all ranks must do together.
        patience_seconds: a collective that takes longer raises.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, patience_seconds: float = 1800.0
    ) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        if group is None and not self.alone:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_seconds))
        self.group = group
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """What every rank gave, by rank; on every rank."""
        if self.alone:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def from_first(self, value: T) -> T:
        """What rank 0 gave, on every rank."""
        if self.alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def greatest(self, values: Sequence[int]) -> list[int]:
        """The greatest that any rank gave, value by value; one all-reduce on the CPU."""
        if self.alone:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")  # whatever the default is
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in numbers]
