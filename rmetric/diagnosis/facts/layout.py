"""Who is who: the graph of identities that lines tie together, and rank and node of each stream."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from rmetric.diagnosis.facts.statements import MANY_RANKS, STATEMENTS, Statement, identities
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix
from rmetric.diagnosis.reading.source import LogSource

#: Different identities that are kept of those tied to one.
MOST_TIED = 64
#: Identities of several parts.
_IDENTITY_PARTS = {
    "process": ("node", "pid"),
    "child": ("writer", "pid"),
    "gpu": ("node", "bus"),
    "member": ("of", "rank"),
}


def writer_node(prefix: Prefix) -> str | None:
    """The node of a line's writer; where the prefix has a task instead, "task 3"."""
    return prefix.node or (None if prefix.task is None else f"task {prefix.task}")


class IdentityGraph:
    """Ties between identities, each with the number of lines that state it."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        #: (kind of tie, identity) -> those tied to it, in the order of their coming
        self._ties: dict[tuple[str, Hashable], Counter[Any]] = defaultdict(Counter)
        #: stream -> what the lines of a report stated so far
        self._report: dict[Prefix, dict[str, Any]] = {}

    def take(self, text: str, prefix: Prefix, may: Sequence[Statement] = STATEMENTS) -> None:
        """Read a line without its prefix (not a joined entry)."""
        own = {
            "rank": prefix.rank, "pid": prefix.pid, "node": prefix.node, "of": MANY_RANKS,
            "stream": (self.file, prefix), "job": None, "writer": writer_node(prefix),
        }  # fmt: skip
        for statement in may:
            for match in statement.pattern.finditer(text):
                found = own | identities(match)
                for name, other in statement.ties:
                    if name == "report":
                        found = self._reported(prefix, other, found[other])
                    else:
                        self._tie(name, other, found)

    def _reported(self, prefix: Prefix, name: str, value: Any) -> dict[str, Any]:
        """What a stream's report states so far; it begins with the node."""
        if name == "node":
            self._report[prefix] = {"of": MANY_RANKS}
        report = self._report.get(prefix, {})
        report[name] = value
        return report

    def _tie(self, name: str, other: str, found: dict[str, Any]) -> None:
        tied = _identity(other, found)
        keys = found["tasks"] if name == "task" else [_identity(name, found)]
        for key in keys if tied is not None else ():
            if key is None and name not in ("job", "writer"):
                continue
            ties = self._ties[f"{name} {other}", key]
            if tied in ties or len(ties) < MOST_TIED:
                ties[tied] += 1

    def merge(self, other: IdentityGraph) -> None:
        """Add the graph of another file of the same job."""
        for key, ties in other._ties.items():
            self._ties[key].update(ties)

    def of(self, tie: str, identity: Hashable = None) -> Counter[Any]:
        """Identities tied to one, each with the number of lines; that of the job is None."""
        return self._ties.get((tie, identity), Counter())

    def all(self, tie: str) -> Iterator[tuple[Any, Counter[Any]]]:
        """Each identity of a kind of tie, with those tied to it."""
        return ((key[1], ties) for key, ties in self._ties.items() if key[0] == tie)

    def best(self, tie: str) -> dict[Any, Any]:
        """Identity -> the one that most lines tie it to, the first of equals."""
        return {key: max(ties, key=ties.__getitem__) for key, ties in self.all(tie)}


def _identity(name: str, found: dict[str, Any]) -> Any:
    parts = _IDENTITY_PARTS.get(name)
    if parts is None:
        return found.get(name)
    whole = tuple(found.get(part) for part in parts)
    # Of a process the node may be unknown.
    return None if None in (whole[1:] if parts[-1] == "pid" else whole) else whole


#: Larger numbers are not rank counts.
MAX_RANKS = 1 << 20
#: Ranks of a node at most, where no line states them.
MOST_PER_NODE = 8


class JobTopology:
    """Answers from the graph of all files of a job."""

    def __init__(self, graph: IdentityGraph, prefixes: Collection[Prefix] = ()) -> None:
        self.graph, self._prefixes = graph, prefixes
        #: number of ranks -> the lines that state it
        self._sizes: dict[int, int] = {
            size: lines for size, lines in graph.of("job size").items() if 0 < size <= MAX_RANKS
        }
        self._num_nodes = max(graph.of("job nodes"), default=0)
        self._per_node = max(graph.of("job each"), default=0)
        #: names of the nodes in the order of their numbers, of the longest list
        self.nodes: list[str] = list(max(graph.of("job hosts"), key=len, default=()))
        self.several_nodes = self._num_nodes > 1
        self._own = {rank for _, ranks in graph.all("stream rank") for rank in ranks}
        self._stated_nodes = graph.best("rank server") | graph.best("rank node")
        #: process -> rank in the largest communicator that it reported, if that has all ranks
        self._members: dict[tuple[str | None, int], tuple[int, int]] = {
            process: largest
            for process, ties in graph.all("process member")
            if (largest := max(ties, key=lambda pair: (pair[0], ties[pair])))[0] >= (self.size or 0)
        }

    @cached_property
    def size(self) -> int | None:
        """Number of ranks: as most lines state it, else of the largest group of any library."""
        if sizes := self._sizes:
            return max(sizes, key=lambda size: (sizes[size], size))
        if 0 < self._num_nodes * self._per_node <= MAX_RANKS:
            return self._num_nodes * self._per_node
        groups: list[int] = [size for size in self.graph.of("job of") if 0 < size <= MAX_RANKS]
        return max(groups, default=None)

    @cached_property
    def per_node(self) -> int | None:
        """Ranks of a node, where all have the same."""
        nodes = self._num_nodes or len(self.nodes)
        if not self._per_node and self.size and nodes and self.size % nodes == 0:
            return self.size // nodes
        return self._per_node or None

    @cached_property
    def node_of_rank(self) -> dict[int, str]:
        """Rank -> node, where a line ties them."""
        tasks = {} if self.tasks_launch else self.graph.best("task node")
        return tasks | self._stated_nodes

    @cached_property
    def tasks_launch(self) -> bool:
        """True if an srun task is a launcher that starts the ranks of its node."""
        # A prefix states another rank, or lines place far other ranks on the task's node.
        stated = ((prefix.rank, prefix.task) for prefix in self._prefixes)
        if any(None not in pair and pair[0] != pair[1] for pair in stated):
            return True
        ranks = defaultdict[str, list[int]](list)
        for rank, node in self._stated_nodes.items():
            ranks[node].append(rank)
        each = self.per_node or MOST_PER_NODE
        return any(
            min(abs(task - rank) for rank in ranks[node]) >= each
            for task, node in self.graph.best("task node").items()
            if node in ranks
        )

    @cached_property
    def rank_of_gpu(self) -> dict[tuple[str, str], int]:
        """(Node, bus and device of a GPU: "bb:00") -> rank, by the largest communicators."""
        found = {gpu: max(ties) for gpu, ties in self.graph.all("gpu member")}
        return {gpu: rank for gpu, (of, rank) in found.items() if of >= (self.size or 0)}

    @cached_property
    def rank_of_pid(self) -> dict[tuple[str | None, int], int]:
        """(Node, process) -> rank, by the largest communicators and by ranks within nodes."""
        found = dict[tuple["str | None", int], int]()
        for (node, pid), (of, rank) in self._members.items():
            found[self.node_of_rank.get(rank, node) if of == MANY_RANKS else node, pid] = rank
        each = self.per_node
        ended = {
            (node, pid): local
            for node, pids in self.graph.all("writer pid")
            if len(pids) == each
            for local, pid in enumerate(pids)
        }
        for (writer, pid), local in (ended | self.graph.best("child local")).items():
            node = self._named(writer)
            number = self.nodes.index(node) if node in self.nodes else _task(node)
            if number is not None and each and local < each:
                found.setdefault((node, pid), number * each + local)
            elif not self.several_nodes and local < (self.size or each or 0) <= (
                each or MOST_PER_NODE
            ):
                found.setdefault((node, pid), local)
        return found

    def rank_of_process(self, prefix: Prefix) -> int | None:
        """Rank in the largest communicator that a process reported."""
        member = self._members.get((prefix.node, -1 if prefix.pid is None else prefix.pid))
        return member[1] if member else None

    def rank_of(self, file: str) -> int | None:
        """The one rank that the lines without prefix of a file state as their own."""
        ranks = [*self.graph.of("stream rank", (file, NO_PREFIX))]
        # Lines of rank 0 may stand in a file that all ranks share.
        known = len(ranks) == 1 and (ranks[0] or self.size == 1 or len(self._own) > 1)
        return ranks[0] if known else None

    def node(self, prefix: Prefix, rank: int | None) -> str | None:
        """Node of a stream, from its prefix or from lines, with or without a global rank."""
        if prefix.node is not None or rank in self.node_of_rank:
            return prefix.node or self.node_of_rank[rank or 0]
        if prefix.task is not None and prefix.rank is None:  # a node's launcher
            return self._named(writer_node(prefix))
        size, number = self.size, len(self.nodes)
        if rank is None or not size or not number or size % number or rank >= size:
            return None
        return self.nodes[rank * number // size]  # in blocks, the launchers' default

    def _named(self, node: str | None) -> str | None:
        """A node by its name, where it is known as a task of srun and the list of nodes has it."""
        task = _task(node) if node and node.startswith("task ") else None
        return node if task is None or task >= len(self.nodes) else self.nodes[task]

    def notes(self) -> list[str]:
        """Notes on contradicting sizes: two jobs in one folder, perhaps."""
        if len(self._sizes) < 2:
            return []
        sizes = f"different numbers of ranks ({', '.join(map(str, sorted(self._sizes)))})"
        return [f"the logs name {sizes}: two jobs, or one restarted; {self.size} is taken"]


def _task(node: str | None) -> int | None:
    """The number of a node that is known as a task of srun only."""
    number = (node or "").removeprefix("task ")
    return int(number) if number.isdigit() else None


#: The difference between the names of two files of one process.
_OUTPUT = re.compile(r"(?i)(?<![a-z])(?:std)?(?:out|err)(?![a-z])")

#: Identity of a node: kind of name ("task", "node" or "file") and name.
Key = tuple[str, str]
Files = Sequence[tuple[LogSource, Sequence[Prefix], IdentityGraph]]
Name = TypeVar("Name", bound=Hashable)


class RankPlacement(NamedTuple):
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
    stated: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    by_prefix: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    numbers: set[int] = field(default_factory=set)
    ranks: dict[int, int] = field(default_factory=dict)
    first: int | None = None

    def rank(self, local_rank: int) -> int | None:
        if local_rank in self.ranks or self.first is None:
            return self.ranks.get(local_rank)
        return self.first + local_rank

    def resolve(self, per_node: int) -> None:
        """Derive `ranks` and `first` from the ranks that streams state about themselves."""
        # All streams of a node have the same distance between global and local rank. One that
        # states another distance than most names another rank, unless its prefix agrees.
        sure = _only(self.by_prefix)
        own = {local: rank for local, rank in (_only(self.stated) | sure).items() if rank >= local}
        firsts = Counter(rank - local for local, rank in own.items()).most_common(1)
        self.ranks = own
        if firsts and 2 * firsts[0][1] > len(own):
            first, self.ranks = firsts[0][0], sure
            # Whole nodes precede the ranks from the first.
            self.first = first if first % per_node == 0 else None

    def number(self, world: JobTopology) -> int | None:
        if self.key[0] == "task":
            return int(self.key[1])
        if len(self.numbers) == 1:
            return min(self.numbers)
        return world.nodes.index(self.key[1]) if self.key[1] in world.nodes else None


class RankLayout:
    """Resolve global ranks and nodes from all files of a job.

    A rank within a node ("[default1]: " of torchrun, "local_rank_1.log") becomes a global one by

    1. any line of the stream that states it ("[rank17]: ", "RANK=17", "rank 17, world size 24"),
    2. the distance that others of the same node have,
    3. the node's number, by its agent ("node_rank=2", "group_rank=2") or a list, times its ranks.

    With one node it is the global rank, without nodes that of the file's name; else unknown.
    """

    def __init__(self, files: Files) -> None:
        whole = IdentityGraph()
        for _, _, graph in files:
            whole.merge(graph)
        streams = [(source, prefix) for source, prefixes, _ in files for prefix in prefixes]
        self.world = JobTopology(whole, [prefix for _, prefix in streams])
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
        self._resolve([node for node in self._nodes.values() if node.stated])

    def place(self, source: LogSource, prefix: Prefix) -> RankPlacement:
        """Placement of a stream, from its prefix, its file name or the lines."""
        rank, local = prefix.rank, _local_rank(source, prefix)
        if rank is None:
            rank = self._only_rank.get(source.name)
        if rank is None and local is not None:
            rank = self._nodes[self._key(source, prefix)].rank(local)
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
        if prefix.task is not None and prefix.rank is None:
            return "task", str(prefix.task)
        by_file = source.local_rank is not None
        node = source.node if by_file or prefix.node is None else prefix.node
        if node is not None:
            return "node", node
        return "file", "" if by_file else _OUTPUT.sub("", source.name)

    def _add(self, source: LogSource, prefix: Prefix) -> None:
        key, local = self._key(source, prefix), _local_rank(source, prefix)
        node, stream = self._nodes.setdefault(key, _Node(key)), (source.name, prefix)
        node.numbers.update(self.world.graph.of("stream number", stream))
        if local is None:
            return
        node.stated[local].update(self.world.graph.of("stream rank", stream))
        if _states_rank(prefix):
            node.by_prefix[local].add(prefix.rank or 0)
        elif (rank := self.world.rank_of_process(prefix)) is not None:
            node.stated[local].add(rank)

    def _resolve(self, nodes: Sequence[_Node]) -> None:
        numbers, per_node = [node.number(self.world) for node in nodes], self.world.per_node or 0
        for node, number in zip(nodes, numbers, strict=True):
            node.resolve(max(per_node, 1))
            known = node.first is not None or node.ranks
            if not known and number is not None and numbers.count(number) == 1:
                node.first = number * per_node if per_node or number == 0 else None
        self._by_names = not any(node.ranks or node.first is not None for node in nodes)
        if not self._several(nodes):
            for node in nodes:
                node.first = node.first or 0

    def _several(self, nodes: Sequence[_Node]) -> bool:
        every, size = set().union(*(node.stated for node in nodes)), self.world.size or 0
        each = len(every) if every == {*range(len(every))} else 0
        named = [node for node in nodes if node.key[0] != "file"]
        dealt = 1 < each < size and size % each == 0
        placed = any(node.first or node.ranks for node in nodes)
        return self.world.several_nodes or len(named) > 1 or placed or dealt


def _only(sets: Mapping[Name, set[int]]) -> dict[Name, int]:
    """Keys with exactly one value, and that value."""
    return {name: min(values) for name, values in sets.items() if len(values) == 1}


def _local_rank(source: LogSource, prefix: Prefix) -> int | None:
    return source.local_rank if prefix.local_rank is None else prefix.local_rank


def _states_rank(prefix: Prefix) -> bool:
    """True for a prefix that states its writer's rank, and not that of a line copied by grep."""
    return prefix.rank is not None and "grep" not in prefix.kinds
