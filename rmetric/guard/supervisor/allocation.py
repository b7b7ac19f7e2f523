"""Assignment of GPUs, nodes and a layout to a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from rmetric._util.printed import counted
from rmetric.guard.layout import Layout, batch_remark, nearest_multiple
from rmetric.guard.planner import BatchSpec, PlanOptions
from rmetric.guard.planner.cluster import Cluster, ClusterNode
from rmetric.guard.planner.cluster import Gpu as PlannerGpu
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import AT_WORK, LARGEST_CHANGE, SIZES, WORTH_SAYING
from rmetric.guard.planner.search import answer, idle_hints, problem_of

#: A GPU: name of its node (empty with a single node) and index on the node.
Gpu = tuple[str, int]
#: Usable GPUs: node -> indices, in the order of use.
Pool = Mapping[str, tuple[int, ...]]


class NothingFitsError(ValueError):
    """No layout fits the remaining GPUs; the message names the binding constraint."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """GPUs and layout of one launch, the same number on each node, as torchrun requires.

    `words` is the reason of the choice. `batch`: it was given; else the training determines it.
    """

    gpus: Pool
    layout: Layout
    words: str = ""
    batch: bool = True

    def __str__(self) -> str:
        return str(self.layout) if self.batch else str(self.layout).partition(", batch")[0]

    @property
    def per_node(self) -> int:
        return len(next(iter(self.gpus.values())))

    def gpu_of(self, rank: int | None) -> Gpu | None:
        found = all_of(self.gpus)
        return found[rank] if rank is not None and 0 <= rank < len(found) else None


#: Maps the usable GPUs and the current layout to an allocation; raises NothingFitsError.
Planner = Callable[[Pool, "Layout | None"], Allocation]


def all_of(pool: Pool) -> list[Gpu]:
    """GPUs of a pool, in rank order."""
    return [(node, gpu) for node, gpus in pool.items() for gpu in gpus]


def without(pool: Pool, dropped: Iterable[Gpu]) -> Pool:
    """Pool without the dropped GPUs and without empty nodes."""
    gone = set(dropped)
    left = {node: tuple(g for g in gpus if (node, g) not in gone) for node, gpus in pool.items()}
    return {node: gpus for node, gpus in left.items() if gpus}


def allot(layout: Layout, pool: Pool) -> Pool | None:
    """GPUs for a layout: the same number on each node, no tensor group across nodes.

    Prefers few nodes. None if the layout does not fit.

    >>> allot(Layout(tensor=2, data=2), {"a": (0, 1, 3), "b": (0, 1)})
    {'a': (0, 1), 'b': (0, 1)}
    """
    for num_nodes in range(1, len(pool) + 1):
        each, rest = divmod(layout.num_gpus, num_nodes)
        nodes = [node for node, gpus in pool.items() if len(gpus) >= each]
        if rest or each % layout.tensor or len(nodes) < num_nodes:
            continue
        return {node: pool[node][:each] for node in nodes[:num_nodes]}
    return None


@dataclass(frozen=True)
class ShrinkData:
    """A planner that changes only the number of copies (data parallelism) of `layout`.

    `batch` is kept by accumulation, with fewer copies where these do not divide it; None if the
    training determines it. With `uneven_batch` the training splits it, so the copies need not
    divide it; it may change by the share `largest_change` to keep more copies at work. `unit` is
    the name of one device. Raises ValueError if no number of copies divides the batch as allowed.
    """

    layout: Layout
    batch: int | None
    unit: str = "GPU"
    uneven_batch: bool = field(default=False, kw_only=True)
    largest_change: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        batch = self.batch
        if batch is not None and (batch < 1 or self.split(1) is None):
            micro = f"micro-batches of {self.layout.micro_batch}"
            raise ValueError(f"a batch of {batch} cannot be split with {micro}")

    def __call__(self, pool: Pool, current: Layout | None) -> Allocation:
        single = replace(self.layout, data=1, accumulation=1, replicas=1, samples=None)
        have = sum(map(len, pool.values()))
        most = 0  # copies that the nodes have room for
        for data in range(have // single.num_gpus, 0, -1):
            gpus = allot(replace(single, data=data), pool)
            if gpus is None:
                continue
            most = most or data
            if found := self.split(data):
                words = f"{counted(found.num_gpus, self.unit)} in {counted(data, 'copy')}"
                if found.num_gpus < have:
                    words += f", {have - found.num_gpus} of {have} unused"
                words += self.remark(found, most)
                known = self.batch is not None
                return Allocation(gpus=gpus, layout=found, words=words, batch=known)
        raise NothingFitsError(
            f"{counted(have, self.unit)} {'is' if have == 1 else 'are'} left; "
            f"one copy needs {single.num_gpus} of them, {self.layout.tensor} on a node"
        )

    def split(self, data: int) -> Layout | None:
        """Layout of so many copies; None if they cannot split the batch.

        The batch is changed only where that is allowed, and, if the copies can split it as it
        is, only for a speed-up that counts: the fullest copy sets the pace.
        """
        if self.batch is None:
            return self.resized(self.layout.accumulation * self.layout.micro_batch * data, data)
        nearest = self.nearest(data, self.largest_change)
        changed = self.resized(nearest, data) if nearest else None
        if not self.uneven_batch or data > self.batch:
            return changed
        kept = self.resized(self.batch, data)
        faster = changed is not None and _pace(changed) > (1 + WORTH_SAYING) * _pace(kept)
        return changed if faster else kept

    def nearest(self, data: int, change: float) -> int:
        """Nearest batch of which each copy has the same samples; 0 if it is too far."""
        unit = data if self.uneven_batch else self.layout.micro_batch * data
        return nearest_multiple(self.batch or 0, unit, change)

    def resized(self, samples: int, data: int) -> Layout:
        given = self.layout
        return Layout.split(
            samples, data=data, micro_batch=given.micro_batch, replicas=gcd(given.replicas, data),
            **{name: getattr(given, name) for name in SIZES},
        )  # fmt: skip

    def remark(self, found: Layout, most: int) -> str:
        """A remark on the batch under this split, or on how to keep more copies at work."""
        if self.batch is None:
            return ""
        if found.global_batch != self.batch:
            return f"; {batch_remark(found.global_batch, self.batch)}"
        kept = f", the batch of {self.batch} is kept"
        if self.uneven_batch or found.data >= AT_WORK * most:
            return kept
        options = []
        if most <= self.batch:
            options.append("--uneven-batch (the training splits it by rmetric.guard.batch_share)")
        if other := self.nearest(most, LARGEST_CHANGE):
            options.append(f"--allow-batch-change (batch {other}, {other / self.batch - 1:+.1%})")
        would = f": {' or '.join(options)} would use all {most}" if options else ""
        micro = f"micro-batches of {self.layout.micro_batch}"
        return f"{kept}; {counted(most, 'copy')} with {micro} do not divide it{would}"


def _pace(layout: Layout) -> float:
    """Samples of a step in the time that the fullest copy takes for one."""
    return layout.global_batch / layout.fullest_copy


def by_model(
    model: ModelShape,
    gpu: PlannerGpu,
    batch: BatchSpec,
    *,
    engine: str,
    first: Layout | None = None,
    fixed_sizes: Mapping[str, int] | None = None,
    uneven_batch: bool = False,
) -> Planner:
    """Allocation by `rmetric.guard.planner`.

    torchrun requires the same number of ranks on each node, so the planner runs once for
    each possible number, and the fastest result is used.

    `model`, `gpu`, `batch` and `engine` are as for `rmetric.guard.planner.plan`, `first` is the
    layout of the first launch, if it fits; None to plan it as well. `fixed_sizes`: sizes among
    tensor, pipeline, context and expert that the command has no placeholder for; they are kept.
    `uneven_batch`: the training splits the batch by `rmetric.guard.batch_share`.
    """
    sizes: dict[str, Any] = {name: (size,) for name, size in (fixed_sizes or {}).items()}
    options = PlanOptions(**sizes, uneven_batch=uneven_batch)
    problem = problem_of(model, Cluster(nodes=(), gpu=gpu), batch, engine, options)

    def plan(pool: Pool, current: Layout | None) -> Allocation:
        if first is not None and current is None and (gpus := allot(first, pool)):
            return Allocation(gpus=gpus, layout=first, words="as requested")
        found: list[tuple[float, Allocation]] = []
        why = "no GPU is left"
        for each in sorted({len(gpus) for gpus in pool.values()}, reverse=True):
            even = {node: gpus[:each] for node, gpus in pool.items() if len(gpus) >= each}
            nodes = tuple(ClusterNode(name=node, gpus=gpus) for node, gpus in even.items())
            answered = answer(replace(problem, cluster=Cluster(nodes=nodes, gpu=gpu)), current)
            if answered.best is None:
                why = "; ".join((answered.why, *answered.would_help))
            for option in filter(None, (answered.best, *answered.alternatives)):
                if (gpus := allot(option.layout, even)) is None:
                    continue
                # Uneven stages are an option of `rmetric plan` only.
                hints = idle_hints(option)
                hints = [hint for hint in hints if not hint.startswith("--uneven-stages")]
                words = "; ".join((answered.why, *option.remarks, *hints))
                allocation = Allocation(gpus=gpus, layout=option.layout, words=words)
                found.append((option.step.tokens_per_second, allocation))
                break  # the first that torchrun can start
        if not found:
            named = ", ".join(f"{{{name}}}" for name in sizes)
            stay = f"; they are fixed because the command has no {named}" if named else ""
            raise NothingFitsError(f"{why}{stay}")
        return max(found, key=lambda pair: pair[0])[1]

    return plan
