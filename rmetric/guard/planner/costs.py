"""Memory and step time of a layout: formulas to rank layouts by, each with its source.

Memory: the activations of a layer follow Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models" (arXiv 2205.05198), with sequence parallelism, generalised to gated
feed-forward parts, grouped queries and experts; their 34 s b h is what `activation_bytes` gives
for a GPT. Bytes a parameter: see `ENGINES`.

Time: work is counted as Narayanan et al. do ("Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv 2104.04473): 72 B s l h^2 (1 + s / 6h + V / 12lh) for a
GPT, a third of its layers' part more with recomputation. Rings move (n - 1) / n of what they
gather. docs/planner.md compares it with published runs and lists what it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rmetric.guard.layout import Layout
from rmetric.guard.planner.cluster import Gpu, Reach
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import Engine, Problem, Split

#: Bytes of a logit while the loss is computed: it in fp32, and its gradient.
LOGIT_BYTES = 8
#: Bytes of a parameter that FSDP has gathered: two layers of bf16 weights (one at work, one
#: fetched ahead), and one layer's gradients in bf16 and, to be reduced, in fp32.
GATHERED_BYTES = 2 * 2 + 2 + 4
#: Seconds a layer that the processor takes to start the kernels of one micro-batch: about
#: twenty of 5 microseconds. It only matters to small models and small micro-batches.
LAUNCH_SECONDS = 1e-4
#: Bytes of GPU memory that a micro-batch moves for each weight on the GPU: the weight in bf16 for
#: the forward and the backward pass, and its gradient in fp32, read and written. The products take
#: at least that long; with few tokens, as of an expert or of a sequence cut by CP, it is more.
#: Recomputation reads the weight once more.
WEIGHT_BYTES = 2 + 2 + 4 + 4
#: Seconds of a step around the ring of context parallelism: kernels for the attention of a block
#: and for joining it to the others, about ten of 5 microseconds, and the start of a transfer.
RING_STEP_SECONDS = 7e-5
#: What each part of a step is called.
PARTS = {
    "compute": "matrix products",
    "launches": "starting kernels",
    "weights": "waiting for weights",
    "tensor": "TP reductions",
    "context": "CP ring",
    "expert": "EP all-to-all",
    "bubble": "pipeline bubble",
    "pipeline": "PP sends",
    "data": "DP gradients",
}


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

    def parts(self) -> dict[str, float]:
        """Bytes of each part that takes any, by its name."""
        return {part: size for part, size in self._asdict().items() if size and part != "stage"}


class StepTime(NamedTuple):
    """Seconds of one step, by what they go to, and the tokens a second that follow."""

    compute: float
    launches: float
    weights: float
    tensor: float
    context: float
    expert: float
    bubble: float
    pipeline: float
    data: float
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        return sum(self[:-1])

    def parts(self) -> dict[str, float]:
        """Seconds of each part that takes any, by what it is called."""
        return {words: getattr(self, part) for part, words in PARTS.items() if getattr(self, part)}


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
    # Each copy of a token has its input and output at the expert, and the width between.
    copies = model.experts_per_token * (4 * model.hidden + per_width * model.expert_ffn)
    experts = common + copies + per_width * model.shared_expert_ffn + 4 * model.experts
    return dense, experts


def distinct_stages(model: ModelShape, stages: int) -> Iterable[int]:
    """Stages that may need most: the first holds most micro-batches, the last the logits.

    One between them is fuller or slower only where layers differ.
    """
    return range(stages) if model.dense_layers else {0, stages - 1}


def stage_parameters(
    model: ModelShape, layout: Layout, engine: Engine, stage: int
) -> tuple[float, float, float]:
    """Parameters of a stage on one GPU: shared by all copies, of experts, of its largest part.

    Norms, routers and the projections to latents are on every GPU of a tensor group; the rest
    is split evenly.
    """
    t = layout.tensor
    dense, expert = model.layers_of_stage(layout.pipeline, stage)
    latent = model.latent_projections
    every = (model.attention_parameters - latent) / t + latent + model.layer_norms
    dense_layer = every + model.dense_ffn_parameters / t
    expert_layer = every + model.shared_expert_parameters / t + model.router_parameters
    shared = dense * dense_layer + expert * expert_layer
    experts = model.experts_parameters / (t * layout.expert)
    table = engine.padded(model.vocabulary, t) * model.hidden / t
    first, last = stage == 0, stage == layout.pipeline - 1
    # A tied output on another stage is a second copy there.
    tables = first + (last and not (model.tied and first))
    shared += tables * table + first * model.positions * model.hidden
    shared += last * model.norm_parameters
    largest = max(
        dense_layer * (dense > 0), (expert_layer + experts) * (expert > 0), table * (tables > 0)
    )
    return shared, experts * expert, largest


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
    shards = layout.data * layout.context / layout.replicas
    tokens = layout.micro_batch * model.sequence / layout.context
    vocabulary = engine.padded(model.vocabulary, layout.tensor)
    fully_sharded = engine.fully_sharded

    def of_stage(stage: int) -> MemoryEstimate:
        shared, experts, largest = stage_parameters(model, layout, engine, stage)
        whole = shared + experts
        sharded = shared / shards + experts * layout.expert / shards
        dense, expert = model.layers_of_stage(layout.pipeline, stage)
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
        return MemoryEstimate(
            stage=stage,
            weights=engine.weight_bytes * (sharded if fully_sharded else whole),
            gradients=engine.gradient_bytes * (sharded if fully_sharded else whole),
            optimiser=engine.optimiser_bytes
            * (sharded if fully_sharded or shard_optimiser else whole),
            gathered=GATHERED_BYTES * largest if fully_sharded else 0.0,
            activations=a_layer_is_split * ((activations + ends) * in_flight + at_once),
            logits=is_last * LOGIT_BYTES * tokens * vocabulary / layout.tensor,
        )

    stages = map(of_stage, distinct_stages(model, layout.pipeline))
    return max(stages, key=lambda each: (each.total, -each.stage))


def layer_flops(model: ModelShape) -> tuple[float, float]:
    """Forward, a token: of a dense layer and of one with experts.

    Attention is counted over the whole sequence, as the papers do, though a causal
    kernel does half of it.
    """
    scores = 2 * model.sequence * (model.query_width + model.attention_output)
    attention = 2 * model.attention_matrices + scores
    per_width = 2 * (3 if model.gated else 2) * model.hidden
    dense = attention + per_width * model.ffn
    width = model.experts_per_token * model.expert_ffn + model.shared_expert_ffn
    experts = attention + per_width * width + 2 * model.hidden * model.experts
    return dense, experts


def step_flops(model: ModelShape, samples: int, *, recompute: bool = False) -> float:
    """Floating-point operations of one step, forward and backward."""
    dense, experts = layer_flops(model)
    with_experts = model.expert_layers
    layers = (model.layers - with_experts) * dense + with_experts * experts
    logits = 2 * model.hidden * model.vocabulary
    return samples * model.sequence * ((4 if recompute else 3) * layers + 3 * logits)


def estimate(
    model: ModelShape,
    layout: Layout,
    engine: Engine,
    gpu: Gpu,
    reach: Reach,
    *,
    recompute: bool = False,
    shard_optimiser: bool = True,
) -> StepTime:
    """Step time.

    One-forward-one-backward without interleaving: the slowest stage sets the pace of all
    micro-batches but one, which passes through every stage. Communication of TP, CP, EP,
    PP and of Megatron's gradients is counted in full, as if nothing overlapped; FSDP's
    gathering hides behind the computation as far as that goes.
    """
    t, p, c, e = layout.tensor, layout.pipeline, layout.context, layout.expert
    # Of an uneven batch the fullest copy sets the pace; its micro-batches differ by one sample.
    samples = layout.fullest_copy / layout.accumulation
    tokens = samples * model.sequence / c
    passes = 4 if recompute else 3
    rate = gpu.peak_flops * gpu.efficiency
    dense_flops, expert_flops = layer_flops(model)
    work = passes * tokens / (t * rate)
    again = 6 if recompute else 4
    tensor = _reduce_seconds(model, gpu, t, tokens, again)
    ring = (passes * (c - 1) * tokens * 2 * (model.key_width + model.value_width)) / t
    context = ring / gpu.intra_bandwidth + passes * (c - 1) * RING_STEP_SECONDS
    sent = again * tokens / t * model.experts_per_token * model.hidden * 2 * (e - 1) / e
    expert = sent / gpu.intra_bandwidth
    vocabulary = engine.padded(model.vocabulary, t)
    logits = 3 * 2 * model.hidden * vocabulary * tokens / (t * rate)
    dense_weights, expert_weights = _waiting_for_weights(
        model, layout, gpu, work, WEIGHT_BYTES + 2 * recompute
    )
    per_dense = work * dense_flops + dense_weights + tensor + context + LAUNCH_SECONDS
    per_expert = work * expert_flops + expert_weights + tensor + context + expert + LAUNCH_SECONDS
    slowest = 0.0
    for stage in distinct_stages(model, p):
        dense, experts = model.layers_of_stage(p, stage)
        pace = dense * per_dense + experts * per_expert + (stage == p - 1) * logits
        slowest = max(slowest, pace)
    with_experts = model.expert_layers
    without = model.layers - with_experts
    through = without * per_dense + with_experts * per_expert + logits
    m = layout.accumulation
    even = m / p  # one GPU's share of all micro-batches through all stages
    busy = even * through
    bandwidth = gpu.intra_bandwidth if reach.all_in_node else gpu.inter_bandwidth
    hop = 2 * 2 * tokens * model.hidden / t / bandwidth if p > 1 else 0.0
    compute = even * (work * (without * dense_flops + with_experts * expert_flops) + logits)
    waiting = even * (without * dense_weights + with_experts * expert_weights)
    whole = model.layers * even
    seconds = {
        "compute": compute,
        "launches": whole * LAUNCH_SECONDS,
        "weights": waiting,
        "tensor": whole * tensor,
        "context": whole * context,
        "expert": even * with_experts * expert,
        "bubble": max(0.0, (m - 1) * slowest + through - busy),  # rounding may leave a trace
        "pipeline": hop * (m + p - 1),
        "data": _data_seconds(
            model, layout, engine, gpu, reach, shard_optimiser, compute + waiting
        ),
    }
    tokens = layout.global_batch * model.sequence
    return StepTime(**seconds, tokens_per_second=tokens / sum(seconds.values()))


def highest_rate(problem: Problem, split: Split) -> float:
    """Tokens a second if nothing but matrix products, TP and the bubble took time."""
    model, gpu, batch = problem.model, problem.cluster.gpu, problem.batch
    tensor, pipeline, context, _, data = split
    flops = step_flops(model, 1) / model.sequence
    seconds = flops / (tensor * gpu.peak_flops * gpu.efficiency)
    seconds += model.layers * _reduce_seconds(model, gpu, tensor, 1, 4)
    most = batch.samples * (1 + batch.largest_change) / data
    at_once = float(data)
    if problem.uneven_batch:
        fullest = -(-batch.samples // data)
        most = max(most, fullest)
        if not batch.largest_change:  # the fullest copy sets the pace of the batch
            at_once = batch.samples / fullest
    # A hair more, so that rounding never hides a layout.
    return (1 + 1e-9) * pipeline * at_once * context / seconds * most / (most + pipeline - 1)


def _reduce_seconds(model: ModelShape, gpu: Gpu, tensor: int, tokens: float, times: int) -> float:
    """All-reduces of a layer's bf16 activations: each a reduce-scatter and an all-gather."""
    return times * 2 * (tensor - 1) / tensor * 2 * tokens * model.hidden / gpu.intra_bandwidth


def _waiting_for_weights(
    model: ModelShape, layout: Layout, gpu: Gpu, work: float, moved: int
) -> tuple[float, float]:
    """Seconds of a micro-batch by which moving the weights takes longer than the products.

    For a dense layer and for one with experts; `work`: seconds of an operation, `moved`: bytes.
    """
    each = moved / (layout.tensor * gpu.memory_bandwidth)
    per_width = 2 * (3 if model.gated else 2) * model.hidden * work
    visited = model.experts_per_token * model.expert_ffn * per_width
    attention = max(0.0, each * model.attention_parameters - 2 * model.attention_matrices * work)
    dense = max(0.0, each * model.dense_ffn_parameters - per_width * model.ffn)
    experts = max(0.0, each * model.experts_parameters / layout.expert - visited)
    return attention + dense, attention + experts


def _data_seconds(
    model: ModelShape, layout: Layout, engine: Engine, gpu: Gpu, reach: Reach,
    shard_optimiser: bool, compute: float,
) -> float:  # fmt: skip
    """Gradients summed over the copies, and weights gathered from them."""
    copies = layout.data * layout.context
    if copies == 1:
        return 0.0
    bandwidth = gpu.intra_bandwidth if reach.stages_in_node else gpu.inter_bandwidth
    shared, experts, _ = stage_parameters(model, layout, engine, 0)
    of_experts = copies / layout.expert
    if engine.fully_sharded:
        r = layout.replicas
        gathering = gpu.intra_bandwidth if reach.shards_in_node else gpu.inter_bandwidth
        moved = _ring(shared, copies / r) + _ring(experts, of_experts / r)
        # Each micro-batch: bf16 weights for the forward and the backward, fp32 gradients;
        # these are then summed over the replicas, shard by shard.
        summed = 2 * 4 * _ring(shared * r / copies + experts * r / of_experts, r)
        seconds = (2 + 2 + 4) * moved / gathering + summed / bandwidth
        return max(0.0, layout.accumulation * seconds - compute)
    moved = _ring(shared, copies) + _ring(experts, of_experts)
    second = engine.weight_bytes if shard_optimiser else engine.gradient_bytes
    return (engine.gradient_bytes + second) * moved / bandwidth


def _ring(size: float, members: float) -> float:
    """Bytes that each of `members` sends in an all-gather of `size` bytes."""
    return size * (members - 1) / members
