"""Parse the line prefixes that a file uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import filterfalse, islice
from random import Random
from typing import Any

from rmetric.diagnosis.reading.forms import (
    COLLECTED,
    COUNTED,
    CUT,
    STATED,
    TRACED,
    ZONED,
    pattern_of,
)
from rmetric.diagnosis.reading.timestamps import TIME_HEAD, WHOLE_HEAD, parse

#: Prefixes that are remembered; a file with more of them has none.
_REMEMBERED = 1 << 16
#: Lines of a sample on whose shares it depends which forms count.
_LEARNT = 1000
#: Bytes of a line in which its prefix is looked for.
_LONGEST_HEAD = 512
_COMPILED = {
    name: re.compile(pattern.encode()) for name, pattern in (CUT | COUNTED | STATED).items()
}
#: Any of the counted forms.
_ANY_COUNTED = re.compile(re.sub(r"[(][?]P<\w+>", "(?:", "|".join(COUNTED.values())).encode())
#: Share of a file's lines before which a collector of logs puts its own.
COLLECTS = 0.9
_TEED = re.compile(rb"\[rank(\d+)\]:\[rank(\d+)\]:")
_LAUNCHES = re.compile(rb"--?nproc[_-]per[_-]node[= ]['\"]?(?:[2-9]|\d\d|gpu|auto)")
#: Numbered words of prose and of training, which are no hosts.
NO_HOST = re.compile(
    rb"(?i)(?:step|epoch|iter|layer|batch|block|cpu|loss|run|trial)\w*?\d|(?:cuda|gpu)\d{1,2}$"
)
#: The number of a GPU, or of a host that is called so.
_OF_DEVICE = re.compile(rb"(?i)gpu(\d{1,2})")
_CODE = (b".py", b".cc", b".cpp", b".c")


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Identity of a line's writer, as far as its prefix states it.

    Attributes:
        kinds: the forms found, outermost first: ("srun", "torchrun").
        rank, local_rank: global rank, rank within its node.
        task: task number of srun or its like: a rank, or a node's number where each task launches
            several ranks.
        node: the node's name or address.
        pid: process number on its node.
        device: number of the GPU among those that the process sees.
    """

    kinds: tuple[str, ...] = ()
    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    node: str | None = None
    pid: int | None = None
    device: int | None = None


NO_PREFIX = Prefix()


class PrefixParser:
    """The forms of prefixes that a file uses.

    Args:
        counted: names of the forms that count in this file only (forms.py).
        behind: as `counted`, behind the time that a collector put before every line; None where
            none did.
        tasks_launch: the tasks of srun are launchers of several ranks each.
        role_is_rank: "[rank3]:" states the rank within the node: torchrun's role is called so, as
            torchtitan calls it.

    Attributes:
        pattern: matches the whole prefix of any line, possibly empty; its groups decide the
            `Prefix`, which `split` looks up in a dictionary. The text begins at `match.end()`.
        forms: equal for parsers that split all lines alike.
    """

    def __init__(
        self,
        counted: Iterable[str] = (),
        *,
        behind: Collection[str] | None = None,
        tasks_launch: bool = False,
        role_is_rank: bool = False,
    ) -> None:
        self.counted, self.behind = set(counted), behind
        self.tasks_launch, self.role_is_rank = tasks_launch, role_is_rank
        known = frozenset(self.counted), None if behind is None else frozenset(behind)
        self.forms = *known, tasks_launch, role_is_rank
        self.pattern = pattern_of(*known)
        used = self.counted.union(behind or ())
        self._forms = [*CUT, *(name for name in COUNTED if name in used)]
        self._known: dict[tuple[bytes | None, ...], Prefix] = {}

    @classmethod
    def learn(cls, lines: Iterable[bytes]) -> PrefixParser:
        """The forms of a file, from a sample of it (`Source.sample`).

        Forms that nothing else looks like count wherever they stand; those that prose may look
        like ("3: ") only where the lines agree: most have one, and the numbers or hosts recur.
        """
        lines = [line for line in lines if line.strip()]
        some = lines if len(lines) <= _LEARNT else Random(0).sample(lines, _LEARNT)
        heads = list(map(cls().pattern.match, some))
        counted, behind = _counted(_rests(heads, 0)), None
        if counted:
            heads = list(map(cls(counted).pattern.match, some))
        if _collected(_rests(heads, 1)):
            parser = cls(counted, behind=())
            behind = _counted([line[parser.split(line)[1] :] for line in some])
        role_is_rank = any(b"]:[rank" in line and _two_ranks(line) for line in lines)
        launches = role_is_rank
        if "srun" in counted.union(behind or ()):
            learnt = cls(counted, behind=behind)
            launches |= any(_launched(learnt.split(line)[0]) for line in lines)
            launches |= any(map(_LAUNCHES.search, lines))
        return cls(counted, behind=behind, tasks_launch=launches, role_is_rank=role_is_rank)

    def split(self, line: bytes) -> tuple[Prefix, int]:
        """The prefix of a line and the offset of its text; `NO_PREFIX` (the object), 0 without one.

        Equal prefixes give the same object: `Prefix` can be compared by `is` and be a dict's key.
        """
        match = self.pattern.match(line)
        assert match is not None
        prefix = self._known.get(match.groups())
        if prefix is None:
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            prefix = self._known[match.groups()] = self._who(match)
        return prefix, match.end()

    def start(self, line: bytes) -> int:
        """Offset of the text of a line that is known to have `NO_PREFIX`."""
        return 0 if self.behind is None else self.split(line)[1]

    def head(self, line: bytes) -> tuple[int, str]:
        """Offset and text of the part of a line in which its time is sought."""
        match = self.pattern.match(line)
        assert match is not None
        start = match.end(1)
        return start, line[start : start + WHOLE_HEAD].decode("utf-8", "replace")

    def time(self, line: bytes) -> float | None:
        """Seconds that the line states, before, within or after its prefix (timestamps.py)."""
        found = parse(self.head(line)[1])
        return found[0] if found else None

    def _who(self, match: re.Match[bytes]) -> Prefix:
        kinds = list[str]()
        found: dict[str, Any] = {}  # the fields of an inner prefix override the outer ones
        self._take_chain(match, 1, kinds, found)
        if host := match[2]:
            kinds.append("syslog")
            found |= _values({"node": host})
        self._take_chain(match, 3, kinds, found)
        for name in STATED if match[4] else ():
            if stated := _COMPILED[name].match(match[4]):
                fields = stated.groupdict()
                if "rank" in found:
                    fields.pop("rank", None)  # of a group: "[rank29]: ... [PG ID 9 Rank 1]"
                kinds.append(name)
                found |= _values(fields)
        if "task" in found and "rank" not in found and not self.tasks_launch:
            found["rank"] = found["task"]
        return Prefix(kinds=tuple(kinds), **found) if kinds else NO_PREFIX

    def _take_chain(
        self, match: re.Match[bytes], group: int, kinds: list[str], found: dict[str, Any]
    ) -> None:
        at, end = match.span(group)
        while at < end:
            ways = ((name, _COMPILED[name].match(match.string, at)) for name in self._forms)
            way = next(((name, one) for name, one in ways if one and at < one.end() <= end), None)
            if way is None:
                return
            name, one = way
            fields = _values(one.groupdict())
            if name == "torch" and self.role_is_rank and "torchrun" not in kinds:
                name, fields = "torchrun", {"local_rank": fields["rank"]}
            kinds.append("srun" if name == "labelled" else name)
            found |= fields
            at = one.end()


def _two_ranks(line: bytes) -> bool:
    """Return True for a line of another rank than torchrun's prefix states: "[rank3]:[rank11]:"."""
    found = _TEED.search(line, 0, TIME_HEAD)
    return found is not None and found[1] != found[2]


def _launched(prefix: Prefix) -> bool:
    """Return True if the rank is one of several of one task."""
    return prefix.task is not None and (
        bool(prefix.local_rank) or prefix.rank not in (None, prefix.task)
    )


def _values(fields: Mapping[str, bytes | None]) -> dict[str, Any]:
    """The fields of a `Prefix` that a form states."""
    return {
        name: value.decode("utf-8", "replace") if name == "node" else int(value)
        for name, value in fields.items()
        if value is not None
    }


def _rests(heads: Iterable[re.Match[bytes] | None], group: int) -> list[bytes]:
    """What stands behind a group of each match."""
    return [head.string[head.end(group) :] for head in heads if head is not None]


def _collected(rests: list[bytes]) -> bool:
    """Return True if a log collector put a time before every line."""
    others = int(len(rests) - COLLECTS * len(rests))

    def most(pattern: re.Pattern[bytes]) -> bool:
        return len([*islice(filterfalse(pattern.match, rests), others + 1)]) <= others

    return bool(rests) and most(COLLECTED) and (most(ZONED) or any(map(TRACED.match, rests)))


def _counted(rests: list[bytes]) -> set[str]:
    """The counted forms, which a single line may have by chance, on which a file's lines agree."""
    may = [rest for rest in rests if _ANY_COUNTED.match(rest, 0, _LONGEST_HEAD)]
    return {name for name in COUNTED if _agree(name, may, len(rests))}


def _agree(form: str, may: list[bytes], count: int) -> bool:
    heads = [match for line in may if (match := _COMPILED[form].match(line, 0, _LONGEST_HEAD))]
    share, distinct = len(heads) / max(count, 1), {match.groups() for match in heads}
    if len(heads) < 3 or share < 0.1 or (len(distinct) >= 0.9 * len(heads) and share <= 0.9):
        return False
    return _ARE.get(form, _are_ranks)(heads, len(distinct), share)


def _are_ranks(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Numbers from 0 with few gaps, or one number on many lines."""
    if distinct == 1:
        return share > 0.9 or (share > 0.3 and len(heads) >= 20)
    dense = distinct >= 0.5 * (max(int(match[1]) for match in heads) + 1)
    many = share >= 0.5 or len(heads) >= 20
    return dense and many and (share > 0.9 or len(heads) >= 2 * distinct)


def _are_hosts(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Words with digits, of one form, that recur on most lines; before ranks, no rank on two."""
    hosts = {match["node"] for match in heads}
    forms = {re.sub(rb"\d+", b"0", host) for host in hosts}
    # Devices are counted from 0, and their numbers have no zero before them.
    numbers = [match[1] for host in hosts if (match := _OF_DEVICE.fullmatch(host))]
    named = len(numbers) == len(hosts) and all(len(one) == 2 for one in numbers)
    if any((NO_HOST.match(host) and not named) or host.endswith(_CODE) for host in hosts):
        return False
    ranks = {match["rank"] for match in heads if "rank" in match.re.groupindex}
    enough = 0.5 if len(hosts) > 1 or ranks else 0.9
    once = not ranks or len(ranks) == distinct
    return len(forms) == 1 and share >= enough and len(heads) >= 2 * distinct and once


def _are_pods(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Before every line a pod of a numbered name and one of few containers."""
    containers = {match[0].split()[1] for match in heads}
    numbered = all(re.search(rb"[0-9]", match["node"]) for match in heads)
    few = len(containers) <= 2 and len(heads) >= 2 * distinct
    words = any(NO_HOST.match(word + b"0") for word in containers)
    return share > COLLECTS and few and numbered and not words


_ARE: dict[str, Callable[[list[re.Match[bytes]], int, float], bool]] = {
    "host": _are_hosts,
    "node_rank": _are_hosts,
    "pals": _are_hosts,
    "stern": _are_pods,
}
