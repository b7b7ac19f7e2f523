"""What happened in a run folder, one line an event; and the lock that its one supervisor holds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from rmetric._util.strict_json import encode, encode_line, parse_line
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.core import Past

Line = dict[str, Any]


class LockedError(RuntimeError):
    """Another supervisor has the folder."""


class Lock:
    """Held while a supervisor runs; the kernel lets go of it when that dies, however it does.

    Raises LockedError on entry, saying who holds it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.lock

    def __enter__(self) -> Lock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What a process opens is not inherited by those that it starts.
        self._file = open(self.path, "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "somebody who has not said who"
            self._file.close()
            raise LockedError(f"{self.path.parent} is supervised already, by {holder}") from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        self._file.flush()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class Journal:
    """Appends to `journal.jsonl`; each line is on the disk when `write` returns.

    A last line that was cut short, by a crash or a full disk, is closed before the next.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+")  # noqa: SIM115
        self._file.seek(0)
        data = self._file.read()
        self.lines: list[Line] = _lines_of(data)
        if data and not data.endswith(b"\n"):
            self._file.write(b"\n")

    def write(self, event: str, **fields: Any) -> Line:
        """Add a line: what happened, when, and what else there is to say."""
        line = {"time": round(time.time(), 3), "event": event, **encode(fields)}
        self.lines.append(line)
        self._file.write(encode_line(line))
        self._file.flush()
        os.fsync(self._file.fileno())
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, of which `write` has told
            self._file.close()


def read_journal(path: Path) -> list[Line]:
    """The lines of a journal; those that are no event are left out. Empty where there is none."""
    try:
        return _lines_of(path.read_bytes())
    except FileNotFoundError:
        return []


def _lines_of(data: bytes) -> list[Line]:
    lines = []
    for raw in data.split(b"\n"):
        try:
            line = parse_line(raw)
        except (ValueError, json.JSONDecodeError):
            continue
        if isinstance(line, dict) and isinstance(line.get("event"), str) and _is_time(line):
            lines.append(line)
    return lines


def past_of(lines: Iterable[Line]) -> Past:
    """Where earlier supervisors of the folder left off.

    >>> past_of([{"event": "launch", "launch": 1}, {"event": "waiting"}, {"event": "launch"}])
    Past(launches=2, restarts=1, best_step=0, dropped=[], outcome='')
    """
    past = Past()
    for line in lines:
        event = line["event"]
        if event == "launch":
            past.launches += 1
            past.outcome = ""
        elif event == "waiting":
            past.restarts += 1
        elif event == "enough progress":
            past.restarts = 0
        elif event in ("resumed", "progress"):
            past.best_step = max(past.best_step, line.get("step", 0))
        elif event == "dropped":
            past.dropped += [(node, gpu) for node, gpu in line.get("gpus", ())]
        elif event == "over":
            past.outcome = line.get("outcome", "")
    return past


def _is_time(line: Line) -> bool:
    return isinstance(line.get("time"), (int, float))
