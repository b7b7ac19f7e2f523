"""Links between devices failed: the one at which most of them end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from rmetric.diagnosis.evidence.row import Row, Scene

_ENDS = ("local_host", "local_device", "remote_host", "remote_device")


def links(scene: Scene) -> list[Row]:
    """Rows against the one device at which most of several failed links end, or that was down.

    The rank is known by its process, or by the stream of the entry.
    """
    names: dict[tuple[str, str], str] = {}
    failed, places = set(), dict[tuple[str, str], str]()
    for stream, fields in entries(scene):
        if all(end in fields for end in _ENDS):
            own = fields["local_host"], fields["local_device"]
            of = scene.job.ranks_of_numbers.get(int(fields.get("pid") or -1), set())
            names.setdefault(own, f"rank {min(of)}" if len(of) == 1 else stream)
            places[stream, own[1]] = names[own]
            failed.add(frozenset((own, (fields["remote_host"], fields["remote_device"]))))
    if not failed:
        return []
    return _down(scene, places) or _where_most_end(failed, names)


def _down(scene: Scene, places: Mapping[tuple[str, str], str]) -> list[Row]:
    """The row against the only device whose link was down, by its rank or its node's own tool."""
    down = {(name, each["down_device"]) for name, each in entries(scene) if "down_device" in each}
    broken = [(name, device) for (of, device), name in places.items() if (of, device) in down]
    if not broken and len(down) == 1:
        broken = [one for one in down if one[0].startswith("node ")]
    if len(broken) != 1:
        return []
    ((name, device),) = broken
    node = name.removeprefix("node ")
    where = [name] if node == name else scene.index.at(node, device)
    return [Row(one, "kernel", "its device's link was down") for one in where[:1]]


def _where_most_end(
    failed: Collection[frozenset[tuple[str, str]]], names: Mapping[tuple[str, str], str]
) -> list[Row]:
    (end, count), (_, second) = Counter(end for link in failed for end in link).most_common(2)
    if count == second or end not in names:
        return []
    return [Row(names[end], "accused", f"{count} of {len(failed)} failed links end at it")]


def entries(scene: Scene) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the stream and the fields of each entry of all faults."""
    for fault in scene.faults:
        for match in fault.matches:
            for fields in match.named:
                yield match.stream, fields
