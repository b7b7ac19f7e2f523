"""The files of a job: found, told from what is no log, unpacked, read in lists of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Bytes of a line that are kept.
LONGEST_LINE = 1 << 16
BLOCK = 1 << 20


class SourceError(ValueError):
    """A path that cannot be read as a log: names it, what was found, what is accepted."""


@dataclass(kw_only=True)
class Source:
    """One log file. Can be pickled; may be read more than once.

    Attributes:
        path: the file.
        name: as the user gave it, or below the folder given.
        size: bytes on disk.
        rank, node: what its name says, None where it does not (file_names.py).
        lines: number of lines, once `chunks` has been read to its end.
        notes: what was cut, replaced or lost; filled while `chunks` is read.
    """

    path: Path
    name: str
    size: int
    rank: int | None = None
    node: str | None = None
    lines: int = 0
    notes: list[str] = field(default_factory=list)

    def chunks(self) -> Iterator[list[bytes]]:
        """All lines in order, about `BLOCK` bytes at a time, as UTF-8 (bytes that are none are left).

        Without line ends, ANSI colours and zero bytes; of a line that carriage returns overwrite,
        what stands in the end; each cut at `LONGEST_LINE`. Empty lines are kept, so that the n-th
        of all is line n of the file.

        Raises:
            SourceError: it cannot be opened, or it needs a package that is missing.
        """
        raise NotImplementedError

    def sample(self) -> list[bytes]:
        """Lines from its beginning and, of a file that is not compressed, its end."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Found:
    """What `find` found: the logs, sorted by name, and what it left out, in sentences."""

    sources: list[Source]
    notes: list[str]


def find(paths: Sequence[str | Path]) -> Found:
    """The logs among files and folders.

    A file that is named is read whatever its suffix. Of a folder, and those below, all text is
    read that is not known to be something else. One content is read once, unless the files' names
    say that different ranks or nodes wrote it.

    Raises:
        SourceError: a path does not exist or cannot be read, a named file is binary, or nothing
            is left to read.
    """
    raise NotImplementedError
