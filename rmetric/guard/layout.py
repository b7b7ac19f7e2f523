"""Parallel layout of a training: tensor, pipeline, context and data parallelism, and batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from rmetric._util.errors import require


def batch_remark(batch: int, given: int) -> str:
    """Change of a batch in words, with the learning rate that goes with it."""
    ratio = batch / given
    return (
        f"the batch becomes {batch} instead of {given} ({ratio - 1:+.1%}); the learning rate times "
        f"{ratio**0.5:.4f} keeps Adam's noise as it was (square-root rule), times {ratio:.4f} SGD's"
    )


def nearest_multiple(batch: int, unit: int, largest_change: float) -> int:
    """Multiple of `unit` nearest to a batch; 0 if it is farther than this share of the batch.

    >>> nearest_multiple(100, 12, 0.1), nearest_multiple(100, 12, 0.01)
    (96, 0)
    """
    below = batch // unit * unit
    near = below if below and batch - below <= below + unit - batch else below + unit
    return near if abs(near - batch) <= largest_change * batch else 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tensor x pipeline x context x data parallelism, and the batch.

    Attributes:
        tensor, pipeline, context, data: sizes (TP, PP, CP, DP), at least 1 like all others.
        expert: expert parallel size (EP), within `data`.
        micro_batch: samples per forward pass of one copy.
        accumulation: micro-batches per step of one copy.
        replicas: number of complete sets of shards within `data` (HSDP); divides `data`.
        samples: samples of a step where the copies' shares differ by one, or are cut into
            micro-batches of different sizes (`rmetric.guard.batch_share`); None where they are
            micro_batch x accumulation x data. `accumulation` is then that of the fullest copy.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    replicas: int = 1
    samples: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.name == "samples" and value is None
            whole = optional or (type(value) is int and value >= 1)
            require(field.name, value, whole, "an int of at least 1")
        shared = self.data % self.replicas == 0
        require("replicas", self.replicas, shared, f"a divisor of data, {self.data}")
        samples = self.samples
        if samples is None:
            return
        if samples < self.data:
            raise ValueError(f"samples is {samples}: at least one for each of {self.data} copies")
        needed = -(-self.fullest_copy // self.micro_batch)
        if self.accumulation != needed:
            raise ValueError(
                f"accumulation is {self.accumulation}: the fullest copy has {self.fullest_copy} "
                f"samples and takes {needed}"
            )
        if samples == self.micro_batch * self.accumulation * self.data:
            object.__setattr__(self, "samples", None)  # one form of an even layout

    @classmethod
    def split(cls, batch: int, *, data: int, micro_batch: int = 1, **sizes: int) -> Layout:
        """Layout of a batch that the `data` copies and micro-batches need not divide.

        `micro_batch` is the greatest number of samples of one. Raises ValueError if a size is
        below 1, or there are more copies than samples.
        """
        accumulation = -(-batch // (max(data, 1) * max(micro_batch, 1)))
        return cls(
            data=data, micro_batch=micro_batch, accumulation=accumulation, samples=batch, **sizes
        )

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def global_batch(self) -> int:
        """Samples of one step over all copies."""
        return self.samples or self.micro_batch * self.accumulation * self.data

    @property
    def fullest_copy(self) -> int:
        """Samples of one step of the copy that has most."""
        return -(-self.global_batch // self.data)

    def __str__(self) -> str:
        names = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "DP": self.data}
        split = " x ".join(f"{name}{n}" for name, n in names.items() if n > 1 or name != "CP")
        experts = f", EP{self.expert}" if self.expert > 1 else ""
        shards = f" ({self.replicas} x {self.data // self.replicas} shards)"
        parts = f"{self.micro_batch} x {self.accumulation} x {self.data}"
        if self.samples is not None:
            each, over = divmod(self.samples, self.data)
            parts = f"{self.data} x {each}{f' or {each + 1}' * (over > 0)}"
            if self.micro_batch > 1:
                parts += f" in micro-batches of at most {self.micro_batch}"
        return (
            f"{split}{shards * (self.replicas > 1)}{experts}, batch {self.global_batch} = {parts}"
        )

    def as_json(self) -> dict[str, Any]:
        """JSON object of all fields; `samples` only where it is set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, entry: Any) -> Layout:
        """Inverse of `as_json`. Raises ValueError for other input."""
        names = [field.name for field in fields(cls)]
        if not isinstance(entry, dict) or not set(entry) <= set(names):
            raise ValueError(f"{entry!r} is not a layout, a mapping with {', '.join(names)}")
        return cls(**entry)
