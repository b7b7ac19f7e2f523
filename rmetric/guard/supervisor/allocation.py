"""Which GPUs of which nodes a launch uses, and in which layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rmetric._util.printed import counted
from rmetric.guard.layout import Layout

#: A GPU: the name of its node (empty where there is one) and its index there.
Gpu = tuple[str, int]
#: What may be used: node -> GPUs, in the order in which they are taken.
Pool = Mapping[str, tuple[int, ...]]


class NothingFitsError(ValueError):
    """No layout runs on what is left; says what binds."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Where one launch runs.

    Attributes:
        gpus: node -> its GPUs that are used, the same number on each, as torchrun needs it.
        layout: for as many GPUs.
        words: why this one.
        batch: whether the samples of a step were given; else the training sees to them.
    """

    gpus: Pool
    layout: Layout
    words: str = ""
    batch: bool = True

    def __str__(self) -> str:
        """The layout, with its batch only where it is known."""
        return str(self.layout) if self.batch else str(self.layout).partition(", batch")[0]

    @property
    def per_node(self) -> int:
        return len(next(iter(self.gpus.values())))

    def gpu_of(self, rank: int) -> Gpu | None:
        """The GPU that this rank uses; None for a rank that there is not."""
        found = all_of(self.gpus)
        return found[rank] if 0 <= rank < len(found) else None


#: From what may be used, and the layout until now, to what is used: raises NothingFitsError.
Planner = Callable[[Pool, "Layout | None"], Allocation]


def all_of(pool: Pool) -> list[Gpu]:
    """Its GPUs, in the order of the ranks.

    >>> all_of({"a": (0, 2), "b": (0,)})
    [('a', 0), ('a', 2), ('b', 0)]
    """
    return [(node, gpu) for node, gpus in pool.items() for gpu in gpus]


def without(pool: Pool, dropped: Iterable[Gpu]) -> Pool:
    """What is left; a node with no GPU left is gone.

    >>> without({"a": (0, 1), "b": (0,)}, [("a", 0), ("b", 0)])
    {'a': (1,)}
    """
    gone = set(dropped)
    left = {node: tuple(g for g in gpus if (node, g) not in gone) for node, gpus in pool.items()}
    return {node: gpus for node, gpus in left.items() if gpus}


def allot(layout: Layout, pool: Pool) -> Pool | None:
    """GPUs for a layout: the same number on each node, no tensor group across nodes.

    Few nodes rather than many. None where it does not fit.

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


def shrink_data(layout: Layout, batch: int | None, unit: str = "GPU") -> Planner:
    """Plans for one model without knowing it: only the number of copies changes.

    Args:
        layout: for all GPUs; what it says of tensor, pipeline and context stays.
        batch: samples of a step, kept by accumulation, with fewer copies than could be
            where they do not divide it; None where the training sees to it itself.
        unit: what one of the pool is called.

    Raises ValueError for a batch that the layout does not divide.
    """
    if batch is not None and (batch < 1 or batch % (layout.micro_batch * layout.data)):
        raise ValueError(
            f"a batch of {batch} cannot be split into {layout.data} copies "
            f"with micro-batches of {layout.micro_batch}"
        )

    def plan(pool: Pool, current: Layout | None) -> Allocation:
        one_copy = layout.num_gpus // layout.data
        have = sum(map(len, pool.values()))
        for data in range(have // one_copy, 0, -1):
            if batch is not None and batch % (layout.micro_batch * data):
                continue
            steps = layout.accumulation if batch is None else batch // (layout.micro_batch * data)
            fewer = replace(layout, data=data, accumulation=steps)
            gpus = allot(fewer, pool)
            if gpus is not None:
                words = _why(fewer, have, batch, unit)
                return Allocation(gpus=gpus, layout=fewer, words=words, batch=batch is not None)
        raise NothingFitsError(
            f"{counted(have, unit)} {'is' if have == 1 else 'are'} left; "
            f"one copy needs {one_copy} of them, {layout.tensor} on a node"
        )

    return plan


def _why(layout: Layout, have: int, batch: int | None, unit: str) -> str:
    spare = f", {have - layout.num_gpus} of {have} stand by" if layout.num_gpus < have else ""
    kept = "" if batch is None else f", the batch of {batch} is kept"
    return f"{counted(layout.num_gpus, unit)} in {counted(layout.data, 'copy')}{kept}{spare}"


def by_model(
    model: Any,
    gpu: Any,
    batch: Any,
    *,
    engine: str,
    first: Layout | None = None,
    untold: Mapping[str, int] | None = None,
) -> Planner:
    """Plans with `rmetric.guard.planner`.

    torchrun needs the same number of ranks on each node, so that it is asked once for
    each number that the nodes could give, and the fastest of its answers is taken.

    Args:
        model: a `ModelShape`.
        gpu: a `rmetric.guard.planner.cluster.Gpu`.
        batch: a `BatchSpec`.
        engine: as for `rmetric.guard.planner.plan`.
        first: layout of the first launch, if it has the GPUs; None where it is planned too.
        untold: of tensor, pipeline, context and expert what the training is not told of, and
            the size that it has; it stays.
    """
    from rmetric.guard.planner import PlanOptions
    from rmetric.guard.planner import plan as plan_layout
    from rmetric.guard.planner.cluster import Cluster, Node

    sizes: dict[str, Any] = {name: (size,) for name, size in (untold or {}).items()}
    options = PlanOptions(**sizes)

    def plan(pool: Pool, current: Layout | None) -> Allocation:
        if first is not None and current is None and (gpus := allot(first, pool)):
            return Allocation(gpus=gpus, layout=first, words="as was asked")
        best: tuple[float, Allocation] | None = None
        why = "no GPU is left"
        for each in sorted({len(gpus) for gpus in pool.values()}, reverse=True):
            even = {node: gpus[:each] for node, gpus in pool.items() if len(gpus) >= each}
            nodes = tuple(Node(name=node, gpus=gpus) for node, gpus in even.items())
            found = plan_layout(
                model,
                Cluster(nodes=nodes, gpu=gpu),
                batch,
                engine=engine,
                current=current,
                options=options,
            )
            why = why if found.best else "; ".join((found.why, *found.would_help))
            # The planner's own first: it may stand before a faster one that changes more.
            for option in (found.best, *found.alternatives):
                gpus = allot(option.layout, even) if option else None
                if option and gpus:
                    words = "; ".join((found.why, *option.remarks))
                    speed = float(option.step.tokens_per_second)
                    if best is None or speed > best[0]:
                        best = speed, Allocation(gpus=gpus, layout=option.layout, words=words)
                    break
        if best is None:
            named = ", ".join(f"{{{name}}}" for name in sizes)
            stay = f"; planned as they are, for the command has no {named}" if named else ""
            raise NothingFitsError(f"{why}{stay}")
        return best[1]

    return plan
