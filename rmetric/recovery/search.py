"""Every layout that works, the most promising first, and where the search may stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import NamedTuple

from rmetric.recovery.layout import Layout
from rmetric.recovery.memory import Memory
from rmetric.recovery.placement import reach, room
from rmetric.recovery.rules import (
    Problem,
    context_rule,
    expert_rule,
    needed_memory,
    pipeline_rule,
    replica_rule,
    tensor_rule,
)
from rmetric.recovery.throughput import Step, estimate, step_flops


class Found(NamedTuple):
    """A layout that works, and what it costs."""

    layout: Layout
    recompute: bool
    memory: Memory
    step: Step


class Split(NamedTuple):
    """Sizes of a layout without its batch; no layout of it makes more tokens than `bound`."""

    bound: float
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


def search(problem: Problem, *, keep: int, margin: float) -> list[Found]:
    """The fastest layout of each TP, PP, CP and EP, for at least the `keep` fastest of these
    and all within `margin` of the fastest. Unordered; others may be among them."""
    best: dict[tuple[int, ...], Found] = {}
    for split in sorted(splits(problem), reverse=True):
        if split.bound < _cutoff(best, keep, margin):
            break
        family = split[1:5]
        for found in _of_split(problem, split):
            held = best.get(family)
            if held is None or order(found) < order(held):
                best[family] = found
    return list(best.values())


def order(found: Found) -> tuple[float | int, ...]:
    """The order of layouts: faster first, then fewer GPUs and simpler."""
    one = found.layout
    return (
        -found.step.tokens_per_second, one.num_gpus, one.pipeline, one.context, one.tensor,
        one.expert, one.replicas, -one.micro_batch, found.recompute,
    )  # fmt: skip


def splits(problem: Problem) -> Iterator[Split]:
    """All sizes that obey the rules but those of batch and memory."""
    sizes, total = problem.cluster.sizes, problem.cluster.num_gpus
    widest = total if "node" in problem.relaxed else max(sizes, default=0)
    if "node" in problem.relaxed:
        sizes = (total,)
    pipelines = [p for p in range(1, total + 1) if not pipeline_rule(problem, p)]
    for tensor in range(1, widest + 1):
        if tensor_rule(problem, tensor):
            continue
        for context in range(1, widest // tensor + 1):
            if context_rule(problem, tensor, context):
                continue
            for expert in _experts(problem, widest // tensor):
                block = tensor * lcm(context, expert)
                most = room(sizes, block) * block
                for pipeline in pipelines:
                    stage = tensor * context
                    for data in _copies(problem, most // (stage * pipeline)):
                        if expert == 1 or not expert_rule(problem, expert, data * context):
                            bound = _bound(problem, tensor, pipeline, context, data)
                            yield Split(bound, tensor, pipeline, context, expert, data)


def layouts(problem: Problem, split: Split) -> Iterator[Layout]:
    """The layouts of a split that come to the batch."""
    _, tensor, pipeline, context, expert, data = split
    for micro_batch in problem.micro_batches:
        accumulation = _accumulation(problem, micro_batch * data)
        if not accumulation:
            continue
        layout = Layout(
            tensor=tensor, pipeline=pipeline, context=context, data=data, expert=expert,
            micro_batch=micro_batch, accumulation=accumulation,
        )  # fmt: skip
        yield layout
        if problem.engine.fully_sharded:
            yield from _with_replicas(problem, layout)


def _with_replicas(problem: Problem, layout: Layout) -> Iterator[Layout]:
    for replicas in range(2, layout.data + 1):
        if layout.data % replicas == 0:
            several = replace(layout, replicas=replicas)
            if not replica_rule(problem, several):
                yield several


def _of_split(problem: Problem, split: Split) -> Iterator[Found]:
    cluster = problem.cluster
    for layout in layouts(problem, split):
        for recompute in problem.recompute:
            needed = needed_memory(problem, layout, recompute)
            if needed.total > cluster.usable_memory:
                continue
            step = estimate(
                problem.model,
                layout,
                problem.engine,
                cluster.gpu,
                reach(cluster.sizes, layout),
                recompute=recompute,
                shard_optimiser=problem.shard_optimiser,
            )
            yield Found(layout, recompute, needed, step)
            break  # computing again what fits anyway is never faster


def _cutoff(best: dict[tuple[int, ...], Found], keep: int, margin: float) -> float:
    if len(best) < keep:
        return 0.0
    rates = sorted((each.step.tokens_per_second for each in best.values()), reverse=True)
    return min(rates[keep - 1], (1 - margin) * rates[0])


def _experts(problem: Problem, most: int) -> list[int]:
    if not problem.model.experts:
        return [1] if not expert_rule(problem, 1, 1) else []
    return [e for e in range(1, most + 1) if not expert_rule(problem, e, e)]


def _copies(problem: Problem, most: int) -> list[int]:
    """Numbers of copies that some micro-batch can share the batch among."""
    return [n for n in range(1, most + 1) if _shares(problem, n)]


def _shares(problem: Problem, copies: int) -> bool:
    return any(_accumulation(problem, each * copies) for each in problem.micro_batches)


def _accumulation(problem: Problem, at_once: int) -> int:
    """Micro-batches a copy for the batch nearest to the one asked; 0 if that is too far."""
    below, over = divmod(problem.samples, at_once)
    if not over:
        return below
    if "batch" in problem.relaxed:
        return max(below, 1)
    nearest = below if below and over <= at_once - over else below + 1
    change = abs(nearest * at_once - problem.samples)
    return nearest if change <= problem.largest_change * problem.samples else 0


def _bound(problem: Problem, tensor: int, pipeline: int, context: int, data: int) -> float:
    """Tokens a second if nothing but matrix products, TP and the bubble took time."""
    model, gpu = problem.model, problem.cluster.gpu
    flops = step_flops(model, 1) / model.sequence
    reduced = 4 * 2 * (tensor - 1) / tensor * 2 * model.hidden * model.layers / gpu.intra_bandwidth
    seconds = flops / (tensor * gpu.peak_flops * gpu.efficiency) + reduced
    most = problem.samples * (1 + problem.largest_change) / data
    if "batch" in problem.relaxed:
        most = max(most, 1.0)
    return pipeline * data * context / seconds * most / (most + pipeline - 1)


def fits(problem: Problem) -> Found | None:
    """Some layout that works, or None."""
    for split in splits(problem):
        for found in _of_split(problem, split):
            return found
    return None


def smallest(problem: Problem) -> tuple[Layout, bool, Memory] | None:
    """The layout that needs least memory, whether it fits or not; None if rules leave none."""
    each = (
        (layout, recompute, needed_memory(problem, layout, recompute))
        for split in splits(problem)
        for layout in layouts(problem, split)
        for recompute in problem.recompute
    )
    return min(each, key=lambda one: (one[2].total, one[0].num_gpus), default=None)
