"""Logs of a rank or a node hold a fault; entries name ranks, nodes, processes and devices."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator

from rmetric.diagnosis.evidence.scene import MAX_COMMON_SHARE, Row, Scene, divided, signal_of
from rmetric.diagnosis.facts.job import Job, Match
from rmetric.diagnosis.faults import Fault

#: Entries of an error in a log without ranks that are of all ranks rather than of one.
BY_ALL = 4
#: Bus and device of a GPU, as the kernel writes them.
_PCI = re.compile(r"(?:\b[0-9a-fA-F]{4,8}:)([0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
#: The process of a task of Ray, at the head of its traceback.
_RAY_TASK = re.compile(r"\bray::\S+ \(pid=(?P<pid>\d{1,9}), ip=(?P<ip>[\d.a-f:]+)")


def own_faults(scene: Scene) -> Iterator[Row]:
    """Rows against the streams that logged a cause, or a fault of the kind that its node logged."""
    index, active = scene.index, scene.index.active
    for fault in scene.faults:
        own = _own_matches(scene, fault)
        # A traceback without its exception may be of any rank.
        if not own or fault.role != "cause" or not fault.signature.rank:
            continue
        words = f"logged: {fault.signature.title}"
        few = len(own) <= MAX_COMMON_SHARE * len(active) or len(own) == len(active) == 1
        if few or fault.signature.of_two:
            kind = "own consequence" if fault.follows else "own cause"
            kind = "of two" if fault.signature.of_two else kind
            for match in own:
                yield Row(match.stream, kind, words, fault.confidence, entry=match.first)
        if fault.follows and fault.signature.reason_in:  # its reason was seen by others
            yield Row(own[0].stream, "own cause", words)
    broken = [one for one in scene.faults if one.signature.actor == "hardware"]
    for one in broken:
        alike = (each for each in broken if each.signature.family == one.signature.family)
        family = {name for each in alike for name in each.streams}
        for node in one.streams:
            ranks = family & index.on_node(node) if node.startswith("node ") else set()
            if len(ranks) == 1:
                yield Row(ranks.pop(), "confirmed", f"its node logged: {one.signature.title}")


def _own_matches(scene: Scene, fault: Fault) -> list[Match]:
    """Those of streams of which a rank or a node can be told; none where they tell of another."""
    index = scene.index
    own = [match for match in fault.matches if match.stream in index.active]
    nodes = [match for match in fault.matches if match.stream.startswith("node ")]
    if nodes and (fault.signature.actor == "hardware" or fault.has("kernel record")):
        return own or nodes  # even where only ranks have logs
    # Of one log that may be of the whole job nobody can be told; one of rank 3 has peers.
    alone = len(index.active) == 1 and not any(index.ranks.values())
    return [] if alone else own


def named_ranks(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks that entries name, the stronger the fewer; a symptom spares some."""
    index = scene.index
    # They waited for another, lost it, or failed in the same way as most.
    innocent = {
        name
        for one in scene.faults
        if one.role == "echo"
        or (one.role == "cause" and one.follows and one.has("connection"))
        or (one.role == "cause" and not index.is_minority(len(one.streams)))
        for name in one.streams
    }
    for fault in scene.faults:
        is_symptom, aborted, names = fault.role == "symptom", False, dict[str, None]()
        if fault.role == "ending" or (is_symptom and _of_many(scene, fault)):
            continue
        spared = innocent - _agreed(fault) if is_symptom else set[str]()
        for stream, fields in fault.entries:
            of = [name for name in index.implicated_ranks(fields, stream) if name not in spared]
            names |= dict.fromkeys(of)
            aborted |= bool(of) and signal_of(fields) == signal.SIGABRT
        # A node may have left no log.
        implicated = [*filter(index.is_known, names)] or [*names]
        if index.is_minority(len(implicated)):
            # A launcher reports consequences too, and watchdogs end processes by an abort. But one
            # exit alone is strong evidence.
            alone = is_symptom and len(implicated) == 1
            kind = "only exit" if alone else "implicated"
            kind = kind if fault.follows or aborted else "accused"
            yield from _against(implicated, kind, "named in: {}", fault)


def _of_many(scene: Scene, exits: Fault) -> bool:
    """True for plain exits of which others may have been the first.

    They stand beside the report of a lost peer, or behind an error that ranks logged many times.
    """
    faults = scene.faults
    lost = [one for one in faults if one.has("lost connection")]
    sure = (one for one in faults if one.role == "cause" and one.is_sure)
    if exits.has("task exit") and lost and all(one in lost for one in sure):
        return True  # whoever loses another one ends, the first as well as the last
    of_all = (
        one
        for one in faults
        if one.has("connection")
        or (one.signature.actor == "user" and one.count >= BY_ALL and not one.follows)
    )
    later = any(scene.ordering.after(exits.first, one.first) for one in of_all)
    return later and not scene.index.ranks


def _against(names: Iterable[str], kind: str, words: str, fault: Fault) -> list[Row]:
    return divided(Row(name, kind, words.format(fault.signature.title)) for name in names)


def _agreed(fault: Fault) -> set[str]:
    """The rank that several ranks name alike, as those that hear of a failed checkpoint do."""
    told = [(stream, fields["rank"]) for stream, fields in fault.entries if "rank" in fields]
    ranks = {f"rank {rank}" for _, rank in told}
    by_ranks = {stream for stream, _ in told if stream.startswith("rank ")} - ranks
    return ranks if len(ranks) == 1 and len(by_ranks) > 1 else set()


def processes(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks whose processes or devices entries name."""
    job, index = scene.job, scene.index
    waited = {name for one in scene.faults if one.role == "echo" for name in one.streams}
    for fault in scene.faults:
        if fault.role == "cause" and fault.signature.rank:
            yield from _on_its_node(job, fault)
            tasks = sorted(_tasks_of_ray(job, fault))
            yield from _against(tasks, "accused", "its process raised: {}", fault)
        if fault.role == "cause" or fault.has("hang"):
            owners = sorted(_owners(job, fault) - waited)
            kind = "accused" if fault.role == "cause" else "implicated"
            if index.is_minority(len(owners)):
                yield from _against(owners, kind, "its process is named in: {}", fault)


def _pid(fields: dict[str, str]) -> int:
    return int(pid) if (pid := fields.get("pid", "")).isdigit() else -1


def _owners(job: Job, fault: Fault) -> set[str]:
    """The ranks whose processes entries name, of which each number is of one."""
    blocked = fault.has("blocked process") or fault.has("stopped process")
    found = set()
    for stream, fields in fault.entries:
        of = job.ranks_of_numbers.get(_pid(fields), set())
        node = stream.removeprefix("node ")
        if "pid" in fields and node != stream:  # of a kernel
            known = job.rank_of_pid.get((node, _pid(fields)))
            of = ({known} if known is not None else of) if blocked else set()
            found |= {stream} if blocked else set()
        found |= {f"rank {min(of)}"} if len(of) == 1 else set()
    return found


def _tasks_of_ray(job: Job, fault: Fault) -> Iterator[str]:
    """The ranks of Ray's workers whose traceback in the driver's log ends with a fault.

    verl names its workers by their node in the pool and their number on it: "WorkerDict_1:3".
    """
    for match in fault.matches:
        before = [one for one in job.streams[match.stream].tail if one.order <= match.first.order]
        tasks = [task for entry in before[-2:] for task in _RAY_TASK.findall(entry.text)]
        if tasks and (rank := job.rank_of_pid.get((tasks[-1][1], int(tasks[-1][0])))) is not None:
            yield f"rank {rank}"
    each = job.ranks_per_node
    for _, fields in fault.entries:
        if each and "pool_node" in fields:
            yield f"rank {int(fields['pool_node']) * each + int(fields['pool_local'])}"


def _on_its_node(job: Job, fault: Fault) -> list[Row]:
    """Rows against the ranks whose GPUs or processes a node's kernel names."""
    if fault.follows and not fault.has("kill"):  # which says several things
        return []
    ranks: dict[int, str] = {}
    for stream, fields in fault.entries:
        node, number = stream.removeprefix("node "), _pid(fields)
        address = _PCI.search(fields.get("gpu", ""))
        by_gpu = job.rank_of_gpu.get((node, address[1].lower())) if address else None
        by_pid = job.rank_of_pid.get((node, number), job.rank_of_pid.get((None, number)))
        if node != stream and by_gpu is not None:
            ranks[by_gpu] = "GPU"
        elif node != stream and by_pid is not None:
            ranks[by_pid] = "process"
    if len(fault.matches) > len(ranks):
        return []  # another node's is not known
    words = f"its {{}} is named in: {fault.signature.title}"
    return divided(
        Row(f"rank {rank}", "kernel", words.format(what), fault.confidence)
        for rank, what in sorted(ranks.items())
    )
