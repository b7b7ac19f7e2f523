"""Find attempts of one job that have files of their own, by a number in the files' names.

Schedulers and scripts name a file by the job's or the attempt's number: "train_41700_0.out",
"run3/rank_0.log". Files are of different attempts if such a number orders them in time, without an
overlap, and if each attempt begins with lines of the same kind; so are the pods of Kubernetes,
whose names end at random ("train-launcher-x7k2p.log"). A log that is rotated goes on where the last
file ended, and does not begin again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from rmetric.diagnosis.job import Occurrence, span_of, span_of_times
from rmetric.diagnosis.ordering import may_be_time_zone
from rmetric.diagnosis.part import Part
from rmetric.diagnosis.reading.file_names import is_kernel_log
from rmetric.diagnosis.reading.timestamps import NO_YEAR, names_zone, without_year

#: Entries of a file's beginning that are compared.
FIRST_ENTRIES = 8
#: Least share of a beginning's kinds of entries that the next beginning has too.
MIN_SHARED = 0.4
#: Least seconds between the beginnings of two attempts; the ranks of one begin together.
MIN_SECONDS = 10.0
#: Most attempts; more numbers are not of attempts.
MAX_ATTEMPTS = 1000

_NUMBER = re.compile(r"\d+")
_NODE = re.compile(r"(?i)(?:node|host|server|machine)[-_]?\d")
#: What Kubernetes puts behind the name of a pod, another one for each attempt.
_OF_POD = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}(?=[._/][^/]*$|$)")
#: The kubelet's files: the pod's id, the container, and how often that was restarted.
_OF_KUBELET = re.compile(r"_[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/([^/]+)/\d+(?=\.log)")
#: The scheduler's lines have its own clock, which may be of another zone.
_OF_SCHEDULER = re.compile(r"^slurmstepd\b|\bCANCELLED AT\b")
#: What kubectl's users call the log of a container before its restart.
_PREVIOUS = re.compile(r"(?i)[-_.](?:previous|prev)(?=[-_.]|$)")

Files = Sequence[Sequence[Part]]


def attempts_by_name(files: Files) -> list[list[Part]]:
    """Parts of each attempt, the first one first; one list where the names tell of one attempt.

    Files without the number, such as a kernel's log, are with the last attempt.

    Args:
        files: the one part of each file.
    """
    parts = [one for each in files for one in each]
    before = [part for part in parts if _PREVIOUS.search(part.source.name)]
    again = {_PREVIOUS.sub("", part.source.name) for part in before}
    after = [part for part in parts if part.source.name in again]
    if after and _are_attempts([before, after]):
        return [before, [part for part in parts if part not in before]]
    pods = _attempts_of_pods(parts)
    if pods:
        return pods
    forms = [_NUMBER.sub("0", part.source.name) for part in parts]
    # A file without its like in another attempt is of none, whatever numbers its name has.
    common = {form for form, count in Counter(forms).items() if count > 1}
    numbers = [
        _NUMBER.findall(part.source.name) if form in common else []
        for part, form in zip(parts, forms, strict=True)
    ]
    most = min(max(map(len, numbers), default=0), 8)
    # A date and a time are two numbers; one alone is of an attempt, a rank or anything.
    places = [slice(0, end) for end in range(most, 1, -1)]
    alone = [slice(at, at + 1) for at in range(most)]
    for place, of_jobs in [
        *((one, True) for one in alone),
        *((one, False) for one in places + alone),
    ]:
        groups: dict[tuple[int, ...], list[Part]] = defaultdict(list)
        others: list[Part] = []
        for part, found in zip(parts, numbers, strict=True):
            key = tuple(map(int, found[place]))
            (groups[key] if len(found) >= place.stop else others).append(part)
        if 1 < len(groups) <= MAX_ATTEMPTS:
            ordered = [groups[number] for number in sorted(groups)]
            if of_jobs and not all(map(_names_job, groups, groups.values())):
                continue
            if _are_attempts(ordered, of_jobs=of_jobs):
                return [*ordered[:-1], [*ordered[-1], *others]]
    return [parts]


def _attempts_of_pods(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts of each attempt where each had new pods or containers in them; else none."""
    pods: dict[str, list[Part]] = defaultdict(list)
    others = list[Part]()
    for part in parts:
        name = _of_pod(part.source.name)
        (others if name == part.source.name else pods[name]).append(part)
    numbers = {len(each) for each in pods.values()}
    if len(numbers) != 1 or not 1 < max(numbers) <= MAX_ATTEMPTS:
        return []
    begins = {id(part): _span([part]) for each in pods.values() for part in each}
    if None in begins.values():
        return []
    in_order = [sorted(each, key=lambda part: begins[id(part)] or ()) for each in pods.values()]
    groups = [list(group) for group in zip(*in_order, strict=True)]
    if not _are_attempts(groups):
        return []
    return [*groups[:-1], [*groups[-1], *others]]


def _of_pod(name: str) -> str:
    """The name of a pod's file without what differs from attempt to attempt.

    >>> _of_pod("llm_train-worker-0_7be5a1b4-90cf-4a86-bd0d-6bd1d4d2b1f7/pytorch/2.log")
    'llm_train-worker-0/pytorch.log'
    """
    return _OF_POD.sub("-0", _OF_KUBELET.sub(r"/\1", name))


def _names_job(numbers: Sequence[int], group: Sequence[Part]) -> bool:
    """True for a number of the scheduler's job, as the files' lines state it."""
    return any(str(number) in part.job_ids for number in numbers for part in group)


def _are_attempts(groups: Sequence[Sequence[Part]], *, of_jobs: bool = False) -> bool:
    """True if the groups follow one another, and begin alike where they are not `of_jobs`."""
    forms = [
        Counter(_NUMBER.sub("0", _of_pod(_PREVIOUS.sub("", part.source.name))) for part in group)
        for group in groups
    ]
    if any(one.keys() != forms[0].keys() for one in forms):
        return False
    nodes = {part.source.node for group in groups for part in group if _is_of_node(part)}
    if len(nodes) == len(groups) or not all(map(_tells, groups)):
        return False
    spans = [_span(group) for group in groups]
    for before, after in pairwise(spans):
        if before is not None and after is not None and _has_year(before) != _has_year(after):
            # Only within a year are they in order.
            before, after = _without_year(before), _without_year(after)
        if before is None or after is None or after[0] <= max(before[1], before[0] + MIN_SECONDS):
            return False
    if of_jobs:
        return True
    # One that failed before its program began has other first lines.
    worked = [
        group for group in groups if any(one.stream.steps for part in group for one in part.streams)
    ]
    kinds = [_beginning(group) for group in (worked if len(worked) > 1 else groups)]
    return all(
        len(before & after) >= max(1.0, MIN_SHARED * min(len(before), len(after)))
        for before, after in pairwise(kinds)
    )


def _is_of_node(part: Part) -> bool:
    """True for a file that is named after its node, so that its number is of no attempt."""
    name, node = part.source.name, part.source.node
    return node is not None and (is_kernel_log(name) or _NODE.match(node) is not None)


def _tells(group: Sequence[Part]) -> bool:
    """True for files with a step or a known fault, as programs write them."""
    return any(one.stream.steps or one.matches for part in group for one in part.streams)


def _has_year(span: tuple[float, float]) -> bool:
    return span[0] >= NO_YEAR[1]


def _without_year(span: tuple[float, float]) -> tuple[float, float]:
    return without_year(span[0]), without_year(span[1])


def _span(group: Sequence[Part]) -> tuple[float, float] | None:
    """First and last time; where only some name their zone, of the others, of one clock."""
    every = [one for part in group for one in part.entries if one.time is not None]
    own = [one for one in every if not _OF_SCHEDULER.search(one.text)] or every
    timed = own if may_be_time_zone(_end(every) - _end(own)) else every
    local = [without_year(one.time or 0.0) for one in timed if not names_zone(one.text)]
    if local and len(local) < len(timed):
        return min(local), max(local)
    if len(timed) < len(every):
        return span_of_times([one.time or 0.0 for one in timed])
    return span_of(one.stream for part in group for one in part.streams)


def _end(entries: Sequence[Occurrence]) -> float:
    return max((without_year(one.time or 0.0) for one in entries), default=0.0)


def _beginning(group: Sequence[Part]) -> set[str]:
    """Kinds of the first entries of each file; none of a file that begins with a step."""
    kinds: set[str] = set()
    for part in group:
        first = sorted(part.entries, key=lambda one: one.line)[:FIRST_ENTRIES]
        if first and first[0].step is None:
            kinds |= {part.templates[one.event].text for one in first if one.step is None}
    return kinds
