"""Event log of a run folder, the text of its lines, and the lock held by its supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
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

    Raises FolderLockedError with the holder, ValueError if other users can write the folder,
    OSError if the lock is a symbolic link, or cannot be written or locked.
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

    A last line truncated by a crash or a full disk is terminated before the next. `lines` are the
    events, of earlier supervisors too; `num_invalid` lines are not events and are ignored.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+", opener=no_follow)  # noqa: SIM115
        self._file.seek(0)
        data = self._file.read()
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
    with contextlib.suppress(FileNotFoundError):
        return _lines_of(path.read_bytes())[0]
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
            lines.append(line)
        except ValueError:
            problems += 1
    return lines, problems


def token_of(lines: Iterable[Line], inode: int) -> str:
    """Token of the launches of a folder; empty if the journal is that of another folder.

    In a copy of a run folder the token is that of the original, whose processes may be alive.
    `inode` is the inode number of the folder.

    >>> lines = [{"event": "supervisor", "token": "a1", "inode": 7}]
    >>> token_of(lines, 7), token_of(lines, 8)
    ('a1', '')
    """
    last = next((line for line in reversed([*lines]) if line["event"] == "supervisor"), {})
    return str(last["token"]) if last.get("inode") == inode else ""


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


def launch_log(launch: int) -> str:
    """Path of a launch's output, relative to the run folder."""
    return f"logs/launch-{launch}.log"


#: The fields of a line that are read again, with their types; others are ignored. `gpus` are by
#: node, those of `dropped` a list.
_FIELDS: list[Any] = [
    ("event", str), ("time", Time), ("words", str, ""), ("kind", str, ""), ("stop", bool, False),
    ("command", list[str] | None, None), ("unreachable", list[str] | None, None),
    ("gpus", dict[str, tuple[Count, ...]] | list[tuple[str, Count]] | None, None),
    ("gpu", tuple[str, Count] | None, None), ("pids", dict[str, Count] | None, None),
    *((n, Count | None, None) for n in ("launch", "step", "passed_over", "number", "checkpoint")),
    *((n, Count | None, None) for n in ("found", "killed", "left")),
    *((n, Time | None, None) for n in ("at", "last_sign", "seconds")),
    *((n, str | None, None) for n in ("token", "source", "reason", "action", "outcome")),
]  # fmt: skip
JournalLine: Any = msgspec.defstruct("JournalLine", _FIELDS, kw_only=True)


#: Event -> fields that it must have, and its text; without a text it is a minor one. A name in the
#: text is a field of the line, or a part of `_parts`.
_EVENTS = {
    "supervisor": ("token gpus command", "supervises `{shown}`{where}"),
    "launch": ("launch gpus", "launch {launch}: {words}, {pool}"),
    "started": ("launch pids", ""),
    "resumed": ("launch step at", "launch {launch} resumed training at step {step}{skipped}"),
    "progress": ("launch step at", ""),
    "asked": ("number source reason", "{requested}: {reason}"),
    "request": ("number source", "{asker} {requested}: {words}"),
    "answered": ("number", "request {number} answered{by}"),
    "verdict": ("action", "{words}{advised}"),
    "failure": ("", "FAILED: {words}{on}{saved}{see}"),
    "ended": ("found killed left unreachable", "{ended}"),
    "dropped": ("gpus", "{pool} dropped: {words}"),
    "waiting": ("", "{restart}"),
    "enough progress": ("step", "step {step}: enough new steps, restart counter reset"),
    "not saved": ("", "NOT SAVED: {words}"),
    "saved again": ("", "saves succeed again"),
    "trouble": ("", "problem: {words}"),
    "advice": ("", "diagnosis: {words}"),
    "over": ("outcome", "{outcome}: {words}{saved}"),
}
#: Source of a request -> name in messages.
_SOURCE_NAMES = {"user": "a user", "risk": "telemetry", "rule": "telemetry", "alarm": "an alarm"}


def _parts(line: Any, unit: str) -> dict[str, str]:
    """Parts of the texts; each is empty where its fields are missing."""
    pool = _pool_name(line.gpus, unit)
    parts = {
        "shown": shlex.join(line.command or ()),
        "where": f" on {pool}" * (unit == "GPU"),
        "pool": pool,
        "skipped": _if(line.passed_over, "; the checkpoint of step {} was skipped"),
        "requested": f"requested a checkpoint{' and a stop' * line.stop} (request {line.number})",
        "asker": _SOURCE_NAMES.get(line.source or "", line.source or ""),
        "by": _if(line.step, " by the checkpoint of step {}"),
        "advised": f" (advised: {(line.action or '').replace('_', ' ')})" * (line.action != "none"),
        "on": _if(gpu_name(line.gpu) if line.gpu and line.kind != "gpu" else None, " (on {})"),
        "see": f"; see {launch_log(line.launch)}" if line.launch else "",
        "restart": f"restarts in {line.seconds:.1f} s" if line.seconds else "",
        "saved": _if(line.checkpoint, "; newest good checkpoint: step {}"),
        "ended": "",
    }
    if line.checkpoint is not None and (line.step or 0) > line.checkpoint:
        parts["saved"] += f", THE STEPS AFTER IT ARE IN NONE (the last was {line.step})"
    if line.found or line.left or line.unreachable:
        killed = _if(line.killed or None, ", {} of them had to be killed")
        left = _if(line.left or None, ", {} CANNOT BE ENDED")
        lost = _if(", ".join(line.unreachable or ()) or None, "; not reached: {}")
        number = counted(line.found or 0, "process")
        parts["ended"] = f"ended {number}{killed}{left}{lost} ({line.words})"
    return parts


def _if(value: object, text: str) -> str:
    return "" if value is None else text.format(value)


def typed_line(line: Any) -> Any:
    """A decoded line. Raises ValueError unless it is an event with fields of the right types."""
    found = converted(line, JournalLine)
    for name in _EVENTS.get(found.event, ("", ""))[0].split():
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
        plain = "{event}: {words}" if typed.words else "{event}"
        text = _EVENTS.get(typed.event, ("", plain))[1]
        words = text.format(**msgspec.structs.asdict(typed) | _parts(typed, unit))
    except ValueError:  # a step beyond `Count`, for example: it must not stop the supervisor
        words = f"{line['event']}: {line.get('words', '')}"
    at = time.strftime("%H:%M:%S", time.localtime(line["time"]))
    return f"{at} {printable(words)}" if words else ""


def _pool_name(pool: Any, unit: str) -> str:
    """GPUs by node, `GPUs 0-2,4` or `node a GPUs 0-7, node b GPUs 0-7`; a list one by one."""
    if isinstance(pool, list):
        return ", ".join(map(gpu_name, pool))
    if unit != "GPU":
        number = counted(sum(map(len, (pool or {}).values())), unit)
        return f"{number} on {', '.join(pool)}" if any(pool or ()) else number
    parts = []
    for node, gpus in (pool or {}).items():
        where = f"node {node} " if node else ""
        parts.append(f"{where}GPU{'s' * (len(gpus) != 1)} {number_ranges(gpus)}")
    return ", ".join(parts)
