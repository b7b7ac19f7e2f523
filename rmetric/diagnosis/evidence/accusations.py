"""Ranks that faults point to: the logger, the named rank, the rank that others wait for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from signal import SIGABRT

from rmetric.diagnosis.evidence.scene import MAX_COMMON_SHARE, Row, Scene, divided, was_ended_by
from rmetric.diagnosis.facts.job import Job, Match, short
from rmetric.diagnosis.faults import GENERIC, Fault
from rmetric.diagnosis.signature import DIFFERENT, SILENT

#: Entries of an error in a log without ranks that are of all ranks rather than of one.
BY_ALL = 4
#: Bus and device of a GPU, as the kernel writes them.
_PCI = re.compile(r"(?:\b[0-9a-fA-F]{4,8}:)([0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
#: The process of a task of Ray, at the head of its traceback.
_RAY_TASK = re.compile(r"\bray::\S+ \(pid=(?P<pid>\d{1,9}), ip=(?P<ip>[\d.a-f:]+)")
_LINK_ENDS = ("local_host", "local_device", "remote_host", "remote_device")
#: What the name of a host's network card has behind that of the host.
_INTERFACE = re.compile(r"[-_.]?(?:ib|eth|hsn|bond|roce|opa)\d*$")
#: Host -> (stream, port) of the connections to it that were lost.
Lost = defaultdict[str, set[tuple[str, str]]]
_POD = re.compile(r"(?P<address>\d+-\d+-\d+-\d+)\.(?P<of>[a-z][\w-]*)\.")
#: Least share of ranks that lost the same host, or are in the same collective, to agree.
MIN_AGREEING_SHARE = 0.75
#: Largest share of the ranks that may lack the timeout of all others.
MAX_LACKING_SHARE = 0.25


def own_faults(scene: Scene) -> Iterator[Row]:
    """Rows against the streams that logged a cause."""
    active = scene.index.active
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
    yield from _confirmed(scene)


def _confirmed(scene: Scene) -> Iterator[Row]:
    """Rows against the only rank that logged a fault of the kind that its node logged."""
    broken = [fault for fault in scene.faults if fault.signature.actor == "hardware"]
    for fault in broken:
        alike = (other for other in broken if other.signature.family == fault.signature.family)
        family = {name for other in alike for name in other.streams}
        for node in fault.streams:
            ranks = family & scene.index.on_node(node) if node.startswith("node ") else set()
            if len(ranks) == 1:
                yield Row(ranks.pop(), "confirmed", f"its node logged: {fault.signature.title}")


def _own_matches(scene: Scene, fault: Fault) -> list[Match]:
    """The fault's matches in streams of known ranks or nodes; none if they report another's."""
    index = scene.index
    own = [match for match in fault.matches if match.stream in index.active]
    nodes = [match for match in fault.matches if match.stream.startswith("node ")]
    if nodes and (fault.signature.actor == "hardware" or fault.has("kernel record")):
        return own or nodes  # even where only ranks have logs
    # A single log that may be of the whole job accuses nobody; one of rank 3 has peers.
    alone = len(index.active) == 1 and not any(index.ranks.values())
    return [] if alone else own


def named_ranks(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks that entries name, the stronger the fewer; a symptom spares some."""
    index, innocent = scene.index, _innocent(scene)
    for fault in scene.faults:
        is_symptom, aborted, names = fault.role == "symptom", False, dict[str, None]()
        if fault.role == "ending" or (is_symptom and _of_many(scene, fault)):
            continue
        spared = innocent - _agreed(fault) if is_symptom else set[str]()
        for stream, fields in fault.entries:
            named = [name for name in index.implicated_ranks(fields, stream) if name not in spared]
            names |= dict.fromkeys(named)
            aborted |= bool(named) and was_ended_by(SIGABRT, fields)
        # A node may have left no log.
        implicated = [*filter(index.is_known, names)] or [*names]
        if index.is_minority(len(implicated)):
            # A launcher reports consequences too, and watchdogs end processes by an abort. But one
            # exit alone is strong evidence.
            kind = "only exit" if is_symptom and len(implicated) == 1 else "implicated"
            kind = kind if fault.follows or aborted else "named as faulty"
            yield from _against(implicated, kind, "named in: {}", fault)


def _innocent(scene: Scene) -> set[str]:
    """Streams that waited for another, lost it, or failed in the same way as most."""
    return {
        name
        for fault in scene.faults
        if fault.role == "echo"
        or (fault.role == "cause" and fault.follows and fault.has("connection"))
        or (fault.role == "cause" and not scene.index.is_minority(len(fault.streams)))
        for name in fault.streams
    }


def _of_many(scene: Scene, exits: Fault) -> bool:
    """True for plain exits beside the report of a lost peer, or behind an error of all ranks."""
    faults = scene.faults
    lost = [fault for fault in faults if fault.has("lost connection")]
    causes = [fault for fault in faults if fault.role == "cause" and not fault.follows]
    sure = (fault for fault in causes if fault.confidence >= GENERIC)
    if exits.has("task exit") and lost and all(fault in lost for fault in sure):
        return True  # whoever loses another one ends, the first as well as the last
    of_all = (
        fault
        for fault in faults
        if fault.has("connection")
        or (fault.signature.actor == "user" and fault.count >= BY_ALL and not fault.follows)
    )
    later = any(scene.ordering.after(exits.first, fault.first) for fault in of_all)
    return later and not scene.index.ranks


def _against(names: Iterable[str], kind: str, words: str, fault: Fault) -> list[Row]:
    return divided(Row(name, kind, words.format(fault.signature.title)) for name in names)


def _agreed(fault: Fault) -> set[str]:
    """The rank that several ranks name alike, as those notified of a failed checkpoint do."""
    named = [(stream, fields["rank"]) for stream, fields in fault.entries if "rank" in fields]
    ranks = {f"rank {rank}" for _, rank in named}
    by_ranks = {stream for stream, _ in named if stream.startswith("rank ")} - ranks
    return ranks if len(ranks) == 1 and len(by_ranks) > 1 else set()


def processes(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks whose processes or devices entries name."""
    job, index = scene.job, scene.index
    waited = {name for fault in scene.faults if fault.role == "echo" for name in fault.streams}
    for fault in scene.faults:
        if fault.role == "cause" and fault.signature.rank:
            yield from _on_its_node(job, fault)
            tasks = sorted(_tasks_of_ray(job, fault))
            yield from _against(tasks, "named as faulty", "its process raised: {}", fault)
        if fault.role == "cause" or fault.has("hang"):
            owners = sorted(_owners(job, fault) - waited)
            kind = "named as faulty" if fault.role == "cause" else "implicated"
            if index.is_minority(len(owners)):
                yield from _against(owners, kind, "its process is named in: {}", fault)


def _pid(fields: dict[str, str]) -> int:
    return int(pid) if (pid := fields.get("pid", "")).isdigit() else -1


def _owners(job: Job, fault: Fault) -> set[str]:
    """The ranks whose processes entries name, of which each number is of one."""
    blocked = fault.has("blocked process") or fault.has("stopped process")
    found = set()
    for stream, fields in fault.entries:
        ranks = job.ranks_of_numbers.get(_pid(fields), set())
        node = stream.removeprefix("node ")
        if node != stream:  # of a kernel
            known = job.rank_of_pid.get((node, _pid(fields)))
            ranks = ({known} if known is not None else ranks) if blocked else set()
            found |= {stream} if blocked else set()
        found |= {f"rank {min(ranks)}"} if len(ranks) == 1 else set()
    return found


def _tasks_of_ray(job: Job, fault: Fault) -> Iterator[str]:
    """The ranks of Ray's workers whose traceback in the driver's log ends with a fault."""
    for match in fault.matches:
        lines = [line for line in job.streams[match.stream].tail if line.order <= match.first.order]
        tasks = [task for line in lines[-2:] for task in _RAY_TASK.findall(line.text)]
        if tasks and (rank := job.rank_of_pid.get((tasks[-1][1], int(tasks[-1][0])))) is not None:
            yield f"rank {rank}"
    each = job.ranks_per_node
    for _, fields in fault.entries:  # verl's names have the node in the pool: "WorkerDict_1:3"
        if each and "pool_node" in fields:
            yield f"rank {int(fields['pool_node']) * each + int(fields['pool_local'])}"


def _on_its_node(job: Job, fault: Fault) -> list[Row]:
    """Rows against the ranks whose GPUs or processes a node's kernel names."""
    if fault.follows and not fault.has("kill"):  # which states several things
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


# -- waiting for others, or having lost them


def links(scene: Scene) -> list[Row]:
    """The row against the only device whose link was down, by its rank or its node's own tool.

    The rank is known by its process, or by the stream of the entry.
    """
    places = dict[tuple[str, str], str]()
    for stream, fields in scene.entries:
        if all(end in fields for end in _LINK_ENDS):
            of = scene.job.ranks_of_numbers.get(_pid(fields), set())
            places[stream, fields["local_device"]] = f"rank {min(of)}" if len(of) == 1 else stream
    down = {(name, each["down_device"]) for name, each in scene.entries if "down_device" in each}
    broken = [(name, device) for (of, device), name in places.items() if (of, device) in down]
    if len(broken) != 1:
        return []
    ((name, device),) = broken
    node = name.removeprefix("node ")
    where = [name] if node == name else scene.index.at(node, device)
    return [Row(target, "kernel", "its device's link was down") for target in where[:1]]


def lost_hosts(scene: Scene) -> list[Row]:
    """Rows against the one node to which most lost connections led, by its name.

    Two nodes name each other, so a node is named only where its own ranks name none; what
    is lost to the others is a consequence. An address that is not known to be a node's may be that
    of one of its network cards: it counts where no name does, and only where some ranks have no
    log, as the logs of all are better evidence.
    """
    job = scene.job
    named, lost = _lost(scene)
    streams = {host: {stream for stream, _ in each} for host, each in lost.items()}
    if not streams:
        return []
    host = max(streams, key=lambda name: len(streams[name]))
    many, ports = len(streams[host]), len(lost[host])
    # The connections in the one log of a node are those of its ranks.
    losing = {name for fault in scene.faults if fault.has("connection") for name in fault.streams}
    nodes_losing = {short(job.node_of(job.streams[name]) or "") for name in losing}
    of_one = named and ports >= 2 and host not in nodes_losing
    if (many < 2 and not of_one) or many < MIN_AGREEING_SHARE * len(set().union(*streams.values())):
        return []
    nodes = {short(node): node for log in job.streams.values() if (node := job.node_of(log))}
    words = f"{ports} connections to it were lost, and none to another node"
    words = f"{many} others lost their connection to it" if many > 1 else words
    return [Row(f"node {nodes.get(host, host)}", "lost host", words)]


def _lost(scene: Scene) -> tuple[bool, dict[str, set[tuple[str, str]]]]:
    """If names of hosts are known; of those that report none, (stream, port) of what was lost."""
    job = scene.job
    named, addressed, reporting = Lost(set), Lost(set), set[str]()
    for match in (match for echo in scene.faults if echo.role == "echo" for match in echo.matches):
        if own := job.node_of(job.streams[match.stream]):
            reporting.add(short(own))
        for fields in match.named:
            if not (stated := fields.get("remote_host")):
                continue
            host, connection = _node_of(stated), (match.stream, fields.get("port", ""))
            if host[:1].isdigit() and not _POD.match(stated):
                addressed[host].add(connection)
            else:
                named[_INTERFACE.sub("", short(host))].add(connection)
    ranks = sum(log.rank is not None for log in job.streams.values())
    every_rank = 0 < ranks >= (job.world_size or 0)
    lost = named or (Lost(set) if every_rank else addressed)
    return bool(named), {host: lost[host] for host in lost if host not in reporting}


def _node_of(host: str) -> str:
    """The name of a node, as stated or by the name that Kubernetes gives to a pod's address.

    A service of many pods identifies no node.

    >>> _node_of("10-244-6-37.gpt-worker-1.train.svc.cluster.local")
    'gpt-worker-1'
    >>> _node_of("10-42-3-18.gpt.train.svc.cluster.local")
    '10.42.3.18'
    """
    pod = _POD.match(host)
    if pod and pod["of"][-1:].isdigit():
        return pod["of"]
    return pod["address"].replace("-", ".") if pod else host


def lacking_echoes(scene: Scene) -> list[Row]:
    """Rows against ranks without the lost-peer error that most of their peers report.

    Where nearly all timed out in a collective, those that did not are accused; they may
    have logged that others reported it.
    """
    index = scene.index
    echoes = [fault for fault in scene.faults if fault.role == "echo"]
    own = [fault for fault in echoes if not fault.has("hearsay")]
    waiting = {stream for fault in own for stream in fault.streams} & index.active
    reporting = {stream for fault in echoes for stream in fault.streams} & index.active
    others, lacking = (
        [*sorted(index.active - some), *sorted(index.silent)] for some in (waiting, reporting)
    )
    if len(index.active) < 3 or not reporting:
        return []
    few = max(1, MAX_LACKING_SHARE * len(waiting))
    timed_out = any(fault.has("timeout") for fault in own)
    if timed_out and 0 < len(others) <= few and set(others) - set(lacking):
        words = f"does not wait, as {len(waiting)} others do"
        return divided(Row(name, "not waiting", words) for name in others)
    if len(lacking) > max(1, (1.0 - MAX_COMMON_SHARE) * len(index.active)):
        return []
    words = f"lacks an error that {len(reporting)} others report"
    return divided(Row(name, "no echo", words, hypothesis=SILENT) for name in lacking)


def waited_for(scene: Scene) -> Iterator[Row]:
    """Rows against ranks for which most waiting ranks wait."""
    for fault in scene.faults:
        remote = {(stream, fields.get("remote_rank", "")) for stream, fields in fault.entries}
        pairs = {(stream, f"rank {int(rank)}") for stream, rank in remote if rank.isdigit()}
        waiting = len({stream for stream, _ in pairs})
        for name, count in sorted(Counter(name for _, name in pairs).items()):
            if scene.index.is_known(name) and count > MAX_COMMON_SHARE * waiting:
                words = f"{count} of the waiting ranks wait for it"
                yield Row(name, "waited for", words, 1.0 if count > 1 else 0.7)


def collectives(scene: Scene) -> Iterator[Row]:
    """Rows against ranks that wait in another collective than most.

    Timeouts name the collective, by its number or its operation; the few that are not where the
    others are kept the others waiting. What holds up one rank holds up its group in another
    operation.
    """
    awaited = {name for name, stack in scene.odd_stacks.items() if stack.awaits}
    faults = [fault for fault in scene.faults if fault.role in ("echo", "symptom")]
    for fault, field in product(faults, ("sequence", "operation")):
        # The first that a stream states.
        each = {stream: of[field] for stream, of in reversed(fault.entries) if of.get(field)}
        if len(each) < 3:
            continue
        ((usual, times),) = Counter(each.values()).most_common(1)
        numbers = field == "sequence" and all(map(str.isdigit, each.values()))
        what = "collective " if field == "sequence" else ""
        words, for_cause = f"waits in {what}{{}}, the others in {usual}", "" if what else DIFFERENT
        if times >= MIN_AGREEING_SHARE * len(each):
            yield from divided(
                Row(name, "other collective", words.format(value), hypothesis=for_cause)
                for name, value in reversed(each.items())
                if value != usual
                and (not numbers or int(value) < int(usual))
                and (not awaited or name in awaited)
            )
