"""An entry names a process or a device: of a kernel, of Ray, of a writer of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.faults import Fault

#: Bus and device of a GPU, as the kernel writes them.
_PCI = re.compile(r"(?:\b[0-9a-fA-F]{4,8}:)([0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
#: The process of a task of Ray, at the head of its traceback.
_RAY_TASK = re.compile(r"\bray::\S+ \(pid=(?P<pid>\d{1,9}), ip=(?P<ip>[\d.a-f:]+)")


def processes(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks whose processes or devices entries name."""
    innocent = {
        name
        for one in scene.faults
        if one.role == "echo" or one.signature.of_two
        for name in one.streams
    }
    for fault in scene.faults:
        if fault.role == "cause" and fault.signature.rank:
            yield from _writers(scene, fault)
            yield from _on_its_node(scene.job, fault)
            yield from _tasks_of_ray(scene.job, fault)
        if fault.role == "cause" or fault.has("hang"):
            yield from _numbers(scene, fault, innocent)


def _numbers(scene: Scene, fault: Fault, innocent: set[str]) -> list[Row]:
    """Rows against the ranks whose processes entries name, of which each number is of one."""
    job, ranks = scene.job, scene.job.ranks_of_numbers
    blocked = fault.has("blocked process") or fault.has("stopped process")
    found = set()
    stated = [(one, each["pid"]) for one in fault.matches for each in one.named if "pid" in each]
    for match, number in stated:
        of = ranks.get(int(number), set()) if number.isdigit() else set()
        node = match.stream.removeprefix("node ")
        if node != match.stream:  # of a kernel
            known = job.rank_of_pid.get((node, int(number))) if number.isdigit() else None
            of = ({known} if known is not None else of) if blocked else set()
            found |= {match.stream} if blocked and len(of) != 1 else set()
        if len(of) == 1:
            found.add(f"rank {min(of)}")
    found -= innocent
    if not scene.index.is_minority(len(found)):
        return []
    kind = "accused" if fault.role == "cause" else "implicated"
    return divided(sorted(found), kind, f"its process is named in: {fault.signature.title}")


def _tasks_of_ray(job: Job, fault: Fault) -> list[Row]:
    """Rows against the worker of Ray whose traceback in the driver's log ends with a fault.

    verl names its workers by their node in the pool and their number on it: "WorkerDict_1:3".
    """
    found = set()
    for match in fault.matches:
        before = [one for one in job.streams[match.stream].tail if one.order <= match.first.order]
        tasks = [task for entry in before[-2:] for task in _RAY_TASK.findall(entry.text)]
        if tasks and (rank := job.rank_of_pid.get((tasks[-1][1], int(tasks[-1][0])))) is not None:
            found.add(f"rank {rank}")
    each = job.ranks_per_node
    found |= {
        f"rank {int(fields['pool_node']) * each + int(fields['pool_local'])}"
        for match in fault.matches
        for fields in match.named
        if each and "pool_node" in fields
    }
    return divided(sorted(found), "accused", f"its process raised: {fault.signature.title}")


def _writers(scene: Scene, fault: Fault) -> list[Row]:
    """Rows against ranks that state their number in the entry, where the log does not."""
    index = scene.index
    ranks = sorted({
        int(fields["writer"])
        for match in fault.matches
        if match.stream not in index.ranks
        for fields in match.named
        if "writer" in fields
    })  # fmt: skip
    names = [name for rank in ranks if index.is_known(name := f"rank {rank}")]
    names = names or index.without_logs(ranks)
    if not index.is_minority(len(names)):
        return []
    return divided(names, "accused", f"logged: {fault.signature.title}")


def _on_its_node(job: Job, fault: Fault) -> list[Row]:
    """Rows against the ranks whose GPUs or processes a node's kernel names."""
    if fault.follows and not fault.has("kill"):  # which says several things
        return []
    ranks: dict[int, str] = {}
    for match in fault.matches:
        node = match.stream.removeprefix("node ")
        for fields in match.named if node != match.stream else ():
            address, pid = _PCI.search(fields.get("gpu", "")), fields.get("pid", "")
            if address and (rank := job.rank_of_gpu.get((node, address[1].lower()))) is not None:
                ranks[rank] = "GPU"
            elif pid.isdigit() and (rank := _of_process(job, node, int(pid))) is not None:
                ranks[rank] = "process"
    if len(fault.matches) > len(ranks):
        return []  # another node's is not known
    title, each = fault.signature.title, fault.confidence / max(1, len(ranks)) ** 0.5
    return [
        Row(f"rank {rank}", "kernel", f"its {what} is named in: {title}", each)
        for rank, what in sorted(ranks.items())
    ]


def _of_process(job: Job, node: str, pid: int) -> int | None:
    rank = job.rank_of_pid.get((node, pid))
    return job.rank_of_pid.get((None, pid)) if rank is None else rank
