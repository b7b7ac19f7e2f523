"""Training engines: their constraints on layouts, and their memory per GPU."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric._util.errors import require


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
