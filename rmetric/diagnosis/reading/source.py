"""Read one log file: unpack, decode to UTF-8, split into lines in bounded memory."""

from __future__ import annotations

import codecs
import html
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from operator import itemgetter
from pathlib import Path

from rmetric._util.durable import is_packed, unpacked
from rmetric.diagnosis.reading.records import Export

#: Bytes of a line that are kept.
LONGEST_LINE = 1 << 16
#: Digits of a number that are kept; Python refuses far longer ones, and no float is larger.
LONGEST_NUMBER = 300

_LONG_NUMBER = re.compile(rb"(\d{%d})\d+" % LONGEST_NUMBER)
#: What is found in `_LONG_NUMBER` once each digit is a zero; that is far quicker.
_ZEROS, _LONG_ZEROS = bytes.maketrans(b"123456789", b"0" * 9), b"0" * (LONGEST_NUMBER + 1)
_COLOURS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
#: What pages of CI systems, saved as text, have in place of quotes and brackets.
_ENTITY = re.compile(rb"&(?:quot|#34|#39|#x27|lt|gt|amp);")
#: What is removed or replaced, and what a text has where there is some of it.
_CLEANED: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\x1b", partial(_COLOURS.sub, b"")),
    (b"\r", lambda body: body.replace(b"\r\n", b"\n")),
    (b"&", partial(_ENTITY.sub, lambda found: html.unescape(found[0].decode()).encode())),
)
#: A line up to its last carriage return. A launcher puts its prefix before the first only, so it
#: is kept: group 1.
_OVERWRITTEN = re.compile(
    rb"^([ ]*\d+: ?|\[[^\]\r\n]{1,80}\](?:<std\w+>)?:? ?|\([^)\r\n]{1,80}\) )?[^\n]*\r(?:\1)?"
)
#: Lines by which it is known what stands before every line, and how many are needed.
SAMPLE, FEWEST = 200, 3
#: What a mail, `cat -n`, `grep -n` or a viewer puts there. Numbers of lines are each one more than
#: the last; those of the second and third may be of ranks or steps but before lines of many kinds.
_MARKS = (
    re.compile(rb">(?: |(?=[^>\s])|$)"),
    re.compile(rb"(?i)(?:\[(?:stdout|stderr)\]|<(?:stdout|stderr)>|(?:stdout|stderr) ?[:|]) ?"),
)
_COUNTED = (re.compile(rb"(?=[ \d]{6,}\t) *(\d{1,9})\t"), re.compile(rb"(\d{1,9})[:-]"),
            re.compile(rb"\[(\d{1,9})\](?: |$)"))  # fmt: skip
#: Share of the lines that a mark needs; lines, and their texts without digits, that numbers need.
_MIN_MARK_SHARE, _MANY, _MANY_KINDS, _MAX_LAYERS = 0.9, 5, 6, 3

Layers = list[re.Pattern[bytes]]


@dataclass
class Lines:
    """Splits blocks into lines; what it had to do is counted.

    Attributes:
        layers: what stands before every line; None until the first lines are there.
        count, nulls: lines so far, zero bytes left out.
        cut, foreign: number and first of the lines longer than `longest`, and of those with bytes
            that are not UTF-8.
    """

    longest: int = LONGEST_LINE
    layers: Layers | None = None
    count: int = 0
    cut: tuple[int, int] = (0, 0)
    foreign: tuple[int, int] = (0, 0)
    nulls: int = 0

    def lists(self, blocks: Iterator[bytes]) -> Iterator[list[bytes]]:
        """The lines of each block that end in it; the last may lack its end."""
        held = b""
        for block in blocks:
            end = block.rfind(b"\n") + 1
            if end:
                yield self._lines(held + block[: end - 1])
                held = block[end:]
            else:
                held += block
            if len(held) > self.longest:
                # Still over-long, so that it is counted.
                ending = b"\r" if held.endswith(b"\r") else b""
                held = self._without_nulls(_left(held))[: self.longest + 1] + ending
        if held:
            yield self._lines(held)

    def notes(self) -> list[str]:
        """Notes on truncated, replaced and removed bytes."""
        notes = ["a mark, number or indent before every line was left out"] if self.layers else []
        longer = f"are longer than {self.longest:,} bytes: only their beginning was read"
        foreign = "hold bytes that are not UTF-8: they were replaced"
        notes += [
            f"{count:,} lines, the first is line {first:,}, {what}"
            for (count, first), what in ((self.cut, longer), (self.foreign, foreign))
            if count
        ]
        return notes + [f"{self.nulls:,} zero bytes were left out"] * bool(self.nulls)

    def _lines(self, body: bytes) -> list[bytes]:
        """Split complete lines; the last has no line end."""
        for mark, cleaned in _CLEANED:
            if mark in body:
                body = cleaned(body)
        body = self._without_nulls(body)
        lines = body.split(b"\n")
        if self.layers is None:
            self.layers = _layers(lines)
        for layer in self.layers:
            lines = _without(layer, lines)
        if b"\r" in body:
            lines = [_left(line) if b"\r" in line else line for line in lines]
        if not body.isascii() and not _is_utf8(body):
            # A line that was cut may end within a letter.
            full = ((at, line) for at, line in enumerate(lines) if len(line) < self.longest)
            self.foreign = self._more(self.foreign, [at for at, line in full if not _is_utf8(line)])
        if max(map(len, lines)) > self.longest:
            long = [at for at, line in enumerate(lines) if len(line) > self.longest]
            self.cut = self._more(self.cut, long)
            lines = [line[: self.longest] for line in lines]
        if _LONG_ZEROS in body.translate(_ZEROS):
            lines = [_LONG_NUMBER.sub(rb"\1", line) for line in lines]
        self.count += len(lines)
        return lines

    def _more(self, known: tuple[int, int], places: list[int]) -> tuple[int, int]:
        first = known[1] or (self.count + places[0] + 1 if places else 0)
        return known[0] + len(places), first

    def _without_nulls(self, text: bytes) -> bytes:
        """The text without the hole that a file may have, which can be larger than memory."""
        if b"\0" not in text:
            return text
        kept = text.translate(None, b"\0")
        self.nulls += len(text) - len(kept)
        return kept


def _layers(lines: Sequence[bytes]) -> Layers:
    """What stands before the lines of a file that begins so, the outermost first."""
    sample = list(islice((line for line in lines if line.strip()), SAMPLE))
    layers = Layers()
    while len(sample) >= FEWEST and len(layers) < _MAX_LAYERS:
        enough = _MIN_MARK_SHARE * len(sample)
        marks = (mark for mark in _MARKS if sum(map(bool, map(mark.match, sample))) >= enough)
        layer = next((num for num in _COUNTED if _numbers(num, sample)), None) or next(marks, None)
        blank = min((line[: -len(line.lstrip(b" \t"))] for line in sample), key=len)
        blank = blank if all(line.startswith(blank) for line in sample) else b""
        if layer is None and len(blank.expandtabs()) > 1:  # one space Megatron's lines have
            layer = re.compile(re.escape(blank))
        if layer is None:
            break
        layers.append(layer)
        sample = [line for line in _without(layer, sample) if line.strip()]
    return layers


def _numbers(form: re.Pattern[bytes], sample: Sequence[bytes]) -> bool:
    numbers = [int(found[1]) for found in map(form.match, sample) if found]
    if len(numbers) < len(sample) or any(b - a != 1 for a, b in pairwise(numbers)):
        return False
    rests = _without(form, sample)
    kinds = {rest.translate(None, b"0123456789") for rest in rests}
    many = len(rests) >= _MANY and len(kinds) >= min(_MANY_KINDS, len(rests) // 2 + 1)
    set_in = form is _COUNTED[1] and not any(rest[:1].strip() for rest in rests)
    return form is _COUNTED[0] or (many and not set_in)


def _without(layer: re.Pattern[bytes], lines: Sequence[bytes]) -> list[bytes]:
    """The lines, those that begin with the layer without it."""
    return [line[found.end() :] if (found := layer.match(line)) else line for line in lines]


def _left(line: bytes) -> bytes:
    """Visible text of a line after its carriage returns."""
    line = line.rstrip(b"\r")
    return _OVERWRITTEN.sub(rb"\1", line) if b"\r" in line else line


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def unwrapped(text: bytes) -> bytes:
    """The text of a whole file, or its first bytes, as `Lines` gives it."""
    lines = [line for lines in Lines().lists(logged(iter([text]))[0]) for line in lines]
    return b"\n".join(lines) + (b"\n" if text.endswith(b"\n") else b"")


def logged(
    blocks: Iterator[bytes], *, may_turn: bool = True
) -> tuple[Iterator[bytes], Export | None]:
    """Blocks of what was logged, and the export that holds it; None without."""
    first = next(blocks, b"")
    export, blocks = Export.of(first), chain([first], blocks)
    return (export.blocks(blocks, may_turn=may_turn) if export else blocks), export


def decoded(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Blocks in UTF-8: those of a file in UTF-16, with or without a byte order mark, recoded."""
    first = next(blocks, b"")
    encoding = utf16(first)
    if encoding is None:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for block in chain([first], blocks):
        yield decoder.decode(block).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def utf16(head: bytes) -> str | None:
    """Which UTF-16 a file is in that begins so; None where in none."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    head = head[: min(len(head), 4096) & ~1]
    # Without a mark: text whose every other byte is zero.
    of_le, of_be = head[1::2].count(0), head[::2].count(0)
    if len(head) < 8 or max(of_le, of_be) < max(0.35 * len(head), 50 * min(of_le, of_be)):
        return None
    return "utf-16-le" if of_le > of_be else "utf-16-be"


#: Bytes read at a time.
BLOCK = 1 << 20
#: Bytes that a sample has of a file's beginning, of places behind, and how many those are.
SAMPLED = 1 << 17
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
    _begun: Iterator[list[bytes]] | None = field(default=None, init=False, compare=False)
    _is_export: bool = field(default=False, init=False, compare=False)
    _lines: Lines = field(default_factory=Lines, init=False, compare=False)

    def chunks(self) -> Iterator[list[bytes]]:
        """All lines in order, about `BLOCK` bytes at a time, as UTF-8 (bytes that are none stay).

        Without line ends, ANSI colours, zero bytes and what a tool put before them; of
        a line that carriage returns overwrite, the last text; each cut at `LONGEST_LINE`. Empty
        lines are kept: the n-th is line n, but in exports of collectors (records.py).

        Raises:
            LogError: it cannot be opened, or it needs a package that is missing.
        """
        if self._begun is not None:
            begun, self._begun = self._begun, None
            yield from begun
            return
        damage, lines = list[str](), Lines()
        self._lines = lines
        blocks, export = logged(
            decoded(unpacked(self.path, BLOCK, damage, may_be_empty=True)),
            may_turn=self.size <= MOST_BACKWARDS,
        )
        self._is_export = export is not None
        yield from lines.lists(blocks)
        self._pieces = export.pieces if export else []
        self.lines, self.cut_off, self.notes = lines.count, "; ".join(damage), lines.notes()

    def line(self, number: int) -> int:
        """The line of the file that `chunks` gave as that of a number, both from 1."""
        at = bisect_right(self._pieces, number, key=itemgetter(0)) - 1
        return number if at < 0 else number - self._pieces[at][0] + self._pieces[at][1]

    def sample(self) -> list[bytes]:
        """Lines of its beginning, which is not read again by the next `chunks`, and of its rest.

        A packed file, UTF-16 and a collector's export give no lines of their rest.
        """
        held, blocks, size = list[list[bytes]](), self.chunks(), 0
        while size < SAMPLED and (lines := next(blocks, None)) is not None:
            held.append(lines)
            size += sum(map(len, lines)) + len(lines)
        self._begun = chain(held, blocks)
        sample = [line for lines in held for line in lines]
        if not sample or self._is_export or self.size <= max(BLOCK, 2 * SAMPLED):
            return sample
        with self.path.open("rb") as file:
            start = file.read(4096)
            if is_packed(start) or utf16(start) is not None:
                return sample
            sample = sample[: len(sample) * SAMPLED // size]
            for at in range(1, PIECES + 1):
                file.seek(SAMPLED + (self.size - SAMPLED) * at // PIECES - SAMPLED_PIECE)
                pieces = Lines(layers=self._lines.layers).lists(iter([file.read(SAMPLED_PIECE)]))
                # The first began elsewhere, the last ends elsewhere.
                sample += [line for lines in pieces for line in lines][1:-1]
        return sample
