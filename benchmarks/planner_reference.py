"""Reference for the planner: a search of every layout, and published runs.

`try_all` is independent of `rmetric.guard.planner.search`: simple loops over all sizes, with the
rules of the documentation. It shares the formulas of memory and time, which are compared with the
published runs below.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf, lcm
from typing import NamedTuple

from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec
from rmetric.guard.planner.cluster import Cluster, Reach
from rmetric.guard.planner.costs import estimate, memory
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import Engine


class Tried(NamedTuple):
    """A valid layout."""

    layout: Layout
    recompute: bool
    tokens_per_second: float


def try_all(
    model: ModelShape, cluster: Cluster, batch: BatchSpec, engine: Engine
) -> Iterator[Tried]:
    """Every valid layout, in no particular order."""
    sizes = [len(node.gpus) for node in cluster.nodes]
    for layout in _every_layout(sum(sizes), model, batch, engine):
        if not _obeys(layout, model, sizes, engine):
            continue
        for recompute in (False, True):
            needed = memory(model, layout, engine, recompute=recompute)
            if needed.total > cluster.gpu.memory - cluster.reserve:
                continue
            step = estimate(
                model, layout, engine, cluster.gpu, _reach(layout, sizes), recompute=recompute
            )
            yield Tried(layout, recompute, step.tokens_per_second)


def least_memory(model: ModelShape, cluster: Cluster, batch: BatchSpec, engine: Engine) -> float:
    """Least memory of any layout, bytes per GPU, at any size of the GPUs; inf if there is none."""
    sizes = [len(node.gpus) for node in cluster.nodes]
    needed = (
        memory(model, layout, engine, recompute=recompute).total
        for layout in _every_layout(sum(sizes), model, batch, engine)
        if _obeys(layout, model, sizes, engine)
        for recompute in (False, True)
    )
    return min(needed, default=inf)


def _every_layout(
    gpus: int, model: ModelShape, batch: BatchSpec, engine: Engine
) -> Iterator[Layout]:
    for t in range(1, gpus + 1):
        for p in range(1, gpus // t + 1):
            for c in range(1, gpus // (t * p) + 1):
                for d in range(1, gpus // (t * p * c) + 1):
                    for e in range(1, max(model.experts, 1) + 1):
                        for b in batch.micro_batches:
                            for r in range(1, d + 1):
                                if batch.samples % (b * d) == 0 and d % r == 0:
                                    yield Layout(
                                        tensor=t, pipeline=p, context=c, data=d, expert=e,
                                        micro_batch=b, accumulation=batch.samples // (b * d),
                                        replicas=r,
                                    )  # fmt: skip
                                elif engine.name == "fsdp" and d <= batch.samples and d % r == 0:
                                    most = ceil(batch.samples / d)
                                    parts = ceil(most / b)
                                    yield Layout(
                                        tensor=t, pipeline=p, context=c, data=d, expert=e,
                                        micro_batch=ceil(most / parts), accumulation=parts,
                                        replicas=r, samples=batch.samples,
                                    )  # fmt: skip


def _obeys(layout: Layout, model: ModelShape, sizes: list[int], engine: Engine) -> bool:
    return (
        _engine_has(layout, engine)
        and _divides_model(layout, model, engine)
        and _groups_fit_nodes(layout, sizes)
    )


def _engine_has(layout: Layout, engine: Engine) -> bool:
    if engine.name == "fsdp":
        return layout.tensor * layout.pipeline * layout.context * layout.expert == 1
    return engine.name != "megatron" or layout.replicas == 1


def _divides_model(layout: Layout, model: ModelShape, engine: Engine) -> bool:
    t, c, e = layout.tensor, layout.context, layout.expert
    widths = (model.heads, model.hidden, model.ffn, model.expert_ffn, model.shared_expert_ffn)
    if any(width % t for width in (*widths, model.sequence)):
        return False
    if model.kv_heads % t and not (engine.name == "megatron" and t % model.kv_heads == 0):
        return False
    if model.layers % layout.pipeline or (c > 1 and model.sequence % (2 * c * t)):
        return False
    return e == 1 or (model.experts > 0 and model.experts % e == 0)


def _groups_fit_nodes(layout: Layout, sizes: list[int]) -> bool:
    """True if expert and shard groups divide the ranks, and each group is inside one node."""
    t, c, e, r = layout.tensor, layout.context, layout.expert, layout.replicas
    ranks = c * layout.data
    if e > 1 and ranks % e:
        return False
    if r > 1 and (ranks // r % e or ranks // r % c or not _hold(sizes, t * ranks // r, layout)):
        return False
    return _hold(sizes, t * lcm(c, e), layout)


def _hold(sizes: list[int], block: int, layout: Layout) -> bool:
    """True if each block of the layout fits inside one node."""
    blocks = layout.num_gpus // block
    for size in sizes:
        while size >= block:
            size, blocks = size - block, blocks - 1
    return blocks <= 0


def _reach(layout: Layout, sizes: list[int]) -> Reach:
    stage = layout.tensor * layout.context * layout.data
    return Reach(
        shards_in_node=_hold(sizes, stage // layout.replicas, layout)
        if stage % (layout.replicas * layout.tensor * lcm(layout.context, layout.expert)) == 0
        else False,
        stages_in_node=_hold(sizes, stage, layout),
        all_in_node=_hold(sizes, layout.num_gpus, layout),
    )


class Run(NamedTuple):
    """A published run: its layout, and teraflops a second and GPU as published."""

    model: ModelShape
    billions: float
    gpus: int
    tensor: int
    pipeline: int
    batch: int
    published: float


def gpt(*, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> ModelShape:
    """Shape of GPT-2 and GPT-3, by Megatron's defaults: biases, dropout, learned positions."""
    return ModelShape.from_json(
        {
            "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "vocab_size": vocabulary, "seq_length": sequence, "max_position_embeddings": sequence,
        }
    )  # fmt: skip


def _gpt(
    billions: float, heads: int, hidden: int, layers: int, tensor: int, pipeline: int, gpus: int,
    batch: int, published: float,
) -> Run:  # fmt: skip
    model = gpt(layers=layers, hidden=hidden, heads=heads, vocabulary=51200, sequence=2048)
    return Run(model, billions, gpus, tensor, pipeline, batch, published)


#: Narayanan et al. 2021 (arXiv 2104.04473), table 1: A100 80GB, activations computed again,
#: optimiser not sharded, stages interleaved; micro-batches are not given. From memory, but for
#: the last one's 502 petaflops on 3072 GPUs, which the abstract has.
NARAYANAN = [
    _gpt(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    _gpt(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    _gpt(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    _gpt(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    _gpt(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    _gpt(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    _gpt(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    _gpt(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    _gpt(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    _gpt(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]

LLAMA_405B = ModelShape(
    layers=126, hidden=16384, heads=128, kv_heads=8, head_size=128, ffn=53248,
    vocabulary=128256, sequence=8192, name="Llama 3 405B",
)  # fmt: skip

#: The Llama 3 herd of models (arXiv 2407.21783), table 4, in a secondary copy: H100, stages
#: interleaved.
LLAMA = [
    Run(LLAMA_405B, 405.9, 8192, 8, 16, 2048, 430),
    Run(LLAMA_405B, 405.9, 16384, 8, 16, 2048, 400),
]
