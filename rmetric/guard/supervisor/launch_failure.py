"""Cause of a failed launch: first failed rank, exit code, exception, implicated GPU.

Evidence in order of reliability: error file of torchrun, its root-cause report in the log,
last exception of the rank, exit code, heartbeats. `rmetric.diagnosis` analyses whole logs
afterwards; this module reads the tail of one log to decide on the restart.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rmetric._util.durable import no_follow
from rmetric.guard.run_folder import LAUNCH_VARIABLE, Heartbeat
from rmetric.guard.supervisor.allocation import Allocation, Gpu

#: Bytes read from the end of a log.
TAIL = 64 * 1024
_ROOT = "Root Cause (first observed failure):"
_FAILED = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s*: (?P<code>-?\d+) \(pid: \d+\)"
)
#: Earlier log line of the agent, the only one of ft_launcher; the rank is local to the node.
_LOCAL = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
#: Last line of a traceback, with torch's optional rank prefix.
_RAISED = re.compile(
    r"^(?:\[rank(?P<rank>\d+)\]: ?|\[[^\]]*?(?P<tag>\d+)\]: ?)?"
    r"(?P<words>(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*)$",
    re.MULTILINE,
)
#: Exceptions of torchrun itself about its children.
_AGENT = ("torch.distributed.elastic", "ChildFailedError", "SystemExit")

#: Messages that implicate the device of the rank, and exceptions to them: out of memory, an
#: index error, or a collective, which fails on many ranks.
_DEVICE = re.compile(
    r"\b(?:CUDA|HIP|cuDNN|cuBLAS(?:Lt)?|cuSOLVER|cuFFT|MIOpen)\b[^.:]{0,40}\berror\b"
    r"|\b(?:CUDNN|CUBLAS|CUSOLVER|CUFFT|HIPBLAS|ROCBLAS|miopen)_?STATUS_"
    r"|\bcudaError|\bhipError|\bECC\b|\bXid\b|fallen off the bus",
    re.IGNORECASE,
)
_NOT_DEVICE = re.compile(
    r"out of memory|OutOfMemory|ALLOC_FAILED|device-side assert|no kernel image|NCCL|RCCL",
    re.IGNORECASE,
)
#: Signals caused by the process itself; others come from outside.
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
#: Printed by a rank that lost another, before NCCL aborts it.
_WATCHDOG = "Watchdog caught collective operation timeout"


@dataclass(frozen=True, kw_only=True)
class LaunchFailure:
    """Cause of a failed launch.

    Attributes:
        kind: `exit`, `signal`, `exception`, `hang` or `gpu`.
        words: human-readable cause.
        code: exit code of the first failed process, below 0 for a signal; None if unknown.
        rank: rank of that process; None if unknown.
        node: node of that process; empty if unknown or with a single node.
        gpu: GPU implicated by the evidence; None for none.
        lasting: it occurs again at each start; see `is_lasting`.
    """

    kind: str
    words: str
    code: int | None = None
    rank: int | None = None
    node: str = ""
    gpu: Gpu | None = None
    lasting: bool = False

    @property
    def signature(self) -> str:
        """Key of failures with the same cause: kind, code, rank and words without numbers."""
        return f"{self.kind} {self.code} {self.rank} {re.sub(r'[0-9]+', '#', self.words)}"


def explain_exit(
    code: int,
    *,
    node: str,
    allocation: Allocation,
    log: str,
    error_file: Path | None,
    beats: Mapping[int, Heartbeat],
    launcher: bool = True,
    arguments: Sequence[str] = (),
) -> LaunchFailure:
    """Cause of a launch whose process exited with a code other than 0.

    A GPU is named only if there is evidence against it: most exceptions occur on all ranks
    alike, and the rank that raised first is no more suspect than the others.

    `code` is below 0 for a signal, `log` the end of the output. `launcher`: the process is
    torchrun or ft_launcher, not the training itself. `arguments`: command of the training.
    """
    rank, root_code = _root_of(log, list(allocation.gpus).index(node) * allocation.per_node)
    raised = _error_file(error_file) or _raised(log, rank)
    if rank is None and code < 0:
        words = f"the {'launcher' if launcher else 'program'} was killed by {signal_name(code)}"
        return LaunchFailure(kind="signal", words=words, code=code, node=node)
    at = code if root_code is None else root_code
    gpu = allocation.gpu_of(rank) if rank is not None else None
    who = "the training" if rank is None else f"rank {rank}"
    beat = beats.get(rank) if rank is not None else None
    step = f", last seen at step {beat.step}" if beat else ""
    where = gpu[0] if gpu else node
    if at < 0:
        gpu = gpu if -at in _OWN_SIGNALS and _WATCHDOG not in log else None
        words = f"{who} was killed by {signal_name(at)}{step}"
        return LaunchFailure(kind="signal", words=words, code=at, rank=rank, node=where, gpu=gpu)
    why = raised or _last_line(log)
    words = f"{who} failed with exit code {at}{step}" + (f": {why}" if why else "")
    return LaunchFailure(
        kind="exception" if raised else "exit", words=with_disk_full_first(words)[:500], code=at,
        rank=rank, node=where, gpu=gpu if names_device(why) else None,
        lasting=is_lasting(raised, at, arguments),
    )  # fmt: skip


def explain_hang(
    beats: Mapping[int, Heartbeat],
    silent: float,
    limit: float,
    allocation: Allocation,
    states: Mapping[int, ProcessState] | None = None,
) -> LaunchFailure:
    """Cause of a hang, with the rank that the others wait for.

    It is the rank that is steps behind all others, or whose process is in another state than
    theirs. Without such evidence no rank is named.

    `silent` is the time without a sign of life and `limit` the exceeded timeout, both in
    seconds; `beats` is empty before the first heartbeat. `states`: processes of ranks on this
    node.
    """
    if not beats:
        words = f"training has not started after {silent:.0f} s, the limit is {limit:g}"
        return LaunchFailure(kind="hang", words=words)
    rank = min(beats, key=lambda r: (beats[r].step, beats[r].time))
    first, others = beats[rank], [beats[r] for r in beats if r != rank]
    # Fast steps have no heartbeat each: a lag below the heartbeat interval is no evidence.
    alone = bool(others) and all(
        other.step > first.step and other.time - first.time >= first.every for other in others
    )
    gpu = allocation.gpu_of(rank) if alone else None
    if alone:
        least = min(other.step for other in others)
        who = f"rank {rank} is at step {first.step}, the others at {least} or later"
    else:
        who = f"all ranks are at step {max(beat.step for beat in beats.values())}"
    named = rank if alone else None
    if odd := odd_one_out(states or {}):
        # A stopped process is no evidence against its GPU, so none is named for it alone.
        who, named = f"{who}; {odd.words}", odd.rank
        gpu = gpu if odd.rank == rank and not odd.stopped else None
    words = f"no heartbeat for {silent:.0f} s while {first.phase}, the limit is {limit:g}; {who}"
    of_named = allocation.gpu_of(named) if named is not None else None
    node = of_named[0] if of_named else ""
    return LaunchFailure(kind="hang", words=words, rank=named, gpu=gpu, node=node)


def names_device(words: str) -> bool:
    """True if an exception implicates the device that it occurred on.

    >>> names_device("RuntimeError: CUDA error: an illegal memory access was encountered")
    True
    >>> names_device("OutOfMemoryError: CUDA out of memory"), names_device("KeyError: 'x'")
    (False, False)
    """
    return bool(_DEVICE.search(words)) and not _NOT_DEVICE.search(words)


def signal_name(code: int) -> str:
    """Name of the signal of an exit code: `SIGKILL` for -9 and for 137."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_tail(path: Path, size: int = TAIL) -> str:
    """End of a log file; empty if it is missing."""
    try:
        with open(path, "rb", opener=no_follow) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _root_of(log: str, first_rank: int) -> tuple[int | None, int | None]:
    """Rank and exit code of the earliest root cause that torchrun reports in the log.

    `first_rank`: first rank of the node that exited.
    """
    _, header, root = log.partition(_ROOT)
    failed = [*_FAILED.finditer(root), *_FAILED.finditer(log)] if header else []
    if failed:
        # The agent orders failures by seconds and may list ranks that it terminated itself.
        cause = min(failed, key=lambda failure: int(failure["code"]) == -signal.SIGTERM)
        return int(cause["rank"]), int(cause["code"])
    local = _LOCAL.search(log)
    if local is not None:
        return first_rank + int(local["rank"]), int(local["code"])
    return None, None


def _error_file(path: Path | None) -> str:
    """Message in the error file of torchrun; empty if there is none."""
    if path is None:
        return ""
    try:
        with open(path, opener=no_follow) as file:
            message: Any = json.loads(file.read())["message"]
        message = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    # The agent's own report about its children repeats the log.
    return "" if "FAILED" in str(message)[:200] else " ".join(str(message).split())[:300]


def _raised(log: str, rank: int | None) -> str:
    """Last exception of this rank; the first of the log if no line names the rank."""
    raised = [m for m in _RAISED.finditer(log) if not m["words"].startswith(_AGENT)]
    of_rank = [m for m in raised if rank in [int(n) for n in m.group("rank", "tag") if n]]
    best = of_rank[-1:] or raised[:1]
    return " ".join(best[0]["words"].split())[:300] if best else ""


def _last_line(log: str) -> str:
    """Last line of the training: of the log up to the agent's failure report."""
    if report := _LOCAL.search(log):
        log = log[: log.rfind("\n", 0, report.start()) + 1]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


#: Exceptions of the program or of its arguments.
LASTING = (
    *("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"),
    *("NameError", "UnboundLocalError", "TypeError", "AttributeError", "ValueError"),
    *("KeyError", "IndexError", "AssertionError", "NotImplementedError", "ZeroDivisionError"),
    *("RecursionError", "ArgumentError", "UsageError", "UnfitCheckpoint"),
)
#: Exceptions of a path: lasting if the path is an argument of the command.
PATHS = ("FileNotFoundError", "NotADirectoryError", "IsADirectoryError")
#: Messages of what may pass, whatever exception carries them.
PASSING = re.compile(
    r"\[Errno \d+\]|\b(?:time[d -]*out|unavailable|temporar\w*|stale file handle"
    r"|connect\w*|network|socket|address already in use|name resolution|rendezvous"
    r"|input/output error|busy|no space left|quota exceeded|out of memory|try again|retry"
    r"|too many requests|service error|HTTP ?(?:429|5\d\d))\b",
    re.IGNORECASE,
)
#: Exit codes without an exception: wrong arguments, not executable, not found.
LASTING_CODES = (2, 126, 127)
DISK_FULL = "disk full"
_DISK_FULL = re.compile(
    r"no space left on device|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|\[Errno (?:28|122)\]"
    r"|disk full",
    re.IGNORECASE,
)
_EXCEPTION = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::\s*(?P<message>.*))?", re.DOTALL)
_QUOTED = re.compile(r"['\"]([^'\"]+)['\"]")


def is_lasting(raised: str, code: int | None, arguments: Sequence[str] = ()) -> bool:
    """True if a failure occurs again at each start.

    `raised` is the exception as in the last line of a traceback, empty without one; `code` the
    exit code, None if unknown; `arguments` the command of the training.

    >>> is_lasting("ModuleNotFoundError: No module named 'x'", 1)
    True
    >>> is_lasting("OSError: [Errno 116] Stale file handle: '/data/a.bin'", 1)
    False
    >>> is_lasting("FileNotFoundError: [Errno 2] No such file: 'a.bin'", 1, ["--data=a.bin"])
    True
    """
    found = _EXCEPTION.fullmatch(raised.strip())
    if found is None:
        return not raised and code in LASTING_CODES
    name, message = found["type"].rpartition(".")[2], found["message"] or ""
    if name in PATHS:
        values = {part for word in arguments for part in (word, word.partition("=")[2]) if part}
        return any(path in values for path in _QUOTED.findall(message))
    # An import cannot pass, whatever its message says of connections.
    if name in ("ImportError", "ModuleNotFoundError", "SyntaxError"):
        return True
    return name in LASTING and not PASSING.search(message)


def is_disk_full(words: str) -> bool:
    """True if a message says that the disk, or the quota, is full.

    >>> is_disk_full("OSError: [Errno 28] No space left on device"), is_disk_full("KeyError: 28")
    (True, False)
    """
    return bool(_DISK_FULL.search(words))


def with_disk_full_first(words: str) -> str:
    """The message, beginning with `disk full` if it is about that.

    >>> with_disk_full_first("rank 0 failed: OSError: [Errno 28] No space left on device")
    'disk full: rank 0 failed: OSError: [Errno 28] No space left on device'
    >>> with_disk_full_first("3 restarts in a row failed, the last: disk full: rank 0 failed")
    'disk full: 3 restarts in a row failed, the last: rank 0 failed'
    """
    if words.startswith(DISK_FULL) or not is_disk_full(words):
        return words
    return f"{DISK_FULL}: {words.replace(f'{DISK_FULL}: ', '')}"


STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
STOPPED = ("T", "t")
#: A rank that polls is seen running now and sleeping then.
SAMPLES, SAMPLE_SECONDS = 5, 0.05


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State of the main thread of a rank's process.

    `state` is the letter of /proc/PID/status, empty if there is no such process; `waits_in` the
    function of the kernel in which it waits, empty if unknown.
    """

    pid: int
    state: str
    waits_in: str = ""

    @property
    def words(self) -> str:
        where = f" in {self.waits_in}" if self.waits_in else ""
        name = STATES.get(self.state, f"in state {self.state}") if self.state else "gone"
        return f"{name}{where}" + (f" (state {self.state})" if self.state in STOPPED else "")


class OddRank(NamedTuple):
    """Rank whose process is in another state than those of the others, with the evidence."""

    rank: int
    words: str
    stopped: bool = False


def read_states(beats: Mapping[int, Heartbeat]) -> dict[int, ProcessState]:
    """Most frequent state, over `SAMPLES`, of each rank whose process is on this node."""
    here = os.uname().nodename
    local = {rank: beat for rank, beat in beats.items() if beat.node == here}
    seen: dict[int, Counter[ProcessState]] = {rank: Counter() for rank in local}
    for sample in range(SAMPLES if local else 0):
        time.sleep(SAMPLE_SECONDS if sample else 0.0)
        for rank, beat in local.items():
            seen[rank][read_state(beat.pid, beat.launch)] += 1
    return {rank: states.most_common(1)[0][0] for rank, states in seen.items()}


def read_state(pid: int, launch: str = "", proc: Path = Path("/proc")) -> ProcessState:
    """State of one process; without a state if it is gone or its pid is of another launch."""
    of = proc / str(pid)
    variable = f"{LAUNCH_VARIABLE}={launch}".encode()
    try:
        if launch and variable not in (of / "environ").read_bytes().split(b"\0"):
            return ProcessState(pid=pid, state="")
        status = (of / "status").read_text()
    except OSError:
        return ProcessState(pid=pid, state="")
    state = next((line.split()[1] for line in status.splitlines() if line.startswith("State:")), "")
    try:
        waits_in = (of / "wchan").read_text().strip()
    except OSError:
        waits_in = ""
    waits_in = "" if waits_in == "0" or state in STOPPED else waits_in
    return ProcessState(pid=pid, state=state, waits_in=waits_in)


def odd_one_out(states: Mapping[int, ProcessState]) -> OddRank | None:
    """The one rank that is stopped, gone, or in another state than at least two that are alike.

    >>> waits = ProcessState(pid=1, state="S", waits_in="futex_wait_queue")
    >>> sleeps = ProcessState(pid=2, state="S", waits_in="hrtimer_nanosleep")
    >>> odd_one_out({0: waits, 1: waits, 2: sleeps}).rank
    2
    >>> odd_one_out({0: waits, 1: sleeps}) is None
    True
    """
    for letters in (STOPPED, ("", "Z", "X")):
        found = [rank for rank, of in states.items() if of.state in letters]
        if len(found) == 1 and len(states) > 1:
            of = states[found[0]]
            words = f"rank {found[0]} (process {of.pid}) is {of.words}"
            return OddRank(found[0], words, letters is STOPPED)
        if found:
            return None
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, of in states.items():
        alike.setdefault((of.state, of.waits_in), []).append(rank)
    if len(alike) != 2 or len(states) < 3 or min(map(len, alike.values())) != 1:
        return None
    [rank], [other, *_] = sorted(alike.values(), key=len)
    of, others = states[rank], states[other].words
    words = f"rank {rank} (process {of.pid}) is {of.words}, the others are {others}"
    return OddRank(rank, words)
