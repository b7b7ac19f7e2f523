"""The graph of identities that lines tie together, and what its surest ties say of the job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

from rmetric.diagnosis.facts.statements import MANY_RANKS, STATEMENTS, Statement, identities
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix

#: Different identities that are kept of those tied to one.
MOST_TIED = 64
#: Identities of several parts.
_PARTS = {
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
        for one in may:
            for match in one.pattern.finditer(text):
                found = own | identities(match)
                for pair in one.ties:
                    if pair[0] == "report":
                        self._take_report(prefix, pair[1], found)
                    else:
                        self._tie(*pair, found)

    def _take_report(self, prefix: Prefix, name: str, found: dict[str, Any]) -> None:
        if name == "node":
            self._report[prefix] = {"of": MANY_RANKS}
        report = self._report.get(prefix)
        if report is None:
            return
        report[name] = found[name]
        if name == "rank":
            self._tie("rank", "node", report)
        elif name == "pid" and "rank" in report:
            self._tie("process", "member", report)

    def _tie(self, one: str, other: str, found: dict[str, Any]) -> None:
        tied = _identity(other, found)
        keys = found["tasks"] if one == "task" else [_identity(one, found)]
        for key in keys if tied is not None else ():
            if key is None and one not in ("job", "writer"):
                continue
            ties = self._ties[f"{one} {other}", key]
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
    parts = _PARTS.get(name)
    if parts is None:
        return found.get(name)
    whole = tuple(found.get(part) for part in parts)
    # Of a process the node may be unknown.
    return None if None in (whole[1:] if parts[-1] == "pid" else whole) else whole


#: A larger number is no number of ranks.
MAX_RANKS = 1 << 20
#: Ranks of a node at most, where no line states them.
MOST_PER_NODE = 8


class World:
    """Answers from the graph of all files of a job."""

    def __init__(self, graph: IdentityGraph, prefixes: Collection[Prefix] = ()) -> None:
        self.graph, self._prefixes = graph, prefixes
        stated = graph.of("job size").items()
        self._sizes = {size: lines for size, lines in stated if 0 < size <= MAX_RANKS}
        self._num_nodes = max(graph.of("job nodes"), default=0)
        self._per_node = max(graph.of("job each"), default=0)
        #: names of the nodes in the order of their numbers, of the longest list
        self.nodes: list[str] = list(max(graph.of("job hosts"), key=len, default=()))
        self._stated_nodes = graph.best("rank server") | graph.best("rank node")
        #: process -> (ranks of a communicator, rank in it), the largest first
        self._members: dict[tuple[str | None, int], list[tuple[int, int]]] = {
            process: sorted(ties, key=lambda one: (one[0], ties[one]), reverse=True)
            for process, ties in graph.all("process member")
        }

    @cached_property
    def size(self) -> int | None:
        """Number of ranks: as most lines state it, else of the largest group of any library."""
        sizes = self._sizes
        if sizes:
            return max(sizes, key=lambda size: (sizes[size], size))
        if 0 < self._num_nodes * self._per_node <= MAX_RANKS:
            return self._num_nodes * self._per_node
        groups = self.graph.of("job of")
        return max((size for size in groups if 0 < size <= MAX_RANKS), default=None)

    @cached_property
    def per_node(self) -> int | None:
        """Ranks of a node, where all have the same."""
        nodes = self._num_nodes or len(self.nodes)
        if not self._per_node and self.size and nodes and self.size % nodes == 0:
            return self.size // nodes
        return self._per_node or None

    @property
    def several_nodes(self) -> bool:
        """True if lines mention more than one node."""
        return self._num_nodes > 1 or len(self.nodes) > 1

    @cached_property
    def node_of_rank(self) -> dict[int, str]:
        """Rank -> node, where a line ties them."""
        tasks = {} if self.tasks_launch else self.graph.best("task node")
        return tasks | self._stated_nodes

    @cached_property
    def tasks_launch(self) -> bool:
        """True if a task of srun is no rank, but starts those of its node."""
        # A prefix states another rank, or lines place far other ranks on the task's node.
        if any(one.task is not None and one.rank not in (None, one.task) for one in self._prefixes):
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
        for (node, pid), members in self._members.items():
            of, rank = members[0]
            if of >= (self.size or 0):
                node = self.node_of_rank.get(rank, node) if of == MANY_RANKS else node
                found[node, pid] = rank
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

    def rank_of_process(self, prefix: Prefix, *, of_all: bool = False) -> int | None:
        """Rank in the largest communicator that a process reported; `of_all`: of all ranks."""
        if prefix.pid is None:
            return None
        members = self._members.get((prefix.node, prefix.pid), ())
        return next((rank for of, rank in members if not of_all or of == self.size), None)

    def rank_of(self, file: str) -> int | None:
        """The one rank that the lines without prefix of a file state as their own."""
        ranks = [*self.graph.of("stream rank", (file, NO_PREFIX))]
        if len(ranks) != 1:
            return None
        # Lines of rank 0 may stand in a file that all ranks share.
        return ranks[0] if ranks[0] > 0 or self.size == 1 or self._several_own else None

    @cached_property
    def _several_own(self) -> bool:
        return len({rank for _, ranks in self.graph.all("stream rank") for rank in ranks}) > 1

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
