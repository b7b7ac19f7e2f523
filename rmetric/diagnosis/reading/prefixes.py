"""Prefixes by which launchers and libraries identify the writer of a line, as a file uses them.

line_heads.yaml has their forms.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import filterfalse, islice
from random import Random
from types import SimpleNamespace
from typing import Any

from rmetric.diagnosis.reading import head_patterns, line_heads
from rmetric.diagnosis.reading.timestamps import TIME_HEAD, WHOLE_HEAD, parse, unnamed

#: The fragments of line_heads.yaml.
_FRAGMENTS = SimpleNamespace(**line_heads()["fragments"])
#: Form, as `Prefix.kinds` has it -> pattern: prefixes that are cut from the line, in the order in
#: which they are tried; that count only where the file's lines agree; that are left in the line.
CUT, COUNTED, STATED = head_patterns("cut"), head_patterns("counted"), head_patterns("stated")


@cache
def pattern_of(counted: frozenset[str], behind: frozenset[str] | None = None) -> re.Pattern[bytes]:
    """The whole prefix of any line; arguments as those of `PrefixParser`.

    Four groups: the prefixes before a time, the node of a line of syslog, the prefixes behind
    either, and the prefix behind time and level.
    """
    cut, some = _chain(counted)
    if behind is not None:
        timed = f"(?:{_FRAGMENTS.COLLECTED})?({_chain(behind)[0]})"
    else:
        stamped = f"{_FRAGMENTS.TIMESTAMP}:? (?:{_FRAGMENTS.STREAM}|(?={some}))"
        timed = f"(?:{_FRAGMENTS.SYSLOG}|{stamped}({cut}))?"
    stated = "|".join(map(unnamed, STATED.values()))
    return re.compile(f"({cut}){timed}(?:(?={_FRAGMENTS.HEADER}({stated})))?".encode())


def _chain(counted: Collection[str]) -> tuple[str, str]:
    """Any number of prefixes, and any one of them."""
    plain = [*map(unnamed, CUT.values())]
    used = [unnamed(pattern) for name, pattern in COUNTED.items() if name in counted]
    some = f"(?:{'|'.join(plain)})*"
    # Once each: "0: 0:1: no option" is a rank and its text.
    return some + "".join(f"(?:{pattern})?" for pattern in used) + some, "|".join([*plain, *used])


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
_ANY_COUNTED = re.compile("|".join(map(unnamed, COUNTED.values())).encode())
#: Share of a file's lines before which a collector of logs puts its own head.
COLLECTS = 0.9
_COLLECTED = re.compile(_FRAGMENTS.COLLECTED.encode())
_ZONED, _TRACED = re.compile(_FRAGMENTS.ZONED.encode()), re.compile(_FRAGMENTS.TRACED.encode())
_TEED = re.compile(rb"\[rank(\d+)\]:\[rank(\d+)\]:")
_LAUNCHES = re.compile(rb"--?nproc[_-]per[_-]node[= ]['\"]?(?:[2-9]|\d\d|gpu|auto)")
#: Numbered words of prose and of training, which are not hosts.
_NO_HOST = re.compile(f"(?i){_FRAGMENTS.NUMBERED_WORD}|{_FRAGMENTS.NUMBERED_GPU}$".encode())
#: The number of a GPU, or of a host that is called so.
_OF_DEVICE = re.compile(rb"(?i)gpu(\d{1,2})")
_CODES = (b".py", b".cc", b".cpp", b".c")

#: The name of a form that a line begins with, and its groups.
_Form = tuple[str, dict[str, bytes | None]]


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Identity of a line's writer, as far as its prefix states it.

    Attributes:
        kinds: the forms found, outermost first: ("srun", "torchrun").
        rank, local_rank: global rank, rank within its node.
        task: task number of srun or its like: a rank, or a node's number where each task launches
            several ranks.
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
        counted: names of the forms of `COUNTED` that it uses.
        behind: as `counted`, behind the time that a collector put before every line; None where
            none did.
        tasks_launch: the tasks of srun are launchers of several ranks each.
        role_is_rank: "[rank3]:" states the rank within the node: torchrun's role is called so, as
            torchtitan calls it.

    Attributes:
        pattern: matches the whole prefix of any line, possibly empty; its groups decide the
            `Prefix`. The text begins at `match.end()`.
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
        """The forms of a file, from a sample of it (`LogSource.sample`)."""
        lines = [line for line in lines if line.strip()]
        some = lines if len(lines) <= _LEARNT else Random(0).sample(lines, _LEARNT)
        counted, behind = _counted(cls()._rests(some)), None
        if _collected(cls(counted)._rests(some, 1)):
            behind = _counted(cls(counted, behind=())._rests(some))
        # A second rank may differ from that of torchrun's prefix: "[rank3]:[rank11]:".
        teed = (found for line in lines if (found := _TEED.search(line, 0, TIME_HEAD)))
        role_is_rank = any(found[1] != found[2] for found in teed)
        launches = role_is_rank
        if "srun" in counted.union(behind or ()):
            learnt = cls(counted, behind=behind)
            of_tasks = (who for who, _ in map(learnt.split, lines) if who.task is not None)
            launches |= any(who.local_rank or who.rank not in (None, who.task) for who in of_tasks)
            launches |= _LAUNCHES.search(b"\n".join(lines)) is not None
        return cls(counted, behind=behind, tasks_launch=launches, role_is_rank=role_is_rank)

    def split(self, line: bytes) -> tuple[Prefix, int]:
        """The prefix of a line (`NO_PREFIX`, the object, for none) and the offset of its text."""
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

    def _rests(self, lines: Iterable[bytes], group: int = 0) -> list[bytes]:
        """What stands behind a group of the pattern in each line."""
        return [line[head.end(group) :] for line in lines if (head := self.pattern.match(line))]

    def _who(self, match: re.Match[bytes]) -> Prefix:
        kinds = list[str]()
        found: dict[str, Any] = {}  # the fields of an inner prefix override the outer ones
        for name, fields in self._stated(match):
            if name == "torch" and self.role_is_rank and "torchrun" not in kinds:
                name, fields = "torchrun", {"local_rank": fields["rank"]}
            if name in STATED and "rank" in found:
                fields["rank"] = None  # of a group: "[rank29]: ... [PG ID 9 Rank 1]"
            kinds.append("srun" if name == "labelled" else name)
            found |= {
                field: value.decode("utf-8", "replace") if field == "node" else int(value)
                for field, value in fields.items()
                if value is not None
            }
        if "task" in found and "rank" not in found and not self.tasks_launch:
            found["rank"] = found["task"]
        return Prefix(kinds=tuple(kinds), **found) if kinds else NO_PREFIX

    def _stated(self, match: re.Match[bytes]) -> Iterator[_Form]:
        """The forms of a whole prefix, the outermost first, each with its groups."""
        yield from self._chain(match, 1)
        if match[2]:
            yield "syslog", {"node": match[2]}
        yield from self._chain(match, 3)
        for name in STATED if match[4] else ():
            if stated := _COMPILED[name].match(match[4]):
                yield name, stated.groupdict()

    def _chain(self, match: re.Match[bytes], group: int) -> Iterator[_Form]:
        at, end = match.span(group)
        while at < end:
            ways = ((name, _COMPILED[name].match(match.string, at)) for name in self._forms)
            way = next(((name, hit) for name, hit in ways if hit and at < hit.end() <= end), None)
            if way is None:
                return
            yield way[0], way[1].groupdict()
            at = way[1].end()


def _collected(rests: list[bytes]) -> bool:
    """Return True if a log collector put a time before every line."""
    others = int(len(rests) - COLLECTS * len(rests))

    def most(pattern: re.Pattern[bytes]) -> bool:
        return len([*islice(filterfalse(pattern.match, rests), others + 1)]) <= others

    return bool(rests) and most(_COLLECTED) and (most(_ZONED) or any(map(_TRACED.match, rests)))


def _counted(rests: list[bytes]) -> set[str]:
    """The counted forms, which a single line may have by chance, on which a file's lines agree."""
    may, agreed = [rest for rest in rests if _ANY_COUNTED.match(rest, 0, _LONGEST_HEAD)], set[str]()
    for form, agree in _AGREE.items():
        heads = [match for line in may if (match := _COMPILED[form].match(line, 0, _LONGEST_HEAD))]
        share, distinct = len(heads) / max(len(rests), 1), len({match.groups() for match in heads})
        enough = len(heads) >= 3 and share >= 0.1
        if enough and (distinct < 0.9 * len(heads) or share > 0.9):
            agreed |= {form} if agree(heads, distinct, share) else set()
    return agreed


def _are_ranks(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Numbers from 0 with few gaps, or one number on many lines."""
    if distinct == 1:
        return share > 0.9 or (share > 0.3 and len(heads) >= 20)
    dense = distinct >= 0.5 * (max(int(match[1]) for match in heads) + 1)
    many = share >= 0.5 or len(heads) >= 20
    return dense and many and (share > 0.9 or len(heads) >= 2 * distinct)


def _are_hosts(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Words with digits, of one form, that recur on most lines."""
    hosts = {match["node"] for match in heads}
    forms = {re.sub(rb"\d+", b"0", host) for host in hosts}
    # Devices are counted from 0, and their numbers have no zero before them.
    numbers = [match[1] for host in hosts if (match := _OF_DEVICE.fullmatch(host))]
    named = len(numbers) == len(hosts) and all(len(number) == 2 for number in numbers)
    words = any((_NO_HOST.match(host) and not named) or host.endswith(_CODES) for host in hosts)
    return len(forms) == 1 and share >= 0.5 and len(heads) >= 2 * distinct and not words


def _are_pods(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Before every line a pod of a numbered name and one of few containers."""
    containers = {match[0].split()[1] for match in heads}
    numbered = all(re.search(rb"[0-9]", match["node"]) for match in heads)
    few = len(containers) <= 2 and len(heads) >= 2 * distinct
    words = any(_NO_HOST.match(word + b"0") for word in containers)
    return share > COLLECTS and few and numbered and not words


_AGREEING = {"ranks": _are_ranks, "hosts": _are_hosts, "pods": _are_pods}
#: Counted form -> the test whether a file's lines state by it what its row says.
_AGREE = {row["name"]: _AGREEING[row["counts_as"]] for row in line_heads()["counted"]}
