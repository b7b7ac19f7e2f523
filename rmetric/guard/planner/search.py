"""Every layout that works, the most promising first, and where the search may stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import NamedTuple

from rmetric.guard.layout import Layout, nearest_multiple
from rmetric.guard.planner.memory import MemoryEstimate
from rmetric.guard.planner.placement import reach, room
from rmetric.guard.planner.rules import (
    Problem,
    context_rule,
    expert_rule,
    needed_memory,
    pipeline_rule,
    replica_rule,
    tensor_rule,
)
from rmetric.guard.planner.throughput import StepTime, estimate, step_flops


class SearchResult(NamedTuple):
    """A feasible layout with its memory and step time."""

    layout: Layout
    recompute: bool
    memory: MemoryEstimate
    step: StepTime


class Split(NamedTuple):
    """Sizes of a layout without its batch; no layout of it makes more tokens than `bound`."""

    bound: float
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


def search(problem: Problem, *, keep: int, margin: float) -> list[SearchResult]:
    """The fastest layout of each TP, PP, CP and EP; unordered.

    The `keep` fastest and all within `margin` (a share) of the fastest are among them.
    """
    best: dict[tuple[int, ...], SearchResult] = {}
    for split in sorted(splits(problem), reverse=True):
        least = _cutoff(best, keep, margin)
        if split.bound < least:
            break
        family = split[1:5]
        held = best.get(family)
        if held is not None:
            least = max(least, held.step.tokens_per_second)
        if split.bound < least:
            continue
        for found in _of_split(problem, split, least):
            if held is None or order(found) < order(held):
                best[family] = held = found
    return list(best.values())


def nearest(problem: Problem, least: float) -> SearchResult | None:
    """The fastest layout of the nearest batch that makes more than `least` tokens a second."""
    asked = problem.batch.samples
    candidates = [
        (abs(layout.global_batch - asked), layout)
        for split in splits(problem)
        if split.bound > least
        for layout in layouts(problem, split)
    ]
    best: SearchResult | None = None
    best_change = 0
    for change, layout in sorted(candidates, key=lambda candidate: candidate[0]):
        if best is not None and change > best_change:
            break
        found = _judged(problem, layout)
        if found is None or found.step.tokens_per_second <= least:
            continue
        if best is None or order(found) < order(best):
            best, best_change = found, change
    return best


def order(found: SearchResult) -> tuple[float | int, ...]:
    """Sort key of layouts: faster first, then fewer GPUs and simpler."""
    sizes = found.layout
    return (
        -found.step.tokens_per_second, sizes.num_gpus, sizes.pipeline, sizes.context,
        sizes.tensor, sizes.expert, sizes.replicas, -sizes.micro_batch, found.recompute,
    )  # fmt: skip


def splits(problem: Problem, *, hopeless: bool = False) -> Iterator[Split]:
    """All sizes that obey the rules but those of batch and memory.

    Those of which even the leanest layout does not fit are left out unless `hopeless`.
    """
    copies = [
        n
        for n in range(1, problem.cluster.num_gpus + 1)
        if (problem.uneven_batch and n <= problem.batch.samples)
        or any(_accumulation(problem, size * n) for size in problem.micro_batches)
    ]
    for tensor, pipeline, context, expert, most in _families(problem):
        if not hopeless and not _may_fit(problem, tensor, pipeline, context, expert, most):
            continue
        for data in copies:
            if data > most:
                break
            if tensor * pipeline * context * data < problem.options.least_gpus:
                continue
            if expert == 1 or not expert_rule(problem, expert, data * context):
                bound = _bound(problem, tensor, pipeline, context, data)
                yield Split(bound, tensor, pipeline, context, expert, data)


def layouts(problem: Problem, split: Split) -> Iterator[Layout]:
    """Layouts of a split that match the batch, each with one set of shards."""
    _, tensor, pipeline, context, expert, data = split
    samples = problem.batch.samples
    found: dict[tuple[int, int], None] = {}
    for micro_batch in problem.micro_batches:
        at_once = micro_batch * data
        if accumulation := _accumulation(problem, at_once):
            found[accumulation * at_once, micro_batch] = None
        if problem.uneven_batch and data <= samples:
            share = -(-samples // data)
            # The largest that there is once a share is cut into parts that differ by one.
            found[samples, -(-share // -(-share // micro_batch))] = None
    for batch, micro_batch in found:
        yield Layout.split(
            batch, tensor=tensor, pipeline=pipeline, context=context, data=data,
            expert=expert, micro_batch=micro_batch,
        )  # fmt: skip


def _families(problem: Problem) -> Iterator[tuple[int, int, int, int, int]]:
    """TP, PP, CP, EP, and the most copies that the nodes have room for."""
    sizes, total = problem.cluster.sizes, problem.cluster.num_gpus
    if "node" in problem.relaxed:
        sizes = (total,)
    widest = max(sizes, default=0)
    pipelines = [
        p for p in range(1, min(total, problem.model.layers) + 1) if not pipeline_rule(problem, p)
    ]
    for tensor in range(1, widest + 1):
        if tensor_rule(problem, tensor):
            continue
        for context in range(1, widest // tensor + 1):
            if context_rule(problem, tensor, context):
                continue
            for expert in _experts(problem, widest // tensor):
                block = tensor * lcm(context, expert)
                used = room(sizes, block) * block
                for pipeline in pipelines:
                    most = used // (tensor * context * pipeline)
                    if most:
                        yield tensor, pipeline, context, expert, most


def _may_fit(
    problem: Problem, tensor: int, pipeline: int, context: int, expert: int, most: int
) -> bool:
    """The layout with the least memory fits: most copies, smallest micro-batch, one in flight."""
    # An uneven share may be cut into parts that are smaller than any micro-batch of the list.
    smallest = 1 if problem.uneven_batch else problem.micro_batches[0]
    leanest = Layout(
        tensor=tensor, pipeline=pipeline, context=context, data=most, expert=expert,
        micro_batch=smallest,
    )  # fmt: skip
    needed = min(needed_memory(problem, leanest, each).total for each in problem.recompute)
    return needed <= problem.cluster.usable_memory


def _of_split(problem: Problem, split: Split, least: float = 0.0) -> Iterator[SearchResult]:
    """Feasible layouts of a split; some with less than `least` tokens per second are omitted."""
    for layout in layouts(problem, split):
        found = _judged(problem, layout)
        if found is None:
            continue
        yield found
        # More sets of shards need more memory; all they save is time that the data takes.
        step = found.step
        at_best = (1 + 1e-9) * step.tokens_per_second * step.seconds / (step.seconds - step.data)
        if problem.engine.fully_sharded and step.data and at_best >= least:
            yield from _with_replicas(problem, layout)


def _with_replicas(problem: Problem, layout: Layout) -> Iterator[SearchResult]:
    for replicas in range(2, layout.data + 1):
        if layout.data % replicas == 0:
            several = replace(layout, replicas=replicas)
            if not replica_rule(problem, several):
                found = _judged(problem, several)
                if found is not None:
                    yield found


def _judged(problem: Problem, layout: Layout) -> SearchResult | None:
    """Costs of a layout, if it fits; recomputation is used only where needed."""
    for recompute in problem.recompute:
        needed = needed_memory(problem, layout, recompute)
        if needed.total <= problem.cluster.usable_memory:
            step = estimate(
                problem.model,
                layout,
                problem.engine,
                problem.cluster.gpu,
                reach(problem.cluster.sizes, layout),
                recompute=recompute,
                shard_optimiser=problem.options.shard_optimiser,
            )
            return SearchResult(layout, recompute, needed, step)
    return None


def _cutoff(best: dict[tuple[int, ...], SearchResult], keep: int, margin: float) -> float:
    if len(best) < keep:
        return 0.0
    rates = sorted((each.step.tokens_per_second for each in best.values()), reverse=True)
    return min(rates[keep - 1], (1 - margin) * rates[0])


def _experts(problem: Problem, most: int) -> list[int]:
    if not problem.model.experts:
        return [1] if not expert_rule(problem, 1, 1) else []
    return [e for e in range(1, most + 1) if not expert_rule(problem, e, e)]


def _accumulation(problem: Problem, at_once: int) -> int:
    """Micro-batches a copy for the batch nearest to the one asked; 0 if that is too far."""
    samples = problem.batch.samples
    if "batch" in problem.relaxed:
        return max(samples // at_once, 1)
    return nearest_multiple(samples, at_once, problem.largest_change) // at_once


def _bound(problem: Problem, tensor: int, pipeline: int, context: int, data: int) -> float:
    """Tokens a second if nothing but matrix products, TP and the bubble took time."""
    model, gpu = problem.model, problem.cluster.gpu
    flops = step_flops(model, 1) / model.sequence
    reduced = 4 * 2 * (tensor - 1) / tensor * 2 * model.hidden * model.layers / gpu.intra_bandwidth
    seconds = flops / (tensor * gpu.peak_flops * gpu.efficiency) + reduced
    most = problem.batch.samples * (1 + problem.largest_change) / data
    at_once = float(data)
    if problem.uneven_batch:
        fullest = -(-problem.batch.samples // data)
        most = max(most, fullest)
        if not problem.largest_change:  # the fullest copy sets the pace of the batch
            at_once = problem.batch.samples / fullest
    if "batch" in problem.relaxed:
        most = max(most, 1.0)
    # A hair more, so that rounding never hides a layout.
    return (1 + 1e-9) * pipeline * at_once * context / seconds * most / (most + pipeline - 1)


def fits(problem: Problem) -> SearchResult | None:
    """Some layout that works, or None."""
    found = (each for split in splits(problem) for each in _of_split(problem, split))
    return next(found, None)


def smallest(problem: Problem) -> tuple[Layout, bool, MemoryEstimate] | None:
    """Layout of least memory, whether it fits or not; None if the rules allow none."""
    each = (
        (layout, recompute, needed_memory(problem, layout, recompute))
        for split in splits(problem, hopeless=True)
        for layout in layouts(problem, split)
        for recompute in problem.recompute
    )
    return min(
        each, key=lambda candidate: (candidate[2].total, candidate[0].num_gpus), default=None
    )
