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
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rmetric.diagnosis.clock import may_be_time_zone
from rmetric.diagnosis.facts.job import span_of, span_of_times
from rmetric.diagnosis.reading.file_names import POD_SUFFIX, is_kernel_log
from rmetric.diagnosis.reading.timestamps import NO_YEAR, names_zone, without_year

if TYPE_CHECKING:
    from rmetric.diagnosis.one_pass import Part, StreamPart

#: Entries of a file's beginning that are compared.
COMPARED_ENTRIES = 8
#: Least share of a beginning's kinds of entries that the next beginning has too.
MIN_SHARED = 0.4
#: Least seconds between the beginnings of two attempts; the ranks of one begin together.
MIN_SECONDS_APART = 10.0
#: Most attempts; more numbers are not of attempts.
MAX_ATTEMPTS = 1000
#: Numbers of a name that are looked at.
MAX_NUMBERS = 8

_NUMBER = re.compile(r"\d+")
_NODE = re.compile(r"(?i)(?:node|host|server|machine)[-_]?\d")
#: What differs in the names of a pod's files from attempt to attempt: what Kubernetes puts behind
#: its name; in the kubelet's files its id, and how often the container was restarted.
_OF_POD = re.compile(rf"{POD_SUFFIX}(?=[._/][^/]*$|$)")
_OF_KUBELET = re.compile(r"_[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/([^/]+)/\d+(?=\.log)")
#: The scheduler's lines have its own clock, which may be of another zone.
_OF_SCHEDULER = re.compile(r"^slurmstepd\b|\bCANCELLED AT\b")
#: What kubectl's users call the log of a container before its restart.
_PREVIOUS = re.compile(r"(?i)[-_.](?:previous|prev)(?=[-_.]|$)")

Group = Sequence["Part"]


def attempts_by_name(files: Sequence[Group]) -> list[list[Part]]:
    """Parts of each attempt, the first one first; one list where the names tell of one attempt.

    Files without the number, such as a kernel's log, are with the last attempt.
    """
    parts = [one for each in files for one in each]
    for groups, of_jobs in _groupings(parts):
        if 1 < len(groups) <= MAX_ATTEMPTS and _are_attempts(groups, of_jobs=of_jobs):
            grouped = {id(part) for group in groups for part in group}
            others = [part for part in parts if id(part) not in grouped]
            return [*map(list, groups[:-1]), [*groups[-1], *others]]
    return [parts]


def _groupings(parts: Group) -> Iterator[tuple[list[Group], bool]]:
    """Parts in the order of what may number attempts; whether that numbers the scheduler's jobs."""
    yield _made_anew(parts), False
    forms = [_NUMBER.sub("0", part.source.name) for part in parts]
    # A file without its like in another attempt is of none, whatever numbers its name has.
    common = {form for form, count in Counter(forms).items() if count > 1}
    numbers = [
        (part, [*map(int, _NUMBER.findall(part.source.name))])
        for part, form in zip(parts, forms, strict=True)
        if form in common
    ]
    most = min(max((len(found) for _, found in numbers), default=0), MAX_NUMBERS)
    # A date and a time are two numbers; one alone is of an attempt, a rank or anything.
    alone = [slice(at, at + 1) for at in range(most)]
    several = [slice(0, end) for end in range(most, 1, -1)]
    for at, place in enumerate((*alone, *several, *alone)):
        groups: dict[tuple[int, ...], list[Part]] = defaultdict(list)
        for part, found in numbers:
            if len(found) >= place.stop:
                groups[tuple(found[place])].append(part)
        of_jobs = at < len(alone)
        if not of_jobs or all(
            any(str(number) in part.job_ids for part in group)
            for (number,), group in groups.items()
        ):
            yield [groups[number] for number in sorted(groups)], of_jobs


def _made_anew(parts: Group) -> list[Group]:
    """Parts of each attempt where each had new pods or containers in them; else none."""
    named: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        named[_without_attempt(part.source.name)].append(part)
    pods = [each for name, each in named.items() if any(one.source.name != name for one in each)]
    spans = {id(part): _span([part]) for each in pods for part in each}
    if None in spans.values() or len(set(map(len, pods))) != 1:
        return []
    in_order = [sorted(each, key=lambda part: spans[id(part)] or ()) for each in pods]
    return [list(group) for group in zip(*in_order, strict=True)]


def _without_attempt(name: str) -> str:
    """A file's name without what Kubernetes and its users change from attempt to attempt.

    >>> _without_attempt("llm_train-worker-0_7be5a1b4-90cf-4a86-bd0d-6bd1d4d2b1f7/pytorch/2.log")
    'llm_train-worker-0/pytorch.log'
    """
    return _OF_POD.sub("-0", _OF_KUBELET.sub(r"/\1", _PREVIOUS.sub("", name)))


def _are_attempts(groups: Sequence[Group], *, of_jobs: bool) -> bool:
    """True if the groups follow one another, and begin alike where they are not `of_jobs`."""
    forms = [
        {_NUMBER.sub("0", _without_attempt(part.source.name)) for part in group} for group in groups
    ]
    nodes = {part.source.node for group in groups for part in group if _is_of_node(part)}
    # A step or a known fault, as programs write them.
    tells = (any(one.stream.steps or one.matches for one in _streams(group)) for group in groups)
    return (
        all(one == forms[0] for one in forms)
        and len(nodes) != len(groups)
        and all(tells)
        and _follow([_span(group) for group in groups])
        and (of_jobs or _begin_alike(groups))
    )


def _follow(spans: Sequence[tuple[float, float] | None]) -> bool:
    """True if each span is known and begins after the one before has ended."""
    known = [span for span in spans if span is not None]
    if len({span[0] >= NO_YEAR[1] for span in known}) > 1:
        # Only within a year are they in order.
        known = [(without_year(begin), without_year(end)) for begin, end in known]
    return len(known) == len(spans) and all(
        after[0] > max(before[1], before[0] + MIN_SECONDS_APART)
        for before, after in pairwise(known)
    )


def _begin_alike(groups: Sequence[Group]) -> bool:
    """True if each group's first entries are of kinds that the next one's have too."""
    # One that failed before its program began has other first lines.
    worked = [group for group in groups if any(one.stream.steps for one in _streams(group))]
    kinds = [_beginning(group) for group in (worked if len(worked) > 1 else groups)]
    return all(
        len(before & after) >= max(1.0, MIN_SHARED * min(len(before), len(after)))
        for before, after in pairwise(kinds)
    )


def _streams(group: Group) -> Iterator[StreamPart]:
    return (one for part in group for one in part.streams)


def _is_of_node(part: Part) -> bool:
    """True for a file that is named after its node, so that its number is of no attempt."""
    name, node = part.source.name, part.source.node
    return node is not None and (is_kernel_log(name) or _NODE.match(node) is not None)


def _span(group: Group) -> tuple[float, float] | None:
    """First and last time; where only some name their zone, of the others, of one clock."""
    every = [(one.time, one.text) for part in group for one in part.entries if one.time is not None]
    own = [one for one in every if not _OF_SCHEDULER.search(one[1])] or every
    last, own_last = (
        max((without_year(time) for time, _ in some), default=0.0) for some in (every, own)
    )
    timed = own if may_be_time_zone(last - own_last) else every
    local = [without_year(time) for time, text in timed if not names_zone(text)]
    if local and len(local) < len(timed):
        return min(local), max(local)
    if len(timed) < len(every):
        return span_of_times([time for time, _ in timed])
    return span_of(one.stream for one in _streams(group))


def _beginning(group: Group) -> set[str]:
    """Kinds of the first entries of each file; none of a file that begins with a step."""
    kinds: set[str] = set()
    for part in group:
        first = sorted(part.entries, key=lambda one: one.line)[:COMPARED_ENTRIES]
        if first and first[0].step is None:
            kinds |= {part.templates[one.event].text for one in first if one.step is None}
    return kinds
