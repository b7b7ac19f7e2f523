"""A launch that fails or hangs: how that is noticed, and its cause.

The cause is the first failed rank, exit code, exception, implicated GPU. Evidence in order of
reliability: error file of torchrun, its root-cause report in the log, last exception of the rank,
exit code, heartbeats. `rmetric.diagnosis` analyses whole logs afterwards; this module reads the
tail of one log to decide on the restart.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric._util.durable import no_follow
from rmetric.guard.run_folder import Heartbeat
from rmetric.guard.supervisor import Settings
from rmetric.guard.supervisor.allocation import Allocation, Gpu
from rmetric.guard.supervisor.processes import GONE, SUSPENDED, states_of

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
        code: exit code of the first failed process, below 0 for a signal; None if unknown.
        rank, node: of that process; None or empty if unknown.
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
    """Cause of a launch whose process exited with a code other than 0, below 0 for a signal.

    A GPU is named only if there is evidence against it: most exceptions occur on all ranks
    alike, so the rank that raised first is not more suspect than the others. `log` is the end of
    the output. `launcher`: the process is torchrun or ft_launcher, not the training itself.
    """
    rank, root_code = _root_of(log, list(allocation.gpus).index(node) * allocation.per_node)
    raised = _error_file(error_file) or _raised(log, rank)
    if rank is None and code < 0:
        words = f"the {'launcher' if launcher else 'program'} was killed by {signal_name(code)}"
        return LaunchFailure(kind="signal", words=words, code=code, node=node)
    at = code if root_code is None else root_code
    gpu = allocation.gpu_of(rank)
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
    states: Mapping[int, str] | None = None,
) -> LaunchFailure:
    """Cause of a hang, with the rank that the others wait for.

    It is the rank that is steps behind all others, or whose process alone is stopped or gone.
    Without such evidence no rank is named.

    `silent` is the time without a sign of life and `limit` the exceeded timeout, both in
    seconds; `beats` is empty before the first heartbeat. `states`: see `states_of`.
    """
    if not beats:
        words = f"training has not started after {silent:.0f} s, the limit is {limit:g}"
        return LaunchFailure(kind="hang", words=words)
    rank = min(beats, key=lambda r: (beats[r].step, beats[r].time))
    first, others = beats[rank], [beats[r] for r in beats if r != rank]
    # Not every fast step has a heartbeat: a lag below the heartbeat interval proves nothing.
    behind = bool(others) and all(
        other.step > first.step and other.time - first.time >= first.every for other in others
    )
    named, gpu = (rank, allocation.gpu_of(rank)) if behind else (None, None)
    who = f"all ranks are at step {max(beat.step for beat in beats.values())}"
    if behind:
        least = min(other.step for other in others)
        who = f"rank {rank} is at step {first.step}, the others at {least} or later"
    states = states or {}
    odd = [r for r, state in states.items() if state in (*SUSPENDED, *GONE)]
    if len(odd) == 1 < len(states):
        named = odd[0]
        # A stopped process does not incriminate its GPU.
        gpu = gpu if named == rank and states[named] in GONE else None
        who += f"; rank {named} (process {beats[named].pid}) is {states[named]}"
    words = f"no heartbeat for {silent:.0f} s while {first.phase}, the limit is {limit:g}; {who}"
    node = (allocation.gpu_of(named) or ("",))[0]
    return LaunchFailure(kind="hang", words=words, rank=named, gpu=gpu, node=node)


def names_device(words: str) -> bool:
    """True if an exception implicates the device that it occurred on."""
    return bool(_DEVICE.search(words)) and not _NOT_DEVICE.search(words)


def signal_name(code: int) -> str:
    """Name of the signal of an exit code: `SIGKILL` for -9 and for 137."""
    number = -code if code < 0 else code - 128
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def read_tail(path: Path, size: int = TAIL) -> str:
    """End of a log file; empty if it is missing."""
    with suppress(OSError), open(path, "rb", opener=no_follow) as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - size))
        return file.read().decode("utf-8", "replace")
    return ""


def _root_of(log: str, first_rank: int) -> tuple[int | None, int | None]:
    """Rank and exit code of the root cause in the log of the node with this first rank."""
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

    `raised` is the exception as in the last line of a traceback, empty without one; `arguments`
    the command of the training.

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
    # An import cannot pass, whatever its message states of connections.
    if name in ("ImportError", "ModuleNotFoundError", "SyntaxError"):
        return True
    return name in LASTING and not PASSING.search(message)


def is_disk_full(words: str) -> bool:
    """True if a message states that the disk, or the quota, is full."""
    return bool(_DISK_FULL.search(words))


def with_disk_full_first(words: str) -> str:
    """The message, beginning with `disk full` if it is about that.

    >>> with_disk_full_first("3 restarts in a row failed, the last: disk full: rank 0 failed")
    'disk full: 3 restarts in a row failed, the last: rank 0 failed'
    """
    if words.startswith(DISK_FULL) or not is_disk_full(words):
        return words
    return f"{DISK_FULL}: {words.replace(f'{DISK_FULL}: ', '')}"


class HeartbeatTracker:
    """Tracks the heartbeats and the output of one launch.

    A heartbeat counts when the content of its file changes, so that clocks of other nodes
    are never compared with the local one. `resumed` is the step at which training resumed, `step`
    the greatest that any rank has done; None before. `resumed_at` and `step_at` are the times of
    these on the heartbeat's clock.
    """

    def __init__(self, settings: Settings, allocation: Allocation, log: Path, now: float) -> None:
        self.settings, self.allocation, self.log = settings, allocation, log
        self.resumed: int | None = None
        self.step: int | None = None
        self.resumed_at = self.step_at = 0.0
        self.beats: dict[int, Heartbeat] = {}
        self._seen: dict[int, float] = {}
        self._size, self._grew = 0, now

    def look(self, beats: Mapping[int, Heartbeat], now: float) -> LaunchFailure | None:
        """Process the current heartbeats; the failure if the launch hangs, else None."""
        for rank, beat in beats.items():
            if self.beats.get(rank) != beat:
                self._seen[rank] = now
        self.beats = self.beats | dict(beats)  # a file may be unreadable for a moment
        self._update_step()
        with suppress(OSError):  # else it has its last size
            if (size := self.log.stat().st_size) != self._size:
                self._size, self._grew = size, now
        return self._silent(now) or self._quiet(now)

    def restart(self, now: float) -> None:
        """Restart all timeouts, after a silence that was not a hang."""
        self._seen = dict.fromkeys(self._seen, now)
        self._grew = now

    @property
    def last_sign(self) -> float | None:
        """Time of the oldest last heartbeat, seconds since the epoch; None without any."""
        return min((beat.time for beat in self.beats.values()), default=None)

    def _update_step(self) -> None:
        at_work = [beat for beat in self.beats.values() if beat.phase != "starting"]
        if not at_work:
            return
        first = min(at_work, key=lambda beat: (beat.time, beat.rank))
        if self.resumed is None:
            resumed = [beat.resumed for beat in at_work if beat.resumed is not None]
            self.resumed = min(resumed, default=min(beat.step for beat in at_work))
            self.resumed_at = first.time
        last = max(at_work, key=lambda beat: (beat.step, -beat.time))
        if self.step is None or last.step > self.step:
            self.step, self.step_at = last.step, last.time

    def _silent(self, now: float) -> LaunchFailure | None:
        """Failure if a rank, or a launch without heartbeats, gave no sign of life in time."""
        waits = [(now - self._seen[rank], self.settings.timeout(beat.phase))
                 for rank, beat in self.beats.items()]  # fmt: skip
        if not waits and not self.settings.quiet_seconds:
            # Without heartbeats only output distinguishes a start from a hang.
            waits = [(now - self._grew, self.settings.start_seconds)]
        for silent, limit in waits:
            if silent > limit:
                states = states_of(self.beats)
                return explain_hang(self.beats, silent, limit, self.allocation, states)
        return None

    def _quiet(self, now: float) -> LaunchFailure | None:
        if self.settings.quiet_seconds is None:
            return None
        silent = now - self._grew
        limit = self.settings.quiet_seconds if self._size else self.settings.start_seconds
        words = f"no output for {silent:.0f} s, the limit is {limit:g}"
        return LaunchFailure(kind="hang", words=words) if silent > limit else None
