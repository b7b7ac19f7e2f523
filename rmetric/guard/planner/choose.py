"""Choice of the best layout for the usable GPUs, ranked by estimated throughput.

Pure: no clock, no files, no torch. `plan` is the whole of it: candidates come from
`search`, in the order of a bound that no layout of theirs can beat, so the search stops
when the rest cannot matter; `memory` and `throughput` judge each. Where nothing fits, each
rule is lifted in turn to find the binding constraint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rmetric.guard.layout import Layout, batch_remark
from rmetric.guard.planner.cluster import Cluster, in_words
from rmetric.guard.planner.engines import engine_named
from rmetric.guard.planner.memory import MemoryEstimate
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.placement import Placement, place
from rmetric.guard.planner.rules import Problem, broken_rules
from rmetric.guard.planner.search import (
    SearchResult,
    fits,
    nearest,
    order,
    search,
    smallest,
    splits,
)
from rmetric.guard.planner.settings import (
    AT_WORK,
    LARGEST_CHANGE,
    SHORT_SEQUENCE,
    SIZES,
    WORTH_SAYING,
    BatchSpec,
    PlanOptions,
)
from rmetric.guard.planner.throughput import PARTS, StepTime

#: Rules that can be lifted one at a time; what is left of one is never a layout to use.
LIFTED = ("tensor", "pipeline", "node", "batch")
#: What may be asked of the planner instead, where there is something.
INSTEAD = {"pipeline": "; uneven stages may be allowed", "batch": "; the batch may be let change"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One feasible layout.

    Attributes:
        layout: see `Layout`.
        recompute: its activations are computed again.
        memory: of the fullest GPU.
        step: how long a step takes.
        placement: which rank sits where, and what is idle.
        remarks: in sentences: what changes, and what to know.
    """

    layout: Layout
    recompute: bool
    memory: MemoryEstimate
    step: StepTime
    placement: Placement
    remarks: tuple[str, ...] = ()

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
        best=_option(best, problem, current),
        alternatives=tuple(_option(each, problem, current) for each in others),
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
    found: Sequence[SearchResult], current: Layout | None, problem: Problem
) -> tuple[SearchResult, str]:
    fastest, margin = found[0], problem.options.margin
    enough = (1 - margin) * fastest.step.tokens_per_second
    near = [each for each in found if each.step.tokens_per_second >= enough]
    if current is None:
        whole = [each for each in near if each.layout.context == 1]
        short = problem.model.sequence <= SHORT_SEQUENCE
        if fastest.layout.context == 1 or not whole or not short:
            return fastest, "the highest estimated throughput of all layouts that fit"
        slower = _gain(fastest.step, whole[0].step)
        return whole[0], (
            f"no layout that leaves sequences whole is faster; with CP{fastest.layout.context} it "
            f"would be {slower:.1%} faster, less than the margin of {margin:.0%} of the estimate"
        )
    best = min(near, key=lambda each: len(_changes(current, each.layout)))
    changed = _changes(current, best.layout)
    what = f"changes {', '.join(changed)}" if changed else "keeps TP, PP, CP and EP"
    if best is fastest:
        return best, f"the highest estimated throughput; it {what}"
    slower = 100 * (1 - best.step.tokens_per_second / fastest.step.tokens_per_second)
    return best, (
        f"{slower:.1f} % slower than the fastest, within the margin of {100 * margin:g} %, and it "
        f"{what}"
    )


def _changes(current: Layout, layout: Layout) -> list[str]:
    """Short names of the sizes that differ."""
    return [
        short for name, short in SIZES.items() if getattr(current, name) != getattr(layout, name)
    ]


def _option(found: SearchResult, problem: Problem, current: Layout | None) -> Option:
    placement = place(problem.cluster, found.layout)
    remarks = tuple(_remarks(found, placement, problem, current))
    return Option(**found._asdict(), placement=placement, remarks=remarks)


def _remarks(
    found: SearchResult, placement: Placement, problem: Problem, current: Layout | None
) -> list[str]:
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
    return remarks


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


@dataclass(frozen=True, kw_only=True)
class NearestBatch:
    """Batch nearest to the one asked for that lets (nearly) all GPUs work.

    Attributes:
        option: fastest layout of that batch that uses these GPUs.
        change: share by which the batch changes, negative for fewer samples.
        speedup: share by which its tokens a second are above those of the plan.
    """

    option: Option
    change: float
    speedup: float


def nearest_batch(problem: Problem, best: Option) -> NearestBatch | None:
    """Nearest batch, within `LARGEST_CHANGE`, for which nearly all GPUs work and are faster.

    Args:
        problem: the question that `best` answers.
        best: plan for the batch as it is.

    Returns:
        The batch, or None if there is no such batch.
    """
    freer = problem.freer(
        batch={"keep": False, "largest_change": LARGEST_CHANGE}, least_gpus=_nearly_all(problem)
    )
    rate = best.step.tokens_per_second
    found = nearest(freer, rate)
    if found is None:
        return None
    return NearestBatch(
        option=_option(found, freer, None),
        change=found.layout.global_batch / problem.batch.samples - 1,
        speedup=found.step.tokens_per_second / rate - 1,
    )


def idle_hints(problem: Problem, best: Option) -> list[str]:
    """Options that would let idle GPUs work.

    Args:
        problem: the question that `best` answers.
        best: the plan, or one of its alternatives.

    Returns:
        One sentence for each option of the command line, with the layout, the GPUs it uses and
        its speed-up. Where at least 5 % of the GPUs are idle, the first names the nearest batch
        that would let the others work, or the loss of speed if there is none.
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
        found.append(_without_gain(problem, best) if near is None else _named(problem, near))
        named = near.option.layout if near else named
    for flag, freed in freer.items():
        other = answer(freed).best
        assert other is not None  # it may do all that the first plan might
        gain = _gain(other.step, best.step)
        if gain >= WORTH_SAYING and other.layout != named:
            found.append(f"{flag}: {_of_gpus(other.layout, problem)}, {gain:+.1%}")
    return found


def _nearly_all(problem: Problem) -> int:
    """Number of GPUs that should work."""
    return math.ceil(AT_WORK * problem.cluster.num_gpus)


def _gain(step: StepTime, before: StepTime) -> float:
    return step.tokens_per_second / before.tokens_per_second - 1


def _of_gpus(layout: Layout, problem: Problem) -> str:
    return f"{layout}, {layout.num_gpus:,} of {problem.cluster.num_gpus:,} GPUs"


def _named(problem: Problem, near: NearestBatch) -> str:
    layout = near.option.layout
    what = f"the nearest batch for at least {AT_WORK:.0%} of the GPUs is {layout.global_batch}"
    if layout.global_batch == problem.batch.samples:
        what = f"the batch as it is with at least {AT_WORK:.0%} of the GPUs"
    else:
        what = f"--allow-batch-change: {what} ({near.change:+.1%})"
    return f"{what}: {_of_gpus(layout, problem)}, {near.speedup:+.1%}"


def _without_gain(problem: Problem, best: Option) -> str:
    """Loss of speed of the fastest layout with nearly all GPUs."""
    freer = problem.freer(batch={"keep": False}, least_gpus=_nearly_all(problem))
    what = f"at least {AT_WORK:.0%} of the GPUs and a batch within {LARGEST_CHANGE:.0%}"
    found = search(freer, keep=1, margin=0.0)
    if not found:
        return f"none: no layout fits {what}"
    other = min(found, key=order)
    loss = _gain(other.step, best.step)

    def of_a_gpu(step: StepTime, layout: Layout, part: str) -> float:
        return float(getattr(step, part)) * layout.num_gpus / layout.global_batch

    grown = {
        name: of_a_gpu(other.step, other.layout, name) - of_a_gpu(best.step, best.layout, name)
        for name in PARTS
    }
    most = max(grown, key=lambda name: grown[name])
    again = " (activations computed again)" * (other.recompute and not best.recompute)
    return (
        f"none: the fastest with {what} is {_of_gpus(other.layout, problem)}, {loss:+.1%}: more "
        f"GPU time a sample goes to {PARTS[most]}{again}"
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
