"""The monitor's log, written by a background thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rmetric._util.background import CLOSE_SECONDS, Background
from rmetric._util.durable import durable_file, no_follow
from rmetric._util.strict_json import parse_line
from rmetric.log_entries import record_from_json

logger = logging.getLogger("rmetric")

FLUSH_SECONDS = 1.0
#: Events about the whole course of a run: they stay when the run goes back.
KEPT = frozenset({"RESCUE"})
#: End of the name of the file that takes the lines of steps which are taken again.
ABANDONED = ".abandoned"


class MonitorLog:
    """Appends lines to a file from a background thread, about once a second.

    A disk that is full, slow or gone costs the log, never the training: the first `problem` is
    reported, and nothing more is written. An older log of the same name is moved aside, to the name
    with ``.1``, ``.2`` ... after it, unless the run continues in it after the step `resume_step`;
    lines of later steps, which are about to be measured again, are left out. `start` is the first
    line of a new log; a `path` of None writes nothing.
    """

    def __init__(self, path: Path | None, background: Background, start: bytes) -> None:
        self.resume_step: int | None = None
        self.problem = ""
        self._path, self._background, self._start = path, background, start
        self._lines: list[bytes] = []  # not yet passed to the background thread
        self._begun = self._reported = self._hangs = False
        self._keep: int | None = None  # `resume_step` as of the first line
        self._flushed = 0.0
        self._file: BinaryIO | None = None

    @property
    def is_wanted(self) -> bool:
        return self._path is not None and not self._reported

    def write(self, line: bytes, *, now: bool = False) -> None:
        """Append a line; with `now` pass it to the background thread at once."""
        if not self.is_wanted:
            return
        if not self._begun:
            self._begun, self._keep = True, self.resume_step
            self._lines, self._flushed = [self._start], time.monotonic()
        self._lines.append(line)
        if now or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._hand_over()
        if self.problem:
            self._reported = True
            logger.error("rmetric: %s; going on without the log", self.problem)

    def cut(self, step: int) -> None:
        """Move the lines of later steps to `ABANDONED`; those of `KEPT` events stay."""
        if self._begun and not self._reported:
            self._hand_over()
            self._submit(lambda: self._cut(step))

    def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write all lines so far; wait for the background thread `seconds` at most."""
        if self._begun:
            self._hand_over()
            if self._hangs or self.problem:  # it was waited for once
                return
            self._hangs = not self._background.wait(seconds)
            if self._hangs:
                logger.warning(
                    "rmetric: the disk of %s does not answer within %g s; no checkpoint waits for "
                    "the log any more", self._path, seconds,
                )  # fmt: skip

    def close(self) -> None:
        if self._begun:
            self._hand_over()
            self._background.submit(self._close)

    def validation_loss(self, step: int) -> float | None:
        """The logged validation loss of a step, maybe logged after its checkpoint; or None."""
        metrics = self._newest_first("METRICS")
        found = next((entry for entry in metrics if entry.get("step") == step), {})
        with suppress(ValueError, KeyError):
            return record_from_json(found).validation_loss
        return None

    def entries(self, event: str) -> list[dict[str, Any]]:
        """The entries of an event in an older log, in their order, from its last bad line on."""
        return [*self._newest_first(event)][::-1]

    def _newest_first(self, event: str) -> Iterator[dict[str, Any]]:
        if self._path is None or not self._path.is_file():
            return
        with suppress(OSError, ValueError, KeyError):
            for line in reversed(self._path.read_bytes().splitlines(keepends=True)):
                if event.encode() in line and line.endswith(b"\n"):
                    entry = parse_line(line)
                    if entry["event"] == event:
                        yield entry

    def _hand_over(self) -> None:
        self._flushed = time.monotonic()
        lines, self._lines = b"".join(self._lines), []
        if lines:
            self._submit(lambda: self._append(lines))

    def _submit(self, write: Callable[[], None]) -> None:
        if not self._background.submit(write):
            self.problem = self.problem or "the disk does not keep up; lines were dropped"

    # -- on the background thread

    def _append(self, lines: bytes) -> None:
        if self.problem or self._path is None:
            return
        try:
            if self._file is None:
                kept = self._begin(self._path)
                lines = lines if self._keep is None else kept + lines.partition(b"\n")[2]
                self._file = open(self._path, "ab", opener=no_follow)  # noqa: SIM115
            self._file.write(lines)
            self._file.flush()
        except (OSError, ValueError) as error:
            self.problem = f"{self._path} cannot be written: {error}"

    def _begin(self, path: Path) -> bytes:
        """Lines to copy from an older log, which is moved aside unless it is continued whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._keep = None
            return b""
        if not path.is_file():  # /dev/null, a pipe: reading may never end, and a cut replaces it
            raise OSError("it is not a file")
        kept = b"" if self._keep is None else _up_to(path, self._keep)
        if kept == path.read_bytes():
            return b""
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(aside)
        return kept

    def _cut(self, step: int) -> None:
        if self.problem or self._path is None or self._file is None:
            return
        kept: list[bytes] = []
        abandoned: list[bytes] = []
        try:
            for line in self._path.read_bytes().splitlines(keepends=True):
                entry = parse_line(line)
                later = entry.get("step", 0) > step and entry["event"] not in KEPT
                (abandoned if later else kept).append(line)
            aside = self._path.with_name(self._path.name + ABANDONED)
            with open(aside, "ab", opener=no_follow) as file:
                file.write(b"".join(abandoned))
            with durable_file(self._path) as whole:
                whole.write(b"".join(kept))
            self._file.close()
            self._file = open(self._path, "ab", opener=no_follow)  # noqa: SIM115
        except (OSError, ValueError) as error:
            self.problem = f"{self._path} cannot be cut back to step {step}: {error}"

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def path_of_rank(log: Path | str | None, rank: int) -> Path | None:
    """Path of this rank's log; None for ranks above 0 without a file of their own."""
    if log is None or (rank > 0 and "{rank}" not in str(log)):
        return None
    return Path(str(log).replace("{rank}", str(rank)))


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
