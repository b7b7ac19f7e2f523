"""Resolve global rank and node of every stream of a job."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rmetric.diagnosis.facts.world import IdentityGraph, World
from rmetric.diagnosis.reading.prefixes import Prefix
from rmetric.diagnosis.reading.source import LogSource

#: The difference between the names of two files of one process.
_OUTPUT = re.compile(r"(?i)(?<![a-z])(?:std)?(?:out|err)(?![a-z])")

#: Identity of a node: kind of name ("task", "node" or "file") and name.
Key = tuple[str, str]
Files = Sequence[tuple[LogSource, Sequence[Prefix], IdentityGraph]]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Global rank and node of a stream; its rank within the node where the global is not known."""

    rank: int | None = None
    node: str | None = None
    local_rank: int | None = None


@dataclass
class _Node:
    """Ranks of a node, or of a file without a known node.

    Attributes:
        stated, by_prefix: local rank -> the global ranks that its lines, their prefixes state.
        numbers: of the node, by its agent.
        ranks: local rank -> global rank, where lines state it.
        first: global rank of local rank 0.
    """

    key: Key
    name: str | None = None
    stated: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    by_prefix: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    numbers: set[int] = field(default_factory=set)
    ranks: dict[int, int] = field(default_factory=dict)
    first: int | None = None

    def rank(self, local_rank: int) -> int | None:
        if local_rank in self.ranks or self.first is None:
            return self.ranks.get(local_rank)
        return self.first + local_rank

    def resolve(self, world: World) -> None:
        """Derive `ranks` and `first` from the ranks that streams state about themselves."""
        # All streams of a node have the same distance between global and local rank. One that
        # states another distance than most names another rank, unless its prefix agrees.
        sure = _only(self.by_prefix)
        stated = {one: rank for one, rank in (_only(self.stated) | sure).items() if rank >= one}
        firsts = Counter(rank - one for one, rank in stated.items()).most_common(1)
        if firsts and 2 * firsts[0][1] > len(stated):
            first = firsts[0][0]
            # Ranks from `first` fit the world size, and whole nodes precede them.
            fits = world.size is None or first + max(self.stated) < world.size
            if (fits and first % (world.per_node or 1) == 0) or first in (
                rank - one for one, rank in sure.items()
            ):
                self.first = first
            stated = {one: rank for one, rank in stated.items() if one in sure}
        if len(set(stated.values())) == len(stated):
            self.ranks = stated

    def number(self, world: World) -> int | None:
        if self.key[0] == "task":
            return int(self.key[1])
        if len(self.numbers) == 1:
            return min(self.numbers)
        return world.nodes.index(self.name) if self.name in world.nodes else None


class RankLayout:
    """Resolve global ranks and nodes from all files of a job.

    A rank within a node ("[default1]: " of torchrun, "local_rank_1.log") becomes a global one by

    1. any line of that stream that states its own ("[rank17]: ", "RANK=17", "rank 17, world
       size 24"),
    2. the distance that others of the same node have,
    3. the node's number, by its agent ("node_rank=2", "group_rank=2") or a list of nodes, times
       the ranks of a node.

    Of one node alone it is the global rank. Where no line tells of any node, it is what the names
    of files say. Else it is not known.
    """

    def __init__(self, files: Files) -> None:
        self._graph = IdentityGraph()
        for _, _, graph in files:
            self._graph.merge(graph)
        streams = [(source, prefix) for source, prefixes, _ in files for prefix in prefixes]
        self.world = World(self._graph, [prefix for _, prefix in streams])
        self._alone = {source.name for source, prefixes, _ in files if len(prefixes) == 1}
        #: ranks that a file's prefixes state; devices of the processes of a node
        self._ranks_in: dict[str, set[int]] = defaultdict(set)
        self._devices: dict[str | None, set[int]] = defaultdict(set)
        for source, prefix in streams:
            if _states_rank(prefix):
                self._ranks_in[source.name].add(prefix.rank or 0)
            if prefix.device is not None:
                self._devices[prefix.node].add(prefix.device)
        #: files of one process by their names, in which one rank states itself
        of_process = {source.name for source, _ in streams if source.local_rank is not None}
        self._only_rank = {
            name: rank for name, rank in _only(self._ranks_in).items() if name in of_process
        }
        self._nodes: dict[Key, _Node] = {}
        for source, prefix in streams:
            self._add(source, prefix)
        self._resolve([one for one in self._nodes.values() if one.stated])

    def place(self, source: LogSource, prefix: Prefix) -> RankPlacement:
        """Placement of a stream, from its prefix, its file name or the lines."""
        rank, local = prefix.rank, _local_rank(source, prefix)
        of_node = None if local is None else self._nodes[self._key(source, prefix)]
        if rank is None and prefix.local_rank is None:
            rank = self._only_rank.get(source.name)
        if rank is None and local is not None and of_node is not None:
            rank = of_node.rank(local)
            rank = source.rank if rank is None and self._by_names else rank
        elif rank is None:
            rank = self._rank_of_lines(source, prefix)
        node = self.world.node(prefix, rank) or source.node
        return RankPlacement(rank=rank, node=node, local_rank=local if rank is None else None)

    def _rank_of_lines(self, source: LogSource, prefix: Prefix) -> int | None:
        """The rank of a stream without a local one: by its process, its file, its GPU."""
        rank = self.world.rank_of_process(prefix)
        rank = source.rank if rank is None else rank
        if rank is None and source.name in self._alone:
            rank = self.world.rank_of(source.name)
        if rank is None and prefix.device is not None:
            rank = self._of_device(source, prefix.node, prefix.device)
        return rank

    def _of_device(self, source: LogSource, node: str | None, device: int) -> int | None:
        """The rank of a process by its GPU, where the processes of a node see all of its GPUs."""
        each, size = self.world.per_node, self.world.size or 0
        if not each and size % len(self._devices) == 0:
            each = size // len(self._devices)
        # A process that sees one GPU alone calls it 0.
        if not each or device >= each or self._devices[node] <= {0}:
            return None
        on_node = {rank for rank, name in self.world.node_of_rank.items() if name == node}
        firsts = {rank // each for rank in on_node or self._ranks_in[source.name]}
        return min(firsts) * each + device if len(firsts) == 1 else None

    def _key(self, source: LogSource, prefix: Prefix) -> Key:
        if prefix.task is not None and (prefix.rank is None or prefix.local_rank is not None):
            return "task", str(prefix.task)
        by_file = source.local_rank is not None
        if prefix.node is not None and not by_file:
            return "node", prefix.node
        if source.node is not None:
            return "node", source.node
        return "file", "" if by_file else _OUTPUT.sub("", source.name)

    def _add(self, source: LogSource, prefix: Prefix) -> None:
        key, local = self._key(source, prefix), _local_rank(source, prefix)
        node, stream = self._nodes.setdefault(key, _Node(key)), (source.name, prefix)
        node.name = node.name or self.world.node(prefix, None) or source.node
        node.numbers.update(self._graph.of("stream number", stream))
        if local is None:
            return
        node.stated[local].update(self._graph.of("stream rank", stream))
        if _states_rank(prefix):
            node.by_prefix[local].add(prefix.rank or 0)
        elif (rank := self.world.rank_of_process(prefix, of_all=True)) is not None:
            node.stated[local].add(rank)

    def _resolve(self, nodes: Sequence[_Node]) -> None:
        numbers = [one.number(self.world) for one in nodes]
        often, per_node = Counter(numbers), self.world.per_node or 0
        for one, number in zip(nodes, numbers, strict=True):
            one.resolve(self.world)
            known = one.first is not None or one.ranks
            if not known and number is not None and often[number] == 1:
                one.first = number * per_node if per_node or number == 0 else None
        self._by_names = not any(one.ranks or one.first is not None for one in nodes)
        if not self._several(nodes):
            for one in nodes:
                one.first = one.first or 0

    def _several(self, nodes: Sequence[_Node]) -> bool:
        """Return True if any evidence suggests more than one node."""
        size, per_node = self.world.size or 0, self.world.per_node
        every = set().union(*(one.stated for one in nodes))
        each = len(every) if every == {*range(len(every))} else 0
        return (
            self.world.several_nodes
            or len([one for one in nodes if one.key[0] != "file"]) > 1
            or any(one.first or one.ranks for one in nodes)
            or bool(per_node and size > per_node)
            or (1 < each < size and size % each == 0)
        )


def _only(sets: Mapping[Name, set[int]]) -> dict[Name, int]:
    """Those of which one value is known, with it."""
    return {name: min(values) for name, values in sets.items() if len(values) == 1}


def _local_rank(source: LogSource, prefix: Prefix) -> int | None:
    return source.local_rank if prefix.local_rank is None else prefix.local_rank


def _states_rank(prefix: Prefix) -> bool:
    """True for a prefix that states its writer's rank, and not that of a line copied by grep."""
    return prefix.rank is not None and "grep" not in prefix.kinds
