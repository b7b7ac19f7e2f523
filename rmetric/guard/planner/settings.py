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


def _require_sizes(name: str, numbers: tuple[int, ...]) -> None:
    whole = bool(numbers) and all(type(n) is int and n >= 1 for n in numbers)
    require(name, numbers, whole, "whole numbers of at least 1")


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
        _require_sizes("micro_batches", self.micro_batches)
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
            if (sizes := getattr(self, name)) is not None:
                _require_sizes(name, sizes)
        require("recompute", self.recompute, bool(self.recompute), "(False,), (True,) or both")
        if not 0 <= self.margin < 1 or self.alternatives < 0:
            raise ValueError(
                f"margin is {self.margin} and alternatives {self.alternatives}: "
                "a share from 0 to below 1, and a number from 0"
            )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One training engine.

    Attributes:
        name: as `rmetric plan --engine` takes it.
        model_parallel: it splits a model (TP, PP, CP, EP), and not only the data.
        kv_may_divide: TP may be a multiple of the KV heads; else it must divide them.
        fully_sharded: parameters, gradients and optimiser are all sharded over the copies
            (FSDP2); else the optimiser at most is (ZeRO-1).
        uneven_batch: the training loop is the user's, so that the copies need not divide the
            batch (`rmetric.guard.batch_share`); else DP x micro-batch must divide it.
        vocabulary_multiple: the vocabulary is padded to a multiple of this times TP.
        weight_bytes, gradient_bytes, optimiser_bytes: of one parameter.
    """

    name: str
    model_parallel: bool
    kv_may_divide: bool
    fully_sharded: bool
    vocabulary_multiple: int
    weight_bytes: float
    gradient_bytes: float
    optimiser_bytes: float
    uneven_batch: bool = False


#: Megatron Core 0.16 takes num_query_groups that are a multiple or a divisor of TP (older ones
#: only a multiple); torchtitan 0.3 cuts keys and values into whole heads. Megatron's bytes are
#: those of bf16 weights with fp32 gradients, as its page on the distributed optimiser lists
#: them; FSDP2's are fp32 shards, with bf16 copies only of what is at work.
ENGINES = {
    "megatron": Engine(
        name="megatron", model_parallel=True, kv_may_divide=True, fully_sharded=False,
        vocabulary_multiple=128, weight_bytes=2, gradient_bytes=4, optimiser_bytes=12,
    ),
    "torchtitan": Engine(
        name="torchtitan", model_parallel=True, kv_may_divide=False, fully_sharded=True,
        vocabulary_multiple=1, weight_bytes=4, gradient_bytes=4, optimiser_bytes=8,
    ),
    "fsdp": Engine(
        name="fsdp", model_parallel=False, kv_may_divide=False, fully_sharded=True,
        vocabulary_multiple=1, weight_bytes=4, gradient_bytes=4, optimiser_bytes=8,
        uneven_batch=True,
    ),
}  # fmt: skip


def engine_named(name: str) -> Engine:
    """Engine by name. Raises ValueError for an unknown name."""
    require("engine", name, name in ENGINES, f"of {', '.join(ENGINES)}")
    return ENGINES[name]


def padded_vocabulary(vocabulary: int, tensor: int, engine: Engine) -> int:
    """Rows of the embedding with the padding that the engine adds.

    >>> padded_vocabulary(50257, 8, ENGINES["megatron"])
    51200
    """
    multiple = engine.vocabulary_multiple * tensor
    return -(-vocabulary // multiple) * multiple
