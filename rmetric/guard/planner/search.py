"""Every layout that works, the most promising first, the choice among them, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from textwrap import wrap
from typing import Any

from rmetric._util.errors import require
from rmetric._util.printed import number_ranges, printable
from rmetric.guard.layout import Layout, batch_remark, nearest_multiple
from rmetric.guard.planner import problem as rules
from rmetric.guard.planner.cluster import Cluster, Placement, by_node, in_words, place, reach, room
from rmetric.guard.planner.costs import MemoryEstimate, StepTime, estimate, highest_rate, memory
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import (
    ENGINES,
    SIZES,
    BatchSpec,
    EngineSettings,
    PlanOptions,
    Problem,
    Split,
)

#: Characters of a line of the text report; layouts and commands may be longer.
WIDTH = 98
BATCH_CHANGE = "--allow-batch-change"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One feasible layout; `remarks` are sentences on what changes, and what to know.

    `memory` is that of the fullest GPU; with `recompute` activations are computed again.
    """

    problem: Problem
    layout: Layout
    recompute: bool
    memory: MemoryEstimate
    step: StepTime
    remarks: tuple[str, ...] = ()

    @cached_property
    def placement(self) -> Placement:
        return place(self.problem.cluster, self.layout)

    @property
    def settings(self) -> EngineSettings:
        return self.problem.engine.settings(self.problem, self.layout, self.recompute)

    def gain(self, before: Option) -> float:
        """Share by which its tokens a second are above those of another."""
        return self.step.tokens_per_second / before.step.tokens_per_second - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.as_json(),
            "recompute": self.recompute,
            "memory_bytes": {**self.memory._asdict(), "total": self.memory.total},
            "step_seconds": self.step._asdict(),
            "ranks": [list(place) for place in self.placement.ranks],
            "idle": [list(place) for place in self.placement.idle],
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Result of `plan`.

    Attributes:
        best: None if nothing fits.
        alternatives: the next best, each of another TP, PP, CP or EP.
        why: why `best` is the best, or the binding constraint if nothing fits.
        would_help: if nothing fits: options with which something would.
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
            "alternatives": [option.as_json() for option in self.alternatives],
            "why": self.why,
            "would_help": list(self.would_help),
        }

    def report(self) -> dict[str, Any]:
        """JSON of `rmetric plan`: plan, model and settings of the best layout."""
        problem, best = self.problem, self.best
        settings = None
        if best is not None:
            launches = [launch._asdict() for launch in best.placement.launches()]
            settings = {"torchrun": launches, problem.engine.name: best.settings.values}
        return {
            "model": problem.model.as_json(),
            "parameters": problem.model.parameters,
            "gpus": problem.cluster.num_gpus,
            "plan": self.as_json(),
            "nearest_batch": _nearest_batch(best) if best else None,
            "settings": settings,
        }

    def as_text(self) -> str:
        """Text of `rmetric plan`: the same, with the reasons, the alternatives and the commands."""
        problem, best = self.problem, self.best
        lines = [
            f"{problem.model}, batch {problem.batch.samples:,}",
            f"{problem.cluster}; {problem.engine.name}",
            *(f"assumed: {printable(assumption)}" for assumption in problem.model.assumed),
            "",
        ]
        if best is None:
            hints = (f"- {hint}" for hint in self.would_help)
            lines += ["Nothing fits.", *_wrapped(f"Binding constraint: {self.why}", *hints)]
            return "\n".join(lines)
        again = ", activations computed again" if best.recompute else ""
        used, usable = in_words(best.memory.total), in_words(problem.cluster.usable_memory)
        lines += [
            f"Plan: {best.layout}{again}",
            f"  {best.step.tokens_per_second:,.0f} tokens a second, {best.step.seconds:.3g} s a "
            f"step; {used} of {usable} on the fullest GPU (estimates)",
            *_wrapped(f"  Why: {self.why}.", *(f"  Note: {remark}." for remark in best.remarks)),
        ]
        for heading, body in _sections(best, self.alternatives).items():
            if body:
                lines += ["", heading, *body]
        return "\n".join(lines)


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
    return answer(problem_of(model, cluster, batch, engine, options), current)


def problem_of(
    model: ModelShape, cluster: Cluster, batch: BatchSpec, engine: str, options: PlanOptions | None
) -> Problem:
    require("engine", engine, engine in ENGINES, f"of {', '.join(ENGINES)}")
    return Problem(
        model=model, cluster=cluster, engine=ENGINES[engine], batch=batch,
        options=options or PlanOptions(),
    )  # fmt: skip


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
    """Reasons why a layout is infeasible, as sentences; arguments and errors as of `plan`."""
    problem = problem_of(model, cluster, batch, engine, options)
    needed = _memory(problem, layout, recompute)
    broken = [*rules.size_rules(problem, layout), rules.batch_rule(problem, layout)]
    broken.append(rules.node_rule(problem, layout))
    if needed.total > cluster.usable_memory:
        broken.append(f"it {_too_little(cluster, needed)}")
    return tuple(filter(None, broken))


def answer(problem: Problem, current: Layout | None = None) -> LayoutPlan:
    """Answer of `plan` to a problem; `current` is the present layout."""
    if not problem.cluster.num_gpus:
        return LayoutPlan(problem=problem, best=None, why="no GPU is left")
    options = problem.options
    found = _search(problem, keep=options.alternatives + 1, margin=options.margin)
    if not found:
        why, would_help = _why_nothing_fits(problem), _would_help(problem)
        return LayoutPlan(problem=problem, best=None, why=why, would_help=would_help)
    found.sort(key=_order)
    best, why = _choose(found, current)
    others = [option for option in found if option is not best][: options.alternatives]
    return LayoutPlan(
        problem=problem,
        best=replace(best, remarks=_remarks(best, current)),
        alternatives=tuple(replace(option, remarks=_remarks(option, current)) for option in others),
        why=why,
    )


# -- the search


def _search(problem: Problem, *, keep: int, margin: float) -> list[Option]:
    """The fastest layout of each TP, PP, CP and EP; unordered.

    The `keep` fastest and all within `margin` (a share) of the fastest are among them.
    """
    best: dict[tuple[int, ...], Option] = {}
    bounded = ((highest_rate(problem, split), split) for split in _splits(problem))
    for bound, split in sorted(bounded, reverse=True):
        least = _cutoff(best, keep, margin)
        if bound < least:
            break
        family = split[:4]
        held = best.get(family)
        if held is not None:
            least = max(least, held.step.tokens_per_second)
        if bound < least:
            continue
        for found in _of_split(problem, split, least):
            if held is None or _order(found) < _order(held):
                best[family] = held = found
    return list(best.values())


def _order(found: Option) -> tuple[float | int, ...]:
    """Sort key of layouts: faster first, then fewer GPUs and simpler."""
    sizes = found.layout
    return (
        -found.step.tokens_per_second, sizes.num_gpus, sizes.pipeline, sizes.context,
        sizes.tensor, sizes.expert, sizes.replicas, -sizes.micro_batch, found.recompute,
    )  # fmt: skip


def _cutoff(best: dict[tuple[int, ...], Option], keep: int, margin: float) -> float:
    if len(best) < keep:
        return 0.0
    rates = sorted((option.step.tokens_per_second for option in best.values()), reverse=True)
    return min(rates[keep - 1], (1 - margin) * rates[0])


def _splits(problem: Problem, *, hopeless: bool = False) -> Iterator[Split]:
    """All sizes that obey the rules but those of batch and memory.

    Those of which even the leanest layout does not fit are left out unless `hopeless`.
    """
    copies = [
        n
        for n in range(1, problem.cluster.num_gpus + 1)
        if (problem.uneven_batch and n <= problem.batch.samples)
        or any(_accumulation(problem, size * n) for size in problem.micro_batches)
    ]
    for fullest in _families(problem):
        if not hopeless and not _may_fit(problem, fullest):
            continue
        for data in copies:
            if data > fullest.data:
                break
            if fullest.expert == 1 or not rules.expert_rule(
                problem, fullest.expert, data * fullest.context
            ):
                yield fullest._replace(data=data)


def _families(problem: Problem) -> Iterator[Split]:
    """TP, PP, CP and EP, with the most copies that the nodes have room for."""
    sizes, total = problem.cluster.sizes, problem.cluster.num_gpus
    widest = max(sizes, default=0)
    pipelines = [
        p
        for p in range(1, min(total, problem.model.layers) + 1)
        if not rules.pipeline_rule(problem, p)
    ]
    for tensor in range(1, widest + 1):
        if rules.tensor_rule(problem, tensor):
            continue
        most_experts = widest // tensor if problem.model.experts else 1
        experts = [e for e in range(1, most_experts + 1) if not rules.expert_rule(problem, e, e)]
        for context in range(1, widest // tensor + 1):
            if rules.context_rule(problem, tensor, context):
                continue
            for expert in experts:
                block = tensor * lcm(context, expert)
                used = room(sizes, block) * block
                for pipeline in pipelines:
                    if most := used // (tensor * context * pipeline):
                        yield Split(tensor, pipeline, context, expert, most)


def _layouts(problem: Problem, split: Split) -> Iterator[Layout]:
    """Layouts of a split that match the batch, each with one set of shards."""
    samples, data = problem.batch.samples, split.data
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
        yield Layout.split(batch, micro_batch=micro_batch, **split._asdict())


def _may_fit(problem: Problem, fullest: Split) -> bool:
    """The layout with the least memory fits: most copies, smallest micro-batch, one in flight."""
    # An uneven share may be cut into parts that are smaller than any micro-batch of the list.
    smallest = 1 if problem.uneven_batch else problem.micro_batches[0]
    leanest = Layout(micro_batch=smallest, **fullest._asdict())
    needed = min(_memory(problem, leanest, how).total for how in problem.recompute)
    return needed <= problem.cluster.usable_memory


def _of_split(problem: Problem, split: Split, least: float = 0.0) -> Iterator[Option]:
    """Feasible layouts of a split; some with less than `least` tokens per second are omitted."""
    for layout in _layouts(problem, split):
        found = _judged(problem, layout)
        if found is None:
            continue
        yield found
        # More sets of shards need more memory; all they save is time that the data takes.
        step = found.step
        at_best = (1 + 1e-9) * step.tokens_per_second * step.seconds / (step.seconds - step.data)
        if not (problem.engine.fully_sharded and step.data and at_best >= least):
            continue
        for replicas in range(2, layout.data + 1):
            if layout.data % replicas == 0:
                several = replace(layout, replicas=replicas)
                if not rules.replica_rule(problem, several) and (more := _judged(problem, several)):
                    yield more


def _judged(problem: Problem, layout: Layout) -> Option | None:
    """Costs of a layout, if it fits; recomputation is used only where needed."""
    for recompute in problem.recompute:
        needed = _memory(problem, layout, recompute)
        if needed.total <= problem.cluster.usable_memory:
            step = estimate(
                problem.model, layout, problem.engine, problem.cluster.gpu,
                reach(problem.cluster.sizes, layout), recompute=recompute,
                shard_optimiser=problem.options.shard_optimiser,
            )  # fmt: skip
            return Option(
                problem=problem, layout=layout, recompute=recompute, memory=needed, step=step
            )
    return None


def _memory(problem: Problem, layout: Layout, recompute: bool) -> MemoryEstimate:
    options = problem.options
    return memory(
        problem.model, layout, problem.engine, recompute=recompute,
        shard_optimiser=options.shard_optimiser, flash_attention=options.flash_attention,
    )  # fmt: skip


def _accumulation(problem: Problem, at_once: int) -> int:
    """Micro-batches a copy for the batch nearest to the requested one; 0 if that is too far."""
    return nearest_multiple(problem.batch.samples, at_once, problem.batch.largest_change) // at_once


# -- the choice, and what is said of it


def _choose(found: Sequence[Option], current: Layout | None) -> tuple[Option, str]:
    """Option to take of those found, the fastest first, and why."""
    fastest = found[0]
    margin = fastest.problem.options.margin
    enough = (1 - margin) * fastest.step.tokens_per_second
    near = [option for option in found if option.step.tokens_per_second >= enough]
    if current is None:
        whole = [option for option in near if option.layout.context == 1]
        short = fastest.problem.model.sequence <= rules.SHORT_SEQUENCE
        if fastest.layout.context == 1 or not whole or not short:
            return fastest, "the highest estimated throughput of all layouts that fit"
        slower = fastest.gain(whole[0])
        return whole[0], (
            f"no layout that leaves sequences whole is faster; with CP{fastest.layout.context} it "
            f"would be {slower:.1%} faster, less than the margin of {margin:.0%} of the estimate"
        )
    best = min(near, key=lambda option: len(_changes(current, option.layout)))
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
    cluster, layout, remarks = found.problem.cluster, found.layout, []
    samples = found.problem.batch.samples
    if layout.global_batch != samples:
        remarks.append(batch_remark(layout.global_batch, samples))
    elif current is not None and current.global_batch == samples:
        remarks.append(
            f"the batch of {samples} is kept: {layout.accumulation} micro-batches of "
            f"{layout.micro_batch} a copy, where there were {current.accumulation} of "
            f"{current.micro_batch}"
        )
    if found.recompute:
        remarks.append(
            "activations are computed again: without that it would not fit, or be slower"
        )
    if layout.data == 1 and current is not None and current.data > 1:
        remarks.append("one copy is left: a further failure cannot be met by dropping a copy")
    tight = cluster.usable_memory - found.memory.total
    if tight < 0.05 * cluster.usable_memory:
        remarks.append(f"tight: {in_words(tight)} are left by an estimate")
    if idle := len(found.placement.idle):
        remarks.append(f"{idle} of {cluster.num_gpus} GPUs stay idle{_why_idle(found)}")
    return tuple(remarks)


def _why_idle(found: Option) -> str:
    """Reason that one copy more is not in the layout, if the batch is the reason."""
    problem, layout, batch = found.problem, found.layout, found.problem.batch
    copies = problem.cluster.num_gpus * layout.data // layout.num_gpus
    divides = batch.samples % (copies * layout.micro_batch) == 0
    if problem.uneven_batch or batch.largest_change or divides:
        return ""
    unit = f"{copies} copies of micro-batch {layout.micro_batch}"
    return f": {unit} do not divide {batch.samples} samples"


def _why_nothing_fits(problem: Problem) -> str:
    """Binding constraint: memory, or the rules if they exclude every layout."""
    candidates = (
        (layout, recompute, _memory(problem, layout, recompute))
        for split in _splits(problem, hopeless=True)
        for layout in _layouts(problem, split)
        for recompute in problem.recompute
    )
    least = min(candidates, key=lambda found: (found[2].total, found[0].num_gpus), default=None)
    if least is None:
        return _no_layout(problem)
    layout, recompute, needed = least
    again = ", with activations computed again" if recompute else ""
    too_little = _too_little(problem.cluster, needed)
    return f"memory: the smallest layout ({layout}{again}) {too_little}"


def _too_little(cluster: Cluster, needed: MemoryEstimate) -> str:
    return (
        f"needs {in_words(needed.total)} on each GPU and there are "
        f"{in_words(cluster.usable_memory)} ({in_words(cluster.gpu.memory)} less "
        f"{in_words(cluster.reserve)} in reserve)"
    )


def _no_layout(problem: Problem) -> str:
    """Constraint when the rules exclude every layout: a requested size, or the batch."""
    if any(True for _ in _families(problem)):
        return (
            f"batch: no micro-batch of {', '.join(map(str, problem.micro_batches))} and number of "
            f"copies comes to {problem.batch.samples} samples"
        )
    requested = {name: sizes for name in SIZES if (sizes := getattr(problem.options, name))}
    words = ", ".join(
        f"{SIZES[name]} of {'/'.join(map(str, sizes))}" for name, sizes in requested.items()
    )
    first = Layout(**{name: sizes[0] for name, sizes in requested.items()})
    broken = [*rules.size_rules(problem, first), rules.node_rule(problem, first)]
    reasons = "; ".join(filter(None, broken)) or "the sizes exclude each other"
    return f"no layout with {words}: {reasons}"


# -- the options that would help


def _freed(problem: Problem) -> dict[str, Problem]:
    """Option of the command line that is not set -> the problem with it."""
    freed: dict[str, Problem] = {}
    batch, options = problem.batch, problem.options
    if not batch.largest_change:
        loose = replace(batch, largest_change=rules.LARGEST_CHANGE)
        freed[BATCH_CHANGE] = replace(problem, batch=loose)
    if not problem.uneven_batch:
        freed["--uneven-batch"] = replace(problem, options=replace(options, uneven_batch=True))
    if not options.uneven_stages:
        freed["--uneven-stages"] = replace(problem, options=replace(options, uneven_stages=True))
    return freed


def _would_help(problem: Problem) -> tuple[str, ...]:
    found = []
    for flag, freed in _freed(problem).items():
        options = (option for split in _splits(freed) for option in _of_split(freed, split))
        if option := next(options, None):
            found.append(f"{flag}: {option.layout} fits")
    return tuple(found)


def idle_hints(best: Option) -> list[str]:
    """A sentence about each option of the command line that would let idle GPUs work."""
    total = best.problem.cluster.num_gpus
    if best.layout.num_gpus == total:
        return []
    faster = {flag: _faster(freed, best) for flag, freed in _freed(best.problem).items()}
    return [
        f"{flag}: {other.layout}, {other.layout.num_gpus:,} of {total:,} GPUs, "
        f"{other.gain(best):+.1%}"
        for flag, other in faster.items()
        if other is not None
    ]


def _faster(problem: Problem, best: Option) -> Option | None:
    """The layout of a problem, if it is faster than `best` by enough to be mentioned."""
    other = answer(problem).best
    return other if other and other.gain(best) >= rules.WORTH_SAYING else None


def _nearest_batch(best: Option) -> dict[str, Any] | None:
    """Layout if the batch may change, where the plan leaves more than a few GPUs idle."""
    problem = best.problem
    freed = _freed(problem).get(BATCH_CHANGE)
    if freed is None or best.layout.num_gpus >= rules.AT_WORK * problem.cluster.num_gpus:
        return None
    near = _faster(freed, best)
    if near is None:
        return None
    change = near.layout.global_batch / problem.batch.samples - 1
    return {"layout": near.layout.as_json(), "change": change, "speedup": near.gain(best)}


# -- the text report


def _sections(best: Option, alternatives: Sequence[Option]) -> dict[str, list[str]]:
    """Heading -> lines below it, none where there is nothing to say."""
    seconds = [
        (part, f"{spent:.3g} s", f"{spent / best.step.seconds:.1%}")
        for part, spent in best.step.parts().items()
    ]
    sizes = [(part, in_words(size)) for part, size in best.memory.parts().items()]
    others = [
        (str(option.layout), f"{option.gain(best):+.1%}", in_words(option.memory.total),
         "computed again" if option.recompute else "")
        for option in alternatives
    ]  # fmt: skip
    return {
        "Time of a step": _columns("<>>", seconds),
        f"Memory of the fullest GPU (stage {best.memory.stage})": _columns("<>", sizes),
        "GPUs": _columns("<<<", _gpus(best.placement)),
        "Next best": _columns("<>><", others),
        "Idle GPUs would be used with": _wrapped(*(f"  {hint}" for hint in idle_hints(best))),
        "Start it": _start(best),
    }


def _gpus(placement: Placement) -> list[tuple[str, str, str]]:
    """Node, its GPUs and what they are used for."""
    rows, rank = [], 0
    for node, used in by_node(placement.ranks).items():
        last = rank + len(used) - 1
        rows.append((printable(node), f"GPUs {number_ranges(used)}", f"ranks {rank}-{last}"))
        rank = last + 1
    for node, idle in by_node(placement.idle).items():
        rows.append((printable(node), f"GPUs {number_ranges(idle)}", "idle"))
    return rows


def _start(best: Option) -> list[str]:
    """Commands of the nodes, and the engine's arguments."""
    layout = best.layout
    lines = [
        f"  on {printable(launch.node)}: {launch} TRAIN.py ..."
        for launch in best.placement.launches()
    ]
    lines.append(best.settings.text)
    if layout.samples is not None:
        lines += [
            "  the copies do not divide the batch; the training must split it (docs/planner.md):",
            f"    batch_share({layout.samples}, {layout.data}, copy)"
            f".micro_batches({layout.micro_batch})",
        ]
    return lines


def _columns(sides: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, its cells aligned; `sides` has `<` (left) or `>` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=False)]
    return [f"  {'  '.join(cells).format(*row)}".rstrip() for row in rows]


def _wrapped(*texts: str) -> list[str]:
    """Lines of each text; those after its first are indented by two more."""
    lines = []
    for text in texts:
        margin = text[: len(text) - len(text.lstrip())]
        lines += wrap(text, WIDTH, subsequent_indent=margin + "  ")
    return lines
