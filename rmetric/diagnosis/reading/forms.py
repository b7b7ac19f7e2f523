"""Prefix formats by which launchers and libraries identify the writer of a line."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

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
#: Prefixes that prose may look like: they count only where the file's lines agree (prefixes.py).
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
    """The whole prefix of any line.

    Four groups: the prefixes before a time, the node of a line of syslog, the prefixes behind
    either, and the prefix behind time and level.

    Args:
        counted: names of the counted forms that the file uses.
        behind: a collector put a time before every line, which is part of the prefix, and these
            counted forms stand behind it; None where it did not.
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
    return some + "".join(f"(?:{one})?" for one in used) + some, "|".join([*plain, *used])


def _bare(pattern: str) -> str:
    return re.sub(r"[(][?]P<\w+>", "(?:", pattern)
