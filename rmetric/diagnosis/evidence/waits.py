"""Ranks wait for others or have lost them: who does not wait, and where connections end."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product

from rmetric.diagnosis.evidence.scene import MAX_COMMON_SHARE, Row, Scene, divided
from rmetric.diagnosis.facts.job import short
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
    named, addressed, reporting = Lost(set), Lost(set), set[str]()
    for match in (one for fault in scene.faults if fault.role == "echo" for one in fault.matches):
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
    heard = sum(one.rank is not None for one in job.streams.values())
    every_rank = 0 < heard >= (job.world_size or 0)
    some = named or (Lost(set) if every_rank else addressed)
    lost = {host: each for host, each in some.items() if host not in reporting}
    streams = {host: {stream for stream, _ in each} for host, each in lost.items()}
    if not streams:
        return []
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
    words = f"{ports} connections to it were lost, and none to another node"
    words = f"{many} others lost their connection to it" if many > 1 else words
    return [Row(f"node {nodes.get(host, host)}", "lost host", words)]


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
    index = scene.index
    echoes = [fault for fault in scene.faults if fault.role == "echo"]
    own = [one for one in echoes if not one.has("hearsay")]
    waiting = {stream for one in own for stream in one.streams} & index.active
    reporting = {stream for one in echoes for stream in one.streams} & index.active
    others, lacking = (
        [*sorted(index.active - some), *sorted(index.silent)] for some in (waiting, reporting)
    )
    if len(index.active) < 3 or not reporting:
        return []
    few = max(1, MAX_LACKING_SHARE * len(waiting))
    timed_out = any(one.has("timeout") for one in own)
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
    awaited = {name for name, one in scene.odd_stacks.items() if one.awaits}
    faults = [one for one in scene.faults if one.role in ("echo", "symptom")]
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
