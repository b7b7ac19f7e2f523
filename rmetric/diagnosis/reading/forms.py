"""Prefix formats by which launchers and libraries identify the writer of a line."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_HOST = r"[A-Za-z\d][\w.-]*"
#: A host that is told by nothing but its name and what stands around it.
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
#: Daemons, whose names say as much as their words.
_DAEMON = r"(?:kernel|systemd|slurm|nv|kube|containerd|docker)"
#: A time that a collector puts before a line, in a column of its own.
_STAMP = (
    _TIME + r"(?:$| (?:std(?:out|err) [FP] )?"
    r"(?: +(?=[\[(]?(?:TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b))?)"
)
#: The head of a line of syslog or the journal, whose one group is the node.
_JOURNAL = rf"{_SYSLOG}({_HOST}) (?={_PROGRAM})(?:(?!{_DAEMON}){_PROGRAM})?"
#: What a collector puts before every line; before any it is the time as these write it; before
#: a traceback's, no program has put it there.
COLLECTED = re.compile(f"{_JOURNAL}|{_STAMP}".encode())
ZONED = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)(?: |$)")
TRACED = re.compile(rf"(?:{_JOURNAL}|{_STAMP})(?:\S{{1,60}} ?)?  File \"".encode())


@dataclass(frozen=True, kw_only=True)
class PrefixForm:
    """One form of prefix.

    Attributes:
        name: the key in `Prefix.kinds`.
        pattern: the whole prefix with the space behind it; its named groups are fields of `Prefix`.
        counted: a prefix that prose may look like: counts only where the file's lines agree.
            Its one group is told to be a number or a host by its name.
    """

    name: str
    pattern: str
    counted: bool = False


#: Cut from the line. In the order in which they are tried.
CUT = (
    # [rank3]: of PyTorch's excepthook and logs
    PrefixForm(name="torch", pattern=r"\[rank(?P<rank>\d+)\]: ?"),
    # [default3]: of torchrun: the role's name and the rank within the node
    PrefixForm(
        name="torchrun",
        pattern=r"\[(?:default|trainer|worker)_?(?P<local_rank>\d+)\]:" + _SPACE,
    ),
    # [1,3]<stderr>: of Open MPI: the job and the rank
    PrefixForm(
        name="mpirun",
        pattern=r"\[(?:[\w.@-]+[@,])?(?P<rank>\d+)\](?:\[[^\]]*\])?<std(?:out|err|diag)>:?"
        + _SPACE,
    ),
    # [1,mpirank:3,algo-1]<stderr>: of SageMaker
    PrefixForm(
        name="sagemaker",
        pattern=r"\[\d+,mpirank:(?P<rank>\d+),(?P<node>[\w-]+)\]<std(?:out|err|diag)>:?" + _SPACE,
    ),
    # job-7/algo-1-1700000000 of CloudWatch, where it tails the streams of SageMaker
    PrefixForm(name="cloudwatch", pattern=r"[\w.-]+(?:/[\w.-]+)*/(?P<node>algo-\d+)-\d{10} "),
    # {app="train", pod="trainer-3"} of Loki
    PrefixForm(
        name="loki",
        pattern=rf"\{{(?:{_LABEL}, ?)*pod=\"(?P<node>[\w.-]+)\"(?:, ?{_LABEL})*\}} ",
    ),
    # trainer.3.k2jx81@node-07 | of Docker's swarm
    PrefixForm(name="swarm", pattern=rf"[\w-]+\.\d+\.[a-z\d]+@(?P<node>{_HOST}) +\| ?"),
    # (RayTrainWorker pid=1234, ip=10.0.0.2)
    PrefixForm(
        name="ray",
        pattern=r"\([^()\n]{0,60}(?:\([^()\n]*\))?[^()\n]{0,20}?\bpid=(?P<pid>\d+)"
        r"(?:, ip=(?P<node>[\da-fA-F.:]+))?\) ?",
    ),
    # [pod/job-worker-3/pytorch] of kubectl logs --prefix
    PrefixForm(name="kubectl", pattern=r"\[?pod/(?P<node>[\w.-]+)(?:/[\w.-]+)?\]? "),
    # gpu041:22011:22055 [0] NCCL INFO: host, process, thread, device
    PrefixForm(
        name="nccl",
        pattern=rf"(?P<node>{_HOST}):(?P<pid>\d+):\d+ \[-?\d+\] "
        rf"(?=NCCL\b|\S+:\d+ NCCL\b|{_TIME}|[\w/]+\.(?:cc|cu|h):)",
    ),
    # [node-07:2566745:0] of UCX: host, process, thread
    PrefixForm(name="ucx", pattern=rf"\[(?P<node>{_HOST}):(?P<pid>\d+):\d+(?::\d+)?\] +"),
    # [node-07:12345] *** of Open MPI's own messages: host, process
    PrefixForm(
        name="open_mpi",
        pattern=rf"\[(?P<node>{_HOST}):(?P<pid>\d+)\] (?=\*\*\*|PMIX|PRTE|ORTE|mca_)",
    ),
    # worker.log-11454- of grep over several files
    PrefixForm(name="grep", pattern=r"[\w./@+-]+\.(?:log|txt|out|err)[-:]\d+[-:]"),
    # [node-07:5]
    PrefixForm(
        name="node_rank",
        pattern=rf"\[(?P<node>{_HOST}):(?P<local_rank>\d{{1,4}})\]:? ",
        counted=True,
    ),
    # node-07: of pdsh, worker-1 | of compose, [node-07]
    PrefixForm(name="host", pattern=rf"(?P<node>{_NAME})(?:: ?| +\| ?)", counted=True),
    # trainer-worker-3 pytorch of stern: pod and container
    PrefixForm(
        name="stern",
        pattern=r"(?P<node>[a-z][a-z\d]*(?:-[a-z\d]+)+) (?:[a-z][a-z\d]*(?:-[a-z\d]+)*) ",
        counted=True,
    ),
    PrefixForm(name="host_bracket", pattern=rf"\[(?P<node>{_NAME})\]:? ", counted=True),
    # 3: of srun --label
    PrefixForm(name="srun", pattern=r" *(?P<task>\d{1,5}): ?(?!\d\d:\d\d)", counted=True),
    # 3 ::, [3]: and [3] of launchers and programs
    PrefixForm(name="number", pattern=r"(?P<rank>\d{1,5}) ?:: ", counted=True),
    PrefixForm(name="bracket", pattern=r"\[(?P<rank>\d{1,5})\](?::? )", counted=True),
    PrefixForm(name="word", pattern=r"[Rr]ank[ _]?(?P<rank>\d{1,5})(?::| \|) ?", counted=True),
)  # fmt: skip

#: Left in the line, for they stand behind its time and level: who says it, by its own words.
SAID = (
    # [Rank 3], [rank: 3], [PG ID 0 PG GUID 0 Rank 3]
    PrefixForm(name="said", pattern=r"\[(?:PG [^\[\]]{0,80})?(?i:rank)[ :_=]{0,2}(?P<rank>\d+)\]"),
    # HCCL(69395,python3): of Ascend
    PrefixForm(name="ascend", pattern=r"[A-Z][A-Z_]+\((?P<pid>\d+),[\w,.-]*\):"),
)
#: Brackets, a time and a level before `SAID`.
HEADER = (
    rf"(?:\[[^\[\]\n]{{0,80}}\][ -]*|{_TIME}[ :,|-]*"
    r"|(?:INFO|WARN|WARNING|ERROR|DEBUG|CRITICAL|FATAL)[ :|-]+){0,4}"
)


def pattern_of(
    counted: Collection[str], stamped: bool, behind: Collection[str] | None = None
) -> re.Pattern[bytes]:
    """The whole prefix of any line.

    Four groups: the prefixes before a time, the node of a line of syslog, the prefixes behind
    either, and what stands behind time and level.

    Args:
        counted: names of the counted forms that the file uses.
        stamped: the file has lines that begin with a time and then a prefix.
        behind: a collector put a time before every line, which is part of the prefix, and these
            counted forms stand behind it; None where it did not.
    """
    cut, some = _chain(counted)
    if behind is not None:
        timed = f"(?:{_JOURNAL}|{_STAMP})?({_chain(behind)[0]})"
    elif stamped:
        timed = (
            rf"(?:{_SYSLOG}({_HOST}) (?={_PROGRAM})"
            rf"|{_TIME} (?:std(?:out|err) [FP] |(?={some}))({cut}))?"
        )
    else:
        timed = "()()"
    said = "|".join(_bare(form.pattern) for form in SAID)
    return re.compile(f"({cut}){timed}(?:(?={HEADER}({said})))?".encode())


def _chain(counted: Collection[str]) -> tuple[str, str]:
    """Any number of prefixes, and any one of them."""
    plain = [_bare(form.pattern) for form in CUT if not form.counted]
    used = [_bare(form.pattern) for form in CUT if form.name in counted]
    some = f"(?:{'|'.join(plain)})*"
    # Once each: "0: 0:1: no option" is a rank and what it says.
    return some + "".join(f"(?:{one})?" for one in used) + some, "|".join([*plain, *used])


def _bare(pattern: str) -> str:
    return re.sub(r"[(][?]P<\w+>", "(?:", pattern)
