"""Event log of a run folder, and the lock held by its supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rmetric._util.durable import no_follow
from rmetric._util.strict_json import encode, encode_line, parse_line
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.core import JournalState
from rmetric.guard.supervisor.journal_lines import typed_line
from rmetric.guard.trust import make_private, require_trusted

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
