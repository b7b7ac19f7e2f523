"""Connections were lost to one host."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from rmetric.diagnosis.evidence.row import Row, Scene
from rmetric.diagnosis.facts.job import Job, short

#: Least share of the ranks that lost a connection to a host, for it to be the one.
MIN_NAMING_SHARE = 0.75
#: What the name of a host's network card has behind that of the host.
_INTERFACE = re.compile(r"[-_.]?(?:ib|eth|hsn|bond|roce|opa)\d*$")
#: NCCL's lines begin with the host, whatever its folder or file is called.
_SPEAKER = re.compile(r"(?:^|\s)([A-Za-z][\w.-]*\d[\w.-]*):\d+:\d+ \[\d+\]")
_POD = re.compile(r"(?P<address>\d+-\d+-\d+-\d+)\.(?P<of>[a-z][\w-]*)\.")


@dataclass
class _Lost:
    """Connections that ranks lost.

    Attributes:
        named: host -> streams that lost a connection to it; the same of addresses.
        connections: host -> (stream, port) of each.
        reporting: hosts that report such a loss themselves.
        losing: nodes that log any lost connection.
    """

    named: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    addressed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    connections: dict[str, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    reporting: set[str] = field(default_factory=set)
    losing: set[str] = field(default_factory=set)


def lost_hosts(scene: Scene) -> list[Row]:
    """Rows against the one node to which most lost connections led, by its name.

    Of two nodes each names the other, so a node is named only where its own ranks name none; what
    is lost to the others is a consequence. An address that is not known to be a node's may be that
    of one of its network cards: it counts where no name does, and only where not all ranks are
    heard, as theirs tell more.
    """
    job, found = scene.job, _lost(scene)
    heard = {one.rank for one in job.streams.values() if one.rank is not None}
    every_rank = bool(heard) and len(heard) >= (job.world_size or 0)
    named = found.named or ({} if every_rank else found.addressed)
    lost = {host: streams for host, streams in named.items() if host not in found.reporting}
    if not lost:
        return []
    host, streams = max(lost.items(), key=lambda one: len(one[1]))
    ports = len(found.connections[host])
    # Of one log of a node, the connections are those of its ranks.
    of_one = len(lost) == 1 and ports >= 2 and host not in map(short, found.losing)
    every = set().union(*lost.values())
    if (len(streams) < 2 and not of_one) or len(streams) < MIN_NAMING_SHARE * len(every):
        return []
    nodes = {short(node): node for one in job.streams.values() if (node := job.node_of(one))}
    words = (
        f"{len(streams)} others lost their connection to it"
        if len(streams) > 1
        else f"{ports} connections to it were lost, and none to another node"
    )
    return [Row(f"node {nodes.get(host, host)}", "lost host", words)]


def _lost(scene: Scene) -> _Lost:
    job, found = scene.job, _Lost()
    for fault in scene.faults:
        if fault.has("connection"):
            found.losing |= {job.node_of(job.streams[name]) or "" for name in fault.streams}
        for match in fault.matches if fault.role == "echo" else ():
            stated = [fields for fields in match.named if fields.get("remote_host")]
            own = job.node_of(job.streams[match.stream])
            found.reporting |= {short(own)} if own and stated else set()
            if speaker := _SPEAKER.search(match.first.text):
                found.reporting.add(short(speaker[1]))
            for fields in stated:
                host = _node_of(job, fields["remote_host"])
                if host[:1].isdigit() and not _POD.match(fields["remote_host"]):
                    found.addressed[host].add(match.stream)
                    continue
                host = _INTERFACE.sub("", short(host))
                found.named[host].add(match.stream)
                found.connections[host].add((match.stream, fields.get("port", "")))
    return found


def _node_of(job: Job, host: str) -> str:
    """A node by its address, or by the name that Kubernetes gives to a pod's address.

    A service of many pods tells nothing.

    >>> _node_of(Job(), "10-244-6-37.gpt-worker-1.train.svc.cluster.local")
    'gpt-worker-1'
    >>> _node_of(Job(), "10-42-3-18.gpt.train.svc.cluster.local")
    '10.42.3.18'
    """
    pod = _POD.match(host)
    if pod and (pod["of"][-1:].isdigit() or pod["of"] in job.node_of_rank.values()):
        return pod["of"]
    address = pod["address"].replace("-", ".") if pod else host
    return job.node_of_address.get(address, address)
