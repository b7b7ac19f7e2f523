"""The forms of prefixes by which launchers and libraries say who writes a line."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HOST = r"[A-Za-z\d][\w.-]*"
#: A host that is told by nothing but its name and what stands around it.
_NAME = r"(?:[A-Za-z][\w.-]*\d[\w.-]*|\d+(?:\.\d+){3})"
_TIME = (
    r"[\[(]?(?:\d{4}[-/]\d\d[-/]\d\d[T _-]\d\d:\d\d:\d\d(?:[.,]\d+)*(?:Z|[+-]\d\d:?\d\d)?"
    r"|1\d{9}\.\d+)[\])]?"
)
#: A line of syslog or the journal, up to the node's name, and what follows it.
_SYSLOG = r"(?:<\d+>)?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|" + _TIME + r") "
_PROGRAM = r"(?:kernel|systemd|slurmd|[\w./()-]+\[\d+\]): "


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of prefix.

    Attributes:
        name: the key in `Who.kinds`.
        pattern: the whole prefix with the space behind it; its named groups are fields of `Who`.
        counted: a prefix that prose may look like: counts only where the file's lines agree.
            Its one group is told to be a number or a host by its name.
    """

    name: str
    pattern: str
    counted: bool = False


#: Cut from the line. In the order in which they are tried.
CUT = (
    # [rank3]: of PyTorch's excepthook and logs
    Form(name="torch", pattern=r"\[rank(?P<rank>\d+)\]: ?"),
    # [default3]: of torchrun: the role's name and the rank within the node
    Form(name="torchrun", pattern=r"\[(?:default|trainer|worker)_?(?P<local_rank>\d+)\]: ?"),
    # [1,3]<stderr>: of Open MPI: the job and the rank
    Form(
        name="mpirun",
        pattern=r"\[(?:[\w.@-]+[@,])?(?P<rank>\d+)\](?:\[[^\]]*\])?<std(?:out|err|diag)>:? ?",
    ),
    # (RayTrainWorker pid=1234, ip=10.0.0.2)
    Form(
        name="ray",
        pattern=r"\([^()\n]{0,60}(?:\([^()\n]*\))?[^()\n]{0,20}?\bpid=(?P<pid>\d+)"
        r"(?:, ip=(?P<node>[\da-fA-F.:]+))?\) ?",
    ),
    # [pod/job-worker-3/pytorch] of kubectl logs --prefix
    Form(name="kubectl", pattern=r"\[?pod/(?P<node>[\w.-]+)(?:/[\w.-]+)?\]? "),
    # gpu041:22011:22055 [0] NCCL INFO: host, process, thread, device
    Form(
        name="nccl",
        pattern=rf"(?P<node>{_HOST}):(?P<pid>\d+):\d+ \[-?\d+\] "
        rf"(?=NCCL\b|\S+:\d+ NCCL\b|{_TIME}|[\w/]+\.(?:cc|cu|h):)",
    ),
    # [node-07:2566745:0] of UCX: host, process, thread
    Form(name="ucx", pattern=rf"\[(?P<node>{_HOST}):(?P<pid>\d+):\d+(?::\d+)?\] +"),
    # [node-07:12345] *** of Open MPI's own messages: host, process
    Form(
        name="open_mpi",
        pattern=rf"\[(?P<node>{_HOST}):(?P<pid>\d+)\] (?=\*\*\*|PMIX|PRTE|ORTE|mca_)",
    ),
    # worker.log-11454- of grep over several files
    Form(name="grep", pattern=r"[\w./@+-]+\.(?:log|txt|out|err)[-:]\d+[-:]"),
    # [node-07:5]
    Form(
        name="node_rank",
        pattern=rf"\[(?P<node>{_HOST}):(?P<local_rank>\d{{1,4}})\]:? ",
        counted=True,
    ),
    # node-07: of pdsh, worker-1 | of compose, [node-07]
    Form(name="host", pattern=rf"(?P<node>{_NAME})(?:: ?| +\| ?)", counted=True),
    Form(name="host_bracket", pattern=rf"\[(?P<node>{_NAME})\]:? ", counted=True),
    # 3: of srun --label
    Form(name="srun", pattern=r" *(?P<task>\d{1,5}): ?(?!\d\d:\d\d)", counted=True),
    # 3 ::, [3]: and [3] of launchers and programs
    Form(name="number", pattern=r"(?P<rank>\d{1,5}) ?:: ", counted=True),
    Form(name="bracket", pattern=r"\[(?P<rank>\d{1,5})\](?::? )", counted=True),
    Form(name="word", pattern=r"[Rr]ank[ _]?(?P<rank>\d{1,5})(?::| \|) ?", counted=True),
)  # fmt: skip

#: Left in the line, for they stand behind its time and level: who says it, by its own words.
SAID = (
    # [Rank 3], [rank: 3], [PG ID 0 PG GUID 0 Rank 3]
    Form(name="said", pattern=r"\[(?:PG [^\[\]]{0,80})?(?i:rank)[ :_=]{0,2}(?P<rank>\d+)\]"),
    # HCCL(69395,python3): of Ascend
    Form(name="ascend", pattern=r"[A-Z][A-Z_]+\((?P<pid>\d+),[\w,.-]*\):"),
)
#: Brackets, a time and a level before `SAID`.
HEADER = (
    rf"(?:\[[^\[\]\n]{{0,80}}\][ -]*|{_TIME}[ :,|-]*"
    r"|(?:INFO|WARN|WARNING|ERROR|DEBUG|CRITICAL|FATAL)[ :|-]+){0,4}"
)


def pattern_of(counted: set[str], stamped: bool) -> re.Pattern[bytes]:
    """The whole prefix of any line.

    Four groups: the prefixes before a time, those behind it, the node of a line of syslog, and
    what stands behind time and level.

    Args:
        counted: names of the counted forms that the file uses.
        stamped: the file has lines that begin with a time and then a prefix.
    """
    plain = "|".join(_bare(form.pattern) for form in CUT if not form.counted)
    used = [_bare(form.pattern) for form in CUT if form.name in counted]
    # Once each: "0: 0:1: no option" is a rank and what it says.
    cut = f"(?:{plain})*" + "".join(f"(?:{one})?" for one in used) + f"(?:{plain})*"
    said = "|".join(_bare(form.pattern) for form in SAID)
    behind = "()()"
    if stamped:
        some = "|".join([plain, *used])
        behind = (
            rf"(?:{_TIME} (?:std(?:out|err) [FP] |(?={some}))({cut})"
            rf"|{_SYSLOG}({_HOST}) (?={_PROGRAM}))?"
        )
    return re.compile(f"({cut}){behind}(?:(?={HEADER}({said})))?".encode())


def _bare(pattern: str) -> str:
    return re.sub(r"[(][?]P<\w+>", "(?:", pattern)
