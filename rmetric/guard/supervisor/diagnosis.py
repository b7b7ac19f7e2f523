"""Why a launch failed: which rank first, and why, in words. Reads what is there, trusts none of it.

The sources, the surest first: torchrun's error file, its report of the root cause in the
log, the last words of the rank, the exit code, the heartbeats that stopped first.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric.guard.run_folder import Heartbeat
from rmetric.guard.supervisor.allocation import Allocation
from rmetric.guard.supervisor.events import Failure

#: Bytes of the end of a log that are looked at.
TAIL = 64 * 1024
_ROOT = "Root Cause (first observed failure):"
_FAILED = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s*: (?P<code>-?\d+) \(pid: \d+\)"
)
#: What an agent logs before, and ft_launcher alone; the rank is that of the node.
_LOCAL = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
#: The line that ends a traceback, perhaps with the rank that torch puts before it.
_RAISED = re.compile(
    r"^(?:\[rank(?P<rank>\d+)\]: ?|\[[^\]]*?(?P<tag>\d+)\]: ?)?"
    r"(?P<words>(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*)$",
    re.MULTILINE,
)


#: Words that name the rank's device, and those that do so where the device is innocent: too
#: little memory, an index that is wrong, a collective, whose victims are many.
_DEVICE = re.compile(
    r"\b(?:CUDA|HIP|cuDNN|cuBLAS(?:Lt)?|cuSOLVER|cuFFT|MIOpen)\b[^.:]{0,40}\berror\b"
    r"|\b(?:CUDNN|CUBLAS|CUSOLVER|CUFFT|HIPBLAS|ROCBLAS|miopen)_?STATUS_"
    r"|\bcudaError|\bhipError|\bECC\b|\bXid\b|fallen off the bus",
    re.IGNORECASE,
)
_INNOCENT = re.compile(
    r"out of memory|OutOfMemory|ALLOC_FAILED|device-side assert|no kernel image|NCCL|RCCL",
    re.IGNORECASE,
)
#: Signals that a process brings on itself; others come from outside.
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
#: What a rank that lost another prints before NCCL aborts it.
_WATCHDOG = "Watchdog caught collective operation timeout"


@dataclass(frozen=True, kw_only=True)
class _Root:
    """What torchrun calls the root cause."""

    rank: int | None = None
    code: int | None = None


def of_exit(
    code: int,
    *,
    node: str,
    allocation: Allocation,
    log: str,
    error_file: Path | None,
    beats: Mapping[int, Heartbeat],
    launcher: bool = True,
) -> Failure:
    """Why a launch whose process on `node` exited with `code`, which is not 0, failed.

    The rank's GPU is named only where something speaks against it: an exception may be the
    same on all ranks, and the one that raised it first is no worse than the others.

    Args:
        log: the end of what it printed.
        error_file: that torchrun was told to leave.
        beats: the last heartbeats of its ranks.
        launcher: the process is torchrun or ft_launcher, not the training itself.
    """
    root = _root_of(log, list(allocation.gpus).index(node) * allocation.per_node)
    said = _error_file(error_file, root.rank) or _raised(log, root.rank)
    if root.rank is None and code < 0:
        words = f"the {'launcher' if launcher else 'program'} was killed by {signal_name(code)}"
        return Failure(kind="signal", words=words, code=code, node=node)
    rank, at = root.rank, root.code if root.code is not None else code
    gpu = allocation.gpu_of(rank) if rank is not None else None
    who = "the training" if rank is None else f"rank {rank}"
    beat = beats.get(rank) if rank is not None else None
    step = f", last seen at step {beat.step}" if beat else ""
    where = gpu[0] if gpu else node
    if at < 0:
        gpu = gpu if -at in _OWN_SIGNALS and _WATCHDOG not in log else None
        words = f"{who} was killed by {signal_name(at)}{step}"
        return Failure(kind="signal", words=words, code=at, rank=rank, node=where, gpu=gpu)
    why = said or _last_line(_before_the_agent(log))
    kind = "exception" if said else "exit"
    words = f"{who} failed with exit code {at}{step}" + (f": {why}" if why else "")
    gpu = gpu if names_device(why) else None
    return Failure(kind=kind, words=words[:500], code=at, rank=rank, node=where, gpu=gpu)


def of_hang(
    beats: Mapping[int, Heartbeat], silent: float, limit: float, allocation: Allocation
) -> Failure:
    """Why a launch that has done nothing for `silent` seconds hangs; the rank furthest behind."""
    if not beats:
        words = f"it has not begun to train in {silent:.0f} s, {limit:g} are allowed"
        return Failure(kind="hang", words=words)
    rank = min(beats, key=lambda r: (beats[r].step, beats[r].time))
    first, others = beats[rank], [beats[r] for r in beats if r != rank]
    # Where steps are quick, not every step has its beat: a small lag is no lag.
    alone = bool(others) and all(
        one.step > first.step and one.time - first.time >= first.every for one in others
    )
    gpu = allocation.gpu_of(rank) if alone else None
    if alone:
        least = min(one.step for one in others)
        who = f"rank {rank} stands at step {first.step}, the others at {least} or later"
    else:
        who = f"all stand at step {max(beat.step for beat in beats.values())}"
    words = f"no sign of life for {silent:.0f} s while {first.phase}, {limit:g} are allowed; {who}"
    return Failure(
        kind="hang", words=words, rank=rank if alone else None, gpu=gpu, node=gpu[0] if gpu else ""
    )


def names_device(words: str) -> bool:
    """Whether an exception's words speak against the device it ran on.

    >>> names_device("RuntimeError: CUDA error: an illegal memory access was encountered")
    True
    >>> names_device("OutOfMemoryError: CUDA out of memory"), names_device("KeyError: 'x'")
    (False, False)
    """
    return bool(_DEVICE.search(words)) and not _INNOCENT.search(words)


def signal_name(code: int) -> str:
    """`SIGKILL` for -9 and for 137."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail(path: Path, size: int = TAIL) -> str:
    """The end of a log; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _root_of(log: str, first_rank: int) -> _Root:
    """The earliest root cause that the agents report; `first_rank` of the node that ended."""
    _, said, root = log.partition(_ROOT)
    failed = [*_FAILED.finditer(root), *_FAILED.finditer(log)] if said else []
    if failed:
        # Within a second the agent cannot tell the cause from those that it ended for it.
        cause = min(failed, key=lambda one: int(one["code"]) == -signal.SIGTERM)
        return _Root(rank=int(cause["rank"]), code=int(cause["code"]))
    local = _LOCAL.search(log)
    if local is not None:
        return _Root(rank=first_rank + int(local["rank"]), code=int(local["code"]))
    return _Root()


def _error_file(path: Path | None, rank: int | None) -> str:
    """The message in torchrun's error file; empty where it does not say."""
    try:
        message: Any = json.loads(path.read_text())["message"] if path else ""
        message = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    # The agent's own report about its children is what the log says already.
    return "" if "FAILED" in str(message)[:200] else " ".join(str(message).split())[:300]


def _raised(log: str, rank: int | None) -> str:
    """The exception of this rank; where it has no name on it, the first of the log."""
    raised = [m for m in _RAISED.finditer(log) if not m["words"].startswith(_AGENT)]
    of_rank = [
        m for m in raised if rank is not None and rank in (_number(m, "rank"), _number(m, "tag"))
    ]
    best = of_rank[-1:] or raised[:1]
    return " ".join(best[0]["words"].split())[:300] if best else ""


#: What torchrun itself raises about its children.
_AGENT = ("torch.distributed.elastic", "ChildFailedError", "SystemExit")


def _number(match: re.Match[str], name: str) -> int | None:
    return int(match[name]) if match[name] else None


def _before_the_agent(log: str) -> str:
    """What the training itself printed: the log up to the agent's report of its failure."""
    report = _LOCAL.search(log)
    return log[: log.rfind("\n", 0, report.start()) + 1] if report else log


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
