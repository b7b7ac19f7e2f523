"""What lines state of ranks, nodes, processes and GPUs, by statements.yaml.

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
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rmetric.diagnosis.library.load import any_digits
from rmetric.diagnosis.reading import line_heads, read_patterns
from rmetric.diagnosis.reading.text import WordIndex

#: More than the ranks of any communicator: for a rank that is stated as the job's own.
MANY_RANKS = 1 << 30
#: Most hosts in one list; a longer list has other contents.
MAX_HOSTS = 100_000
#: Characters of a line's form; longer ones may state anything.
LONGEST_FORM = 2000


class Statement:
    """One way in which lines state something: a row of statements.yaml."""

    __slots__ = ("examples", "gates", "loose", "pattern", "ties")

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.ties = [(name, other) for name, other in map(str.split, row["ties"])]
        self.gates, self.examples = row["gates"], row["examples"]
        self.pattern = re.compile(row["pattern"])
        self.loose = any_digits(row["pattern"])


_TABLE = read_patterns(Path(__file__).with_name("statements.yaml"), line_heads()["fragments"])
STATEMENTS = tuple(map(Statement, _TABLE["statements"]))
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
