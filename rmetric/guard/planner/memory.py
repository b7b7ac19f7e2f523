"""Memory of a layout on a GPU: formulas, each with its source.

Sources: the activations of a layer follow Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198), with sequence parallelism,
generalised to gated feed-forward parts, grouped queries and experts; their 34 s b h is
what `activation_bytes` gives for a GPT. Bytes a parameter: see `engines`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rmetric.guard.layout import Layout
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.settings import Engine, padded_vocabulary

#: Of one logit, while the loss is computed: it in fp32, and its gradient.
LOGIT_BYTES = 8
#: Of one parameter of what FSDP has gathered: two layers of bf16 weights (one at work, one
#: fetched ahead), and one layer's gradients in bf16 and, to be reduced, in fp32.
GATHERED_BYTES = 2 * 2 + 2 + 4


class MemoryEstimate(NamedTuple):
    """Bytes on the GPU that needs most, by what they hold; `stage` is where it is."""

    stage: int
    weights: float
    gradients: float
    optimiser: float
    gathered: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(self[1:])


def memory(
    model: ModelShape,
    layout: Layout,
    engine: Engine,
    *,
    recompute: bool = False,
    shard_optimiser: bool = True,
    flash_attention: bool = True,
) -> MemoryEstimate:
    """Peak memory of the fullest GPU during a step, bytes; the settings as in `PlanOptions`."""
    kept = activation_bytes(model, flash_attention=flash_attention)
    stages = (
        _stage(model, layout, engine, stage, recompute, shard_optimiser, kept)
        for stage in distinct_stages(model, layout.pipeline)
    )
    return max(stages, key=lambda each: (each.total, -each.stage))


def activation_bytes(model: ModelShape, *, flash_attention: bool = True) -> tuple[float, float]:
    """Bytes that a dense layer, and one with experts, keep of each token, unsplit.

    Two norms, the inputs of the two halves, queries, keys, values, the projection's
    input, latents before and after their norm, the feed-forward part, masks of dropout at one
    byte; everything else in bf16.
    """
    q, k, v = model.query_width, model.key_width, model.value_width
    latents = 2 * (model.q_lora_rank + model.kv_lora_rank) + model.rope_head_size
    attention = 2 * (q + k + v + model.attention_output + latents) + 2 * (q + k) * model.qk_norm
    scores = 0 if flash_attention else 5 * model.heads * model.sequence
    common = (8 + 2 * model.dropout) * model.hidden + attention + scores
    per_width = 6 if model.gated else 4
    dense = common + per_width * model.ffn
    # Of each copy of a token: its input and output at the expert, and the width between.
    copies = model.experts_per_token * (4 * model.hidden + per_width * model.expert_ffn)
    experts = common + copies + per_width * model.shared_expert_ffn + 4 * model.experts
    return dense, experts


def split_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage; where they do not come out even, the first stages have one more."""
    each, over = divmod(layers, stages)
    return [each + (i < over) for i in range(stages)]


def distinct_stages(model: ModelShape, stages: int) -> Iterable[int]:
    """Stages that may need most: the first holds most micro-batches, the last the logits.

    One between them is fuller or slower only where layers differ.
    """
    return range(stages) if model.dense_layers else {0, stages - 1}


def layers_of_stage(model: ModelShape, stages: int, stage: int) -> tuple[int, int]:
    """Dense layers and layers with experts of a stage."""
    each, over = divmod(model.layers, stages)
    begin = stage * each + min(stage, over)
    end = begin + each + (stage < over)
    first = model.dense_layers if model.experts else model.layers
    dense = max(0, min(end, first) - begin)
    return dense, end - begin - dense


def stage_parameters(
    model: ModelShape, layout: Layout, engine: Engine, stage: int
) -> tuple[float, float, float]:
    """Parameters of a stage on one GPU: shared by all copies, of experts, of its largest part.

    Norms, routers and the projections to latents are on every GPU of a tensor group; the rest
    is split evenly.
    """
    t = layout.tensor
    dense, expert = layers_of_stage(model, layout.pipeline, stage)
    latent = model.latent_projections
    every = (model.attention_parameters - latent) / t + latent + model.layer_norms
    dense_layer = every + model.dense_ffn_parameters / t
    expert_layer = every + model.shared_expert_parameters / t + model.router_parameters
    shared = dense * dense_layer + expert * expert_layer
    experts = model.experts_parameters / (t * layout.expert)
    table = padded_vocabulary(model.vocabulary, t, engine) * model.hidden / t
    first, last = stage == 0, stage == layout.pipeline - 1
    # A tied output on another stage is a second copy there.
    tables = first + (last and not (model.tied and first))
    shared += tables * table + first * model.positions * model.hidden
    shared += last * model.norm_parameters
    largest = max(
        dense_layer * (dense > 0),
        (expert_layer + experts) * (expert > 0),
        table * (tables > 0),
    )
    return shared, experts * expert, largest


def _stage(
    model: ModelShape,
    layout: Layout,
    engine: Engine,
    stage: int,
    recompute: bool,
    shard_optimiser: bool,
    kept: tuple[float, float],
) -> MemoryEstimate:
    shared, experts, largest = stage_parameters(model, layout, engine, stage)
    copies = layout.data * layout.context
    shards = copies / layout.replicas
    whole = shared + experts
    sharded = shared / shards + experts * layout.expert / shards
    dense, expert = layers_of_stage(model, layout.pipeline, stage)
    tokens = layout.micro_batch * model.sequence / layout.context
    in_flight = min(layout.pipeline - stage, layout.accumulation)
    activations = dense * kept[0] + expert * kept[1]
    at_once = 0.0
    if recompute:
        activations = 2.0 * model.hidden * (dense + expert)
        at_once = max(kept[0] * (dense > 0), kept[1] * (expert > 0)) - 2 * model.hidden
    ends = (stage == 0) * model.dropout * model.hidden
    is_last = stage == layout.pipeline - 1
    at_once += is_last * 4 * model.hidden
    a_layer_is_split = tokens / layout.tensor
    vocabulary = padded_vocabulary(model.vocabulary, layout.tensor, engine)
    return MemoryEstimate(
        stage=stage,
        weights=engine.weight_bytes * (sharded if engine.fully_sharded else whole),
        gradients=engine.gradient_bytes * (sharded if engine.fully_sharded else whole),
        optimiser=engine.optimiser_bytes
        * (sharded if engine.fully_sharded or shard_optimiser else whole),
        gathered=GATHERED_BYTES * largest if engine.fully_sharded else 0.0,
        activations=a_layer_is_split * ((activations + ends) * in_flight + at_once),
        logits=is_last * LOGIT_BYTES * tokens * vocabulary / layout.tensor,
    )


def memory_in_words(
    model: ModelShape, layout: Layout, engine: Engine, needed: MemoryEstimate, *, recompute: bool,
    shard_optimiser: bool = True,
) -> list[tuple[str, float, str]]:  # fmt: skip
    """Each term: its name, its bytes, and the formula behind it."""
    shared, experts, _ = stage_parameters(model, layout, engine, needed.stage)
    copies = layout.data * layout.context // layout.replicas
    count = f"{(shared + experts) / 1e9:.2f} billion parameters of stage {needed.stage}"
    over = f" / {copies} shards" if copies > 1 else ""
    all_over = over if engine.fully_sharded else ""
    optimiser_over = over if engine.fully_sharded or shard_optimiser else ""
    in_flight = min(layout.pipeline - needed.stage, layout.accumulation)
    kept = "the inputs of its layers" if recompute else "what the backward pass needs"
    words = [
        ("weights", needed.weights, f"{engine.weight_bytes:g} B x {count}{all_over}"),
        ("gradients", needed.gradients, f"{engine.gradient_bytes:g} B x the same{all_over}"),
        ("optimiser", needed.optimiser, f"{engine.optimiser_bytes:g} B x the same{optimiser_over}"),
        ("gathered layers", needed.gathered, f"{GATHERED_BYTES} B x the largest part"),
        (
            "activations",
            needed.activations,
            f"{kept}, of {in_flight} micro-batch{'es' * (in_flight > 1)} in flight",
        ),
        ("logits", needed.logits, f"{LOGIT_BYTES} B x tokens x vocabulary / TP"),
    ]
    return [each for each in words if each[1]]
