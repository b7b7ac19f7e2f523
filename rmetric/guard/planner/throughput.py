"""Estimated step time of a layout, to rank layouts; not a forecast.

Work is counted as Narayanan et al. do ("Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv 2104.04473): 72 B s l h^2 (1 + s / 6h + V / 12lh) for a
GPT, a third of its layers' part more with recomputation. Rings move (n - 1) / n of what they
gather. docs/planner.md compares it with published runs and lists what it leaves out.
"""

from __future__ import annotations

from typing import NamedTuple

from rmetric.guard.layout import Layout
from rmetric.guard.planner.cluster import Gpu, Reach
from rmetric.guard.planner.memory import distinct_stages, layers_of_stage, stage_parameters
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.settings import Engine, padded_vocabulary

#: Seconds a layer that the processor takes to start the kernels of one micro-batch: about
#: twenty of 5 microseconds. It only matters to small models and small micro-batches.
LAUNCH_SECONDS = 1e-4


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


#: Bytes of GPU memory that a micro-batch moves for each weight on the GPU: the weight in bf16 for
#: the forward and the backward pass, and its gradient in fp32, read and written. The products take
#: at least that long; with few tokens, as of an expert or of a sequence cut by CP, it is more.
#: Recomputation reads the weight once more.
WEIGHT_BYTES = 2 + 2 + 4 + 4
#: Seconds of a step around the ring of context parallelism: kernels for the attention of a block
#: and for joining it to the others, about ten of 5 microseconds, and the start of a transfer.
RING_STEP_SECONDS = 7e-5


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
    # An all-reduce is a reduce-scatter and an all-gather of bf16 activations.
    tensor = again * 2 * (t - 1) / t * 2 * tokens * model.hidden / gpu.intra_bandwidth
    ring = (passes * (c - 1) * tokens * 2 * (model.key_width + model.value_width)) / t
    context = ring / gpu.intra_bandwidth + passes * (c - 1) * RING_STEP_SECONDS
    sent = again * tokens / t * model.experts_per_token * model.hidden * 2 * (e - 1) / e
    expert = sent / gpu.intra_bandwidth
    vocabulary = padded_vocabulary(model.vocabulary, t, engine)
    logits = 3 * 2 * model.hidden * vocabulary * tokens / (t * rate)
    dense_weights, expert_weights = _waiting_for_weights(
        model, layout, gpu, work, WEIGHT_BYTES + 2 * recompute
    )
    per_dense = work * dense_flops + dense_weights + tensor + context + LAUNCH_SECONDS
    per_expert = work * expert_flops + expert_weights + tensor + context + expert + LAUNCH_SECONDS
    slowest = 0.0
    for stage in distinct_stages(model, p):
        dense, experts = layers_of_stage(model, p, stage)
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


def _waiting_for_weights(
    model: ModelShape, layout: Layout, gpu: Gpu, work: float, moved: int
) -> tuple[float, float]:
    """Seconds of a micro-batch by which moving the weights takes longer than the products.

    Of a dense layer and of one with experts; `work` is the seconds of a forward operation,
    `moved` the bytes of each weight.
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
    bytes_each = engine.gradient_bytes + (
        engine.weight_bytes if shard_optimiser else engine.gradient_bytes
    )
    return bytes_each * moved / bandwidth


def _ring(size: float, members: float) -> float:
    """Bytes that each of `members` sends in an all-gather of `size` bytes."""
    return size * (members - 1) / members
