"""Every layout that works, the most promising first, and where the search may stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import lcm
from typing import Any, NamedTuple

from rmetric.guard.layout import Layout, batch_remark, nearest_multiple
from rmetric.guard.planner.cluster import Cluster, Placement, in_words, place, reach, room
from rmetric.guard.planner.memory import MemoryEstimate
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.rules import (
    Problem,
    broken_rules,
    context_rule,
    expert_rule,
    needed_memory,
    pipeline_rule,
    replica_rule,
    tensor_rule,
)
from rmetric.guard.planner.settings import (
    AT_WORK,
    LARGEST_CHANGE,
    SHORT_SEQUENCE,
    SIZES,
    WORTH_SAYING,
    BatchSpec,
    PlanOptions,
    engine_named,
)
from rmetric.guard.planner.throughput import PARTS, StepTime, estimate, step_flops

#: Rules that can be lifted one at a time; what is left of one is never a layout to use.
LIFTED = ("tensor", "pipeline", "node", "batch")
#: What may be asked of the planner instead, where there is something.
INSTEAD = {"pipeline": "; uneven stages may be allowed", "batch": "; the batch may be let change"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One feasible layout.

    Attributes:
        problem: question that it answers.
        layout: see `Layout`.
        recompute: its activations are computed again.
        memory: of the fullest GPU.
        step: how long a step takes.
        remarks: in sentences: what changes, and what to know.
    """

    problem: Problem
    layout: Layout
    recompute: bool
    memory: MemoryEstimate
    step: StepTime
    remarks: tuple[str, ...] = ()

    @cached_property
    def placement(self) -> Placement:
        """Which rank sits where, and what is idle."""
        return place(self.problem.cluster, self.layout)

    def gain(self, before: Option) -> float:
        """Share by which its tokens a second are above those of another."""
        return self.step.tokens_per_second / before.step.tokens_per_second - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.as_json(),
            "recompute": self.recompute,
            "memory_bytes": {**self.memory._asdict(), "total": self.memory.total},
            "step_seconds": self.step._asdict(),
            "ranks": [list(each) for each in self.placement.ranks],
            "idle": [list(each) for each in self.placement.idle],
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Result of `plan`.

    Attributes:
        problem: question that it answers.
        best: None if nothing fits.
        alternatives: the next best, each of another TP, PP, CP or EP.
        why: why `best` is the best, or the binding constraint if nothing fits.
        would_help: if nothing fits: what would make something fit.
    """

    problem: Problem
    best: Option | None
    alternatives: tuple[Option, ...] = ()
    why: str
    would_help: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.problem.engine.name,
            "best": self.best.as_json() if self.best else None,
            "alternatives": [each.as_json() for each in self.alternatives],
            "why": self.why,
            "would_help": list(self.would_help),
        }


class Split(NamedTuple):
    """Sizes of a layout without its batch; no layout of it makes more tokens than `bound`."""

    bound: float
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


def search(problem: Problem, *, keep: int, margin: float) -> list[Option]:
    """The fastest layout of each TP, PP, CP and EP; unordered.

    The `keep` fastest and all within `margin` (a share) of the fastest are among them.
    """
    best: dict[tuple[int, ...], Option] = {}
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


def nearest(problem: Problem, least: float) -> Option | None:
    """The fastest layout of the nearest batch that makes more than `least` tokens a second."""

    def change(layout: Layout) -> int:
        return abs(layout.global_batch - problem.batch.samples)

    within = (split for split in splits(problem) if split.bound > least)
    candidates = (layout for split in within for layout in layouts(problem, split))
    for _, alike in groupby(sorted(candidates, key=change), key=change):
        judged = filter(None, (_judged(problem, layout) for layout in alike))
        if found := [each for each in judged if each.step.tokens_per_second > least]:
            return min(found, key=order)
    return None


def order(found: Option) -> tuple[float | int, ...]:
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


def _of_split(problem: Problem, split: Split, least: float = 0.0) -> Iterator[Option]:
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


def _with_replicas(problem: Problem, layout: Layout) -> Iterator[Option]:
    for replicas in range(2, layout.data + 1):
        if layout.data % replicas == 0:
            several = replace(layout, replicas=replicas)
            if not replica_rule(problem, several):
                found = _judged(problem, several)
                if found is not None:
                    yield found


def _judged(problem: Problem, layout: Layout) -> Option | None:
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
            return Option(
                problem=problem, layout=layout, recompute=recompute, memory=needed, step=step
            )
    return None


def _cutoff(best: dict[tuple[int, ...], Option], keep: int, margin: float) -> float:
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


def fits(problem: Problem) -> Option | None:
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


def plan(
    model: ModelShape,
    cluster: Cluster,
    batch: BatchSpec,
    *,
    engine: str = "megatron",
    current: Layout | None = None,
    options: PlanOptions | None = None,
) -> LayoutPlan:
    """Best layout of `model` on the GPUs of `cluster`, alternatives, and the reason.

    `answer` does the same for a `Problem`. Ties go to fewer GPUs, then to smaller PP, CP, TP and
    EP, larger micro-batches and no recomputation.

    Args:
        model: shape of the model.
        cluster: usable GPUs by node.
        batch: samples of a step.
        engine: `megatron`, `torchtitan` or `fsdp`.
        current: present layout: of the layouts within `options.margin` of the fastest, the
            one that changes least is taken, since less has to be resharded. Without it the
            fastest, but short sequences are left whole where that is within the margin.
        options: sizes to search.

    Returns:
        The plan; `best` is None if nothing fits.

    Raises:
        ValueError: the engine is unknown.
    """
    return answer(_problem(model, cluster, batch, engine, options), current)


def _problem(
    model: ModelShape, cluster: Cluster, batch: BatchSpec, engine: str, options: PlanOptions | None
) -> Problem:
    options = options or PlanOptions()
    return Problem(
        model=model, cluster=cluster, engine=engine_named(engine), batch=batch, options=options
    )


def answer(problem: Problem, current: Layout | None = None) -> LayoutPlan:
    """Answer of `plan` to a problem; `current` is the present layout."""
    if not problem.cluster.num_gpus:
        return LayoutPlan(problem=problem, best=None, why="no GPU is left")
    options = problem.options
    found = search(problem, keep=options.alternatives + 1, margin=options.margin)
    if not found:
        why, would_help = _why_nothing_fits(problem), _would_help(problem)
        return LayoutPlan(problem=problem, best=None, why=why, would_help=would_help)
    found.sort(key=order)
    best, why = _choose(found, current, problem)
    others = [each for each in found if each is not best][: options.alternatives]
    return LayoutPlan(
        problem=problem,
        best=replace(best, remarks=_remarks(best, current)),
        alternatives=tuple(replace(each, remarks=_remarks(each, current)) for each in others),
        why=why,
    )


def check(
    model: ModelShape,
    cluster: Cluster,
    batch: BatchSpec,
    layout: Layout,
    *,
    engine: str = "megatron",
    recompute: bool = False,
    options: PlanOptions | None = None,
) -> tuple[str, ...]:
    """Check one layout; arguments as of `plan`.

    Returns:
        Reasons why it is infeasible, as sentences; empty if it is feasible.

    Raises:
        ValueError: the engine is unknown.
    """
    problem = _problem(model, cluster, batch, engine, options)
    return tuple(broken_rules(problem, layout, recompute).values())


def _choose(
    found: Sequence[Option], current: Layout | None, problem: Problem
) -> tuple[Option, str]:
    fastest, margin = found[0], problem.options.margin
    enough = (1 - margin) * fastest.step.tokens_per_second
    near = [each for each in found if each.step.tokens_per_second >= enough]
    if current is None:
        whole = [each for each in near if each.layout.context == 1]
        short = problem.model.sequence <= SHORT_SEQUENCE
        if fastest.layout.context == 1 or not whole or not short:
            return fastest, "the highest estimated throughput of all layouts that fit"
        slower = fastest.gain(whole[0])
        return whole[0], (
            f"no layout that leaves sequences whole is faster; with CP{fastest.layout.context} it "
            f"would be {slower:.1%} faster, less than the margin of {margin:.0%} of the estimate"
        )
    best = min(near, key=lambda each: len(_changes(current, each.layout)))
    changed = _changes(current, best.layout)
    what = f"changes {', '.join(changed)}" if changed else "keeps TP, PP, CP and EP"
    if best is fastest:
        return best, f"the highest estimated throughput; it {what}"
    return best, (
        f"{-100 * best.gain(fastest):.1f} % slower than the fastest, within the margin of "
        f"{100 * margin:g} %, and it {what}"
    )


def _changes(current: Layout, layout: Layout) -> list[str]:
    """Short names of the sizes that differ."""
    return [
        short for name, short in SIZES.items() if getattr(current, name) != getattr(layout, name)
    ]


def _remarks(found: Option, current: Layout | None) -> tuple[str, ...]:
    problem, placement = found.problem, found.placement
    layout, batch, remarks = found.layout, problem.batch, []
    if layout.global_batch != batch.samples:
        remarks.append(batch_remark(layout.global_batch, batch.samples))
    elif current is not None and current.global_batch == batch.samples:
        remarks.append(
            f"the batch of {batch.samples} is kept: {layout.accumulation} micro-batches of "
            f"{layout.micro_batch} a copy, where there were {current.accumulation} of "
            f"{current.micro_batch}"
        )
    if found.recompute:
        remarks.append(
            "activations are computed again: without that it would not fit, or be slower"
        )
    if layout.data == 1 and current is not None and current.data > 1:
        remarks.append("one copy is left: a further failure cannot be met by dropping a copy")
    tight = problem.cluster.usable_memory - found.memory.total
    if tight < 0.05 * problem.cluster.usable_memory:
        remarks.append(f"tight: {in_words(tight)} are left by an estimate")
    if placement.idle:
        why = _why_idle(layout, problem)
        remarks.append(f"{len(placement.idle)} of {problem.cluster.num_gpus} GPUs stay idle{why}")
    return tuple(remarks)


def _why_idle(layout: Layout, problem: Problem) -> str:
    """Reason that one copy more is not in the layout, if the batch is the reason."""
    copies = problem.cluster.num_gpus * layout.data // layout.num_gpus
    samples = problem.batch.samples
    if copies == layout.data:
        return ""
    if not problem.uneven_batch:
        unit = copies * layout.micro_batch
        if samples % unit == 0 or not problem.batch.keep:
            return ""
        return (
            f": {copies} copies with micro-batches of {layout.micro_batch} do not divide the batch "
            f"of {samples}"
        )
    if -(-samples // copies) < layout.fullest_copy:
        return ""
    return (
        f": the fullest of {copies} copies would have {layout.fullest_copy} of {samples} samples, "
        f"as many as that of {layout.data}"
    )


def nearest_batch(problem: Problem, best: Option) -> Option | None:
    """Fastest layout of the nearest batch, within `LARGEST_CHANGE`, for which nearly all GPUs work.

    `best` is the plan for the batch as it is; None if no such batch makes it faster.
    """
    freer = problem.freer(
        batch={"keep": False, "largest_change": LARGEST_CHANGE}, least_gpus=_nearly_all(problem)
    )
    return nearest(freer, best.step.tokens_per_second)


def batch_change(problem: Problem, near: Option) -> float:
    """Share by which a layout changes the batch, negative for fewer samples."""
    return near.layout.global_batch / problem.batch.samples - 1


def idle_hints(problem: Problem, best: Option) -> list[str]:
    """Options of the command line that would let idle GPUs work, one sentence each.

    It has the layout, the GPUs that it uses and its speed-up over `best`, the plan or one of its
    alternatives. Where at least 5 % of the GPUs are idle, the first names the nearest batch that
    would let the others work, or the loss of speed if there is none.
    """
    if best.layout.num_gpus == problem.cluster.num_gpus:
        return []
    freer: dict[str, Problem] = {}
    if problem.batch.keep:
        freer["--allow-batch-change"] = problem.freer(batch={"keep": False})
    if not problem.uneven_batch:
        freer["--uneven-batch"] = problem.freer(uneven_batch=True)
    if not problem.options.uneven_stages:
        freer["--uneven-stages"] = problem.freer(uneven_stages=True)
    found, named = [], best.layout
    if best.layout.num_gpus < _nearly_all(problem):
        near = nearest_batch(problem, best)
        found.append(_named(problem, best, near) if near else _without_gain(problem, best))
        named = near.layout if near else named
    for flag, freed in freer.items():
        other = answer(freed).best
        assert other is not None  # it may do all that the first plan might
        gain = other.gain(best)
        if gain >= WORTH_SAYING and other.layout != named:
            found.append(f"{flag}: {_of_gpus(other.layout, problem)}, {gain:+.1%}")
    return found


def _nearly_all(problem: Problem) -> int:
    """Number of GPUs that should work."""
    return math.ceil(AT_WORK * problem.cluster.num_gpus)


def _of_gpus(layout: Layout, problem: Problem) -> str:
    return f"{layout}, {layout.num_gpus:,} of {problem.cluster.num_gpus:,} GPUs"


def _named(problem: Problem, best: Option, near: Option) -> str:
    batch = near.layout.global_batch
    what = f"the nearest batch for at least {AT_WORK:.0%} of the GPUs is {batch}"
    if batch == problem.batch.samples:
        what = f"the batch as it is with at least {AT_WORK:.0%} of the GPUs"
    else:
        what = f"--allow-batch-change: {what} ({batch_change(problem, near):+.1%})"
    return f"{what}: {_of_gpus(near.layout, problem)}, {near.gain(best):+.1%}"


def _without_gain(problem: Problem, best: Option) -> str:
    """Loss of speed of the fastest layout with nearly all GPUs."""
    freer = problem.freer(batch={"keep": False}, least_gpus=_nearly_all(problem))
    what = f"at least {AT_WORK:.0%} of the GPUs and a batch within {LARGEST_CHANGE:.0%}"
    found = search(freer, keep=1, margin=0.0)
    if not found:
        return f"none: no layout fits {what}"
    other = min(found, key=order)

    def of_a_gpu(option: Option, part: str) -> float:
        layout = option.layout
        return float(getattr(option.step, part)) * layout.num_gpus / layout.global_batch

    grown = {name: of_a_gpu(other, name) - of_a_gpu(best, name) for name in PARTS}
    most = max(grown, key=lambda name: grown[name])
    again = " (activations computed again)" * (other.recompute and not best.recompute)
    return (
        f"none: the fastest with {what} is {_of_gpus(other.layout, problem)}, "
        f"{other.gain(best):+.1%}: more GPU time a sample goes to {PARTS[most]}{again}"
    )


def _why_nothing_fits(problem: Problem) -> str:
    """Binding constraint: memory, or the rules if they exclude every layout."""
    least = smallest(problem)
    if least is None:
        return _no_layout(problem)
    layout, recompute, needed = least
    again = ", with activations computed again" if recompute else ""
    return (
        f"memory: the smallest layout ({layout}{again}) needs {in_words(needed.total)} on each GPU "
        f"and {problem.cluster.memory_in_words}"
    )


def _no_layout(problem: Problem) -> str:
    """Constraint when the rules exclude every layout: a requested size is impossible."""
    if not any(True for _ in splits(replace(problem, relaxed=frozenset({"batch"})), hopeless=True)):
        asked = {name: sizes for name in SIZES if (sizes := getattr(problem.options, name))}
        words = ", ".join(
            f"{SIZES[name]} of {'/'.join(map(str, sizes))}" for name, sizes in asked.items()
        )
        first = Layout(**{name: sizes[0] for name, sizes in asked.items()})
        broken = broken_rules(problem, first, problem.recompute[0])
        reasons = [broken[name] for name in broken if name not in ("batch", "memory")]
        return f"no layout with {words}: {'; '.join(reasons) or 'the sizes exclude each other'}"
    return (
        f"batch: no micro-batch of {', '.join(map(str, problem.micro_batches))} and number of "
        f"copies comes to {problem.batch.samples} samples"
    )


def _would_help(problem: Problem) -> tuple[str, ...]:
    """Each rule without which something would fit, in words."""
    found = []
    for rule in LIFTED:
        without = fits(replace(problem, relaxed=frozenset({rule})))
        if without is not None:
            broken = broken_rules(problem, without.layout, without.recompute)
            reasons = "; ".join(broken[name] for name in broken if name != "memory")
            found.append(
                f"{without.layout} would fit in memory, but {reasons}{INSTEAD.get(rule, '')}"
            )
    return tuple(found)
