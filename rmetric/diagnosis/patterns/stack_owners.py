"""Which stream of the job a stack of py-spy is of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from rmetric.diagnosis.auxiliary.stacks import Stack
from rmetric.diagnosis.facts.job import Job, short
from rmetric.diagnosis.reading.file_names import names_in

#: Least number of processes that are all of a job on one node whose size is not stated.
MIN_PROCESSES = 3


def assign(
    job: Job, stacks: Sequence[Stack], on_node: Callable[[str, str], Sequence[str]]
) -> list[Stack]:
    """The stacks with the streams of the job that they are of.

    A process is known by its rank, by its number, or by its rank within its node. Where none of a
    file's is, processes of consecutive numbers are those of one launcher, in the order of their
    ranks. Else it is the node's, if that is known.
    """
    nodes = {*map(job.node_of, job.streams.values()), *job.node_of_rank.values()} - {None}
    whole = {short(node): node for node in sorted(filter(None, nodes))}
    numbers = job.ranks_of_numbers
    by_file = defaultdict(list)
    for one in stacks:
        by_file[one.file].append(one)
        if one.node not in nodes:
            named = names_in(one.node or one.above, whole) or names_in(one.file, whole)
            one.node = whole[named[0]] if named else one.node
        one.stream = _by_rank(job, one, numbers)
    heard = [one.rank for one in job.streams.values() if one.rank is not None]
    size = job.world_size or max(heard, default=-1) + 1 or None
    each = job.ranks_per_node or (size // max(1, len(nodes)) if size else None)
    # A file for each process, or for all of a node.
    alone = all(len(some) == 1 for some in by_file.values())
    for some in [list(stacks)] if alone else by_file.values():
        _by_order(some, each)
    all_there = len(stacks) >= MIN_PROCESSES and size in (None, len(stacks))
    _by_local_rank(stacks, on_node, one_node=all_there and len(nodes) <= 1)
    return list(stacks)


def _by_rank(job: Job, stack: Stack, numbers: dict[int, set[int]]) -> str:
    """The rank that the file states, or that has the process's number."""
    rank = stack.rank
    if rank is None and stack.pid is not None:
        alike = numbers.get(stack.pid, set())
        only = min(alike) if len(alike) == 1 else None
        rank = job.rank_of_pid.get((stack.node, stack.pid), only)
    return f"rank {rank}" if rank is not None else ""


def _by_local_rank(
    stacks: Sequence[Stack], on_node: Callable[[str, str], Sequence[str]], *, one_node: bool
) -> None:
    """The rank of a number within its node, else the node, of those that are not known."""
    left = [one for one in stacks if not one.stream]
    local = [one.local_rank for one in left if one.local_rank is not None]
    one_node = one_node and len(set(local)) == len(local)
    for one in left:
        node, number = one.node, one.local_rank
        names = on_node(node, str(number)) if node is not None and number is not None else ()
        if one_node and number is not None and not any(name.startswith("rank ") for name in names):
            names = [f"rank {number}"]
        one.stream = names[0] if len(names) == 1 else f"node {node}" if node is not None else ""


def _by_order(stacks: Sequence[Stack], each: int | None) -> None:
    """Local ranks of the processes of one file by their numbers, where nothing else tells them.

    Not where fewer than `each` are there: nothing tells which are missing.
    """
    numbers = sorted({one.pid for one in stacks if one.pid is not None})
    known = any(one.stream or one.local_rank is not None or one.pid is None for one in stacks)
    in_row = len(numbers) > 1 and numbers[-1] - numbers[0] + 1 == len(numbers)
    if known or not in_row or each not in (None, len(numbers)):
        return
    for one in stacks:
        one.local_rank = numbers.index(one.pid or 0)
        if one.node is None:
            one.rank, one.stream = one.local_rank, f"rank {one.local_rank}"
