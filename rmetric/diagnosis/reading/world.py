"""Parse world size and rank placement from log lines."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection

from rmetric.diagnosis.reading import stated_ranks
from rmetric.diagnosis.reading.prefixes import NO_HOST, Prefix
from rmetric.diagnosis.reading.sought import Sought, those_that_may
from rmetric.diagnosis.reading.stated_ranks import StatedRanks

#: More than the ranks of any communicator: for a rank that is stated as the job's own.
MANY_RANKS = 1 << 30
#: A larger number is no number of ranks.
MAX_RANKS = 1 << 20
#: Ranks of a node at most, where no line states them.
MOST_PER_NODE = 8
#: Hosts of one list; a longer one is no list of hosts.
MAX_HOSTS = 100_000
_PART = re.compile(r"([^,\s\[\]]*)(?:\[([\d,-]+)\])?([^,\s\[\]]*)")
_NUMBER = r"[\"']?[ :=.]{1,60}[\"']?(\d+)"
#: JAX on its distributed system: "process 5 of 8".
_JAX = r"\b(?i:jax|coordinator|distributed)\b.{0,160}?\bprocess(?:[ _](?:id|index))?[ :=#]{1,3}"
_JAX_RANK, _JAX_SIZE = rf"{_JAX}(\d+) ?(?:of|/) ?\d+\b", rf"{_JAX}\d+ ?(?:of|/) ?(\d+)\b"
#: The number of ranks, by whole words: a size of a tensor's or a pipeline's group is another one.
_SIZES = tuple(
    Sought(pattern, (part,))
    for part, pattern in (
        ("world", rf"(?i)(?<![a-z]_)(?<!parallel )(?:global_)?world[ _-]?size{_NUMBER}"),
        ("member: ", r"MEMBER: \d+/(\d+)"),
        ("total ", r"(?i)\btotal (?:number of )?(?:ranks|processes|workers)[ :=]+(\d+)"),
        ("rank ", r"(?i)\brank \d+ ?(?:of|/) ?(\d+)\b"),
        ("num", r"(?i)\bnum(?:ber of)?[ _](?:training[ _]ranks|processes)[ :=]+(\d+)"),
        ("process", _JAX_SIZE),
        ("global_world_sizes=", r"\bglobal_world_sizes=\[(\d+)"),
    )
)
#: Of one communicator; the largest is the world's.
_GROUPS = Sought(
    r"\b(?:rank (?P<rank>\d+) nranks|ranks\[|rankNum\[)[ ]?(?P<size>\d+)",
    ("nranks", "ranks[", "ranknum["),
)
_HCCL_RANK = re.compile(r"\b(?:ranks|rankNum)\[\d+\], ?rank\[(\d+)\]")
_HCCL_NODE = re.compile(r"\bserver\[([\w.:-]+)")
_NODES = Sought(
    r"(?i)--?nnodes[= ]['\"]?(?:\d+:)?(\d+)|\bnnodes=(\d+)|\bgroup_world_size=(\d+)",
    ("nnodes", "group_world_size"),
)
_PER_NODE = Sought(
    r"(?i)--?nproc[_-]per[_-]node[= ]['\"]?(\d+)|\bnum_local_procs=(\d+)"
    r"|\bn_gpus_per_node['\"]?[=:] ?(\d+)",
    ("proc", "n_gpus_per_node"),
)
#: The stream's own rank.
_OWN = Sought(
    rf"(?i)(?<![a-z]_)(?:global[ _]rank|world[ _]rank|rank_train){_NUMBER}"
    r"|(?<=[\s\"'(])rank=(\d+) world|^(?:export )?RANK=[\"']?(\d+)"
    r"|^.{0,80}?\binit\w*\b.{0,60}\brank[ :=]{1,3}(\d+)\b"
    # and Orbax, which JAX saves with
    rf"|{_JAX_RANK}|\[process=(\d+)\]\[thread=",
    ("rank", "process"),
)
#: Of one process each, or of the agents of nodes: as many as the ranks, or as the nodes.
_OF_POD = Sought(
    r"\bWORLD_SIZE=[\"']?(\d+)[\"']?,? RANK=[\"']?(\d+)|"
    r"(?<![A-Za-z_])RANK=[\"']?(\d+)[\"']?,? WORLD_SIZE=[\"']?(\d+)",
    ("world_size=",),
    ("rank=",),
)
_HOST = r"(?P<node>[A-Za-z][\w.-]*\d[\w.-]*|\d+\.\d+\.\d+\.\d+)"
#: No number of a node or within one stands behind it.
_OWN_RANK = r"(?<!node )(?<!local )(?<!machine )(?<!group )(?<!host )"
_RANK_ON = Sought(
    rf"(?i){_OWN_RANK}\brank(?: id)?[ :=\[]{{0,3}}(?P<rank>\d+)\b.{{0,40}}?"
    rf"\b(?:on|host(?:name)?|node)[ :=]+{_HOST}",
    ("rank",),
    ("on", "host", "node"),
)
_ON_RANK = Sought(
    rf"(?i)\b(?:on|host(?:name)?|node)[ :=]+{_HOST}\b.{{0,20}}?"
    rf"{_OWN_RANK}\brank[ :=\[]{{0,3}}(?P<rank>\d+)\b",
    ("on", "host", "node"),
    ("rank",),
)
_MY_NODE = Sought(rf"^(?:export )?SLURMD_NODENAME=[\"']?{_HOST}", ("slurmd_nodename=",))
#: The host of a script, as it says when it begins.
_DEVICE = r"(?!(?:cuda|gpu|npu|hpu|xpu|tpu|device|rank|python)\d{1,2}\b)"
_THIS_HOST = Sought(
    r"^(?:.{0,60}[ ./])?(?:[Rr]unning|[Ss]tart(?:ed|ing)|[Ll]aunch(?:ed|ing)|[Jj]ob \S+|\w+\.sh)"
    rf"(?: \S+){{0,4}}? on (?:(?:host|node) )?{_DEVICE}{_HOST}\W*$"
    rf"|^\W{{0,6}}(?i:host(?:name)?|node)(?: name)? ?[:=] ?{_HOST.replace('node', 'named')}\s*$",
    ("on", "host", "node"),
)
#: May be the launching host's, which containers and srun pass to all.
_MY_HOST = Sought(rf"^(?:export )?HOSTNAME=[\"']?{_HOST}", ("hostname=",))
#: The GPU of a communicator's rank as NCCL writes it ("busId bb000"), and as the kernel does.
_BUS = re.compile(
    r"\bbusId ([0-9a-f]{4,12})\b|\b(?:[0-9a-fA-F]{4,8}:)([0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b"
)
#: A worker of Ray: its address, its process and its rank.
_RAY = Sought(r"\bip=([\d.a-f:]+), pid=(\d+)\) world_rank=(\d+)", ("world_rank",))
#: DeepSpeed's launcher: the nodes in their order, with the GPUs of each; a process it started.
_WORLD_INFO = Sought(r"\bWORLD INFO DICT: (\{.*\})", ("world info dict: ",))
_INFO_NODE = re.compile(r"[\"']([\w.-]+)[\"']: ?\[([\d, ]*)\]")
_SPAWNED = Sought(
    r"\bprocess (\d{1,9}) spawned with command: .*--local[_-]rank=(\d{1,4})\b",
    (" spawned with command: ",),
)
#: One that it ends: the order of all of a node is that of their ranks.
_ENDED = Sought(r"\bKilling subprocess (\d{1,9})\s*$", ("killing subprocess ",))
#: A process that torchrun reports, by its rank within the node.
_CHILD_PID = Sought(r"\blocal_rank: (\d{1,4}) \(pid: (\d{1,9})\) of binary", ("local_rank: ",))
#: The process of a rank, in one line, and in torchrun's report, where its rank stands above it.
_RANK_PID = Sought(
    r"(?i)\brank[ :=\[]{0,3}(\d{1,6})\b[^\n]{0,60}?\bpid[ :=]{1,3}(\d{1,9})\b", ("rank",), ("pid",)
)
_REPORT_PID = Sought(r"^\s*exitcode +: \S+ \(pid: (\d{1,9})\)", ("exitcode ",))
_TASKS = Sought(rf"^srun: error: {_HOST}: tasks? (?P<tasks>[\d,-]+):", ("srun: error: ",))
_LIST = Sought(
    r"(?i)(?:^hosts=(?=(?P<spaced>.*))|:::DLPAL \S+ \d+ \d+ |(?:^|_|\b)nodelist=)[\"']?"
    r"(?P<list>[a-z][\w.-]*(?:\[[\d,-]+\])?(?:,[a-z][\w.-]*(?:\[[\d,-]+\])?)*)",
    ("hosts=", ":::dlpal", "nodelist="),
)
#: The report of torchrun: a host's line, then a rank's.
_REPORT_HOST = Sought(rf"^\s*host +: {_HOST}\s*$", ("host ",))
_REPORT_RANK = Sought(r"^\s*rank +: (\d+) \(local_rank", ("rank ",))
#: The address of a node, as NCCL writes it behind the node's name, and in a file of hosts.
_IP = r"(?P<address>\d{1,3}(?:\.\d{1,3}){3})"
_OWN_ADDRESS = Sought(rf"\bBootstrap : Using \S+?:{_IP}<", ("bootstrap : using",))
_HOST_LINE = Sought(
    rf"^\s*(?:(?P<node>[A-Za-z][\w.-]*\d[\w.-]*)\s+{_IP}|{_IP.replace('address', 'first')}\s+"
    r"(?P<named>[A-Za-z][\w-]*\d[\w.-]*)(?:\s+[A-Za-z][\w.-]*){0,3})\s*$",
    ("...",),
)
_OF_SIZES = frozenset((*_SIZES, _NODES, _PER_NODE))
_OF_NODES = frozenset(
    (
        _RANK_ON,
        _ON_RANK,
        _MY_NODE,
        _MY_HOST,
        _THIS_HOST,
        _RAY,
        _TASKS,
        _LIST,
        _REPORT_HOST,
        _REPORT_RANK,
        _WORLD_INFO,
        _SPAWNED,
        _ENDED,
        _RANK_PID,
        _REPORT_PID,
        _CHILD_PID,
        _OWN_ADDRESS,
        _HOST_LINE,
    )
)
_OF_RANKS = frozenset(stated_ranks.SOUGHT)
#: All that `World.take` seeks.
_SOUGHT = _OF_SIZES | _OF_NODES | _OF_RANKS | {_GROUPS, _OWN, _OF_POD}

_STATES = re.compile(
    rb"world[ _-]?size|world_rank|member: /|total (?:number of )?(?:ranks|processes|workers)|nranks"
    rb"|rank {0,2}(?:of |/)|num(?:ber of)?[ _](?:training[ _]ranks|processes)|ranks\[|ranknum\["
    rb"|nnodes|group_world_size|nproc[_-]per|n_gpus_per_node|num_local_procs"
    rb"|global[ _]rank|world[ _]rank|rank_train|rank= world"
    rb"|^(?:export )?(?:rank|hostname|slurmd_nodename)=|init.{0,70}rank[ :=]"
    rb"|\brank[ :=\[]{0,3}\b.{0,40}\b(?:on|host|hostname|node)[ :=]"
    rb"|\b(?:host|hostname|node)[ :=].{1,60}\brank|\bon \S+ .{0,20}\brank"
    rb"|(?:node|group)[_-]rank[\"' :=]|global_ranks="
    rb"|\brank=[\"']?,? local_rank=|\blocal_rank=[\"']?,? rank=|^\W{0,4}local_rank\b"
    rb"|\b(?:i am|i'm|this is|my) (?:global )?rank\b|^hosts=|:::dlpal|nodelist=|srun: error: "
    rb"|(?:jax|coordinator|distributed)\b.{0,160}\bprocess\b|\[process=\]\[thread="
    rb"|^\s*host +: |^\s*rank +: |^\s*exitcode +: |world info dict: | spawned with command: "
    rb"|killing subprocess "
    rb"|(?:running|start|launch|job|\.sh).{0,80} on |^\W{0,6}(?:host|node)\w*(?: name)? ?[:=]"
    rb"|\brank[ :=\[]{0,3}\b.{0,60}\bpid[ :=]|bootstrap : using |local_rank: {1,2}\(pid: "
)
#: An address, which many lines with dots are not.
_ADDRESS = re.compile(rb"(?:^|\s)\.\.\.(?:\s|$)")


#: Parts of lines, of which every match of `_STATES` has one.
_PARTS = (
    b"rank", b"node", b"host", b"world", b"process", b"workers", b"nproc", b"num_local_procs",
    b"n_gpus", b"member: /", b":::dlpal", b"srun: error: ", b"exitcode", b"bootstrap : ",
    b" on ",
)  # fmt: skip


def describes(bare: str, form: bytes) -> frozenset[Sought]:
    """What lines of a form may state of the world; `World.take` needs no line that states nothing.

    Args:
        bare: the line without its digits.
        form: the same in lower case.
    """
    return those_that_may(_SOUGHT, bare) if may_describe_world(form) else frozenset()


def may_describe_world(form: bytes) -> bool:
    """Return False only if a line (lower case, no digits) cannot describe the world.

    Quick, and the same whatever its digits are: call `World.take` for such lines only.
    """
    if b"..." in form and _ADDRESS.search(form):
        return True
    return any(map(form.__contains__, _PARTS)) and _STATES.search(form) is not None


class World:
    """World size and rank placement collected from lines.

    Attributes:
        node_of_rank: rank -> node.
        node_of_task: task of srun -> node.
        node_of_address: address -> node.
        rank_of_gpu: (node, bus and device of a GPU: "bb:00") -> rank.
        rank_of_pid: (node, process) -> rank.
        nodes: names of the nodes in the order of their numbers, where a list was given.
        own: the ranks that each stream states about itself. Of one file: `merge` omits it.
    """

    def __init__(self) -> None:
        self.node_of_rank: dict[int, str] = {}
        self.node_of_task: dict[int, str] = {}
        self.node_of_address: dict[str, str] = {}
        #: with the number of ranks of the communicator
        self._gpus: dict[tuple[str, str], tuple[int, int]] = {}
        self.nodes: list[str] = []
        self.own: dict[Prefix, StatedRanks] = {}
        self._sizes: Counter[int] = Counter()
        #: ranks of a communicator -> (node, process) -> rank in it
        self._groups: dict[int, dict[tuple[str | None, int | None], int]] = defaultdict(dict)
        self._num_nodes = self._per_node = 0
        self._own: dict[str, set[int]] = defaultdict(set)
        self._all_own: set[int] = set()
        #: stream -> rank -> the size of the world that was stated with it
        self._pods: dict[str, dict[int, int]] = defaultdict(dict)
        self._hosts: dict[int, str] = {}
        self._this_host: set[str] = set()
        self._report_host: dict[str, str] = {}
        self._report_rank: dict[str, int] = {}
        #: (node, process) -> rank
        self._pids: dict[tuple[str | None, int], int] = {}
        #: (node, process) -> its rank within the node
        self._spawned: dict[tuple[str | None, int], int] = {}
        #: node -> the processes that its launcher ended, in their order
        self._ended: dict[str | None, dict[int, None]] = defaultdict(dict)

    def take(
        self, text: str, prefix: Prefix, stream: str, may: Collection[Sought] = _SOUGHT
    ) -> None:
        """Read a line (not a joined entry).

        Args:
            text: without its prefix.
            prefix: as `PrefixParser.split` gives it.
            stream: name of the stream; a file where no more is known.
            may: what lines of its form may state, by `describes`.
        """
        if not _OF_SIZES.isdisjoint(may):
            self._take_sizes(text, may)
        if _GROUPS in may:
            self._take_groups(text, prefix, stream)
        if not _OF_NODES.isdisjoint(may):
            self._take_nodes(text, prefix, stream, may)
        if not _OF_RANKS.isdisjoint(may):
            own = StatedRanks()
            own.take(text, may)
            if own:
                self.own.setdefault(prefix, StatedRanks()).add(own)
        for match in _OWN.pattern.finditer(text) if _OWN in may else ():
            self._add_own(stream, int(match[match.lastindex or 0]))
        for match in _OF_POD.pattern.finditer(text) if _OF_POD in may else ():
            size, rank = int(match[1] or match[4]), int(match[2] or match[3])
            self._pods[stream][rank] = size
            self._all_own.add(rank)

    def _add_own(self, stream: str, rank: int) -> None:
        self._own[stream].add(rank)
        self._all_own.add(rank)

    def node(self, prefix: Prefix, rank: int | None) -> str | None:
        """Node of a stream, from its prefix or from lines, with or without a global rank."""
        # A task that is no rank is a node's launcher.
        return prefix.node or self._node(rank, prefix.task if prefix.rank is None else None)

    def rank_of_process(self, prefix: Prefix, *, of_all: bool = False) -> int | None:
        """Rank in the largest communicator that a process reported; `of_all`: of all ranks."""
        if prefix.pid is None:
            return None
        sizes = sorted(self._groups, reverse=True) if not of_all else [self.size]
        key = (prefix.node, prefix.pid)
        groups = (self._groups[size] for size in sizes if size in self._groups)
        return next((ranks[key] for ranks in groups if key in ranks), None)

    @property
    def rank_of_gpu(self) -> dict[tuple[str, str], int]:
        """(Node, GPU) -> rank, by the largest communicators."""
        size = self.size
        return {gpu: rank for gpu, (of, rank) in self._gpus.items() if size is None or of >= size}

    @property
    def rank_of_pid(self) -> dict[tuple[str | None, int], int]:
        """(Node, process) -> rank, by the largest communicators."""
        size, found = self.size, dict(self._pids)
        for of, ranks in sorted(self._groups.items()):
            if size is None or of >= size:
                found |= {(node, pid): rank for (node, pid), rank in ranks.items() if pid}
        each = self.per_node
        spawned = {
            (node, pid): local
            for node, pids in self._ended.items()
            if len(pids) == each
            for local, pid in enumerate(pids)
        } | self._spawned
        for (node, pid), local in spawned.items():
            number = self.nodes.index(node) if node in self.nodes else _task(node)
            if number is not None and each and local < each:
                found.setdefault((node, pid), number * each + local)
            elif not self.several_nodes and local < (size or each or 0) <= (each or MOST_PER_NODE):
                found.setdefault((node, pid), local)
        return found

    def _add_gpu(self, node: str | None, text: str, size: int, rank: int) -> None:
        found = _BUS.search(text)
        if found is None or node is None:
            return
        # The last three hexadecimal digits are the device's and the function's.
        bus = f"{found[1][:-3][-2:]:0>2}:{found[1][-3:-1]}" if found[1] else found[2].lower()
        self._gpus[node, bus] = max(self._gpus.get((node, bus), (0, 0)), (size, rank))

    @property
    def several_nodes(self) -> bool:
        """True if lines mention more than one node."""
        return self._num_nodes > 1 or len(self.nodes) > 1

    @property
    def per_node(self) -> int | None:
        """Ranks of a node, where all have the same."""
        nodes = self._num_nodes or len(self.nodes)
        if not self._per_node and self.size and nodes and self.size % nodes == 0:
            return self.size // nodes
        return self._per_node or None

    def rank_of(self, stream: str) -> int | None:
        """The rank that a stream without prefixes states about itself ("global rank 3").

        None where it names several, and where all streams name the same one: lines of rank 0
        may stand in a file that all ranks share.
        """
        ranks = self._own.get(stream) or {
            rank
            for rank, size in self._pods.get(stream, {}).items()
            if size == self.size and self._per_node <= 1
        }
        if len(ranks) != 1:
            return None
        (rank,) = ranks
        return rank if rank > 0 or self.size == 1 or self._all_own - ranks else None

    @property
    def size(self) -> int | None:
        """Number of ranks: as most lines state it, else of the largest group of any library."""
        if self._sizes:
            return max(self._sizes, key=lambda size: (self._sizes[size], size))
        if 0 < self._num_nodes * self._per_node <= MAX_RANKS:
            return self._num_nodes * self._per_node
        return max((size for size in self._groups if size <= MAX_RANKS), default=None)

    def merge(self, other: World) -> None:
        """Add the world of other files of the same job."""
        self.node_of_rank = {**other.node_of_rank, **self.node_of_rank}
        self.node_of_task = {**other.node_of_task, **self.node_of_task}
        self.node_of_address = {**other.node_of_address, **self.node_of_address}
        self.nodes = self.nodes or other.nodes
        for gpu, known in other._gpus.items():
            self._gpus[gpu] = max(self._gpus.get(gpu, known), known)
        self._sizes.update(other._sizes)
        for size, ranks in other._groups.items():
            self._groups[size].update(ranks)
        self._hosts.update(other._hosts)
        self._this_host |= other._this_host
        self._spawned.update(other._spawned)
        for node, pids in other._ended.items():
            self._ended[node] |= pids
        self._pids.update(other._pids)
        self._num_nodes = max(self._num_nodes, other._num_nodes)
        self._per_node = max(self._per_node, other._per_node)
        for stream, ranks_of in other._own.items():
            self._own[stream] |= ranks_of
        self._all_own |= other._all_own
        for stream, sizes in other._pods.items():
            self._pods[stream] |= sizes

    def notes(self) -> list[str]:
        """Notes on contradicting sizes: two jobs in one folder, perhaps."""
        if len(self._sizes) < 2:
            return []
        sizes = ", ".join(map(str, sorted(self._sizes)))
        return [
            f"the logs name different numbers of ranks ({sizes}): two jobs, or one restarted; "
            f"{self.size} is taken"
        ]

    def _take_sizes(self, text: str, may: Collection[Sought]) -> None:
        for one in _SIZES:
            for size in one.pattern.findall(text) if one in may else ():
                if 0 < int(size) <= MAX_RANKS:
                    self._sizes[int(size)] += 1
        if _NODES in may and (match := _NODES.pattern.search(text)):
            self._num_nodes = max(self._num_nodes, int(match[1] or match[2] or match[3]))
        if _PER_NODE in may and (match := _PER_NODE.pattern.search(text)):
            self._per_node = max(self._per_node, int(match[1] or match[2] or match[3]))

    def _take_groups(self, text: str, prefix: Prefix, stream: str) -> None:
        match = _GROUPS.pattern.search(text)
        if match is None:
            return
        hccl = None if match["rank"] else _HCCL_RANK.search(text)
        ranks = self._groups[int(match["size"])]
        if not match["rank"] and not hccl:
            return
        rank = int(hccl[1] if hccl else match["rank"])
        ranks[prefix.node, prefix.pid] = rank
        self._add_gpu(prefix.node, text, int(match["size"]), rank)
        if hccl:
            self._add_own(stream, rank)
            if node := _HCCL_NODE.search(text):
                self.node_of_rank.setdefault(rank, node[1])

    def _take_nodes(self, text: str, prefix: Prefix, stream: str, may: Collection[Sought]) -> None:
        for one in (_RANK_ON, _ON_RANK):
            match = one.pattern.search(text) if one in may else None
            if match and not NO_HOST.match(match["node"].encode()):
                self.node_of_rank[int(match["rank"])] = match["node"]
                self._add_gpu(match["node"], text, MANY_RANKS, int(match["rank"]))
        ranked = prefix.rank
        if ranked is not None and _MY_NODE in may and (match := _MY_NODE.pattern.match(text)):
            self.node_of_rank[ranked] = match["node"]
        if ranked is not None and _MY_HOST in may and (match := _MY_HOST.pattern.match(text)):
            self._hosts[ranked] = match["node"]
        if _THIS_HOST in may and (match := _THIS_HOST.pattern.match(text)):
            self._this_host.add(match["node"] or match["named"])
        if _REPORT_HOST in may and (match := _REPORT_HOST.pattern.match(text)):
            self._report_host[stream] = match["node"]
        if (
            _REPORT_RANK in may
            and stream in self._report_host
            and (match := _REPORT_RANK.pattern.match(text))
        ):
            self.node_of_rank[int(match[1])] = self._report_host[stream]
            self._report_rank[stream] = int(match[1])
        if (
            _REPORT_PID in may
            and stream in self._report_rank
            and (match := _REPORT_PID.pattern.match(text))
        ):
            node = self._report_host.get(stream)
            self._pids[node, int(match[1])] = self._report_rank.pop(stream)
        for match in _RANK_PID.pattern.finditer(text) if _RANK_PID in may else ():
            rank = int(match[1])
            self._pids[self.node_of_rank.get(rank, prefix.node), int(match[2])] = rank
        if _RAY in may and (match := _RAY.pattern.search(text)):
            self._groups[MANY_RANKS][match[1], int(match[2])] = int(match[3])
            self.node_of_rank[int(match[3])] = match[1]
        if _WORLD_INFO in may and (match := _WORLD_INFO.pattern.search(text)):
            gpus = {node: len(some.split(",")) for node, some in _INFO_NODE.findall(match[1])}
            if len(gpus) > len(self.nodes) and "localhost" not in gpus:
                self.nodes = list(gpus)
            if len(set(gpus.values())) == 1:
                self._per_node = max(self._per_node, *gpus.values())
                self._num_nodes = max(self._num_nodes, len(gpus))
        if _CHILD_PID in may and (match := _CHILD_PID.pattern.search(text)):
            self._spawned[prefix.node, int(match[2])] = int(match[1])
        if _OWN_ADDRESS in may and (match := _OWN_ADDRESS.pattern.search(text)):
            node = self._node(prefix.rank, prefix.task) if prefix.node is None else prefix.node
            if node is not None:
                self.node_of_address[match["address"]] = node
        if _HOST_LINE in may and (match := _HOST_LINE.pattern.match(text)):
            self.node_of_address[match["address"] or match["first"]] = (
                match["node"] or match["named"]
            )
        launcher = prefix.node or (None if prefix.task is None else self._node(None, prefix.task))
        if _SPAWNED in may and (match := _SPAWNED.pattern.search(text)):
            self._spawned[launcher, int(match[1])] = int(match[2])
        if _ENDED in may and (match := _ENDED.pattern.search(text)):
            self._ended[launcher][int(match[1])] = None
        if _TASKS in may and (match := _TASKS.pattern.match(text)):
            for task in expanded(f"[{match['tasks']}]"):
                self.node_of_task.setdefault(int(task), match["node"])
        if _LIST in may and (match := _LIST.pattern.search(text)):
            nodes = expanded(match["spaced"] or match["list"])
            self.nodes = nodes if len(nodes) > len(self.nodes) else self.nodes

    def _node(self, rank: int | None, task: int | None) -> str | None:
        number = len(self.nodes)
        if rank in self.node_of_rank:
            return self.node_of_rank[rank]
        if task is not None:
            return self.nodes[task] if task < number else f"task {task}"
        if rank is not None and self.size and number and self.size % number == 0:
            # In blocks, the launchers' default.
            return self.nodes[rank * number // self.size] if rank < self.size else None
        if rank in self._hosts and len(set(self._hosts.values())) > 1:
            return self._hosts[rank]
        if rank is not None and not self.several_nodes and len(self._this_host) == 1:
            fits = rank < (self.size or 0) <= (self.per_node or MOST_PER_NODE)
            return next(iter(self._this_host)) if fits else None
        return None


def _task(node: str | None) -> int | None:
    """The number of a node that is known as a task of srun only."""
    number = (node or "").removeprefix("task ")
    return int(number) if number.isdigit() else None


def expanded(hosts: str) -> list[str]:
    """All hosts of a list as SLURM writes it, in its order.

    >>> expanded("node[08-10,12],login1")
    ['node08', 'node09', 'node10', 'node12', 'login1']
    """
    if hosts.count("[") != hosts.count("]"):
        return []
    names: list[str] = []
    for before, ranges, after in _PART.findall(hosts):
        numbers = _numbers(ranges) if ranges else [""]
        if before or ranges:
            names += [before + number + after for number in numbers]
        if len(names) > MAX_HOSTS:
            return []
    return names


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        last = last or first
        if not (first and last.isdecimal()) or int(last) - int(first) > MAX_HOSTS:
            return []
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers
