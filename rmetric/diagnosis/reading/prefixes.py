"""Prefixes by which launchers and libraries identify the writer of a line, as a file uses them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import filterfalse, islice
from random import Random
from typing import Any

from rmetric.diagnosis.reading.timestamps import TIME_HEAD, WHOLE_HEAD, parse

_HOST = r"[A-Za-z\d][\w.-]*"
#: A host by its name alone: with a digit in it.
_NAME = r"(?:[A-Za-z][\w.-]*\d[\w.-]*|\d+(?:\.\d+){3})"
#: The space behind a prefix that some put there: tracebacks are indented by twos, but for carets.
_SPACE = r"(?: (?=(?:  )*(?:[^ ~^]|$)))?"
_TIME = (
    r"[\[(]?(?:\d{4}[-/]\d\d[-/]\d\d[T _-]\d\d:\d\d:\d\d(?:[.,]\d+)*(?:Z|[+-]\d\d:?\d\d)?"
    r"|1\d{9}\.\d+)[\])]?"
)
#: One label of Loki's but the pod.
_LABEL = r"(?!pod=)\w+=\"[^\"\n]{0,200}\""
#: A line of syslog or the journal, up to the node's name, and what follows it.
_SYSLOG = r"(?:<\d+>)?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|" + _TIME + r") "
_PROGRAM = r"(?:kernel|systemd|slurmd|[\w./()-]+\[\d+\]): "
#: Daemons, whose names remain in the line.
_DAEMON = r"(?:kernel|systemd|slurm|nv|kube|containerd|docker)"
#: A time that a collector puts before a line, in a column of its own.
_STAMP = (
    _TIME + r":?(?:$| (?:std(?:out|err) [FP] )?"
    r"(?: +(?=[\[(]?(?:TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b))?)"
)
#: The head of a line of syslog or the journal, whose one group is the node.
_JOURNAL = rf"{_SYSLOG}({_HOST}) (?={_PROGRAM})(?:(?!{_DAEMON}){_PROGRAM})?"
#: The head that a collector puts before every line: its time, in the collectors' form, and before
#: the lines of a traceback, where no program has put it.
COLLECTED = re.compile(f"{_JOURNAL}|{_STAMP}".encode())
ZONED = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d):?(?: |$)")
TRACED = re.compile(rf"(?:{_JOURNAL}|{_STAMP})(?:\S{{1,60}} ?)?  File \"".encode())

#: Prefixes that are cut from the line, by the key in `Prefix.kinds`, in the order in which they are
#: tried. A pattern is the whole prefix with the space behind it; its groups are fields of `Prefix`.
CUT = {
    # 3: of srun --label, which the rank behind it leaves no doubt about
    "labelled": r" *(?P<task>\d{1,5}): (?=\[rank\d+\]: ?)",
    # [rank3]: of PyTorch's excepthook and logs, and of torchrun --tee where the role is "rank"
    "torch": r"\[rank(?P<rank>\d+)\]:(?: (?! File \"))?",
    # [default3]: of torchrun: the role's name and the rank within the node
    "torchrun": r"\[(?:default|trainer|worker)_?(?P<local_rank>\d+)\]:" + _SPACE,
    # [1,3]<stderr>: of Open MPI: the job and the rank
    "mpirun": (
        r"\[(?:[\w.@-]+[@,])?(?P<rank>\d+)\](?:\[[^\]]*\])?<std(?:out|err|diag)>:?" + _SPACE
    ),
    # [1,mpirank:3,algo-1]<stderr>: of SageMaker
    "sagemaker": r"\[\d+,mpirank:(?P<rank>\d+),(?P<node>[\w-]+)\]<std(?:out|err|diag)>:?" + _SPACE,
    # {app="train", pod="trainer-3"} of Loki
    "loki": rf"\{{(?:{_LABEL}, ?)*pod=\"(?P<node>[\w.-]+)\"(?:, ?{_LABEL})*\}} ",
    # (RayTrainWorker pid=1234, ip=10.0.0.2)
    "ray": (
        r"\([^()\n]{0,60}(?:\([^()\n]*\))?[^()\n]{0,20}?\bpid=(?P<pid>\d+)"
        r"(?:, ip=(?P<node>[\da-fA-F.:]+))?\) ?"
    ),
    # [pod/job-worker-3/pytorch] of kubectl logs --prefix
    "kubectl": r"\[?pod/(?P<node>[\w.-]+)(?:/[\w.-]+)?\]? ",
    # gpu041:22011:22055 [0] NCCL INFO: host, process, thread, device
    "nccl": (
        rf"(?P<node>{_HOST}):(?P<pid>\d+):\d+ \[(?:-\d+|(?P<device>\d+))\] "
        rf"(?=NCCL\b|\S+:\d+ NCCL\b|{_TIME}|[\w/]+\.(?:cc|cu|h):)"
    ),
    # [node-07:2566745:0] of UCX: host, process, thread
    "ucx": rf"\[(?P<node>{_HOST}):(?P<pid>\d+):\d+(?::\d+)?\] +",
    # [node-07:12345] *** of Open MPI's own messages: host, process
    "open_mpi": rf"\[(?P<node>{_HOST}):(?P<pid>\d+)\] (?=\*\*\*|PMIX|PRTE|ORTE|mca_)",
    # worker.log-11454- of grep over several files
    "grep": r"[\w./@+-]+\.(?:log|txt|out|err)[-:]\d+[-:]",
}
#: Prefixes that prose may look like: they count only where the file's lines agree (`_counted`).
COUNTED = {
    # [node-07:5]
    "node_rank": rf"\[(?P<node>{_HOST}):(?P<local_rank>\d{{1,4}})\]:? ",
    # node-07: of pdsh, worker-1 | of compose
    "host": rf"(?P<node>{_NAME})(?:: ?| +\| ?)",
    # trainer-worker-3 pytorch of stern: pod and container
    "stern": r"(?P<node>[a-z][a-z\d]*(?:-[a-z\d]+)+) (?:[a-z][a-z\d]*(?:-[a-z\d]+)*) ",
    # x1002c3s1b0n0 6: of Cray's PALS, mpiexec --label
    "pals": rf"(?P<node>{_NAME}) (?P<rank>\d{{1,5}}): ?(?!\d\d:\d\d)",
    # 3: of srun --label
    "srun": r" *(?P<task>\d{1,5}): ?(?!\d\d:\d\d)",
    # [3]: and [3] of launchers and programs
    "bracket": r"\[(?P<rank>\d{1,5})\](?::? )",
    "word": r"[Rr]ank[ _]?(?P<rank>\d{1,5})(?::| \|) ?",
}

#: Prefixes that are left in the line, as they stand behind its time and level.
STATED = {
    # [Rank 3], [rank: 3], [PG ID 0 PG GUID 0 Rank 3]
    "stated": r"\[(?:PG [^\[\]]{0,80})?(?i:rank)[ :_=]{0,2}(?P<rank>\d+)\]",
    # {"time": 1.2, "rank": 3, "host": "node-07", ...} of loggers that write JSON
    "json": (
        r"\"(?:global_)?rank\": ?(?P<rank>\d{1,6})(?!\d)"
        rf"(?:, ?\"(?:host|hostname|node|nodename)\": ?\"(?P<node>{_HOST})\")?"
    ),
    # step=3 rank=5 of loggers that write keys and values
    "logfmt": r"rank=(?P<rank>\d{1,6})(?= \w+=|\Z)",
    # HCCL(69395,python3): of Ascend
    "ascend": r"[A-Z][A-Z_]+\((?P<pid>\d+),[\w,.-]*\):",
}
#: Brackets, a time and a level before `STATED`.
HEADER = (
    rf"(?:\[[^\[\]\n]{{0,80}}\][ -]*|{_TIME}[ :,|-]*"
    r"|(?:INFO|WARN|WARNING|ERROR|DEBUG|CRITICAL|FATAL)[ :|-]+){0,4}"
    # The keys of JSON before that of the rank; a logger's message is not among them.
    r"(?:\{ ?(?:\"(?!msg|message|text|log)\w+\": ?(?:\"[^\"\\\n]{0,80}\"|[\d.]+), ?){0,6}"
    r"(?=\"(?:global_)?rank\"))?"
    r"(?:(?:(?!msg|message)\w+=[^\s\"=]{1,60} ){1,6}(?=rank=\d))?"
)


@cache
def pattern_of(counted: frozenset[str], behind: frozenset[str] | None = None) -> re.Pattern[bytes]:
    """The whole prefix of any line; arguments as those of `PrefixParser`.

    Four groups: the prefixes before a time, the node of a line of syslog, the prefixes behind
    either, and the prefix behind time and level.
    """
    cut, some = _chain(counted)
    if behind is not None:
        timed = f"(?:{_JOURNAL}|{_STAMP})?({_chain(behind)[0]})"
    else:
        timed = (
            rf"(?:{_SYSLOG}({_HOST}) (?={_PROGRAM})"
            rf"|{_TIME}:? (?:std(?:out|err) [FP] |(?={some}))({cut}))?"
        )
    stated = "|".join(map(_bare, STATED.values()))
    return re.compile(f"({cut}){timed}(?:(?={HEADER}({stated})))?".encode())


def _chain(counted: Collection[str]) -> tuple[str, str]:
    """Any number of prefixes, and any one of them."""
    plain = [*map(_bare, CUT.values())]
    used = [_bare(pattern) for name, pattern in COUNTED.items() if name in counted]
    some = f"(?:{'|'.join(plain)})*"
    # Once each: "0: 0:1: no option" is a rank and its text.
    return some + "".join(f"(?:{pattern})?" for pattern in used) + some, "|".join([*plain, *used])


def _bare(pattern: str) -> str:
    return re.sub(r"[(][?]P<\w+>", "(?:", pattern)


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
_ANY_COUNTED = re.compile("|".join(map(_bare, COUNTED.values())).encode())
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
        # Of another rank than torchrun's prefix states: "[rank3]:[rank11]:".
        teed = (found for line in lines if (found := _TEED.search(line, 0, TIME_HEAD)))
        role_is_rank = any(found[1] != found[2] for found in teed)
        launches = role_is_rank
        if "srun" in counted.union(behind or ()):
            learnt = cls(counted, behind=behind)
            of_tasks = (who for who, _ in map(learnt.split, lines) if who.task is not None)
            launches |= any(who.local_rank or who.rank not in (None, who.task) for who in of_tasks)
            launches |= any(map(_LAUNCHES.search, lines))
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

    return bool(rests) and most(COLLECTED) and (most(ZONED) or any(map(TRACED.match, rests)))


def _counted(rests: list[bytes]) -> set[str]:
    """The counted forms, which a single line may have by chance, on which a file's lines agree."""
    may, agreed = [rest for rest in rests if _ANY_COUNTED.match(rest, 0, _LONGEST_HEAD)], set[str]()
    for form in COUNTED:
        heads = [match for line in may if (match := _COMPILED[form].match(line, 0, _LONGEST_HEAD))]
        share, distinct = len(heads) / max(len(rests), 1), len({match.groups() for match in heads})
        enough = len(heads) >= 3 and share >= 0.1
        if enough and (distinct < 0.9 * len(heads) or share > 0.9):
            agreed |= {form} if _ARE.get(form, _are_ranks)(heads, distinct, share) else set()
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
    words = any((NO_HOST.match(host) and not named) or host.endswith(_CODES) for host in hosts)
    return len(forms) == 1 and share >= 0.5 and len(heads) >= 2 * distinct and not words


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
