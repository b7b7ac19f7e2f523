"""Question to the planner, the engines with their settings, and the constraints on a layout.

Each function whose name ends in `_rule` returns a sentence if the constraint is violated, else an
empty string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from rmetric._util.errors import require
from rmetric.guard.layout import Layout
from rmetric.guard.planner.cluster import Cluster, reach, room, together
from rmetric.guard.planner.model_shape import ModelShape

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
        largest_change: share by which the layout may change them, from 0.
        micro_batches: samples of a forward pass that may be tried; the most of one where the
            batch may be split unevenly.
    """

    samples: int
    largest_change: float = 0.0
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
    margin: float = 0.03
    alternatives: int = 4

    def __post_init__(self) -> None:
        for name in SIZES:
            if (sizes := getattr(self, name)) is not None:
                _require_sizes(name, sizes)
        require("recompute", self.recompute, bool(self.recompute), "(False,), (True,) or both")
        require("margin", self.margin, 0 <= self.margin < 1, "from 0 to below 1")
        require("alternatives", self.alternatives, self.alternatives >= 0, "at least 0")


class Split(NamedTuple):
    """Sizes of a layout without its batch."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


class EngineSettings(NamedTuple):
    """An engine's settings for a layout: values for JSON, and lines for the terminal."""

    values: Any
    text: str


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
        settings: of a layout that answers a problem, and whether activations are computed again.
    """

    name: str
    model_parallel: bool
    kv_may_divide: bool
    fully_sharded: bool
    vocabulary_multiple: int
    weight_bytes: float
    gradient_bytes: float
    optimiser_bytes: float
    settings: Callable[[Problem, Layout, bool], EngineSettings]
    uneven_batch: bool = False

    def padded(self, vocabulary: int, tensor: int) -> int:
        """Rows of the embedding with the padding that the engine adds."""
        multiple = self.vocabulary_multiple * tensor
        return -(-vocabulary // multiple) * multiple


def megatron_settings(problem: Problem, layout: Layout, recompute: bool) -> EngineSettings:
    """Megatron-LM arguments that a layout sets; those of the model are unchanged.

    With TP or CP, GPUs before Blackwell need CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment.
    A checkpoint can only be taken up at another TP or PP if it was saved with
    --ckpt-format torch_dist and, for a sharded optimiser,
    --dist-ckpt-optim-fully-reshardable.
    """
    model, stages = problem.model, layout.pipeline
    arguments = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {stages}",
        f"--context-parallel-size {layout.context}",
        f"--expert-model-parallel-size {layout.expert}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.global_batch}",
    ]
    if layout.tensor > 1:
        arguments.append("--sequence-parallel")
    if problem.options.shard_optimiser:
        arguments += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    arguments.append("--ckpt-format torch_dist")
    if recompute:
        arguments += ["--recompute-granularity full", "--recompute-method uniform"]
        arguments.append("--recompute-num-layers 1")
    if model.layers % stages:
        # E the embedding, t a layer, L the loss, a bar between stages.
        counts = [sum(model.layers_of_stage(stages, stage)) for stage in range(stages)]
        cut = "|".join("t" * count for count in counts)
        arguments.append(f"--pipeline-model-parallel-layout E{cut}L")
    text = _shell_lines(arguments)
    if layout.tensor > 1 or layout.context > 1:
        text += "\n  before Blackwell: export CUDA_DEVICE_MAX_CONNECTIONS=1"
    return EngineSettings(" ".join(arguments).split(), text)


def torchtitan_settings(problem: Problem, layout: Layout, recompute: bool) -> EngineSettings:
    """Section -> key -> value. Stages are cut as planned: by layers alone."""
    piped = layout.pipeline > 1
    training = {
        "local_batch_size": layout.micro_batch * (layout.accumulation if piped else 1),
        "global_batch_size": layout.global_batch,
        "seq_len": problem.model.sequence,
    }
    parallelism: dict[str, int | str] = {
        "data_parallel_replicate_degree": layout.replicas,
        "data_parallel_shard_degree": layout.data // layout.replicas,
        "tensor_parallel_degree": layout.tensor,
        "pipeline_parallel_degree": layout.pipeline,
        "context_parallel_degree": layout.context,
        "expert_parallel_degree": layout.expert,
    }
    if piped:
        parallelism |= {
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    mode = "full" if recompute else "none"
    arguments = [
        *(f"--training.{key} {value}" for key, value in training.items()),
        *(f"--parallelism.{key} {value}" for key, value in parallelism.items()),
        f"activation-checkpoint:{mode}",  # a subcommand, which comes last
    ]
    values = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": mode},
    }
    return EngineSettings(values, f"  torchtitan 0.3:\n{_shell_lines(arguments)}")


def fsdp_settings(problem: Problem, layout: Layout, recompute: bool) -> EngineSettings:
    """Device mesh for `fully_shard`, FSDP or with replicas HSDP, and the parts of the batch."""
    mesh = {"dp_shard": layout.data // layout.replicas}
    if layout.replicas > 1:
        mesh = {"dp_replicate": layout.replicas, **mesh}
    shape, names = tuple(mesh.values()), tuple(mesh)
    values = {
        "mesh_shape": shape,
        "mesh_dim_names": names,
        "batch": layout.global_batch,
        "micro_batch": layout.micro_batch,
        "accumulation": layout.accumulation,
        "recompute": recompute,
    }
    checkpointed = ", checkpoint each block's activations" if recompute else ""
    text = f"""\
  mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={names})
  policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
  fully_shard(each block and the model, mesh=mesh, mp_policy=policy)
  micro-batch {layout.micro_batch}, accumulation {layout.accumulation}{checkpointed}"""
    return EngineSettings(values, text)


def _shell_lines(arguments: Sequence[str]) -> str:
    return " \\\n".join(f"    {argument}" for argument in arguments)


#: Megatron Core 0.16 takes num_query_groups that are a multiple or a divisor of TP (older ones
#: only a multiple); torchtitan 0.3 cuts keys and values into whole heads. Megatron's bytes are
#: those of bf16 weights with fp32 gradients, as its page on the distributed optimiser lists
#: them; FSDP2's are fp32 shards, with bf16 copies only of what is at work.
_MEGATRON = Engine(
    name="megatron", model_parallel=True, kv_may_divide=True, fully_sharded=False,
    vocabulary_multiple=128, weight_bytes=2, gradient_bytes=4, optimiser_bytes=12,
    settings=megatron_settings,
)  # fmt: skip
_TORCHTITAN = Engine(
    name="torchtitan", model_parallel=True, kv_may_divide=False, fully_sharded=True,
    vocabulary_multiple=1, weight_bytes=4, gradient_bytes=4, optimiser_bytes=8,
    settings=torchtitan_settings,
)  # fmt: skip
_FSDP = replace(
    _TORCHTITAN, name="fsdp", model_parallel=False, uneven_batch=True, settings=fsdp_settings
)
ENGINES = {engine.name: engine for engine in (_MEGATRON, _TORCHTITAN, _FSDP)}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that decides which layouts work."""

    model: ModelShape
    cluster: Cluster
    engine: Engine
    batch: BatchSpec
    options: PlanOptions

    @property
    def uneven_batch(self) -> bool:
        requested = self.options.uneven_batch
        return self.engine.uneven_batch if requested is None else requested

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.batch.micro_batches)))

    @cached_property
    def recompute(self) -> tuple[bool, ...]:
        """Settings to try: recomputation only where it is needed."""
        return tuple(sorted(set(self.options.recompute)))


def size_rule(problem: Problem, name: str, size: int) -> str:
    """The engine and the options allow the size, one of `SIZES` by name."""
    if size > 1 and not problem.engine.model_parallel:
        return f"{problem.engine.name} has no {name} parallelism: {SIZES[name]} is {size}"
    allowed: tuple[int, ...] | None = getattr(problem.options, name)
    if allowed is not None and size not in allowed:
        return f"{SIZES[name]}{size} is not among the allowed {', '.join(map(str, allowed))}"
    return ""


def tensor_rule(problem: Problem, size: int) -> str:
    """TP divides what it splits."""
    model, engine = problem.model, problem.engine
    if broken := size_rule(problem, "tensor", size):
        return broken
    split = {
        f"{model.heads} heads": model.heads,
        f"the hidden size of {model.hidden}": model.hidden,
        f"the feed-forward width of {model.ffn}": model.ffn,
        f"the expert width of {model.expert_ffn}": model.expert_ffn,
        f"the shared expert's width of {model.shared_expert_ffn}": model.shared_expert_ffn,
        f"the sequence of {model.sequence}, which sequence parallelism splits": model.sequence,
    }
    for words, number in split.items():
        if number % size:
            return f"TP{size} does not divide {words}"
    if model.kv_heads % size and not (engine.kv_may_divide and size % model.kv_heads == 0):
        how = "divide or be a multiple of" if engine.kv_may_divide else "divide"
        return f"TP{size} must {how} the {model.kv_heads} KV heads"
    return ""


def pipeline_rule(problem: Problem, stages: int) -> str:
    """PP divides the layers, or leaves no stage without one."""
    layers = problem.model.layers
    if broken := size_rule(problem, "pipeline", stages):
        return broken
    if stages > layers:
        return f"PP{stages} leaves stages without one of the {layers} layers"
    if layers % stages and not problem.options.uneven_stages:
        return f"PP{stages} does not divide {layers} layers"
    return ""


def context_rule(problem: Problem, tensor: int, size: int) -> str:
    """Each sequence is cut into 2 CP pieces (for balance), and these by TP."""
    if broken := size_rule(problem, "context", size):
        return broken
    if size > 1 and problem.model.sequence % (2 * size * tensor):
        return f"2 x CP{size} x TP{tensor} does not divide the sequence of {problem.model.sequence}"
    return ""


def expert_rule(problem: Problem, size: int, copies: int) -> str:
    """EP divides the experts and the copies (DP x CP) that it takes its GPUs from."""
    experts = problem.model.experts
    broken = size_rule(problem, "expert", size)
    if broken or size == 1:
        return broken
    if not experts:
        return f"EP{size}, but the model has no experts"
    if experts % size:
        return f"EP{size} does not divide {experts} experts"
    if copies % size:
        return f"EP{size} does not divide the {copies} copies (DP x CP)"
    return ""


def replica_rule(problem: Problem, layout: Layout) -> str:
    """Several sets of shards are of use only if each lies inside a node."""
    if layout.replicas == 1:
        return ""
    if not problem.engine.fully_sharded:
        return f"{problem.engine.name} has no sets of shards: replicas is {layout.replicas}"
    shards = layout.data * layout.context // layout.replicas
    if shards % layout.expert or shards % layout.context:
        return f"a set of {shards} shards cannot be split by CP and EP"
    if not reach(problem.cluster.sizes, layout).shards_in_node:
        return f"a set of {shards} shards does not lie inside a node"
    return ""


def size_rules(problem: Problem, layout: Layout) -> list[str]:
    """Sentences of all rules on the sizes of a layout, also empty ones."""
    return [
        tensor_rule(problem, layout.tensor),
        pipeline_rule(problem, layout.pipeline),
        context_rule(problem, layout.tensor, layout.context),
        replica_rule(problem, layout),
        expert_rule(problem, layout.expert, layout.data * layout.context),
    ]


def batch_rule(problem: Problem, layout: Layout) -> str:
    """The layout yields the batch, or is within its tolerance."""
    samples = problem.batch.samples
    if layout.samples is not None and not problem.uneven_batch:
        return (
            f"{problem.engine.name} gives each copy the same micro-batches, and the layout "
            f"splits {samples} samples unevenly"
        )
    if abs(layout.global_batch - samples) <= problem.batch.largest_change * samples:
        return ""
    unit = layout.micro_batch * layout.data
    return (
        f"a batch of {samples} is not kept: micro-batch {layout.micro_batch} x "
        f"accumulation {layout.accumulation} x DP{layout.data} is {layout.global_batch}"
        + (f" ({unit} does not divide it)" if samples % unit else "")
    )


def node_rule(problem: Problem, layout: Layout) -> str:
    """Each group with the most communication lies in one node."""
    sizes, block = problem.cluster.sizes, together(layout)
    if room(sizes, block) * block >= layout.num_gpus:
        return ""
    return (
        f"{layout.num_gpus} GPUs in groups of {block} within a node, but the nodes have "
        f"{', '.join(map(str, sizes))}"
    )
