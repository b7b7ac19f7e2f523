"""The bytes of a log: unpacked, as UTF-8, in blocks of whole lines, in constant memory.

LF, CR LF and a lone CR (a progress bar) each end a line. A byte order mark means
UTF-8 or UTF-16. Bytes that are not UTF-8 are replaced, with a note: one
foreign letter must not cost a log, and in a number it is an error of that cell.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from rmetric._util.durable import PACKED, unpacked
from rmetric._util.errors import LogError
from rmetric._util.printed import counted

#: Bytes read at a time: what is made of them then fits into the processor's cache.
BLOCK = 1 << 16
#: Bytes from which the format and the columns are recognised.
HEAD = 1 << 18
SHOWN = 1 << 16
#: Bytes of a first line that begins with an object: settings may be long.
LONGEST_FIRST = 8 << 20
LONGEST_LINE = 64 << 20
#: Formats that are one JSON document or one table of lists are held in memory.
LONGEST_DOCUMENT = 1 << 30
#: What no text has, in a file with zero bytes.
_ODD = re.compile(rb"\0+|[\x01-\x06\x0e-\x1a]")
_OBJECT = re.compile(rb"\s*\{")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class ForeignLines:
    """Counts the lines that could not be read, as a crash or a second writer leaves them.

    Args:
        say: called with a sentence at the first of them, of a log that grows.

    Attributes:
        forgiving: True for a log that grows: a wrong value costs its line, and not the log.
        good, bad: lines that were read, which the reader counts, and that were left out.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say, self.forgiving = say, say is not None
        self.good = self.bad = 0
        self._first = ""
        self._good_before = self._closing = 0
        self._unread: list[str] = []

    def add(self, line: int, problem: str, *, of_record: bool = False) -> None:
        """Leave out one line; `problem`: what it holds or lacks.

        `of_record`: it looks like a line with values, and not like what a crash prints.
        """
        if not self.bad:
            self._first = f"line {line}: {problem}"
            if self._say is not None:
                self._say(f"a line could not be read and was left out, {self._first}")
        if self.good != self._good_before:
            self._closing, self._unread = 0, []
        self._closing += 1
        self._unread += [f"line {line}: {problem}"] if of_record else []
        self._good_before = self.good
        self.bad += 1

    def note(self) -> str:
        """The number of lines and the first of them, as a sentence; empty if there are none."""
        if not self.bad:
            return ""
        were, first = ("was", "namely") if self.bad == 1 else ("were", "the first is")
        lines = counted(self.bad, "line")
        return f"{lines} could not be read and {were} left out, {first} {self._first}"

    @property
    def unread(self) -> str:
        """In words, the lines with values below the last good one; empty for none."""
        lines = self._unread if self.good == self._good_before else []
        if len(lines) < 2:
            return "".join(f"the last line could not be read, {line}" for line in lines)
        return f"the last {len(lines):,} lines could not be read, the first is {lines[0]}"

    def check(self, path: Path) -> None:
        """Raise LogError where more than half are bad: then it is another kind of file.

        Those below the last good line do not count: a crash writes as many as it likes.
        """
        closing = self._closing if self.good == self._good_before and self.good else 0
        inside = self.bad - closing
        if inside > self.good and not self.forgiving:
            share = f"{inside:,} of {inside + self.good:,} lines could not be read"
            raise LogError(path, None, f"{share}, half are allowed; the first is {self._first}")


class Source:
    """One log, read once from its beginning to its end; see `open_log` for its arguments.

    Attributes:
        head: its beginning as UTF-8 without zero bytes, about `HEAD` bytes.
        cut: whether the line that was read last lacks its end.
        foreign_lines: lines that the reader could not read and passed over.
    """

    def __init__(
        self,
        path: Path,
        *,
        longest_line: int = LONGEST_LINE,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.path, self.longest_line = path, longest_line
        self._on_bytes = on_bytes
        self.cut, self.foreign_lines = False, ForeignLines()
        self._notes: list[str] = []
        self._replaced = self._first_replaced = self._nulls = self._num_odd = 0
        self._decode: Callable[[bytes], bytes] = lambda block: block
        self._blocks = self._unpacked()
        self.head = self._begin()

    @property
    def unread(self) -> str:
        """What follows the last record and could not be read, in words; else empty."""
        return "; ".join([*self._notes, *filter(None, [self.foreign_lines.unread])])

    @property
    def notes(self) -> list[str]:
        """Notes on lines that were left out or replaced so far, as sentences."""
        notes = self._notes[:]
        if self._replaced:
            notes.append(
                f"{self._replaced} lines, the first is line {self._first_replaced}, hold bytes "
                "that are not UTF-8: they were replaced"
            )
        if self._nulls:
            notes.append(f"{self._nulls} zero bytes between the lines were left out")
        if self.foreign_lines.bad:
            notes.append(self.foreign_lines.note())
        return notes

    def head_text(self) -> str:
        """The beginning, by which a format is recognised, up to `SHOWN` bytes.

        An object on the first line is shown whole.
        """
        first = self.head.find(b"\n") + 1 if _OBJECT.match(self.head) else 0
        text = self.head[: max(SHOWN, first)].decode("utf-8", "replace")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def check_is_text(self) -> None:
        """Raise LogError for what cannot be a log in text."""
        if not self.head_text().strip():
            raise LogError(self.path, None, "the file is empty")
        # A crash leaves zero bytes between lines or at the end: at most once a line.
        if self._num_odd > self.head.count(b"\n") + self.head.count(b"\r"):
            raise LogError(self.path, None, f"a binary file; a log is text, {PACKED} allowed")

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines, many at a time, with the number of the first; LF ends each.

        Only the last line of the file may lack its end; `cut` is true then.
        """
        line, size, too_long = 1, 0, False
        held: list[bytes] = []
        for block in self._texts():
            end = block.rfind(b"\n") + 1
            size += len(block) if not end else block.find(b"\n")
            if size > self.longest_line and not too_long:
                problem = f"the line is longer than {self.longest_line:,} bytes"
                if not self.foreign_lines.forgiving:
                    raise LogError(self.path, line, problem)
                self.foreign_lines.add(line, problem)
                held, too_long = [], True
            if not end:
                held += [] if too_long else [block]
                continue
            if too_long:
                # An empty line stands for it in the count.
                block, too_long = block[block.find(b"\n") :], False
                end = block.rfind(b"\n") + 1
            chunk = b"".join((*held, block[:end]))
            held, size = [block[end:]], len(block) - end
            yield line, chunk
            # Several times faster than `bytes.count`.
            line += int(np.count_nonzero(np.frombuffer(chunk, np.uint8) == ord("\n")))
        last = b"".join(held)
        if last:
            self.cut = True
            yield line, last

    def lines(self) -> Iterator[tuple[int, str]]:
        """Each line without its end, with its number."""
        for number, chunk in self.chunks():
            lines = self.decoded(number, chunk).split("\n")
            if not lines[-1]:
                lines.pop()
            yield from enumerate(lines, number)

    def decoded(self, number: int, chunk: bytes) -> str:
        """The text of lines that begin with line `number`."""
        try:
            return chunk.decode()
        except UnicodeDecodeError:
            text = chunk.decode("utf-8", "replace")
        at = [i for i, line in enumerate(text.split("\n"), number) if "\ufffd" in line]
        if at:
            self._first_replaced = self._first_replaced or at[0]
            self._replaced += len(at)
        return text

    def whole(self) -> str:
        """The whole text, for the formats that are one document."""
        parts, size = [], 0
        for chunk in self._texts():
            parts.append(chunk)
            size += len(chunk)
            if size > LONGEST_DOCUMENT:
                problem = f"one document of more than {LONGEST_DOCUMENT:,} bytes"
                raise LogError(self.path, None, problem)
        return self.decoded(1, b"".join(parts))

    def _begin(self) -> bytes:
        """The first block, in UTF-8 without zero bytes; what follows is decoded alike."""
        first, has_line = b"", False
        for block in self._blocks:
            if block and not first and not block.strip(b"\0"):
                self._nulls += len(block)
                continue
            first += block
            has_line = has_line or b"\n" in block
            enough = HEAD if has_line or not _OBJECT.match(first) else LONGEST_FIRST
            if len(first) >= enough or (not block and has_line):
                break
        if first.startswith(_UTF16_MARKS):
            decoder = codecs.getincrementaldecoder("utf-16")("replace")
            self._decode = lambda block: decoder.decode(block).encode("utf-8", "replace")
        head = self._decode(first.removeprefix(codecs.BOM_UTF8))
        if b"\0" in head:
            self._nulls += head.count(b"\0")
            self._num_odd = len(_ODD.findall(head))
        return head.replace(b"\0", b"")

    def _texts(self) -> Iterator[bytes]:
        """Blocks in UTF-8 in which LF alone ends lines."""
        carriage = b""
        for block in chain([self.head], map(self._decode, self._blocks)):
            if carriage or b"\r" in block:
                block = carriage + block
                # It may be the first half of CR LF.
                carriage = b"\r" if block.endswith(b"\r") else b""
                block = block.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if b"\0" in block:
                self._nulls += block.count(b"\0")
                block = block.replace(b"\0", b"")
            if block:
                yield block
        if carriage:
            yield b"\n"

    def _unpacked(self) -> Iterator[bytes]:
        return unpacked(self.path, BLOCK, self._notes, self._on_bytes)


class PathOnly(Source):
    """A path whose bytes are read elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path, self.foreign_lines = path, ForeignLines()
