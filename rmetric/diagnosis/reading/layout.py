"""Resolve global rank and node of every stream of a job."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rmetric.diagnosis.reading.file_names import natural
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.reading.stated_ranks import StatedRanks
from rmetric.diagnosis.reading.world import MOST_PER_NODE, World

#: The difference between the names of two files of one process.
_OUTPUT = re.compile(r"(?i)(?<![a-z])(?:std)?(?:out|err)(?![a-z])")
#: A host of SageMaker, which counts them from 1.
_ALGO = re.compile(r"algo-(\d{1,4})")
#: A node of one process, as "worker-6".
_NUMBERED = re.compile(r"[A-Za-z]+[-_.=]?(\d{1,6})")

#: Identity of a node: kind of name ("task", "node" or "file") and name.
Key = tuple[str, str]
Files = Sequence[tuple[LogSource, Sequence[Prefix], World]]


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Rank and node of a stream, None where not known.

    Attributes:
        rank: global rank.
        local_rank: rank within the node, where the global one is not known.
    """

    rank: int | None = None
    node: str | None = None
    local_rank: int | None = None


@dataclass
class _Node:
    """Ranks of a node, or of a file without a known node.

    Attributes:
        stated: local rank -> the ranks that its lines state.
        by_prefix: local rank -> the global ranks in its lines' prefixes.
        by_name: global ranks of local rank 0 by the names of files.
        own: the ranks that its agent states.
        ranks: local rank -> global rank, where lines state it.
        first: global rank of local rank 0.
    """

    key: Key
    name: str | None = None
    stated: dict[int, StatedRanks] = field(default_factory=lambda: defaultdict(StatedRanks))
    by_prefix: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    by_name: set[int] = field(default_factory=set)
    own: StatedRanks = field(default_factory=StatedRanks)
    ranks: dict[int, int] = field(default_factory=dict)
    first: int | None = None

    @property
    def full(self) -> bool:
        return set(self.stated) == set(range(len(self.stated)))

    def rank(self, local_rank: int) -> int | None:
        if local_rank in self.ranks or self.first is None:
            return self.ranks.get(local_rank)
        return self.first + local_rank

    def resolve(self, world: World) -> None:
        """Derive `ranks` and `first` from the ranks that streams state about themselves.

        All streams of a node have the same distance between global and local rank. One that
        states another distance than most names another rank, unless its prefix agrees.
        """
        sure = {one: min(ranks) for one, ranks in self.by_prefix.items() if len(ranks) == 1}
        stated = {one: min(own.ranks) for one, own in self.stated.items() if len(own.ranks) == 1}
        stated = {one: rank for one, rank in {**stated, **sure}.items() if rank >= one}
        firsts = Counter(rank - one for one, rank in stated.items()).most_common(1)
        if firsts and 2 * firsts[0][1] > len(stated):
            first = firsts[0][0]
            # Ranks from `first` fit the world size, and whole nodes precede them.
            fits = world.size is None or first + max(self.stated) < world.size
            fits = fits and (world.per_node is None or first % world.per_node == 0)
            if fits or any(rank - one == first for one, rank in sure.items()):
                self.first = first
            stated = {one: rank for one, rank in stated.items() if one in sure}
        if len(set(stated.values())) == len(stated):
            self.ranks = stated
        if self.first is None and not stated and len(self.own.first_ranks) == 1:
            (self.first,) = self.own.first_ranks


class RankLayout:
    """Resolve global ranks and nodes from all files of a job.

    A rank within a node ("[default1]: " of torchrun, "local_rank_1.log") becomes a global one by

    1. any line of that stream that states its own ("[rank17]: ", "RANK=17", "rank 17, world
       size 24"),
    2. the distance that others of the same node have,
    3. the node's number, by its agent ("node_rank=2", "group_rank=2") or a list of nodes, times
       the ranks of a node,
    4. the natural order of the nodes, where all have the local ranks 0 to n - 1 and the stated
       world size is nodes times n; or numbers in the names of files, where no size is stated.

    Of one node alone it is the global rank. Else it is not known.

    Where the world has as many ranks as there are nodes, all lines of a node are its one rank's;
    where no line states any, nodes that are numbered from 0 have the ranks of their numbers.

    Args:
        files: each with the prefixes in it and the world that its lines state.

    Attributes:
        world: as the lines of all files state it.
    """

    def __init__(self, files: Files) -> None:
        self.world = World()
        for _, _, world in files:
            self.world.merge(world)
        #: each task of srun starts the ranks of its node
        self.tasks_launch = any(
            prefix.task is not None and prefix.rank not in (None, prefix.task)
            for _, prefixes, _ in files
            for prefix in prefixes
        ) or _tasks_are_no_ranks(self.world)
        if not self.tasks_launch:
            self.world.node_of_rank = {**self.world.node_of_task, **self.world.node_of_rank}
        self._nodes: dict[Key, _Node] = {}
        self._alias = {source.name: _only_node(prefixes) for source, prefixes, _ in files}
        self._alone = {source.name for source, prefixes, _ in files if len(prefixes) == 1}
        self._local = self._stated_locals(files)
        #: ranks that a file's prefixes state; devices of the processes of a node
        self._ranks_in: dict[str, set[int]] = defaultdict(set)
        self._devices: dict[str | None, set[int]] = defaultdict(set)
        for source, prefixes, _ in files:
            for prefix in prefixes:
                if prefix.rank is not None and "grep" not in prefix.kinds:
                    self._ranks_in[source.name].add(prefix.rank)
                if prefix.device is not None:
                    self._devices[prefix.node].add(prefix.device)
        for source, prefixes, world in files:
            for prefix in prefixes:
                self._add(source, prefix, world)
        #: files of one process by their names, in which one rank states itself
        self._only_rank = {
            source.name: min(self._ranks_in[source.name])
            for source, _, _ in files
            if source.local_rank is not None and len(self._ranks_in[source.name]) == 1
        }
        nodes = [one for one in self._nodes.values() if one.stated]
        nodes.sort(key=lambda one: (one.key[0], natural(one.key[1])))
        self._resolve(nodes)
        self._rank_of_node = self._one_each(
            [self._seat(source, prefix) for source, prefixes, _ in files for prefix in prefixes]
        )

    def place(self, source: LogSource, prefix: Prefix) -> RankPlacement:
        """Placement of a stream, from its prefix, its file name or the lines."""
        seat = self._seat(source, prefix)
        if seat.rank is None and seat.node in self._rank_of_node:
            return RankPlacement(rank=self._rank_of_node[seat.node], node=seat.node)
        return seat

    def _one_each(self, seats: Sequence[RankPlacement]) -> dict[str, int]:
        """Node -> its rank, where each has one; the last node has the rank that is left."""
        ranks: dict[str, set[int]] = {}
        for seat in seats:
            if seat.node is not None:
                ranks.setdefault(seat.node, set()).update(() if seat.rank is None else (seat.rank,))
        known = {node: min(some) for node, some in ranks.items() if some}
        one_each = max(map(len, ranks.values()), default=0) == 1
        if not one_each or len(ranks) != self.world.size:
            return {}
        numbers = {node: int(number[1]) for node in ranks if (number := _NUMBERED.fullmatch(node))}
        alone = self.world.per_node in (None, 1) and not known
        if alone and sorted(numbers.values()) == list(range(len(ranks))):
            return numbers
        left = set(range(len(ranks))) - set(known.values())
        if len(left) + len(known) != len(ranks):  # two nodes of one rank, or one outside the world
            return {}
        silent = set(ranks) - set(known)
        return known | dict(zip(silent, left, strict=True)) if len(silent) == 1 else known

    def _seat(self, source: LogSource, prefix: Prefix) -> RankPlacement:
        rank, local = prefix.rank, self._local_rank(source, prefix)
        if rank is None and prefix.local_rank is None:
            rank = self._only_rank.get(source.name)
        if rank is None and local is not None:
            rank = self._nodes[self._key(source, prefix)].rank(local)
        if rank is None and local is None:
            rank = self.world.rank_of_process(prefix)
            rank = source.rank if rank is None else rank
            if rank is None and source.name in self._alone:
                rank = self.world.rank_of(source.name)
            if rank is None and prefix.device is not None:
                rank = self._of_device(source, prefix.node, prefix.device)
        node = self.world.node(prefix, rank) or source.node
        if node is None and rank is not None:
            node = self.world.node_of_rank.get(rank)
        if node is None and rank is None and local is not None:
            node = self._nodes[self._key(source, prefix)].name
        return RankPlacement(rank=rank, node=node, local_rank=local if rank is None else None)

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
        if not firsts and node in self.world.nodes:
            firsts = {self.world.nodes.index(node)}
        return min(firsts) * each + device if len(firsts) == 1 else None

    def _stated_locals(self, files: Files) -> dict[str, int]:
        """Files of one process each by "LOCAL_RANK: 3" alone: several, all of a node different."""
        stated: dict[str | None, dict[str, int]] = defaultdict(dict)
        for source, prefixes, world in files:
            known = source.rank is not None or source.local_rank is not None
            known = known or self.world.rank_of(source.name) is not None
            numbers = world.own[NO_PREFIX].locals if NO_PREFIX in world.own else set()
            if list(prefixes) == [NO_PREFIX] and len(numbers) == 1 and not known:
                stated[source.node][source.name] = min(numbers)
        found: dict[str, int] = {}
        for names in stated.values():
            if len(set(names.values())) == len(names) > 1:
                found |= names
        return found

    def _local_rank(self, source: LogSource, prefix: Prefix) -> int | None:
        if prefix.local_rank is not None:
            return prefix.local_rank
        return self._local.get(source.name, source.local_rank)

    def _key(self, source: LogSource, prefix: Prefix) -> Key:
        if prefix.task is not None and (prefix.rank is None or prefix.local_rank is not None):
            return "task", str(prefix.task)
        by_file = source.name in self._local or source.local_rank is not None
        if prefix.node not in (None, self._alias[source.name]) and not by_file:
            return "node", prefix.node
        if source.node is not None:
            return "node", source.node
        return "file", "" if by_file else _OUTPUT.sub("", source.name)

    def _add(self, source: LogSource, prefix: Prefix, world: World) -> None:
        key, local = self._key(source, prefix), self._local_rank(source, prefix)
        node = self._nodes.setdefault(key, _Node(key))
        node.name = node.name or self.world.node(prefix, None) or source.node
        own = world.own.get(prefix, StatedRanks())
        node.own.add(StatedRanks(node_ranks=own.node_ranks, first_ranks=own.first_ranks))
        if local is None:
            return
        node.stated[local].add(own)
        if prefix.rank is not None and "grep" not in prefix.kinds:
            node.by_prefix[local].add(prefix.rank)
        elif (rank := self.world.rank_of_process(prefix, of_all=True)) is not None:
            node.stated[local].ranks.add(rank)
        if prefix.local_rank is None and source.rank is not None:
            node.by_name.add(source.rank - local)

    def _resolve(self, nodes: Sequence[_Node]) -> None:
        for one in nodes:
            one.resolve(self.world)
        self._resolve_by_number(nodes)
        self._resolve_by_order(nodes)
        if not self._several(nodes):
            for one in nodes:
                one.first = 0 if one.first is None else one.first

    def _resolve_by_number(self, nodes: Sequence[_Node]) -> None:
        numbers = {one.key: self._number(one) for one in nodes}
        often = Counter(numbers.values())
        for one in nodes:
            number, per_node = numbers[one.key], self.world.per_node
            if one.first is not None or one.ranks or number is None or often[number] > 1:
                continue
            first = number * (per_node or 0)
            ranks = {first + local for local in one.stated}
            others = (other for other in nodes if other is not one)
            taken = any(each.rank(local) in ranks for each in others for local in each.stated)
            if (number == 0 or per_node) and not taken:
                one.first = first

    def _number(self, node: _Node) -> int | None:
        if node.key[0] == "task":
            return int(node.key[1])
        if node.name is not None and (of_sagemaker := _ALGO.fullmatch(node.name)):
            return int(of_sagemaker[1]) - 1
        if len(node.own.node_ranks) == 1:
            return min(node.own.node_ranks)
        return self.world.nodes.index(node.name) if node.name in self.world.nodes else None

    def _resolve_by_order(self, nodes: Sequence[_Node]) -> None:
        each = len(nodes[0].stated) if nodes else 0
        firsts = {one.key: at * each for at, one in enumerate(nodes)}
        if self.world.size is None:
            firsts = {one.key: min(one.by_name) for one in nodes if len(one.by_name) == 1}
        elif self.world.size != len(nodes) * each:
            return
        equal = all(one.full and len(one.stated) == each for one in nodes)
        agree = all(one.first in (None, firsts.get(one.key)) and not one.ranks for one in nodes)
        named = each > 1 or all(one.key[0] != "file" for one in nodes)
        if equal and agree and named and len(firsts) == len(nodes):
            for one in nodes:
                one.first = firsts[one.key]

    def _several(self, nodes: Sequence[_Node]) -> bool:
        """Return True if any evidence suggests more than one node."""
        size, per_node = self.world.size or 0, self.world.per_node
        largest = max((max(one.stated) + 1 for one in nodes), default=0)
        full = all(one.full for one in nodes) and largest > 1
        stated = [own for one in nodes for own in one.stated.values()]
        return (
            self.world.several_nodes
            or len([one for one in nodes if one.key[0] != "file"]) > 1
            or any(one.first or one.ranks for one in nodes)
            or any(len(own.ranks) > 1 and max(own.ranks) >= largest for own in stated)
            or bool(per_node and size > per_node)
            or (full and size > largest and size % largest == 0)
        )


def _tasks_are_no_ranks(world: World) -> bool:
    """Return True if a task's number is far from the ranks that other lines place on its node."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, node in world.node_of_rank.items():
        ranks[node].append(rank)
    each = world.per_node or MOST_PER_NODE
    return any(
        min(abs(task - rank) for rank in ranks[node]) >= each
        for task, node in world.node_of_task.items()
        if node in ranks
    )


def _only_node(prefixes: Sequence[Prefix]) -> str | None:
    """The node of a file in which some lines of ranks name it and others name none."""
    nodes = {
        prefix.node for prefix in prefixes if prefix.local_rank is not None and prefix.task is None
    }
    names = nodes - {None}
    return names.pop() if len(nodes) == 2 and len(names) == 1 else None
