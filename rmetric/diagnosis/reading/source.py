"""Read one log file: unpack, decode to UTF-8, split into lines."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path

from rmetric._util.unpacked import is_packed, unpacked
from rmetric.diagnosis.reading.json_records import newest_first
from rmetric.diagnosis.reading.lines import LONGEST_LINE, Lines, decoded, said, utf16
from rmetric.diagnosis.reading.lsf import LsfReports
from rmetric.diagnosis.reading.timestamps import DATE_TIME

__all__ = ["BLOCK", "LONGEST_LINE", "LogSource"]

#: Bytes read at a time.
BLOCK = 1 << 20
#: Bytes that a sample has of the beginning, of places in between, and how many those are.
SAMPLED_HEAD = 1 << 17
SAMPLED_PIECE = 1 << 14
PIECES = 8
#: Least number of times that fall of a file whose newest line comes first; bytes of such a file
#: that are turned round in memory.
MIN_FALLS_OF_LINES = 10
MOST_BACKWARDS = 1 << 28
_STAMP = re.compile(DATE_TIME.encode())


@dataclass(kw_only=True)
class LogSource:
    """One log file. Can be pickled; may be read more than once.

    Attributes:
        path: the file.
        name: as the user gave it, or below the folder given.
        size: bytes on disk.
        rank, node, local_rank: as its name states them, else None (file_names.py).
        backwards: its newest line comes first, as collectors export it; known after `sample`.
        lines: number of lines; this and the following once `chunks` has been read to its end.
        cut_off: why its end is missing, "" where it is not.
        notes: on cut or replaced bytes.
    """

    path: Path
    name: str
    size: int
    rank: int | None = None
    node: str | None = None
    local_rank: int | None = None
    backwards: bool = False
    lines: int = 0
    cut_off: str = ""
    notes: list[str] = field(default_factory=list)
    _pieces: list[tuple[int, int]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _held: list[list[bytes]] | None = field(default=None, init=False, repr=False, compare=False)

    def chunks(self) -> Iterator[list[bytes]]:
        """All lines in order, about `BLOCK` bytes at a time, as UTF-8 (bytes that are none stay).

        Without line ends, ANSI colours, zero bytes and what a tool put before them (wrapping.py);
        of a line that carriage returns overwrite, the last text; each cut at `LONGEST_LINE`.
        Empty lines are kept: the n-th is line n, but for the reports of LSF, which stand above the
        output that they are about and come after it, and where the file is `backwards`: the oldest
        comes first.

        Raises:
            LogError: it cannot be opened, or it needs a package that is missing.
        """
        if self._held is not None:
            held, self._held = self._held, None
            yield from held
        elif self.backwards:
            yield [line for some in self._forwards() for line in some][::-1]
        else:
            yield from self._forwards()

    def _forwards(self) -> Iterator[list[bytes]]:
        """The lines in the order of the file."""
        damage: list[str] = []
        lines, report = Lines(LONGEST_LINE), LsfReports()
        blocks, records = said(
            decoded(unpacked(self.path, BLOCK, damage, may_be_empty=True)),
            may_turn=self.size <= MOST_BACKWARDS,
        )
        for some in lines.lists(blocks):
            yield report.moved(some)
        if rest := report.rest():
            yield rest
        self._pieces = report.pieces if records is None else records.pieces
        self.lines = lines.count
        self.cut_off, self.notes = "; ".join(damage), lines.notes()

    def line(self, number: int) -> int:
        """The line of the file that `chunks` gave as that of a number, both from 1."""
        if self.backwards:
            return self.lines + 1 - number
        at = bisect_right(self._pieces, number, key=itemgetter(0)) - 1
        return number if at < 0 else number - self._pieces[at][0] + self._pieces[at][1]

    def sample(self) -> list[bytes]:
        """Lines from its beginning and, of a file that is not packed, from there to its end.

        All lines of a small file are held for the next `chunks`, so that it is read once.
        """
        with self.path.open("rb") as file:
            start = file.read(4096)
            packed = is_packed(start)
            if self.size <= SAMPLED_HEAD and not packed:
                held = list(self.chunks())
                lines = [line for some in held for line in some]
                if not self.backwards and lines_newest_first(lines):
                    self.backwards = True
                    lines.reverse()
                    held = [lines]
                self._held = held
                return lines
            beginning = Lines(LONGEST_LINE)
            blocks, records = said(iter([b"".join(decoded(self.head()))]))
            lines = _all(beginning, blocks)
            if packed or utf16(start) is not None or records is not None:
                return lines
            for at in range(1, PIECES + 1):
                place = SAMPLED_HEAD + (self.size - SAMPLED_HEAD) * at // PIECES - SAMPLED_PIECE
                if place > SAMPLED_HEAD:
                    file.seek(place)
                    # The first began elsewhere, the last ends elsewhere but in the last piece.
                    of_piece = Lines(LONGEST_LINE, beginning.layers, beginning.table)
                    piece = _all(of_piece, iter([file.read(SAMPLED_PIECE)]))
                    lines += piece[1:] if at == PIECES else piece[1:-1]
        if self.size <= MOST_BACKWARDS and lines_newest_first(lines):
            self.backwards = True
            lines.reverse()
        return lines

    def head(self) -> Iterator[bytes]:
        """Blocks from its beginning, unpacked, about `SAMPLED_HEAD` bytes in all."""
        small = SAMPLED_HEAD // 4
        return islice(unpacked(self.path, small, [], may_be_empty=True), SAMPLED_HEAD // small)


def lines_newest_first(lines: Sequence[bytes]) -> bool:
    """True where the times of the lines fall and hardly ever rise.

    >>> stamps = [f"2025-05-06T17:{59 - at}:00Z step".encode() for at in range(20)]
    >>> [lines_newest_first(some) for some in (stamps, stamps[::-1], stamps[:1] * 20)]
    [True, False, False]
    """
    times = [found[0] for line in lines if (found := _STAMP.search(line, 0, 120))]
    return newest_first(times, MIN_FALLS_OF_LINES)


def _all(split: Lines, blocks: Iterator[bytes]) -> list[bytes]:
    return [line for lines in split.lists(blocks) for line in lines]
