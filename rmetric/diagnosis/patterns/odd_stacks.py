"""Which processes stand elsewhere than most of the job's, by their stacks, and whose they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rmetric.diagnosis.auxiliary.stacks import Stack, main_threads, process_of
from rmetric.diagnosis.facts.job import STACKS_OF_RANK, Job, JobStream, Occurrence, short
from rmetric.diagnosis.reading.file_names import names_in, natural

#: Least number of processes with stacks, and least share of them in one place, for one to be odd.
MIN_STACKS = 3
MIN_SHARE_IN_ONE_PLACE = 0.6
#: Largest share of all stacks that may wait outside the job, to be those that hold up the others.
MAX_ODD_SHARE = 0.4
#: What faulthandler writes when a time that was set is over: once, where it watches for a hang.
_WATCHED = "Timeout ("
_AWAITS = {
    "": "stands in",
    "load data": "waits for its data in",
    "checkpoint": "is at a checkpoint in",
}


class OddStack(NamedTuple):
    """Where a stream stands other than most, in words, and what it waits for outside the job.

    Attributes:
        collective: it waits for others in a collective that they have not entered.
        stays: it does not move.
    """

    words: str
    awaits: str
    collective: bool = False
    stays: bool = False


def odd_stacks(stacks: Sequence[Stack]) -> dict[str, OddStack]:
    """The few streams that stand in another function than most, or that alone await no other.

    Of these, those that wait for data or a checkpoint keep the others waiting, which are left out.

    Args:
        stacks: of several of one rank the last counts; of a stream "" no more is known.
    """
    ranked = {one.stream: one for one in stacks if one.stream.startswith("rank ")}
    others = [one for one in stacks if one.stream not in ranked]
    every = [*ranked.values(), *others]
    found = _apart_from_most(every)
    if others:  # of a node there may be several: only what they wait for tells them apart
        known = all(one.stream for one in every)
        found = {name: odd for name, odd in found.items() if known and odd.collective}
    waiting = [one for one in every if one.stage]
    few = len(every) <= 2 or len(waiting) <= MAX_ODD_SHARE * len(every)
    if waiting and few:
        where = {name: one.words for name, one in found.items()}
        found = {
            one.stream: OddStack(where.get(one.stream, one.shown), one.stage) for one in waiting
        }
    stay = {one.stream for one in stacks if one.stays}
    return {
        name: one._replace(words=f"{_AWAITS[one.awaits]} {one.words}", stays=name in stay)
        for name, one in found.items()
    }


def _apart_from_most(stacks: Sequence[Stack]) -> dict[str, OddStack]:
    """The streams of other places than that of most, in their natural order."""
    usual, times = Counter(one.place for one in stacks).most_common(1)[0] if stacks else ((), 0)
    if len(stacks) < MIN_STACKS or times < MIN_SHARE_IN_ONE_PLACE * len(stacks):
        return {}
    example = next(one for one in stacks if one.place == usual)
    found = {}
    for one in sorted(stacks, key=lambda one: natural(one.stream)):
        if one.place != usual:
            words = f"{one.words(example)}, {times} others in {example.words(one)}"
            found[one.stream] = OddStack(words, "", one.differs(example))
    return found


def stacks_in_logs(job: Job, after: Callable[[Occurrence, Occurrence], bool]) -> list[Stack]:
    """The last stack of every stream that logged one, and no step behind it."""
    furthest = job.furthest.last_step_at if job.furthest else None

    def is_last(stream: JobStream, dump: Occurrence) -> bool:
        if stream.last_step is not None:
            return dump.step == stream.last_step
        ends = stream.last is not None and stream.last.order <= dump.order  # "Fatal Python error"
        return furthest is None or ends or after(dump, furthest)

    written = [(key[0], job.streams[key[1]], dumps) for key, dumps in _by_process(job).items()]
    last = [[one for one in every if is_last(stream, one)] for _, stream, every in written]
    rounds = {len(every) for (*_, every), dumps in zip(written, last, strict=True) if dumps}
    found = []
    for (name, stream, every), dumps in zip(written, last, strict=True):
        if not dumps and stream.last_step is None and rounds == {len(every)}:
            dumps = every  # without a time, but all were asked as often
        watched = len(every) == 1 and every[0].text.startswith(_WATCHED)
        found += _last_stack(name, dumps, watched=watched)
    return found


def _last_stack(name: str, dumps: Sequence[Occurrence], *, watched: bool) -> list[Stack]:
    *before, last = [(), *(frames for dump in dumps for frames in main_threads(dump.text))]
    stays = watched or last in before
    return [Stack(file=dumps[-1].file, stream=name, frames=last, stays=stays)] if last else []


def _by_process(job: Job) -> dict[tuple[str, str, str], list[Occurrence]]:
    """The last stacks of each process, by its rank or stream, the stream, and its main thread.

    Processes of a node may share its stream; a process of a rank may be started again.
    """
    found: dict[tuple[str, str, str], list[Occurrence]] = {}
    for stream in job.streams.values():
        for dump in stream.stacks:
            rank, thread = process_of(dump.text) if stream.rank is None else ("", "")
            thread = thread if stream.node is not None and not rank else ""
            found.setdefault((rank or stream.name, stream.name, thread), []).append(dump)
    return {key: dumps[-STACKS_OF_RANK:] for key, dumps in found.items()}


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
