"""Ranks wait for others or have lost them: who does not wait, and where connections end."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rmetric.diagnosis.evidence.scene import MAX_COMMON_SHARE, Row, Scene, divided
from rmetric.diagnosis.facts.job import short
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.signature import DIFFERENT, SILENT

_ENDS = ("local_host", "local_device", "remote_host", "remote_device")
#: Least share of the ranks that lost a connection to a host, for it to be the one.
MIN_NAMING_SHARE = 0.75
#: What the name of a host's network card has behind that of the host.
_INTERFACE = re.compile(r"[-_.]?(?:ib|eth|hsn|bond|roce|opa)\d*$")
#: Host -> (stream, port) of the connections to it that were lost.
Lost = defaultdict[str, set[tuple[str, str]]]
_POD = re.compile(r"(?P<address>\d+-\d+-\d+-\d+)\.(?P<of>[a-z][\w-]*)\.")


def links(scene: Scene) -> list[Row]:
    """The row against the only device whose link was down, by its rank or its node's own tool.

    The rank is known by its process, or by the stream of the entry.
    """
    places = dict[tuple[str, str], str]()
    for stream, fields in scene.entries:
        if all(end in fields for end in _ENDS):
            of = scene.job.ranks_of_numbers.get(int(fields.get("pid") or -1), set())
            places[stream, fields["local_device"]] = f"rank {min(of)}" if len(of) == 1 else stream
    down = {(name, each["down_device"]) for name, each in scene.entries if "down_device" in each}
    broken = [(name, device) for (of, device), name in places.items() if (of, device) in down]
    if len(broken) != 1:
        return []
    ((name, device),) = broken
    node = name.removeprefix("node ")
    where = [name] if node == name else scene.index.at(node, device)
    return [Row(one, "kernel", "its device's link was down") for one in where[:1]]


def lost_hosts(scene: Scene) -> list[Row]:
    """Rows against the one node to which most lost connections led, by its name.

    Of two nodes each names the other, so a node is named only where its own ranks name none; what
    is lost to the others is a consequence. An address that is not known to be a node's may be that
    of one of its network cards: it counts where no name does, and only where not all ranks are
    heard, as theirs tell more.
    """
    job = scene.job
    named, lost = _lost(scene)
    if not lost:
        return []
    streams = {host: {stream for stream, _ in each} for host, each in lost.items()}
    host = max(streams, key=lambda one: len(streams[one]))
    many, ports = len(streams[host]), len(lost[host])
    # Of one log of a node, the connections are those of its ranks.
    losing = {name for one in scene.faults if one.has("connection") for name in one.streams}
    nodes_losing = {short(job.node_of(job.streams[name]) or "") for name in losing}
    of_one = named and ports >= 2 and host not in nodes_losing
    every = set().union(*streams.values())
    if (many < 2 and not of_one) or many < MIN_NAMING_SHARE * len(every):
        return []
    nodes = {short(node): node for one in job.streams.values() if (node := job.node_of(one))}
    words = (
        f"{many} others lost their connection to it"
        if many > 1
        else f"{ports} connections to it were lost, and none to another node"
    )
    return [Row(f"node {nodes.get(host, host)}", "lost host", words)]


def _lost(scene: Scene) -> tuple[bool, Lost]:
    """Lost connections to hosts that report none, and whether names of hosts are known."""
    job = scene.job
    named, addressed, reporting = Lost(set), Lost(set), set[str]()
    for match in (one for fault in scene.faults if fault.role == "echo" for one in fault.matches):
        stated = [fields for fields in match.named if fields.get("remote_host")]
        own = job.node_of(job.streams[match.stream])
        reporting |= {short(own)} if own else set()
        for fields in stated:
            host = _node_of(fields["remote_host"])
            connection = match.stream, fields.get("port", "")
            if host[:1].isdigit() and not _POD.match(fields["remote_host"]):
                addressed[host].add(connection)
            else:
                named[_INTERFACE.sub("", short(host))].add(connection)
    heard = {one.rank for one in job.streams.values() if one.rank is not None}
    every_rank = bool(heard) and len(heard) >= (job.world_size or 0)
    lost = named or (Lost(set) if every_rank else addressed)
    for host in reporting:
        lost.pop(host, None)
    return bool(named), lost


def _node_of(host: str) -> str:
    """The name of a node, as stated or by the name that Kubernetes gives to a pod's address.

    A service of many pods tells nothing.

    >>> _node_of("10-244-6-37.gpt-worker-1.train.svc.cluster.local")
    'gpt-worker-1'
    >>> _node_of("10-42-3-18.gpt.train.svc.cluster.local")
    '10.42.3.18'
    """
    pod = _POD.match(host)
    if pod and pod["of"][-1:].isdigit():
        return pod["of"]
    return pod["address"].replace("-", ".") if pod else host


#: Least share of ranks in the same collective for the others to be outliers.
MIN_AGREEING_SHARE = 0.75
#: Largest share of the ranks that may lack the timeout of all others.
MAX_LACKING_SHARE = 0.25


def lacking_echoes(scene: Scene) -> list[Row]:
    """Rows against ranks without the lost-peer error that most of their peers report.

    Where nearly all waited in vain for a collective, those that did not are the ones; they may
    have logged that they heard of it.
    """
    active = scene.index.active
    echoes = [fault for fault in scene.faults if fault.role == "echo"]
    own = [one for one in echoes if not one.has("hearsay")]
    if not any(one.has("timeout") for one in own):
        own = []
    waiting, others = _reporting(scene, own)
    reporting, lacking = _reporting(scene, echoes)
    few = max(1, MAX_LACKING_SHARE * len(waiting))
    if len(active) >= 3 and 0 < len(others) <= few and set(others) - set(lacking):
        words = f"does not wait, as {len(waiting)} others do"
        return divided(Row(name, "not waiting", words) for name in others)
    most = max(1, (1.0 - MAX_COMMON_SHARE) * len(active))
    if len(active) < 3 or not reporting or len(lacking) > most:
        return []
    words = f"lacks an error that {len(reporting)} others report"
    return divided(Row(name, "no echo", words, hypothesis=SILENT) for name in lacking)


def _reporting(scene: Scene, faults: Sequence[Fault]) -> tuple[set[str], list[str]]:
    """The streams that report any of these, and those that do not."""
    index = scene.index
    reporting = index.active & {stream for one in faults for stream in one.streams}
    return reporting, [*sorted(index.active - reporting), *sorted(index.silent)]


def waited_for(scene: Scene) -> Iterator[Row]:
    """Rows against ranks for which most waiting ranks wait."""
    for fault in scene.faults:
        pairs = {
            (stream, f"rank {int(remote)}"): None
            for stream, fields in fault.entries
            if (remote := fields.get("remote_rank", "")).isdigit()
        }
        waiting = len({stream for stream, _ in pairs})
        for name, count in Counter(name for _, name in pairs).items():
            if scene.index.is_known(name) and count > MAX_COMMON_SHARE * waiting:
                words = f"{count} of the waiting ranks wait for it"
                yield Row(name, "waited for", words, 1.0 if count > 1 else 0.7)


def collectives(scene: Scene) -> Iterator[Row]:
    """Rows against ranks that wait in another collective than most.

    Timeouts name the collective, by its number or its operation; the few that are not where the
    others are kept the others waiting. What holds up one rank holds up its group in another
    operation.
    """
    awaited = {name for name, one in scene.odd_stacks.items() if one.awaits}
    rows: list[Row] = []
    for fault in scene.faults:
        if fault.role in ("echo", "symptom"):
            words = "waits in collective {}, the others in {}"
            rows += _unlike_most(fault, "sequence", words)
            rows += _unlike_most(fault, "operation", "waits in {}, the others in {}", DIFFERENT)
    return (one for one in rows if not awaited or one.target in awaited)


def _unlike_most(fault: Fault, field: str, words: str, hypothesis: str = "") -> list[Row]:
    stated = dict[str, str]()
    for stream, fields in fault.entries:
        if fields.get(field):
            stated.setdefault(stream, fields[field])
    if len(stated) < 3:
        return []
    ((usual, times),) = Counter(stated.values()).most_common(1)
    if times < MIN_AGREEING_SHARE * len(stated):
        return []
    numbers = field == "sequence" and all(map(str.isdigit, stated.values()))
    return divided(
        Row(name, "other collective", words.format(value, usual), 1.0, hypothesis)
        for name, value in stated.items()
        if value != usual and (not numbers or int(value) < int(usual))
    )
