"""Constraints on a layout; each function returns a sentence if violated, else an empty string."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rmetric.guard.layout import Layout
from rmetric.guard.planner.cluster import Cluster, in_words, reach, room, together
from rmetric.guard.planner.memory import MemoryEstimate, memory
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.settings import SIZES, BatchSpec, Engine, PlanOptions


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that decides which layouts work.

    Attributes:
        relaxed: names of rules that are lifted, to find out which one binds.
    """

    model: ModelShape
    cluster: Cluster
    engine: Engine
    batch: BatchSpec
    options: PlanOptions
    relaxed: frozenset[str] = frozenset()

    def freer(self, *, batch: Mapping[str, Any] | None = None, **options: Any) -> Problem:
        """This problem with other settings: fields of `BatchSpec`, and of `PlanOptions`."""
        return replace(
            self, batch=replace(self.batch, **batch or {}), options=replace(self.options, **options)
        )

    @property
    def largest_change(self) -> float:
        """Share by which the samples of a step may change."""
        return 0.0 if self.batch.keep else self.batch.largest_change

    @property
    def uneven_batch(self) -> bool:
        """The copies need not divide the batch."""
        asked = self.options.uneven_batch
        return self.engine.uneven_batch if asked is None else asked

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """Sizes to try, ascending."""
        return tuple(sorted(set(self.batch.micro_batches)))

    @cached_property
    def recompute(self) -> tuple[bool, ...]:
        """Settings to try: recomputation only where it is needed."""
        return tuple(sorted(set(self.options.recompute)))


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


def size_rule(problem: Problem, name: str, size: int) -> str:
    """The engine and the options allow the size, one of `SIZES` by name."""
    if size > 1 and not problem.engine.model_parallel:
        return f"{problem.engine.name} has no {name} parallelism: {SIZES[name]} is {size}"
    allowed: tuple[int, ...] | None = getattr(problem.options, name)
    if allowed is not None and size not in allowed:
        return f"{SIZES[name]}{size} is not among the allowed {_list(allowed)}"
    return ""


def tensor_rule(problem: Problem, size: int) -> str:
    """TP divides what it splits."""
    model, engine = problem.model, problem.engine
    broken = size_rule(problem, "tensor", size)
    if broken or "tensor" in problem.relaxed:
        return broken
    split = {
        "heads": model.heads,
        "hidden size": model.hidden,
        "feed-forward width": model.ffn,
        "expert width": model.expert_ffn,
        "shared expert's width": model.shared_expert_ffn,
    }
    for name, number in split.items():
        if number % size:
            of = f"{number} heads" if name == "heads" else f"the {name} of {number}"
            return f"TP{size} does not divide {of}"
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
    if broken := size_rule(problem, "pipeline", stages):
        return broken
    if stages > layers:
        return f"PP{stages} leaves stages without one of the {layers} layers"
    uneven = problem.options.uneven_stages or "pipeline" in problem.relaxed
    if layers % stages and not uneven:
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


def batch_rule(problem: Problem, layout: Layout) -> str:
    """The layout yields the batch, or is within its tolerance."""
    if "batch" in problem.relaxed:
        return ""
    samples = problem.batch.samples
    if layout.samples is not None and not problem.uneven_batch:
        return (
            f"{problem.engine.name} gives each copy the same micro-batches, and the layout "
            f"splits {samples} samples unevenly"
        )
    if abs(layout.global_batch - samples) <= problem.largest_change * samples:
        return ""
    unit = layout.micro_batch * layout.data
    return (
        f"a batch of {samples} is not kept: micro-batch {layout.micro_batch} x "
        f"accumulation {layout.accumulation} x DP{layout.data} is {layout.global_batch}"
        + (f" ({unit} does not divide it)" if samples % unit else "")
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
        shard_optimiser=problem.options.shard_optimiser,
        flash_attention=problem.options.flash_attention,
    )


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
