"""Expand SLURM host lists."""

from __future__ import annotations

import re

#: Hosts of one list; what is longer is no list of hosts.
MAX_HOSTS = 100_000
_PART = re.compile(r"([^,\s\[\]]*)(?:\[([\d,-]+)\])?([^,\s\[\]]*)")


def expanded(hosts: str) -> list[str]:
    """All hosts of a list, in its order.

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
