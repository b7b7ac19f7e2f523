"""Parallel layout of a training: tensor, pipeline, context and data parallelism, and batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tensor x pipeline x context x data parallelism, and the batch.

    Attributes:
        tensor: tensor parallel size (TP), at least 1 like all others.
        pipeline: number of pipeline stages (PP).
        context: context parallel size (CP).
        data: data parallel size (DP).
        expert: expert parallel size (EP), within `data`.
        micro_batch: samples per forward pass of one copy.
        accumulation: micro-batches per step of one copy.
        replicas: number of complete sets of shards within `data` (HSDP); divides `data`.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name} is {value!r}: it must be an int of at least 1")
        if self.data % self.replicas:
            raise ValueError(f"replicas is {self.replicas}: it must divide data, {self.data}")

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def global_batch(self) -> int:
        """Samples of one step over all copies."""
        return self.micro_batch * self.accumulation * self.data

    def __str__(self) -> str:
        names = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "DP": self.data}
        split = " x ".join(f"{name}{n}" for name, n in names.items() if n > 1 or name != "CP")
        experts = f", EP{self.expert}" if self.expert > 1 else ""
        shards = f" ({self.replicas} x {self.data // self.replicas} shards)"
        return (
            f"{split}{shards * (self.replicas > 1)}{experts}, batch {self.global_batch} = "
            f"{self.micro_batch} x {self.accumulation} x {self.data}"
        )

    def as_json(self) -> dict[str, Any]:
        """JSON object of all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Any) -> Layout:
        """Inverse of `as_json`. Raises ValueError for other input."""
        names = [field.name for field in fields(cls)]
        if not isinstance(entry, dict) or not set(entry) <= set(names):
            raise ValueError(f"{entry!r} is no layout: a mapping with {', '.join(names)} is needed")
        return cls(**entry)
