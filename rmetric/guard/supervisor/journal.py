"""Event log of a run folder, and the lock held by its supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    >>> token_of(lines, 7), token_of(lines, 8), token_of([{"event": "supervisor", "token": "b"}], 8)
    ('a1', '', 'b')
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
    """A line of the journal: the types of the fields that are read again; others are ignored."""

    event: str
    time: Time
    words: str = ""
    token: str | None = None
    command: list[str] | None = None
    #: By node; of `dropped` a list.
    gpus: dict[str, tuple[Count, ...]] | list[tuple[str, Count]] | None = None
    pids: dict[str, Count] | None = None
    launch: Count | None = None
    step: Count | None = None
    at: Time | None = None
    passed_over: Count | None = None
    number: Count | None = None
    source: str | None = None
    reason: str | None = None
    stop: bool = False
    action: str | None = None
    kind: str = ""
    gpu: tuple[str, Count] | None = None
    last_sign: Time | None = None
    checkpoint: Count | None = None
    found: Count | None = None
    killed: Count | None = None
    left: Count | None = None
    unreachable: list[str] | None = None
    seconds: Time | None = None
    outcome: str | None = None

    @property
    def asked(self) -> str:
        stop = " and a stop" if self.stop else ""
        return f"requested a checkpoint{stop} (request {self.number})"

    @property
    def saved(self) -> str:
        if self.checkpoint is None:
            return ""
        words = f"; newest good checkpoint: step {self.checkpoint}"
        if (self.step or 0) > self.checkpoint:
            words += f", THE STEPS AFTER IT ARE IN NONE (the last was {self.step})"
        return words


#: Event -> fields that it must have.
_NEEDED = {
    "supervisor": "token gpus command",
    "launch": "launch gpus",
    "started": "launch pids",
    "resumed": "launch step at",
    "progress": "launch step at",
    "asked": "number source reason",
    "request": "number source",
    "answered": "number",
    "verdict": "action",
    "ended": "found killed left unreachable",
    "dropped": "gpus",
    "enough progress": "step",
    "over": "outcome",
}
#: Source of a request -> name in messages.
_SOURCE_NAMES = {"user": "a user", "risk": "telemetry", "rule": "telemetry", "alarm": "an alarm"}
#: Event -> its text from the line and the name of one device of the pool; empty for a minor event.
_TEXTS: dict[str, Callable[[Any, str], str]] = {
    "supervisor": lambda line, unit: (
        f"supervises `{shlex.join(line.command)}`"
        + (f" on {_pool_name(line.gpus, unit)}" if unit == "GPU" else "")
    ),
    "launch": lambda line, unit: (
        f"launch {line.launch}: {line.words}, {_pool_name(line.gpus, unit)}"
    ),
    "started": lambda _line, _unit: "",
    "progress": lambda _line, _unit: "",
    "resumed": lambda line, _: (
        f"launch {line.launch} resumed training at step {line.step}"
        + (
            f"; the checkpoint of step {n} was skipped"
            if (n := line.passed_over) is not None
            else ""
        )
    ),
    "asked": lambda line, _: f"{line.asked}: {line.reason}",
    "request": lambda line, _: (
        f"{_SOURCE_NAMES.get(line.source, line.source)} {line.asked}: {line.words}"
    ),
    "answered": lambda line, _: (
        f"request {line.number} answered"
        + (f" by the checkpoint of step {line.step}" if line.step is not None else "")
    ),
    "verdict": lambda line, _: (
        line.words + f" (advised: {line.action.replace('_', ' ')})" * (line.action != "none")
    ),
    "failure": lambda line, _: (
        f"FAILED: {line.words}"
        + (f" (on {gpu_name(line.gpu)})" if line.gpu and line.kind != "gpu" else "")
        + line.saved
        + (f"; see {launch_log(line.launch)}" if line.launch else "")
    ),
    "ended": lambda line, _: _ended(line),
    "dropped": lambda line, _: f"{gpu_names(line.gpus)} dropped: {line.words}",
    "waiting": lambda line, _: f"restarts in {line.seconds:.1f} s" if line.seconds else "",
    "enough progress": lambda line, _: f"step {line.step}: enough new steps, restart counter reset",
    "not saved": lambda line, _: f"NOT SAVED: {line.words}",
    "saved again": lambda _line, _unit: "saves succeed again",
    "trouble": lambda line, _: f"problem: {line.words}",
    "advice": lambda line, _: f"diagnosis: {line.words}",
    "over": lambda line, _: f"{line.outcome}: {line.words}{line.saved}",
}


def _ended(line: Any) -> str:
    if not (line.found or line.left or line.unreachable):
        return ""
    killed = f", {line.killed} of them had to be killed" if line.killed else ""
    left = f", {line.left} CANNOT BE ENDED" if line.left else ""
    lost = f"; not reached: {', '.join(line.unreachable)}" if line.unreachable else ""
    return f"ended {counted(line.found, 'process')}{killed}{left}{lost} ({line.words})"


def typed_line(line: Any) -> JournalLine:
    """A decoded line. Raises ValueError unless it is an event with fields of the right types."""
    found = converted(line, JournalLine)
    for name in _NEEDED.get(found.event, "").split():
        if getattr(found, name) is None:
            raise ValueError(f"{found.event} without {name}")
    if isinstance(found.gpus, list) != (found.event == "dropped") and found.gpus is not None:
        raise ValueError(f"{found.event} has other gpus than {found.gpus!r}")
    return found


def console_line(line: dict[str, Any], unit: str = "GPU") -> str:
    """Format one journal line for the terminal, with the local time; empty for a minor event.

    `unit` is the name of one device of the pool.

    >>> console_line({"time": 0.0, "event": "waiting", "words": "", "seconds": 2.04})[8:]
    ' restarts in 2.0 s'
    """
    try:
        typed = typed_line(line)
        text = _TEXTS.get(typed.event)
        plain = f"{typed.event}: {typed.words}" if typed.words else typed.event
        words = text(typed, unit) if text else plain
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
