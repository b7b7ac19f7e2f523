"""How a model's work is split over GPUs: the numbers that every part here speaks of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tensor x pipeline x context x data parallelism, and the batch.

    Attributes:
        tensor: GPUs that share each layer (TP), at least 1, as all below.
        pipeline: stages that the layers are cut into (PP).
        context: GPUs that share each sequence (CP).
        data: copies that each see other samples (DP).
        expert: GPUs that the experts are spread over (EP); they are taken from `data`.
        micro_batch: samples of one forward pass of one copy.
        accumulation: micro-batches of one copy in a step.
        replicas: whole sets of shards that `data` is made of, where an engine shards all
            (HSDP); a divisor of `data`.
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
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Any) -> Layout:
        """The layout that `as_json` gave; raises ValueError for anything else."""
        names = [field.name for field in fields(cls)]
        if not isinstance(entry, dict) or not set(entry) <= set(names):
            raise ValueError(f"{entry!r} is no layout: a mapping with {', '.join(names)} is needed")
        return cls(**entry)
