"""Infer the unreachable rank from the order in which its ring neighbours lose connections."""

from __future__ import annotations

import re
from collections import defaultdict

from rmetric.diagnosis.evidence.row import Row, Scene
from rmetric.diagnosis.job import Job, short

#: Least number of ranks that form a ring, and of losses that form an order.
MIN_RANKS = 4
#: Weight of a neighbour at a distance of a power of two, relative to a ring neighbour.
POWER_OF_TWO_WEIGHT = 0.4
#: Least strength of evidence.
MIN_STRENGTH = 0.3
#: Least share of the ranks that lost a connection to a host, for it to be the one.
MIN_NAMING_SHARE = 0.75
#: What the name of a host's network card has behind that of the host.
_INTERFACE = re.compile(r"[-_.]?(?:ib|eth|hsn|bond|roce|opa)\d*$")
#: NCCL's lines begin with the host, whatever its folder or file is called.
_SPEAKER = re.compile(r"(?:^|\s)([A-Za-z][\w.-]*\d[\w.-]*):\d+:\d+ \[\d+\]")
_POD = re.compile(r"(?P<address>\d+-\d+-\d+-\d+)\.(?P<of>[a-z][\w-]*)\.")
#: Losses are in an order, or of few, if the best place is so many times better than the usual.
MIN_BEST_TO_MEAN_RATIO = 1.2
#: Losses run round the ring from a rank if at least this much of their order agrees with it; and
#: another rank is as good a centre as it agrees, down to none at so much less.
MIN_WAVE_AGREEMENT = 0.8
CENTRE_TOLERANCE = 0.2
#: Of an order so many are compared, of so many orders; waves are sought in so large a world.
MAX_COMPARED_LOSSES = 12
MAX_COMPARED_ORDERS = 64
MAX_WAVE_WORLD_SIZE = 2048


def lost_hosts(scene: Scene) -> list[Row]:
    """Rows against the one node to which most lost connections led, by its name.

    Of two nodes each names the other, so a node is named only where its own ranks name none; what
    is lost to the others is a consequence. An address that is not known to be a node's may be that
    of one of its network cards: it counts where no name does, and only where not all ranks are
    heard, as theirs tell more.
    """
    job, faults = scene.job, scene.faults
    nodes = {short(node): node for one in job.streams.values() if (node := job.node_of(one))}
    named: dict[str, set[str]] = defaultdict(set)
    addressed: dict[str, set[str]] = defaultdict(set)
    connections: dict[str, set[tuple[str, str]]] = defaultdict(set)
    reporting: set[str] = set()
    losing: set[str] = set()
    for fault in faults:
        if fault.has("connection"):
            losing |= {job.node_of(job.streams[name]) or "" for name in fault.streams}
        for match in fault.matches if fault.role == "echo" else ():
            stated = [fields for fields in match.named if fields.get("remote_host")]
            own = job.node_of(job.streams[match.stream])
            reporting |= {short(own)} if own and stated else set()
            if speaker := _SPEAKER.search(match.first.text):
                reporting.add(short(speaker[1]))
            for fields in stated:
                host = _node_of(job, fields["remote_host"])
                if host[:1].isdigit() and not _POD.match(fields["remote_host"]):
                    addressed[host].add(match.stream)
                    continue
                host = _INTERFACE.sub("", short(host))
                named[host].add(match.stream)
                connections[host].add((match.stream, fields.get("port", "")))
    heard = {one.rank for one in job.streams.values() if one.rank is not None}
    if not heard or len(heard) < (job.world_size or 0):
        named = named or addressed
    lost = {host: streams for host, streams in named.items() if host not in reporting}
    every = set().union(*lost.values()) if lost else set()
    host, streams = max(lost.items(), key=lambda one: len(one[1]), default=("", set()))
    # Of one log of a node, the connections are those of its ranks.
    of_one = len(lost) == 1 and len(connections[host]) >= 2 and host not in map(short, losing)
    if (len(streams) < 2 and not of_one) or len(streams) < MIN_NAMING_SHARE * len(every):
        return []
    words = (
        f"{len(streams)} others lost their connection to it"
        if len(streams) > 1
        else f"{len(connections[host])} connections to it were lost, and none to another node"
    )
    return [Row(f"node {nodes.get(host, host)}", "lost host", words)]


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
