"""Constraints on a layout; each function returns a sentence if violated, else an empty string."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric.guard.layout import Layout
from rmetric.guard.planner.cluster import Cluster, in_words
from rmetric.guard.planner.engines import Engine
from rmetric.guard.planner.memory import MemoryEstimate, memory
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.placement import reach, room, together


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that decides which layouts work.

    Attributes:
        model, cluster, engine: see there.
        samples: of one step.
        largest_change: share by which they may change.
        micro_batches, recompute: what may be tried, ascending.
        tensor, pipeline, context, expert: sizes that are allowed; None for all.
        shard_optimiser, flash_attention: see `memory`.
        uneven_stages: stages may differ by one layer.
        relaxed: names of rules that are not asked, to find out which one binds.
    """

    model: ModelShape
    cluster: Cluster
    engine: Engine
    samples: int
    largest_change: float
    micro_batches: tuple[int, ...]
    tensor: tuple[int, ...] | None
    pipeline: tuple[int, ...] | None
    context: tuple[int, ...] | None
    expert: tuple[int, ...] | None
    recompute: tuple[bool, ...]
    shard_optimiser: bool
    flash_attention: bool
    uneven_stages: bool
    relaxed: frozenset[str] = frozenset()


def broken_rules(problem: Problem, layout: Layout, recompute: bool) -> dict[str, str]:
    """Name of each rule that `layout` breaks -> a sentence."""
    found = {
        "tensor": tensor_rule(problem, layout.tensor),
        "pipeline": pipeline_rule(problem, layout.pipeline),
        "context": context_rule(problem, layout.tensor, layout.context),
        "replicas": replica_rule(problem, layout),
        "experts": expert_rule(problem, layout.expert, layout.data * layout.context),
        "batch": batch_rule(problem, layout),
        "node": node_rule(problem, layout),
        "memory": memory_rule(problem, needed_memory(problem, layout, recompute)),
    }
    return {name: words for name, words in found.items() if words}


def tensor_rule(problem: Problem, size: int) -> str:
    """TP divides what it splits."""
    model, engine = problem.model, problem.engine
    if not engine.model_parallel and size > 1:
        return f"{engine.name} has no tensor parallelism: TP is {size}"
    if problem.tensor is not None and size not in problem.tensor:
        return f"TP{size} is not among the allowed {_list(problem.tensor)}"
    if "tensor" in problem.relaxed:
        return ""
    split = {
        "heads": model.heads,
        "hidden size": model.hidden,
        "feed-forward width": model.ffn,
        "expert width": model.expert_ffn,
        "shared expert's width": model.shared_expert_ffn,
    }
    for name, number in split.items():
        if number % size:
            return f"TP{size} does not divide {_of(number, name)}"
    if model.sequence % size:
        return (
            f"TP{size} does not divide the sequence of {model.sequence}, which sequence "
            "parallelism splits"
        )
    kv_fits = model.kv_heads % size == 0 or (engine.kv_may_divide and size % model.kv_heads == 0)
    if not kv_fits:
        how = "divide or be a multiple of" if engine.kv_may_divide else "divide"
        return f"TP{size} must {how} the {model.kv_heads} KV heads"
    return ""


def pipeline_rule(problem: Problem, stages: int) -> str:
    """PP divides the layers, or leaves no stage without one."""
    layers = problem.model.layers
    if not problem.engine.model_parallel and stages > 1:
        return f"{problem.engine.name} has no pipeline parallelism: PP is {stages}"
    if problem.pipeline is not None and stages not in problem.pipeline:
        return f"PP{stages} is not among the allowed {_list(problem.pipeline)}"
    if stages > layers:
        return f"PP{stages} leaves stages without one of the {layers} layers"
    if layers % stages and not problem.uneven_stages and "pipeline" not in problem.relaxed:
        return f"PP{stages} does not divide {layers} layers"
    return ""


def context_rule(problem: Problem, tensor: int, size: int) -> str:
    """Each sequence is cut into 2 CP pieces (for balance), and these by TP."""
    if not problem.engine.model_parallel and size > 1:
        return f"{problem.engine.name} has no context parallelism: CP is {size}"
    if problem.context is not None and size not in problem.context:
        return f"CP{size} is not among the allowed {_list(problem.context)}"
    if size > 1 and problem.model.sequence % (2 * size * tensor):
        return f"2 x CP{size} x TP{tensor} does not divide the sequence of {problem.model.sequence}"
    return ""


def expert_rule(problem: Problem, size: int, copies: int) -> str:
    """EP divides the experts and the copies (DP x CP) that it takes its GPUs from."""
    experts = problem.model.experts
    if problem.expert is not None and size not in problem.expert:
        return f"EP{size} is not among the allowed {_list(problem.expert)}"
    if size == 1:
        return ""
    if not problem.engine.model_parallel:
        return f"{problem.engine.name} has no expert parallelism: EP is {size}"
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


def batch_rule(problem: Problem, layout: Layout) -> str:
    """The layout yields the batch, or is within its tolerance."""
    if "batch" in problem.relaxed:
        return ""
    change = abs(layout.global_batch - problem.samples)
    if change <= problem.largest_change * problem.samples:
        return ""
    unit = layout.micro_batch * layout.data
    return (
        f"a batch of {problem.samples} is not kept: micro-batch {layout.micro_batch} x "
        f"accumulation {layout.accumulation} x DP{layout.data} is {layout.global_batch}"
        + (f" ({unit} does not divide it)" if problem.samples % unit else "")
    )


def node_rule(problem: Problem, layout: Layout) -> str:
    """Each group with the most communication lies in one node."""
    cluster, block = problem.cluster, together(layout)
    if "node" in problem.relaxed:
        if layout.num_gpus <= cluster.num_gpus:
            return ""
    elif room(cluster.sizes, block) * block >= layout.num_gpus:
        return ""
    return (
        f"{layout.num_gpus} GPUs in groups of {block} within a node, but the nodes have "
        f"{_list(cluster.sizes)}"
    )


def memory_rule(problem: Problem, needed: MemoryEstimate) -> str:
    if needed.total <= problem.cluster.usable_memory:
        return ""
    cluster = problem.cluster
    return f"it needs {in_words(needed.total)} on each GPU and {cluster.memory_in_words}"


def needed_memory(problem: Problem, layout: Layout, recompute: bool) -> MemoryEstimate:
    return memory(
        problem.model,
        layout,
        problem.engine,
        recompute=recompute,
        shard_optimiser=problem.shard_optimiser,
        flash_attention=problem.flash_attention,
    )


def _of(number: int, name: str) -> str:
    return f"{number} heads" if name == "heads" else f"the {name} of {number}"


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
