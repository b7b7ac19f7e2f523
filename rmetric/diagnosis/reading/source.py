"""Read one log file: unpack, decode to UTF-8, split into lines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path

from rmetric._util.durable import is_packed, unpacked
from rmetric.diagnosis.reading.lines import Lines, decoded, said, utf16

#: Bytes read at a time.
BLOCK = 1 << 20
#: Bytes that a sample has of the beginning, of places in between, and how many those are.
SAMPLED_HEAD = 1 << 17
SAMPLED_PIECE = 1 << 14
PIECES = 8
#: Bytes of an export whose newest line comes first that are turned round in memory.
MOST_BACKWARDS = 1 << 28


@dataclass(kw_only=True)
class LogSource:
    """One log file. Can be pickled; may be read more than once.

    Attributes:
        name: as the user gave it, or below the folder given.
        size: bytes on disk.
        rank, node, local_rank: as its name states them, else None (file_names.py).
        lines: their number; this and the following once `chunks` has been read to its end.
        cut_off: why its end is missing, "" where it is not.
        notes: on cut or replaced bytes.
    """

    path: Path
    name: str
    size: int
    rank: int | None = None
    node: str | None = None
    local_rank: int | None = None
    lines: int = 0
    cut_off: str = ""
    notes: list[str] = field(default_factory=list)
    _pieces: list[tuple[int, int]] = field(default_factory=list, init=False, compare=False)
    _held: list[list[bytes]] | None = field(default=None, init=False, compare=False)

    def chunks(self) -> Iterator[list[bytes]]:
        """All lines in order, about `BLOCK` bytes at a time, as UTF-8 (bytes that are none stay).

        Without line ends, ANSI colours, zero bytes and what a tool put before them (lines.py); of
        a line that carriage returns overwrite, the last text; each cut at `LONGEST_LINE`. Empty
        lines are kept: the n-th is line n, but in exports of collectors (records.py).

        Raises:
            LogError: it cannot be opened, or it needs a package that is missing.
        """
        if self._held is not None:
            held, self._held = self._held, None
            yield from held
            return
        damage, lines = list[str](), Lines()
        blocks, export = said(
            decoded(unpacked(self.path, BLOCK, damage, may_be_empty=True)),
            may_turn=self.size <= MOST_BACKWARDS,
        )
        yield from lines.lists(blocks)
        self._pieces = export.pieces if export else []
        self.lines, self.cut_off, self.notes = lines.count, "; ".join(damage), lines.notes()

    def line(self, number: int) -> int:
        """The line of the file that `chunks` gave as that of a number, both from 1."""
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
                self._held = list(self.chunks())
                return [line for some in self._held for line in some]
            beginning = Lines()
            blocks, export = said(iter([b"".join(decoded(self.head()))]))
            lines = [line for some in beginning.lists(blocks) for line in some]
            if packed or utf16(start) is not None or export is not None:
                return lines
            for at in range(1, PIECES + 1):
                place = SAMPLED_HEAD + (self.size - SAMPLED_HEAD) * at // PIECES - SAMPLED_PIECE
                if place > SAMPLED_HEAD:
                    file.seek(place)
                    # The first began elsewhere, the last ends elsewhere but in the last piece.
                    of_piece = Lines(layers=beginning.layers).lists(
                        iter([file.read(SAMPLED_PIECE)])
                    )
                    piece = [line for some in of_piece for line in some]
                    lines += piece[1:] if at == PIECES else piece[1:-1]
        return lines

    def head(self) -> Iterator[bytes]:
        """Blocks from its beginning, unpacked, about `SAMPLED_HEAD` bytes in all."""
        small = SAMPLED_HEAD // 4
        return islice(unpacked(self.path, small, [], may_be_empty=True), SAMPLED_HEAD // small)
