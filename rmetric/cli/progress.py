"""How much has been read of files that take a while, for whoever sits before a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rmetric._util.printed import counted

#: Seconds until it is first said, and between two times.
FIRST, NEXT = 1.5, 0.5


class Progress:
    """A line on the terminal that is written over while files are read, and gone at the end.

    Call it with each number of bytes that were read. Where stderr is no terminal nothing is said.

    Args:
        paths: files and folders.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._read = 0
        self._done = threading.Event()
        self._teller: threading.Thread | None = None

    def __call__(self, read: int) -> None:
        self._read += read

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._teller = threading.Thread(target=self._tell, daemon=True)
            self._teller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._teller is not None:
            self._teller.join()

    def _tell(self) -> None:
        if self._done.wait(FIRST):
            return
        with contextlib.suppress(OSError):  # of a folder that cannot be listed, or of the terminal
            of, words = self._of(), ""
            while not self._done.wait(NEXT if words else 0):
                words = f"reading {of}: {size(self._read)} of text so far"
                print(f"\r{words}", end="", file=sys.stderr, flush=True)
            print(f"\r{' ' * len(words)}\r", end="", file=sys.stderr, flush=True)

    def _of(self) -> str:
        files = [
            file
            for path in self._paths
            for file in (path.rglob("*") if path.is_dir() else [path])
            if file.is_file()
        ]
        return f"{counted(len(files), 'file')}, {size(sum(one.stat().st_size for one in files))}"


def size(number: int) -> str:
    """Bytes, in a unit that suits them.

    >>> size(900), size(13_511_120), size(10_000_000_000)
    ('0.9 kB', '13.5 MB', '10.0 GB')
    """
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if number >= one:
            return f"{number / one:.1f} {unit}"
    return f"{number / 1e3:.1f} kB"
