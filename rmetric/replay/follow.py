"""A log that is still being written, record by record as its lines come.

A line counts when it is whole. A file that shrinks or is replaced is read again from its
beginning, and one that vanishes is waited for. Memory stays constant.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rmetric._util.durable import refuse_special
from rmetric._util.errors import LogError
from rmetric.readers import OpenLog, UnknownFormat, open_log
from rmetric.readers.source import BLOCK, SHOWN, ForeignLines, Source
from rmetric.records import Record

_GZIP_MAGIC = b"\x1f\x8b"


class _Replaced(BaseException):
    """The file was cut short or another has taken its name; states how. No error of a reader."""


class Follower:
    """Tails one log.

    Args:
        path: of a file in a format of lines; it need not exist yet where `wait` is above 0.
        take: called with the id of a run and each record of it.
        say: called with a sentence when the file is read again or waited for.
        mapping: target -> column, as for `open_log`.
        poll: seconds between two looks at a file that does not grow, above 0.
        settle: seconds without growth after which a record is handed on that a
            further row of its step could have added to.
        stop_after: seconds without growth after which `run` returns; None for never.
        wait: seconds to wait for a file that is not there, from 0; inf for no end.
        begun_again: called when the file turned out to be another one.
        caught_up: called with the log once, when what it held already has been handed on.

    Attributes:
        unread: after a `run` to the end, run id -> `Run.unread`. None where it was stopped before.
    """

    def __init__(
        self,
        path: Path,
        take: Callable[[str, Record], None],
        say: Callable[[str], None],
        *,
        mapping: Mapping[str, str] | None = None,
        poll: float = 0.2,
        settle: float = 1.0,
        stop_after: float | None = None,
        wait: float = 0.0,
        begun_again: Callable[[], None] = lambda: None,
        caught_up: Callable[[OpenLog], None] | None = None,
    ) -> None:
        self.path, self.mapping = path, mapping or {}
        self.poll, self.settle, self.stop_after, self.wait = poll, settle, stop_after, wait
        self.stopped = False
        self.unread: dict[str, str] | None = None
        self._take, self._say, self._caught_up = take, say, caught_up
        self._begun_again = begun_again
        self._gone = self._ran_out = False
        self._log: OpenLog | None = None
        self._grew = time.monotonic()

    def stop(self) -> None:
        """Let `run` return after what has been read, also from within `take`."""
        self.stopped = True

    def run(self) -> None:
        """Read on until `stop` or `stop_after`.

        Raises LogError for what cannot be read, and for a file that is not there at the end.
        """
        self._grew = time.monotonic()
        while not self.stopped:
            self._await()
            if self.stopped:
                return
            try:
                self._read()
                return
            except _Replaced as how:
                self._hand_on()
                self._say(f"{self.path}: {how}, and is read again")
                self._begun_again()

    def _await(self) -> None:
        if not self.path.exists():
            if not self.wait:
                raise LogError(self.path, None, "no such file (--wait SECONDS waits for it)")
            self._say(f"{self.path}: not there yet, waiting for it")
        until = time.monotonic() + self.wait
        while not self.path.exists():
            if time.monotonic() >= until or (not self._pause() and self._ran_out):
                raise LogError(self.path, None, "it did not appear: nothing was watched")
            if self.stopped:
                return

    def _read(self) -> None:
        """The file from its beginning; returns when there is nothing more to wait for."""
        log: OpenLog | None = None
        self._log = None
        while log is None:
            source = _Growing(self)
            try:
                log = self._log = open_log(self.path, self.mapping, growing=source)
            except UnknownFormat:
                # Its first lines may not show yet what it is.
                if not self._may_grow_clear(source):
                    raise
        for id, record in log:
            self._take(id, record)
            if self.stopped:
                break
        else:
            self._reach()
        if self._ran_out:
            self.unread = {id: run.unread for id, run in log.runs.items()}
        if source.foreign_lines.bad > 1:
            self._say(f"{self.path}: {source.foreign_lines.note()}")
        if self._ran_out and not self.path.exists():
            raise LogError(self.path, None, "it was removed while it was watched")

    def _may_grow_clear(self, source: Source) -> bool:
        size = self.path.stat().st_size
        while len(source.head) < SHOWN and self._pause():
            if self.path.stat().st_size != size:
                return True
        return False

    def _pause(self) -> bool:
        """Wait a moment, with all handed on that can be; False where it is time to stop."""
        idle = time.monotonic() - self._grew
        ends = self.stop_after is not None and idle >= self.stop_after
        if idle >= self.settle or ends:
            self._hand_on()
            self._reach()
        if self.stopped or ends:
            self._ran_out = not self.stopped
            self.stopped = True
            return False
        time.sleep(self.poll)
        return True

    def _reach(self) -> None:
        """Report, once, that the initial content of the file has been passed on."""
        if self._log is not None and self._caught_up is not None:
            caught_up, self._caught_up = self._caught_up, None
            caught_up(self._log)

    def _look(self) -> None:
        """Report when the file is gone; one that comes back is another file."""
        is_gone = not self.path.exists()
        if is_gone and not self._gone:
            self._say(f"{self.path}: it was removed or moved; waiting for it to come back")
        self._gone = is_gone

    def _hand_on(self) -> None:
        for id, record in self._log.held() if self._log else ():
            self._take(id, record)


class _Growing(Source):
    """The bytes of a file that grows, waited for; an empty block means that all was read."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        super().__init__(follower.path)
        self.foreign_lines = ForeignLines(lambda words: follower._say(f"{follower.path}: {words}"))

    def _unpacked(self) -> Iterator[bytes]:
        follower, path = self._follower, self._follower.path
        refuse_special(path)
        try:
            with open(path, "rb") as file:
                if file.peek(2)[:2] == _GZIP_MAGIC:
                    raise LogError(path, None, "compressed: it cannot be followed")
                how, waited = None, False
                while True:
                    while block := file.read(BLOCK):
                        if waited:
                            follower._reach()
                        follower._grew = time.monotonic()
                        yield block
                    # Looked at before this last reading: nothing of the old file is lost.
                    if how is not None:
                        raise _Replaced(how)
                    yield b""
                    if not follower._pause():
                        return
                    waited = True
                    follower._look()
                    how = _how_replaced(path, file.fileno(), file.tell())
        except OSError as error:
            raise LogError(path, None, f"cannot be read: {error.strerror}") from None


def _how_replaced(path: Path, handle: int, position: int) -> str | None:
    opened = os.fstat(handle)
    if opened.st_size < position:
        return f"it shrank from {position:,} to {opened.st_size:,} bytes"
    try:
        now = path.stat()
    except FileNotFoundError:
        return None  # a moment of a rotation, or the end
    if (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino):
        return "it was replaced by another file"
    return None
