"""Usable GPUs by node, their memory, compute and network, and the ranks placed on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import inf, lcm
from typing import Any, NamedTuple

from rmetric._util.errors import require
from rmetric._util.printed import counted
from rmetric.guard.layout import Layout

GIB = 2**30


def in_words(size: float) -> str:
    """Bytes as people read them: `80.0 GiB`, `3.3 MiB`."""
    if size >= 0.1 * GIB or not size:
        return f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 0.1 * 2**20 else f"{size / 2**10:.1f} KiB"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Specification of one GPU type.

    Attributes:
        memory: bytes, as the driver reports them.
        peak_flops: dense bfloat16, a second.
        efficiency: share of the peak that matrix products reach, from above 0 to 1.
        memory_bandwidth: of its own memory, bytes a second.
        intra_bandwidth: to GPUs of its node, bytes a second in one direction.
        inter_bandwidth: its share of the node's network, bytes a second in one direction.
    """

    name: str
    memory: float
    peak_flops: float
    efficiency: float
    memory_bandwidth: float
    intra_bandwidth: float
    inter_bandwidth: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "name":
                require(name, value, 0 < value < inf, "a number above 0")
        require("efficiency", self.efficiency, self.efficiency <= 1, "at most 1")


#: Peak, memory and NVLink from NVIDIA's data sheets of the A100, H100 and H200 (half of the sum
#: of both directions); the network from those of DGX A100 (200 Gb/s a GPU) and DGX H100 (400).
#: The efficiencies are fitted to published runs, see docs/planner.md.
_A100 = Gpu(
    name="A100 80GB SXM", memory=80 * GIB, peak_flops=312e12, efficiency=0.57,
    memory_bandwidth=2039e9, intra_bandwidth=300e9, inter_bandwidth=25e9,
)  # fmt: skip
_H100 = Gpu(
    name="H100 SXM", memory=81_559 * 2**20, peak_flops=989.4e12, efficiency=0.53,
    memory_bandwidth=3350e9, intra_bandwidth=450e9, inter_bandwidth=50e9,
)  # fmt: skip
GPUS = {
    "a100": _A100,
    "a100-40": replace(_A100, name="A100 40GB SXM", memory=40 * GIB, memory_bandwidth=1555e9),
    "h100": _H100,
    "h200": replace(_H100, name="H200 SXM", memory=143_771 * 2**20, memory_bandwidth=4800e9),
}


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """One machine and the indices of its usable GPUs."""

    name: str
    gpus: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(type(gpu) is not int or gpu < 0 for gpu in self.gpus):
            raise ValueError(f"node {self.name}: GPUs {self.gpus!r}: whole numbers from 0 are used")
        if len(set(self.gpus)) != len(self.gpus):
            raise ValueError(f"node {self.name}: a GPU is named twice in {self.gpus}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Usable GPUs of a cluster.

    Attributes:
        nodes: in the order of their ranks; one without GPUs is allowed.
        gpu: what each GPU can do; they are all alike.
        reserve: bytes of each GPU's memory that CUDA, NCCL and fragmentation take.
    """

    nodes: tuple[ClusterNode, ...]
    gpu: Gpu
    reserve: float = 4 * GIB

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"two nodes have one name: {', '.join(names)}")
        require("reserve", self.reserve, 0 <= self.reserve < inf, "at least 0")

    @classmethod
    def of(
        cls, sizes: Sequence[int], gpu: str | Gpu = "a100", *, memory_gib: float | None = None,
        **others: Any,
    ) -> Cluster:  # fmt: skip
        """Nodes node0, node1, ... with that many GPUs each, numbered from 0."""
        if isinstance(gpu, str):
            if gpu not in GPUS:
                raise ValueError(f"gpu is {gpu!r}: {', '.join(GPUS)} or a Gpu is accepted")
            gpu = GPUS[gpu]
        if memory_gib is not None:
            gpu = replace(gpu, memory=memory_gib * GIB)
        nodes = tuple(
            ClusterNode(name=f"node{i}", gpus=tuple(range(size))) for i, size in enumerate(sizes)
        )
        return cls(nodes=nodes, gpu=gpu, **others)

    @cached_property
    def num_gpus(self) -> int:
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(node.gpus) for node in self.nodes)

    @property
    def usable_memory(self) -> float:
        """Bytes a GPU that training can use."""
        return max(self.gpu.memory - self.reserve, 0.0)

    def __str__(self) -> str:
        runs = [(size, len(list(alike))) for size, alike in groupby(self.sizes)]
        # As in `8 + 7 + 8` or `4 x 8 + 7`.
        nodes = " + ".join(
            f"{count} x {size}" if count > 3 else " + ".join([f"{size}"] * count)
            for size, count in runs
        )
        return (
            f"{counted(self.num_gpus, 'GPU')} ({nodes}), {self.gpu.name}, "
            f"{in_words(self.usable_memory)} of {in_words(self.gpu.memory)} usable"
        )

    def without(self, node: str, gpus: Iterable[int] | None = None) -> Cluster:
        """Cluster without a node, or some of its GPUs. Raises KeyError if they are not there."""
        if node not in {each.name for each in self.nodes}:
            raise KeyError(f"no node {node!r}: there are {[each.name for each in self.nodes]}")
        kept = []
        for each in self.nodes:
            if each.name == node:
                dropped = set(each.gpus if gpus is None else gpus)
                if unknown := dropped - set(each.gpus):
                    raise KeyError(f"node {node} has GPUs {each.gpus}, not {sorted(unknown)}")
                each = replace(each, gpus=tuple(gpu for gpu in each.gpus if gpu not in dropped))
            if each.gpus:
                kept.append(each)
        return replace(self, nodes=tuple(kept))


class NodeLaunch(NamedTuple):
    """torchrun command of one node; `arguments` come before the training script."""

    node: str
    environment: dict[str, str]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        variables = " ".join(f"{name}={value}" for name, value in self.environment.items())
        return f"{variables} torchrun {' '.join(self.arguments)}"


class Placement(NamedTuple):
    """Node and GPU of each rank, consecutive on each node, and of those that no rank uses."""

    ranks: tuple[tuple[str, int], ...]
    idle: tuple[tuple[str, int], ...]

    def launches(self) -> list[NodeLaunch]:
        """One launch per node, in rank order; the first node is the rendezvous.

        torchrun numbers ranks node by node, so that nodes may have different numbers of them.
        """
        nodes = by_node(self.ranks)
        first = next(iter(nodes))
        launches = []
        for index, (node, gpus) in enumerate(nodes.items()):
            rendezvous = ["--standalone"]
            if len(nodes) > 1:
                rendezvous = [
                    f"--node-rank={index}", f"--master-addr={first}", "--master-port=29500",
                ]  # fmt: skip
            # CUDA counts the fastest first by default; the numbers here are NVML's.
            environment = {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            }
            arguments = (f"--nnodes={len(nodes)}", f"--nproc-per-node={len(gpus)}", *rendezvous)
            launches.append(NodeLaunch(node, environment, arguments))
        return launches


def by_node(places: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """GPUs of each node, in the order of the places, which are consecutive on it."""
    return {node: [gpu for _, gpu in of] for node, of in groupby(places, key=lambda at: at[0])}


class Reach(NamedTuple):
    """Groups of a layout that lie within single nodes."""

    shards_in_node: bool
    stages_in_node: bool
    all_in_node: bool


def together(layout: Layout) -> int:
    """GPUs that must lie in one node: tensor groups, and those of CP and EP over them."""
    return layout.tensor * lcm(layout.context, layout.expert)


def shard_block(layout: Layout) -> int:
    """GPUs of a stage that hold one whole set of shards, in whole groups of `together`."""
    return lcm(layout.num_gpus // (layout.pipeline * layout.replicas), together(layout))


@lru_cache(maxsize=4096)
def room(sizes: tuple[int, ...], block: int) -> int:
    """Blocks of that many GPUs that nodes of these sizes hold."""
    return sum(size // block for size in sizes)


def reach(sizes: tuple[int, ...], layout: Layout) -> Reach:
    """For each set of shards, each stage and the whole layout: it fits into a single node."""
    stage = layout.num_gpus // layout.pipeline
    shards = shard_block(layout)
    return Reach(
        shards_in_node=room(sizes, shards) * shards >= layout.num_gpus,
        stages_in_node=room(sizes, stage) >= layout.pipeline,
        all_in_node=max(sizes, default=0) >= layout.num_gpus,
    )


def place(cluster: Cluster, layout: Layout) -> Placement:
    """Put the largest blocks that can be kept whole on the fewest nodes.

    Raises ValueError if the groups of the layout do not fit into the nodes.
    """
    stage = layout.num_gpus // layout.pipeline
    for block in (layout.num_gpus, stage, shard_block(layout), together(layout)):
        if room(cluster.sizes, block) * block >= layout.num_gpus:
            return _place_blocks(cluster, layout.num_gpus // block, block)
    raise ValueError(
        f"{layout} needs {layout.num_gpus // together(layout)} groups of {together(layout)} GPUs "
        f"in one node each; nodes of {', '.join(map(str, cluster.sizes))} do not hold them"
    )


def _place_blocks(cluster: Cluster, needed: int, block: int) -> Placement:
    order = sorted(range(len(cluster.nodes)), key=lambda i: -(cluster.sizes[i] // block))
    taken = {}
    for i in order:
        taken[i] = min(cluster.sizes[i] // block, needed)
        needed -= taken[i]
    ranks, idle = [], []
    for i, node in enumerate(cluster.nodes):
        used = taken[i] * block
        ranks += [(node.name, gpu) for gpu in node.gpus[:used]]
        idle += [(node.name, gpu) for gpu in node.gpus[used:]]
    return Placement(ranks=tuple(ranks), idle=tuple(idle))
