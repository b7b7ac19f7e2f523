"""Progress of files that take a while to read, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rmetric._util.printed import counted

if TYPE_CHECKING:
    from tqdm import tqdm

#: Seconds until progress is first shown, and between two updates.
FIRST, NEXT = 1.5, 0.5


def reading(paths: Sequence[Path]) -> tqdm[None]:
    """A bar of the bytes read, shown late and removed at the end; call its `update` with them.

    Nothing is shown where stderr is no terminal.

    Args:
        paths: files and folders that are read. Their size is no total: files are unpacked.
    """
    from tqdm import tqdm

    files = _described(paths) if sys.stderr.isatty() else ""
    return tqdm(
        desc=f"reading {files}",
        bar_format="{desc}: {n_fmt}B of text so far",
        unit_scale=True,
        leave=False,
        disable=None,
        delay=FIRST,
        mininterval=NEXT,
    )


class ReplayProgress:
    """Progress of a long log, with the rate and the time left: bytes read, then records judged.

    Each stage is shown late, and nothing where stderr is no terminal. The bytes are those of
    the file, compressed or not.
    """

    def __init__(self) -> None:
        self._stage, self._total = "", 0
        self._bar: tqdm[None] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done in a stage, ``"bytes"`` or ``"records"``."""
        from tqdm import tqdm

        if (stage, total) != (self._stage, self._total) or (self._bar and done < self._bar.n):
            self.close()
            self._stage, self._total = stage, total
            self._bar = tqdm(
                desc="reading" if stage == "bytes" else "judging",
                unit="B" if stage == "bytes" else " records",
                total=total,
                unit_scale=True,
                leave=False,
                disable=None,
                delay=FIRST,
                mininterval=NEXT,
            )
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove what is shown."""
        if self._bar is not None:
            self._bar.close()
        self._stage, self._total, self._bar = "", 0, None


def _described(paths: Sequence[Path]) -> str:
    with contextlib.suppress(OSError):  # of a folder that cannot be listed
        files = [
            file
            for path in paths
            for file in (path.rglob("*") if path.is_dir() else [path])
            if file.is_file()
        ]
        return f"{counted(len(files), 'file')}, {size(sum(file.stat().st_size for file in files))}"
    return "files"


def size(number: int) -> str:
    """Bytes, in a unit that suits them.

    >>> size(900), size(13_511_120), size(10_000_000_000)
    ('0.9 kB', '13.5 MB', '10.0 GB')
    """
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if number >= one:
            return f"{number / one:.1f} {unit}"
    return f"{number / 1e3:.1f} kB"
