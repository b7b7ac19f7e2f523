"""The monitor's log, written by a background thread."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import BinaryIO

from rmetric._util.background import Background
from rmetric._util.strict_json import parse_line
from rmetric.log_entries import record_from_json

logger = logging.getLogger("rmetric")

FLUSH_SECONDS = 1.0


class MonitorLog:
    """The log of one monitor: opened at the first line, given up at the first problem.

    Args:
        path: of the log; None writes nothing.
        background: the thread that writes.
        start: the first line of a new log.

    Attributes:
        file: the open log; None before the first line.
        resume_step: keep an existing log up to this step; None begins a new one.
    """

    def __init__(self, path: Path | None, background: Background, start: bytes) -> None:
        self.file: LogFile | None = None
        self.resume_step: int | None = None
        self._path, self._background, self._start = path, background, start

    def write(self, line: bytes, *, now: bool = False) -> None:
        """Append a line; with `now` hand it to the background thread at once."""
        if self._path is None:
            return
        if self.file is None:
            self.file = LogFile(self._path, self._background, self._start, self.resume_step)
        self.file.write(line, now=now)
        if self.file.problem:
            logger.error("rmetric: %s; going on without the log", self.file.problem)
            self._path = None

    def flush(self, seconds: float) -> None:
        """Write all lines so far; wait for the background thread `seconds` at most."""
        if self.file is not None:
            self.file.flush()
            self._background.wait(seconds)

    def validation_loss(self, step: int) -> float | None:
        """The logged validation loss of a step; None where there is none."""
        return None if self._path is None else validation_loss_of(self._path, step)

    def close(self) -> None:
        """Write the last lines and close the file."""
        if self.file is not None:
            self.file.close()


def path_of_rank(log: Path | str | None, rank: int) -> Path | None:
    """Path of this rank's log; None for ranks above 0 without a file of their own."""
    if log is None or (rank > 0 and "{rank}" not in str(log)):
        return None
    return Path(str(log).replace("{rank}", str(rank)))


class LogFile:
    """Appends lines to a file from a background thread, about once a second.

    A disk that is full, slow or gone costs the log, never the training: the
    first problem is kept in `problem`, and what could not be written is dropped.

    An older log of the same name is moved aside, to the name with ``.1``, ``.2``
    ... after it, unless the run goes on in it (`keep`).

    Args:
        path: of the log; its folder is made.
        background: the thread that writes.
        start: the first line of a new log.
        keep: go on in an existing log after this step; lines of later steps,
            which are about to be measured again, are left out. None for a new one.
    """

    def __init__(
        self, path: Path, background: Background, start: bytes, keep: int | None = None
    ) -> None:
        self.path, self.problem = path, ""
        self._background = background
        self._lines = [start]
        self._flushed = time.monotonic()
        self._keep = keep
        self._file: BinaryIO | None = None

    def write(self, line: bytes, *, now: bool = False) -> None:
        """Take a line; with `now` hand all of them over at once."""
        self._lines.append(line)
        if now or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand what was taken to the thread; waits for nothing."""
        self._flushed = time.monotonic()
        lines, self._lines = b"".join(self._lines), []
        if lines and not self._background.submit(lambda: self._append(lines)):
            self.problem = self.problem or "the disk does not keep up; lines were dropped"

    def close(self) -> None:
        self.flush()
        self._background.submit(self._close)

    def _append(self, lines: bytes) -> None:
        if self.problem:
            return
        try:
            if self._file is None:
                lines = self._begin() + (lines if self._keep is None else _without_start(lines))
                self._file = self.path.open("ab")
            self._file.write(lines)
            self._file.flush()
        except (OSError, ValueError) as error:
            self.problem = f"{self.path} cannot be written: {error}"

    def _begin(self) -> bytes:
        """The part of an older log to continue; the file is moved aside unless it is the whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._keep = None
            return b""
        kept = b"" if self._keep is None else _up_to(self.path, self._keep)
        if kept == self.path.read_bytes():
            return b""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(aside)
        return kept

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def validation_loss_of(path: Path, step: int) -> float | None:
    """The logged validation loss of a step; it may have been logged after the step's checkpoint."""
    try:
        lines = _up_to(path, step).splitlines()
        entries = (parse_line(line) for line in reversed(lines))
        found = next(e for e in entries if e["event"] == "METRICS" and e["step"] == step)
        return record_from_json(found).validation_loss
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def _without_start(lines: bytes) -> bytes:
    return lines.partition(b"\n")[2]


def _up_to(path: Path, step: int) -> bytes:
    """The lines of a log up to `step`, without its last line and what was cut off."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        entry = parse_line(line)
        if entry["event"] in ("EXPERIMENT_SUCCESS", "EXPERIMENT_FAILURE"):
            break
        if entry.get("step", 0) <= step:
            kept.append(line)
    return b"".join(kept)
