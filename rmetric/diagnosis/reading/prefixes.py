"""Parse the line prefixes that a file uses."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rmetric.diagnosis.reading.forms import (
    COLLECTED,
    COUNTED,
    CUT,
    FIRST_BYTES,
    STATED,
    TRACED,
    ZONED,
    pattern_of,
)
from rmetric.diagnosis.reading.timestamps import HEAD, may_be_time, may_state, parse

#: Prefixes that are remembered; a file with more of them has none.
_REMEMBERED = 1 << 16
#: Lines whose heads are remembered, of each pattern, and the length of the longest.
_REMEMBERED_HEADS = 1 << 14
#: Bytes of a line in which its prefix is looked for.
_LONGEST_HEAD = 1000
_LONGEST_HEAD = 512
#: To "0" every digit that no pattern tells from it; all of them, where no seconds of an epoch are.
_ALIKE = bytes.maketrans(b"23456789", b"0" * 8)
_ALL_ALIKE = bytes.maketrans(b"123456789", b"0" * 9)
_MAY_BE_EPOCH = re.compile(rb"1[0-9]{9}")
#: Lines that are made alike at a time.
_AT_A_TIME = 512
_COMPILED = {
    name: re.compile(pattern.encode()) for name, pattern in (CUT | COUNTED | STATED).items()
}
#: Form -> the bytes that lines with it may begin with.
_FIRSTS = {
    name: [byte for byte in range(256) if FIRST_BYTES[name].match(bytes([byte]))]
    for name in COUNTED
}
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


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Identity of a line's writer, as far as its prefix states it.

    Attributes:
        kinds: the forms found, outermost first: ("srun", "torchrun").
        rank: global rank.
        local_rank: rank within its node.
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


#: Begin and end of a match and of each of its groups, -1 of one that takes no part.
Spans = tuple[tuple[int, int], ...]


class HeadMatches:
    """Where patterns match at the heads of lines, looked up where a like line was matched before.

    Exact, as no pattern here tells one digit from another but for "1", with which the seconds of an
    epoch begin: so two lines that differ in other digits alone are matched alike. Several files
    share what is remembered.
    """

    def __init__(self) -> None:
        self._known: dict[re.Pattern[bytes], dict[bytes, Spans]] = defaultdict(dict)

    def spans(self, pattern: re.Pattern[bytes], lines: Sequence[bytes]) -> Iterator[Spans]:
        """Of each line the spans of the match and of its groups; () where there is no match."""
        known = self._known[pattern]  # once: the hash of a pattern takes as long as a match
        for begin in range(0, len(lines), _AT_A_TIME):
            some = lines[begin : begin + _AT_A_TIME]
            text = b"\n".join(some)
            keys = text.translate(_ALIKE if _MAY_BE_EPOCH.search(text) else _ALL_ALIKE)
            each = keys.split(b"\n")
            found = list(map(known.get, each))
            for at, spans in enumerate(found) if None in found else ():
                if spans is None and (spans := known.get(each[at])) is None:
                    match = pattern.match(some[at])
                    spans = match.regs if match else ()
                    if len(known) >= _REMEMBERED_HEADS:
                        known.clear()
                    if len(each[at]) <= _LONGEST_HEAD:
                        known[each[at]] = spans
                found[at] = spans
            yield from cast("list[Spans]", found)


class PrefixParser:
    """The forms of prefixes that a file uses.

    Attributes:
        pattern: matches the whole prefix of any line, possibly empty; its groups decide the
            `Prefix`, which `split` looks up in a dictionary. The text begins at `match.end()`.
        forms: equal for parsers that split all lines alike.
        behind: as `counted`, behind the time that a collector put before every line; None where
            none did.
        tasks_launch: the tasks of srun are launchers of several ranks each.
        role_is_rank: "[rank3]:" states the rank within the node: torchrun's role is called so.

    Args:
        counted: names of the forms that count in this file only (forms.py).
        stamped: there are prefixes behind a time.
    """

    def __init__(
        self,
        counted: Iterable[str] = (),
        *,
        stamped: bool = True,
        behind: Collection[str] | None = None,
        tasks_launch: bool = False,
        role_is_rank: bool = False,
    ) -> None:
        self.counted, self.behind = set(counted), behind
        self.tasks_launch, self.role_is_rank = tasks_launch, role_is_rank
        known = None if behind is None else frozenset(behind)
        self.forms = frozenset(self.counted), stamped, known, tasks_launch, role_is_rank
        self.pattern = pattern_of(frozenset(self.counted), stamped, known)
        used = self.counted.union(behind or ())
        self._forms = [*CUT, *(name for name in COUNTED if name in used)]
        self._known: dict[tuple[bytes | None, ...], Prefix] = {}

    @classmethod
    def learn(cls, lines: Iterable[bytes], known: HeadMatches | None = None) -> PrefixParser:
        """The forms of a file, from a sample of it (`Source.sample`).

        Forms that nothing else looks like count wherever they stand; those that prose may look
        like ("3: ") only where the lines agree: most have one, and the numbers or hosts recur.

        Args:
            lines: the sample.
            known: what the heads of other files' lines are.
        """
        lines = [line for line in lines if line.strip()]
        known = known or HeadMatches()
        plain = cls()
        heads = plain._heads(lines, known)
        counted = _counted([line[head[0][1] :] for line, head in zip(lines, heads, strict=True)])
        behind, learnt = None, plain
        if counted:
            learnt = cls(counted)
            heads = learnt._heads(lines, known)
        if _collected([line[head[1][1] :] for line, head in zip(lines, heads, strict=True)], known):
            behind = _counted(cls(counted, behind=()).rests(lines))
            learnt = cls(counted, behind=behind)
            heads = learnt._heads(lines, known)
        role_is_rank = any(b"]:[rank" in line and _two_ranks(line) for line in lines)
        return cls(
            counted,
            stamped=any(head[0][1] > head[1][1] for head in heads),
            behind=behind,
            tasks_launch=role_is_rank
            or (
                "srun" in {*counted, *(behind or ())}
                and (learnt._launches(lines, heads) or any(map(_LAUNCHES.search, lines)))
            ),
            role_is_rank=role_is_rank,
        )

    def _heads(self, lines: Sequence[bytes], known: HeadMatches) -> list[Spans]:
        return list(known.spans(self.pattern, lines))

    def _launches(self, lines: Sequence[bytes], heads: Sequence[Spans]) -> bool:
        """Return True if the rank of a line is one of several of one task."""
        # Lines whose heads are the same have one prefix.
        ends = {head: max(end for _, end in head) for head in set(heads)}
        by_head = {
            (line[: ends[head]], head): line for line, head in zip(lines, heads, strict=True)
        }
        return any(_launched(self.split(line)[0]) for line in by_head.values())

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
            prefix = self._who(match) if any(match.groups()) else NO_PREFIX
            self._known[match.groups()] = prefix
        return prefix, match.end()

    def start(self, line: bytes) -> int:
        """Offset of the text of a line that is known to have `NO_PREFIX`."""
        return 0 if self.behind is None else self.split(line)[1]

    def rests(self, lines: Iterable[bytes]) -> list[bytes]:
        """The lines without their prefixes."""
        return [line[self.split(line)[1] :] for line in lines]

    def time(self, line: bytes) -> float | None:
        """Seconds that the line states, before, within or after its prefix (timestamps.py)."""
        # Digits of other scripts make no time, as they make no form.
        if not may_be_time(line):
            return None
        match = self.pattern.match(line)
        assert match is not None
        start = match.end(1)
        found = parse(line[start : start + HEAD].decode("utf-8", "replace"))
        return found[0] if found else None

    def first_time(self, lines: Iterable[bytes]) -> float | None:
        """Seconds of the first line that states any."""
        times = map(self.time, lines)
        return next((time for time in times if time is not None), None)

    def may_state_time(self, line: bytes) -> bool:
        """Return False only if `time` is None for lines that differ from this in digits alone."""
        match = self.pattern.match(line)
        assert match is not None
        plain = re.sub(rb"[0-9]+", b"0", line[match.end(1) :])
        return may_state(plain.decode("utf-8", "replace"))

    def _who(self, match: re.Match[bytes]) -> Prefix:
        kinds = list[str]()
        found: dict[str, Any] = {}  # the fields of an inner prefix override the outer ones
        self._take_chain(match, 1, kinds, found)
        if host := match[2]:
            kinds.append("syslog")
            found |= _values({"node": host})
        self._take_chain(match, 3, kinds, found)
        for name in STATED:
            if match[4] and (stated := _COMPILED[name].match(match[4])):
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
            for name in self._forms:
                one = _COMPILED[name].match(match.string, at)
                if one and at < one.end() <= end:
                    fields = _values(one.groupdict())
                    if name == "torch" and self.role_is_rank and "torchrun" not in kinds:
                        name, fields = "torchrun", {"local_rank": fields["rank"]}
                    kinds.append("srun" if name == "labelled" else name)
                    found |= fields
                    at = one.end()
                    break
            else:
                break


def _two_ranks(line: bytes) -> bool:
    """Return True for a line of another rank than torchrun's prefix states: "[rank3]:[rank11]:"."""
    found = _TEED.search(line, 0, HEAD)
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


def _counted(rests: list[bytes]) -> set[str]:
    # Most lines cannot begin with most forms, by their first byte.
    by_first: dict[int, list[bytes]] = defaultdict(list)
    for rest in rests:
        if rest:
            by_first[rest[0]].append(rest)
    return {
        name
        for name in COUNTED
        if _agree(
            name, [rest for first in _FIRSTS[name] for rest in by_first.get(first, ())], len(rests)
        )
    }


def _collected(rests: list[bytes], known: HeadMatches) -> bool:
    """Return True if a log collector put a time before every line."""
    least, heads = COLLECTS * len(rests), 0
    for at, head in enumerate(known.spans(COLLECTED, rests)):
        heads += head != ()
        if heads + len(rests) - at - 1 < least:
            return False
    zoned = sum(head != () for head in known.spans(ZONED, rests))
    return bool(rests) and (zoned >= least or any(known.spans(TRACED, rests)))


def _agree(form: str, lines: list[bytes], count: int) -> bool:
    """Return True if the lines of a file use a form that a single line may have by chance.

    Args:
        form: its name.
        lines: those that may begin with it.
        count: number of all lines.
    """
    if len(lines) < 0.1 * count:
        return False
    heads = [match for line in lines if (match := _COMPILED[form].match(line, 0, _LONGEST_HEAD))]
    share = len(heads) / max(count, 1)
    if len(heads) < 3 or share < 0.1:
        return False
    names = Counter(tuple(match.groups()) for match in heads)
    if len(names) < 0.9 * len(heads) or share > 0.9:
        if form == "stern":
            return _are_pods(heads, len(names), share)
        if form == "pals":
            ranks = sorted({int(rank) for _, rank in names})
            return share > 0.5 and _are_hosts(heads, len(names), share) and len(ranks) == len(names)
        if form.startswith("host") or form == "node_rank":
            return _are_hosts(heads, len(names), share)
        return _are_ranks([int(number) for (number,) in names], len(heads), share)
    return False


def _are_ranks(numbers: list[int], count: int, share: float) -> bool:
    """Numbers from 0 with few gaps, or one number on many lines."""
    if len(numbers) == 1:
        return share > 0.9 or (share > 0.3 and count >= 20)
    dense = len(numbers) >= 0.5 * (max(numbers) + 1)
    return dense and (share >= 0.5 or count >= 20) and (share > 0.9 or count >= 2 * len(numbers))


def _are_pods(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Before every line a pod of a numbered name and one of few containers."""
    containers = {match.group().split()[1] for match in heads}
    numbered = all(any(48 <= letter < 58 for letter in match["node"]) for match in heads)
    few = len(containers) <= 2 and len(heads) >= 2 * distinct
    words = any(NO_HOST.match(word + b"0") for word in containers)
    return share > COLLECTS and few and numbered and not words


def _are_hosts(heads: list[re.Match[bytes]], distinct: int, share: float) -> bool:
    """Words with digits, of one form, that recur on most lines."""
    hosts = {match["node"] for match in heads}
    forms = {re.sub(rb"\d+", b"0", host) for host in hosts}
    # Devices are counted from 0, and their numbers have no zero before them.
    numbers = [match[1] for host in hosts if (match := _OF_DEVICE.fullmatch(host))]
    named = len(numbers) == len(hosts) and all(len(one) == 2 for one in numbers)
    if any(
        (NO_HOST.match(host) and not named) or host.endswith((b".py", b".cc", b".cpp", b".c"))
        for host in hosts
    ):
        return False
    enough = 0.5 if len(hosts) > 1 else 0.9
    return len(forms) == 1 and share >= enough and len(heads) >= 2 * distinct
