"""What lines state of ranks, nodes, processes and GPUs: one table of patterns.

A named group is an identity, and a statement ties identities to one another:

    rank, local, number          global rank; rank within its node; number of its node
    node, task, server           a host's name; a task of srun; an address of a host
    pid, bus                     process number; PCI bus and device of a GPU ("bb:00")
    size, of                     ranks of the job; of a communicator, of which `rank` is a member
    nodes, each, hosts           number of nodes; ranks of each; names of all in their order

What a statement does not name is the writer's, as the prefix of the line states it. Identities of
several parts are the process (node, pid), the child (writer, pid), the gpu (node, bus), and the
member (of, rank) of a communicator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from rmetric.diagnosis.library.load import any_digits
from rmetric.diagnosis.reading.prefixes import NO_HOST
from rmetric.diagnosis.reading.text import WordIndex

#: More than the ranks of any communicator: for a rank that is stated as the job's own.
MANY_RANKS = 1 << 30
#: Hosts of one list; a longer one is no list of hosts.
MAX_HOSTS = 100_000
#: Characters of a line's form; longer ones may state anything.
LONGEST_FORM = 2000


class Statement:
    """One way in which lines state something.

    Args:
        ties: pairs of identities: "rank node, process member".
        gates: literals in lower case without digits, with | between; a match holds one.
        pattern: sought in the line without its prefix.
    """

    __slots__ = ("gates", "loose", "pattern", "ties")

    def __init__(self, ties: str, gates: str, pattern: str) -> None:
        self.ties = [(name, other) for name, other in map(str.split, ties.split(","))]
        self.gates = gates.split("|")
        self.pattern = re.compile(pattern)
        self.loose = any_digits(pattern)


def _not_after(words: str) -> str:
    return "".join(rf"(?<!{word}[ _-])" for word in words.split())


_EQUALS = r"[\"']?[ :=.]{1,60}[\"']?"
_IS = r"[\"']?(?: is)?[ :=.]{1,60}[\"']?"
_APART = r"[ ,;|/()]{1,4}[\"']?"
_RANK = r"(?P<rank>\d+)"
#: Words before "rank" by which it is counted within a node or over the nodes;
_WITHIN = _not_after("node local machine group host")
#: by which it is another's, or none of the world.
_OTHER = _WITHIN + _not_after(
    "role tp dp ep mp pp cp parallel data model pipe pipeline tensor expert sequence context peer"
    " remote src dst root other from for to by of on with waiting and"
)
#: JAX on its distributed system: "process 5 of 8".
_JAX = r"\b(?i:jax|coordinator|distributed)\b.{0,160}?\bprocess(?:[ _](?:id|index))?[ :=#]{1,3}"
#: No host: numbered words of prose and of training, devices.
_NO_HOST = NO_HOST.pattern.decode().removeprefix("(?i)").replace("$", r"(?![\w.-])")
_DEVICE = rf"(?!(?i:{_NO_HOST}|(?:npu|hpu|xpu|tpu|device|rank|python)\d{{1,2}}\b))"
_HOSTNAME = r"[A-Za-z][\w.-]*\d[\w.-]*"
_ADDR = rf"{_HOSTNAME}|\d+\.\d+\.\d+\.\d+"
_ON = rf"\b(?:on|host(?:name)?|node)[ :=]+{_DEVICE}(?P<node>{_ADDR})"
#: A GPU as NCCL writes it ("busId bb000"), and as the kernel does.
_BUS = (
    r"(?:.*?\b(?:busId (?P<bus>[0-9a-f]{4,12})"
    r"|[0-9a-fA-F]{4,8}:(?P<pci>[0-9a-fA-F]{2}:[0-9a-fA-F]{2}))\b)?"
)
_LISTED = r"[a-z][\w.-]*(?:\[[\d,-]+\])?"

# fmt: off
STATEMENTS: tuple[Statement, ...] = tuple(Statement(*row) for row in (
    # the number of ranks: a size of a tensor's or a pipeline's group is another one
    ("job size", "world",
     rf"(?i)(?<![a-z]_)(?<!parallel )(?:global_)?world[ _-]?size{_EQUALS}(?P<size>\d+)"),
    ("job size", "member: /", r"MEMBER: \d+/(?P<size>\d+)"),
    ("job size", "total ",
     r"(?i)\btotal (?:number of )?(?:ranks|processes|workers)[ :=]+(?P<size>\d+)"),
    ("job size", "rank ", r"(?i)\brank \d+ ?(?:of|/) ?(?P<size>\d+)\b"),
    ("job size", "num",
     r"(?i)\bnum(?:ber of)?[ _](?:training[ _]ranks|processes)[ :=]+(?P<size>\d+)"),
    ("job size", "global_world_sizes=", r"\bglobal_world_sizes=\[(?P<size>\d+)"),
    ("job nodes", "nnodes|group_world_size",
     r"(?i)(?:--?nnodes[= ]['\"]?(?:\d+:)?|\bnnodes=|\bgroup_world_size=)(?P<nodes>\d+)"),
    ("job each", "nproc|num_local_procs|n_gpus_per_node",
     r"(?i)(?:--?nproc[_-]per[_-]node[= ]['\"]?|\bnum_local_procs=|\bn_gpus_per_node['\"]?[=:] ?)"
     r"(?P<each>\d+)"),

    # communicators
    ("job of, process member, gpu member", "nranks",
     rf"\brank {_RANK} nranks (?P<of>\d+)\b{_BUS}"),
    ("job of, process member, stream rank", "ranks[|ranknum[",
     rf"\b(?:ranks|rankNum)\[(?P<of>\d+)(?:\], ?rank\[{_RANK}\])?"),
    ("rank server", "server[",
     rf"\b(?:ranks|rankNum)\[\d+\], ?rank\[{_RANK}\].*?\bserver\[(?P<server>[\w.:-]+)"),

    # the writer's own
    ("stream rank", "rank=", rf"(?<![A-Za-z_])RANK=[\"']?{_RANK}"),
    ("stream rank", "rank",
     rf"(?i)(?<![a-z_])(?:global[ _]rank|world[ _]rank|rank_train){_IS}{_RANK}"),
    ("stream rank", "rank", rf"(?i){_OTHER}(?<![a-z])rank{_IS}{_RANK}\b{_APART}world[ _-]?size"),
    ("stream rank", "world",
     rf"(?i)(?<![a-z_])(?<!parallel )world[ _-]?size{_IS}\d+{_APART}{_OTHER}rank{_IS}{_RANK}\b"),
    ("stream rank", "rank",
     rf"(?i)\b(?:i am|i'm|this is|my) (?:global )?rank(?: is)?[ :=]{{1,3}}{_RANK}\b"),
    ("stream rank", "rank", rf"(?i)^[^a-z]{{0,80}}rank[ :=]?{_RANK} ?(?:of|/) ?\d+\b"),
    ("stream rank", "init",
     rf"(?i)^.{{0,80}}?\binit\w*\b.{{0,60}}?{_OTHER}\brank[ :=]{{1,3}}{_RANK}\b"),
    ("stream rank, job size", "process", rf"{_JAX}{_RANK} ?(?:of|/) ?(?P<size>\d+)\b"),
    ("stream rank", "[process=]", rf"\[process={_RANK}\]\[thread="),  # Orbax, which JAX saves with
    # torchrun's agents, DeepSpeed's launcher, scripts
    ("stream number", "node|group",
     r"(?i)(?<![a-z])(?:node|group)[_-]rank[\"']?[ :=]{1,3}[\"']?(?P<number>\d+)"),

    # where ranks are
    ("rank node, gpu member", "rank",
     rf"(?i){_WITHIN}\brank(?: id)?[ :=\[]{{0,3}}{_RANK}\b.{{0,40}}?{_ON}{_BUS}"),
    ("rank node, gpu member", "rank",
     rf"(?i){_ON}\b.{{0,20}}?{_WITHIN}\brank[ :=\[]{{0,3}}{_RANK}\b{_BUS}"),
    ("rank node", "slurmd_nodename=", rf"^(?:export )?SLURMD_NODENAME=[\"']?(?P<node>{_ADDR})"),
    ("task node", "srun: error: ", rf"^srun: error: (?P<node>{_ADDR}): tasks? (?P<tasks>[\d,-]+):"),
    ("job hosts", "hosts=", r"(?i)^hosts=[\"']?(?P<hosts>[a-z][^\"']*)"),
    ("job hosts", ":::dlpal|nodelist=",
     r"(?i)(?::::DLPAL \S+ \d+ \d+ |(?:^|_|\b)nodelist=)[\"']?"
     rf"(?P<hosts>{_LISTED}(?:,{_LISTED})*)"),
    ("job hosts, job nodes, job each", "world info dict: ",  # DeepSpeed's launcher
     r"\bWORLD INFO DICT: (?P<info>\{.*\})"),

    # processes
    ("process member, rank node", "world_rank",  # a worker of Ray
     rf"\bip=(?P<node>[\d.a-f:]+), pid=(?P<pid>\d+)\) world_rank={_RANK}"),
    ("process member", "rank",
     rf"(?i){_WITHIN}\brank[ :=\[]{{0,3}}(?P<rank>\d{{1,6}})\b[^\n]{{0,60}}?"
     r"\bpid[ :=]{1,3}(?P<pid>\d{1,9})\b"),
    ("child local", "local_rank: ",
     r"\blocal_rank: (?P<local>\d{1,4}) \(pid: (?P<pid>\d{1,9})\) of binary"),
    ("child local", " spawned with command: ",
     r"\bprocess (?P<pid>\d{1,9}) spawned with command: .*--local[_-]rank=(?P<local>\d{1,4})\b"),
    # DeepSpeed's launcher ends all of its node in the order of their ranks
    ("writer pid", "killing subprocess ", r"\bKilling subprocess (?P<pid>\d{1,9})\s*$"),
    # the report of torchrun: lines of a host, its rank and its process
    ("report node", "host ", rf"^\s*host +: (?P<node>{_ADDR})\s*$"),
    ("report rank, rank node", "rank ", rf"^\s*rank +: {_RANK} \(local_rank"),
    ("report pid, process member", "exitcode ", r"^\s*exitcode +: \S+ \(pid: (?P<pid>\d{1,9})\)"),
))
# fmt: on
_GATES = WordIndex((gate.encode(), at) for at, row in enumerate(STATEMENTS) for gate in row.gates)
_PART = re.compile(r"([^,\s\[\]]*)(?:\[([\d,-]+)\])?([^,\s\[\]]*)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_INFO_NODE = re.compile(r"[\"']([\w.-]+)[\"']: ?\[([\d, ]*)\]")


def may_state(
    bare: str, form: bytes, words: Collection[bytes] | None = None
) -> tuple[Statement, ...]:
    """Statements that lines may make: `bare` without their digits, `form` in lower case too."""
    gated = (STATEMENTS[at] for at in sorted(set(_GATES.items(form, words))))
    # `re` keeps what it has compiled, and most of these patterns no log needs.
    return tuple(row for row in gated if len(bare) > LONGEST_FORM or re.search(row.loose, bare))


def identities(match: re.Match[str]) -> dict[str, Any]:
    """What a statement names; None for what this line of it does not."""
    groups = match.groupdict().items()
    found = {name: text and _READERS.get(name, _number)(text) for name, text in groups}
    if found.get("pci"):
        found["bus"] = found["pci"]
    if gpus := found.get("info"):
        found |= {"hosts": None if "localhost" in gpus else tuple(gpus)}
        equal = len(set(gpus.values())) == 1
        found |= {"nodes": len(gpus), "each": max(gpus.values())} if equal else {}
    return found


def _number(text: str) -> int | None:
    return int(text) if len(text) < 19 else None


#: Group -> what its text states; of other groups a number.
_READERS: dict[str, Callable[[str], Any]] = {
    "node": str,
    "server": str,
    "hosts": lambda text: tuple(expanded(text)) or None,
    "tasks": lambda text: [int(task) for task in numbers(text)],
    "info": lambda text: {name: len(gpus.split(",")) for name, gpus in _INFO_NODE.findall(text)},
    "pci": str.lower,
    # The last three hexadecimal digits are the device's and the function's.
    "bus": lambda text: f"{text[:-3][-2:]:0>2}:{text[-3:-1]}",
}


def expanded(hosts: str) -> list[str]:
    """All hosts of a list as SLURM writes it, in its order.

    >>> expanded("node[08-10,12],login1")
    ['node08', 'node09', 'node10', 'node12', 'login1']
    """
    if hosts.count("[") != hosts.count("]"):
        return []
    names: list[str] = []
    for before, ranges, after in _PART.findall(hosts):
        if before or ranges:
            names += [before + number + after for number in (numbers(ranges) if ranges else [""])]
        if len(names) > MAX_HOSTS:
            return []
    return names


def numbers(ranges: str) -> list[str]:
    """Expand a list of numbers as launchers write it; none of one that is too long.

    >>> numbers("3,08-10")
    ['3', '08', '09', '10']
    """
    found: list[str] = []
    for first, last in _RANGE.findall(ranges):
        if int(last or first) - int(first) > MAX_HOSTS:
            return []
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return found
