"""Settings of a plan: the batch, and the sizes to search."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric._util.errors import require

#: Share of the GPUs that should work; where fewer do, the plan names what would use them.
AT_WORK = 0.95
#: Share by which a batch may change, unless another is given.
LARGEST_CHANGE = 0.1
#: Tokens of a sequence up to which context parallelism must win by the margin of the estimate.
SHORT_SEQUENCE = 8192
#: Share by which a layout must be faster to be worth mentioning.
WORTH_SAYING = 0.02
#: The sizes of a layout that are searched -> their short names.
SIZES = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}

_SIZES = "whole numbers of at least 1"


def _are_sizes(numbers: tuple[int, ...]) -> bool:
    return bool(numbers) and all(type(n) is int and n >= 1 for n in numbers)


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Samples of one step.

    Attributes:
        samples: of one step, over all copies, at least 1.
        keep: the layout must come to exactly these; else it may change them.
        largest_change: by which share at most, if they need not be kept.
        micro_batches: samples of a forward pass that may be tried; the most of one where the
            batch may be split unevenly.
    """

    samples: int
    keep: bool = True
    largest_change: float = LARGEST_CHANGE
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        whole = type(self.samples) is int and self.samples >= 1
        require("the batch", self.samples, whole, "a whole number of at least 1")
        require("micro_batches", self.micro_batches, _are_sizes(self.micro_batches), _SIZES)
        change = self.largest_change
        require("largest_change", change, 0 <= change < 1, "from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Sizes to search.

    Attributes:
        tensor, pipeline, context, expert: sizes that are allowed; None allows all.
        recompute: whether each layer's activations may be computed again: settings to try.
        shard_optimiser: ZeRO-1 for Megatron (its distributed optimiser).
        flash_attention: attention scores are not kept.
        uneven_stages: stages may differ by one layer.
        uneven_batch: the copies need not divide the batch, since the training splits it by
            `rmetric.guard.batch_share`; None: as the engine can.
        least_gpus: number of GPUs that a layout must use.
        margin: a layout this share slower than the fastest is taken if it is a smaller
            change from the present one or, without a present one, if it leaves sequences of
            up to `SHORT_SEQUENCE` tokens whole.
        alternatives: how many to give beside the best; each differs in TP, PP, CP or EP.
    """

    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] = (False, True)
    shard_optimiser: bool = True
    flash_attention: bool = True
    uneven_stages: bool = False
    uneven_batch: bool | None = None
    least_gpus: int = 1
    margin: float = 0.03
    alternatives: int = 4

    def __post_init__(self) -> None:
        for name in SIZES:
            sizes = getattr(self, name)
            require(name, sizes, sizes is None or _are_sizes(sizes), f"{_SIZES}, or None")
        require("recompute", self.recompute, bool(self.recompute), "(False,), (True,) or both")
        if not 0 <= self.margin < 1 or self.alternatives < 0:
            raise ValueError(
                f"margin is {self.margin} and alternatives {self.alternatives}: "
                "a share from 0 to below 1, and a number from 0"
            )
