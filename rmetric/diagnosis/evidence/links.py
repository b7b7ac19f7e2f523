"""Links between devices failed: the one at which most of them end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import Row, Scene, divided

_ENDS = ("local_host", "local_device", "remote_host", "remote_device")


def links(scene: Scene) -> list[Row]:
    """Rows against the one device at which most of several failed links end, or that was down.

    The rank is known by its process, or by the stream of the entry.
    """
    job, index = scene.job, scene.index
    names: dict[tuple[str, str], str] = {}
    failed, places = set(), dict[tuple[str, str], str]()
    down = {(name, each["down_device"]) for name, each in entries(scene) if "down_device" in each}
    for stream, fields in entries(scene):
        if all(end in fields for end in _ENDS):
            own = fields["local_host"], fields["local_device"]
            of = job.ranks_of_numbers.get(int(fields.get("pid") or -1), set())
            names.setdefault(own, f"rank {min(of)}" if len(of) == 1 else stream)
            places[stream, own[1]] = names[own]
            failed.add(frozenset((own, (fields["remote_host"], fields["remote_device"]))))
    broken = [(name, device) for (of, device), name in places.items() if (of, device) in down]
    if failed and not broken and len(down) == 1:  # by the node's own tool
        broken = [one for one in down if one[0].startswith("node ")]
    if len(broken) == 1:
        ((name, device),) = broken
        node = name.removeprefix("node ")
        where = [name] if node == name else index.at(node, device)
        return divided(where, "kernel", "its device's link was down") if len(where) == 1 else []
    ends = Counter(end for link in failed for end in link).most_common(2)
    if len(failed) < 2 or ends[0][1] == ends[1][1]:
        return []
    (host, device), count = ends[0]
    known = names.get((host, device))
    where = [known] if known else index.implicated_ranks({"node": host, "local_rank": device})
    words = f"{count} of {len(failed)} failed links end at it"
    return divided(where, "accused", words) if len(where) == 1 else []


def entries(scene: Scene) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the stream and the fields of each entry of all faults."""
    for fault in scene.faults:
        for match in fault.matches:
            for fields in match.named:
                yield match.stream, fields
