"""Event log of a run folder, and the lock held by its supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rmetric._util.durable import no_follow
from rmetric._util.printed import counted, number_ranges, printable
from rmetric._util.strict_json import encode, encode_line, parse_line
from rmetric.guard.run_folder import Count, RunFolder, converted
from rmetric.guard.supervisor.core import JournalState
from rmetric.guard.trust import make_private, require_trusted
from rmetric.telemetry.reading import Time

Line = dict[str, Any]


class FolderLockedError(RuntimeError):
    """Another supervisor holds the folder."""


@contextlib.contextmanager
def folder_lock(folder: RunFolder) -> Iterator[None]:
    """Lock a run folder; the kernel releases the lock when the process ends.

    Raises:
        FolderLockedError: on entry, with the holder.
        ValueError: other users can write the folder.
        OSError: the lock is a symbolic link, or cannot be written or locked.
    """
    make_private(folder.path)
    require_trusted(folder.path)
    # Child processes do not inherit the descriptor.
    with open(folder.lock, "a+", opener=no_follow) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "an unknown process"
            words = f"{folder.path} is supervised already, by {holder}"
            raise FolderLockedError(words) from None
        except OSError as error:  # the file system may not support locks
            words = f"it cannot be locked: {error.strerror}"
            raise OSError(error.errno, words, str(folder.lock)) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


class Journal:
    """Appends to `journal.jsonl`; each line is durable when `write` returns.

    A last line truncated by a crash or a full disk is terminated before the next.

    Attributes:
        lines: events, of earlier supervisors too.
        num_invalid: JSON lines of earlier supervisors that are no events; they are ignored.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+", opener=no_follow)  # noqa: SIM115
        self._file.seek(0)
        data = self._file.read()
        self.lines: list[Line]
        self.lines, self.num_invalid = _lines_of(data)
        if data and not data.endswith(b"\n"):
            self._file.write(b"\n")

    def write(self, event: str, **fields: Any) -> Line:
        """Append an event with its time and fields; returns the line."""
        line = {"time": round(time.time(), 3), "event": event, **encode(fields)}
        self.lines.append(line)
        self._file.write(encode_line(line))
        self._file.flush()
        os.fsync(self._file.fileno())
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which `write` has raised
            self._file.close()


def read_journal(path: Path) -> list[Line]:
    """Events of a journal, without invalid lines; empty if the file is missing."""
    try:
        return _lines_of(path.read_bytes())[0]
    except FileNotFoundError:
        return []


def _lines_of(data: bytes) -> tuple[list[Line], int]:
    """Valid lines, and the number of others that are not cut off."""
    lines, problems = [], 0
    for raw in data.split(b"\n"):
        try:
            line = parse_line(raw)
        except ValueError:
            continue
        try:
            typed_line(line)
        except ValueError:
            problems += 1
            continue
        lines.append(line)
    return lines, problems


def token_of(lines: Iterable[Line], inode: int) -> str:
    """Token of the launches of a folder; empty if the journal is that of another folder.

    In a copy of a run folder the token is that of the original, whose processes may be alive.

    Args:
        lines: journal of the folder.
        inode: inode number of the folder.

    >>> lines = [{"event": "supervisor", "token": "a1", "inode": 7}]
    >>> token_of(lines, 7), token_of(lines, 8)
    ('a1', '')
    """
    for line in reversed(list(lines)):
        if line["event"] == "supervisor":
            # Earlier versions wrote no inode.
            return str(line["token"]) if line.get("inode", inode) == inode else ""
    return ""


def journal_state(lines: Iterable[Line]) -> JournalState:
    """State that earlier supervisors of the folder left.

    >>> journal_state([{"event": "launch", "launch": 1}, {"event": "waiting"}, {"event": "launch"}])
    JournalState(launches=2, restarts=1, best_step=0, dropped=[], outcome='')
    """
    state = JournalState()
    for line in lines:
        event = line["event"]
        if event == "launch":
            state.launches += 1
            state.outcome = ""
        elif event == "waiting":
            state.restarts += 1
        elif event == "enough progress":
            state.restarts = 0
        elif event in ("resumed", "progress"):
            state.best_step = max(state.best_step, line.get("step", 0))
        elif event == "dropped":
            state.dropped += [(node, gpu) for node, gpu in line.get("gpus", ())]
        elif event == "over":
            state.outcome = line.get("outcome", "")
    return state


Node = str
Indices = tuple[Count, ...]
GpuField = tuple[Node, Count]


def gpu_name(gpu: Sequence[Any]) -> str:
    """Name of a GPU given as node and index.

    >>> gpu_name(["", 2]), gpu_name(["a", 2])
    ('GPU 2', 'node a GPU 2')
    """
    node, index = gpu
    return f"node {node} GPU {index}" if node else f"GPU {index}"


def gpu_names(gpus: Iterable[Sequence[Any]]) -> str:
    """Names of GPUs as a list."""
    return ", ".join(map(gpu_name, gpus))


def launch_log(launch: int) -> str:
    """Path of a launch's output, relative to the run folder."""
    return f"logs/launch-{launch}.log"


class JournalLine(msgspec.Struct, kw_only=True):
    """A line of the journal, and the base of those whose fields are checked."""

    event: str
    time: Time
    words: str = ""

    def text(self, unit: str) -> str:
        """Text for the terminal; empty for a minor event. `unit`: as for `console_line`."""
        template = _TEXTS.get(self.event, "{0.event}: {0.words}" if self.words else "{0.event}")
        return template.format(self)


class _Supervisor(JournalLine, kw_only=True):
    token: str
    gpus: dict[Node, Indices]
    command: list[str]

    def text(self, unit: str) -> str:
        on = f" on {_pool_name(self.gpus, unit)}" if unit == "GPU" else ""
        return f"supervises `{shlex.join(self.command)}`{on}"


class _Launch(JournalLine, kw_only=True):
    launch: Count
    gpus: dict[Node, Indices]

    def text(self, unit: str) -> str:
        return f"launch {self.launch}: {self.words}, {_pool_name(self.gpus, unit)}"


class _Started(JournalLine, kw_only=True):
    launch: Count
    pids: dict[Node, Count]


class _Progress(JournalLine, kw_only=True):
    launch: Count
    step: Count
    at: Time


class _Resumed(_Progress, kw_only=True):
    passed_over: Count | None = None

    def text(self, unit: str) -> str:
        over = self.passed_over
        passed = "" if over is None else f"; the checkpoint of step {over} was skipped"
        return f"launch {self.launch} resumed training at step {self.step}{passed}"


class _Request(JournalLine, kw_only=True):
    number: Count
    source: str
    stop: bool = False

    def text(self, unit: str) -> str:
        who = _SOURCE_NAMES.get(self.source, self.source)
        return f"{who} {self.asked}: {self.words}"

    @property
    def asked(self) -> str:
        stop = " and a stop" if self.stop else ""
        return f"requested a checkpoint{stop} (request {self.number})"


class _Asked(_Request, kw_only=True):
    reason: str

    def text(self, unit: str) -> str:
        return f"{self.asked}: {self.reason}"


class _Answered(JournalLine, kw_only=True):
    number: Count
    step: Count | None = None

    def text(self, unit: str) -> str:
        by = "" if self.step is None else f" by the checkpoint of step {self.step}"
        return f"request {self.number} answered{by}"


class _Verdict(JournalLine, kw_only=True):
    action: str

    def text(self, unit: str) -> str:
        if self.action == "none":
            return self.words
        return f"{self.words} (advised: {self.action.replace('_', ' ')})"


class _End(JournalLine, kw_only=True):
    """The end of a launch or of all."""

    checkpoint: Count | None = None
    step: Count | None = None

    @property
    def saved(self) -> str:
        if self.checkpoint is None:
            return ""
        words = f"; newest good checkpoint: step {self.checkpoint}"
        if (self.step or 0) > self.checkpoint:
            words += f", THE STEPS AFTER IT ARE IN NONE (the last was {self.step})"
        return words


class _Failure(_End, kw_only=True):
    kind: str = ""
    launch: Count | None = None
    gpu: GpuField | None = None
    last_sign: Time | None = None

    def text(self, unit: str) -> str:
        where = f" (on {gpu_name(self.gpu)})" if self.gpu and self.kind != "gpu" else ""
        see = f"; see {launch_log(self.launch)}" if self.launch else ""
        return f"FAILED: {self.words}{where}{self.saved}{see}"


class _Over(_End, kw_only=True):
    outcome: str

    def text(self, unit: str) -> str:
        return f"{self.outcome}: {self.words}{self.saved}"


class _Ended(JournalLine, kw_only=True):
    found: Count
    killed: Count
    left: Count
    unreachable: list[str]

    def text(self, unit: str) -> str:
        if not (self.found or self.left or self.unreachable):
            return ""
        killed = f", {self.killed} of them had to be killed" if self.killed else ""
        left = f", {self.left} CANNOT BE ENDED" if self.left else ""
        lost = f"; not reached: {', '.join(self.unreachable)}" if self.unreachable else ""
        return f"ended {counted(self.found, 'process')}{killed}{left}{lost} ({self.words})"


class _Dropped(JournalLine, kw_only=True):
    gpus: list[GpuField]

    def text(self, unit: str) -> str:
        return f"{gpu_names(self.gpus)} dropped: {self.words}"


class _Waiting(JournalLine, kw_only=True):
    seconds: Time | None = None

    def text(self, unit: str) -> str:
        return f"restarts in {self.seconds:.1f} s" if self.seconds else ""


class _EnoughProgress(JournalLine, kw_only=True):
    step: Count


#: Events whose text depends on no condition; one of another event is `event: words`.
_TEXTS = {
    "started": "",
    "progress": "",
    "not saved": "NOT SAVED: {0.words}",
    "saved again": "saves succeed again",
    "enough progress": "step {0.step}: enough new steps, restart counter reset",
    "trouble": "problem: {0.words}",
    "advice": "diagnosis: {0.words}",
}
#: Source of a request -> name in messages.
_SOURCE_NAMES = {"user": "a user", "risk": "telemetry", "rule": "telemetry", "alarm": "an alarm"}
_KINDS: dict[str, type[JournalLine]] = {
    "supervisor": _Supervisor,
    "launch": _Launch,
    "started": _Started,
    "resumed": _Resumed,
    "progress": _Progress,
    "asked": _Asked,
    "request": _Request,
    "answered": _Answered,
    "verdict": _Verdict,
    "failure": _Failure,
    "ended": _Ended,
    "dropped": _Dropped,
    "waiting": _Waiting,
    "enough progress": _EnoughProgress,
    "over": _Over,
}


def typed_line(line: Any) -> JournalLine:
    """A decoded line. Raises ValueError unless it is an event with fields of the right types."""
    event = line.get("event") if isinstance(line, dict) else None
    return converted(
        line, _KINDS.get(event, JournalLine) if isinstance(event, str) else JournalLine
    )


def console_line(line: dict[str, Any], unit: str = "GPU") -> str:
    """Format one journal line for the terminal, with the local time; empty for a minor event.

    `unit` is the name of one device of the pool.

    >>> console_line({"time": 0.0, "event": "waiting", "words": "", "seconds": 2.04})[8:]
    ' restarts in 2.0 s'
    """
    try:
        words = typed_line(line).text(unit)
    except ValueError:  # a step beyond `Count`, for example: it must not stop the supervisor
        words = f"{line['event']}: {line.get('words', '')}"
    at = time.strftime("%H:%M:%S", time.localtime(line["time"]))
    return f"{at} {printable(words)}" if words else ""


def _pool_name(pool: Mapping[str, Sequence[int]], unit: str) -> str:
    """GPUs by node: `GPUs 0-2,4`, or `node a GPUs 0-7, node b GPUs 0-7`."""
    if unit != "GPU":
        number = counted(sum(map(len, pool.values())), unit)
        return f"{number} on {', '.join(pool)}" if any(pool) else number
    parts = []
    for node, gpus in pool.items():
        where = f"node {node} " if node else ""
        parts.append(f"{where}GPU{'s' * (len(gpus) != 1)} {number_ranges(gpus)}")
    return ", ".join(parts)
