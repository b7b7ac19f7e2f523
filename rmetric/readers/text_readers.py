"""The readers of text logs: a line that a program prints, such as ``iter 5: loss 2.31``.

Each is an entry of the table `text_formats` or a module ``text_<program>.py`` with

    NAME        of the format, as messages and the index print it
    MARK        pattern that the beginning of a file (up to 64 KiB), without colours, has
    rows        from numbered lines, without their ends, to rows, as a generator that
                holds no more than it needs: a file may be larger than the memory

and, where there is something to say,

    notes       from the beginning of a file to sentences for the run
    OTHER_NAMES of cells that count only where ``--map`` says so

A row's cells stand under the names of `TARGETS` (``step``, ``loss``, ``eval_loss``,
``grad_norm``, ``learning_rate``, ``loss_scale``, ``skipped``, ``time``, ``run``, ...), so
nothing about them is guessed: a number, a bool for ``skipped``, or text that
`rows.number` understands; absent where not logged. Lines that say nothing are
passed over. Neighbouring rows of one step that state different things become one
record; steps that start again become another run. A line that cannot be
understood and must not be passed over is `rows.BadRow`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from rmetric.readers import (
    text_deepspeed,
    text_fairseq,
    text_hugging_face,
    text_megatron,
    text_mlperf,
    text_pairs,
    text_stable_baselines3,
)
from rmetric.readers.columns import Columns, named_by_target
from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream, stream_rows
from rmetric.readers.text_formats import (
    LLM_C,
    MODDED_NANOGPT,
    NANOCHAT,
    NANOGPT,
    TORCHTITAN,
    TORCHTUNE,
)
from rmetric.readers.text_parts import LONGEST, without_colours

#: Bytes in which a mark is looked for at a time.
WINDOW = 1 << 16
#: Bytes of start-up, or of the program's own source, that may come before the first step.
FURTHEST = 4 << 20


_BLANKS = re.compile(r" +")
_NUMBERS = re.compile(r" ?[-+]?(?:\d[\d.,]*(?:e[-+]?\d*)?|nan|inf)", re.IGNORECASE)


class TextReader(Protocol):
    """Interface of a text format: a module or a `text_formats.LineFormat`."""

    @property
    def NAME(self) -> str: ...

    @property
    def MARK(self) -> re.Pattern[str]: ...

    def rows(self, lines: Iterable[tuple[int, str]]) -> Iterator[Row]: ...


#: The first that matches reads the file: the more particular come first.
TEXT_READERS: tuple[TextReader, ...] = (
    text_mlperf,
    text_hugging_face,
    text_stable_baselines3,
    text_fairseq,
    text_megatron,
    NANOGPT,
    NANOCHAT,
    MODDED_NANOGPT,
    LLM_C,
    TORCHTITAN,
    TORCHTUNE,
)


def as_reader(reader: TextReader) -> Reader:
    """A text format as one of `READERS`."""
    mark = reader.MARK

    def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
        others = getattr(reader, "OTHER_NAMES", ())
        wanted = {target: name for target, name in mapping.items() if name in others}
        columns = Columns(by_target=named_by_target().by_target | wanted)
        notes: list[str] = []
        if not wanted and hasattr(reader, "notes"):
            notes += reader.notes(without_colours(source.head_text()))
        if len(wanted) < len(mapping):
            notes.append("--map is not needed for this format and was not used")
        return stream_rows(source, columns, reader.rows(whole_lines(source, notes)), notes)

    return Reader(
        reader.NAME, lambda head: mark.search(without_colours(head)) is not None, stream, True
    )


def _stream_pairs(source: Source, mapping: Mapping[str, str]) -> Stream:
    """The records by `text_pairs`, which follows --map and notes what it guessed."""
    head = without_colours(source.head.decode("utf-8", "replace"))
    finest = None if "step" in mapping else text_pairs.finest_step(head)
    notes = []
    if finest is not None:
        mapping = {**mapping, "step": finest}
        notes.append(f"the step is {finest!r}, which differs on most lines with a loss")
    notes += text_pairs.notes(head, mapping)
    rows = text_pairs.rows(whole_lines(source, notes), mapping)
    return stream_rows(source, named_by_target(), rows, notes)


def _stream_without_step(source: Source, mapping: Mapping[str, str]) -> Stream:
    notes = ["no step is stated: the lines with a training loss are counted from 0"]
    rows = text_pairs.counted_rows(whole_lines(source, notes), mapping)
    return stream_rows(source, named_by_target(), rows, notes)


def _stream_mapped(source: Source, mapping: Mapping[str, str]) -> Stream:
    has_steps = text_pairs.matches(without_colours(source.head_text()), mapping)
    return (_stream_pairs if has_steps else _stream_without_step)(source, mapping)


def whole_lines(source: Source, notes: list[str]) -> Iterator[tuple[int, str]]:
    """The lines, without a last one that was cut off: a note says so.

    A last line without its end may be whole all the same. It is cut off where it is
    the beginning of what lines shortly before it look like, numbers aside.
    """
    before: deque[str] = deque(maxlen=64)
    for number, text in source.lines():
        if source.cut and text.strip():
            shape = _shape(text)
            shapes = {_shape(line) for line in before}
            if shape not in shapes and any(other.startswith(shape) for other in shapes):
                notes.append(f"line {number} is cut off and was left out")
                return
        before.append(text[:LONGEST])
        yield number, text


def _shape(text: str) -> str:
    return _NUMBERS.sub("0", _BLANKS.sub(" ", text[:LONGEST].rstrip()))


#: Asked after all that know a program's lines, and before a table, which any commas look like.
LAST_READERS: tuple[Reader, ...] = (
    Reader(
        text_pairs.NAME, lambda head: text_pairs.matches(without_colours(head)), _stream_pairs, True
    ),
    as_reader(text_deepspeed),
)
#: Asked where no other reader knows any part of the file.
WITHOUT_STEP = Reader(
    text_pairs.NAME_WITHOUT_STEP,
    lambda head: text_pairs.is_without_step(without_colours(head)),
    _stream_without_step,
    follows=True,
)
#: Of any text, where --map says what a loss is: without a name any number may be one.
MAPPED = Reader(
    "text with name=value (needs --map loss=NAME)", lambda head: False, _stream_mapped, True
)
#: It knows no loss: whatever else is in the file goes first.
WITHOUT_LOSS = LAST_READERS[-1]


def reader_further_on(source: Source) -> Reader | None:
    """The reader of a text whose first step comes after where a mark was looked for."""
    readers = (*map(as_reader, TEXT_READERS), *LAST_READERS[:-1])
    size, last = 0, None
    for _, chunk in Source(source.path, longest_line=source.longest_line).chunks():
        for begin in range(0, len(chunk), WINDOW - 4096):
            part = chunk[begin : begin + WINDOW].decode("utf-8", "replace")
            found = next((reader for reader in readers if reader.matches(part)), None)
            if last is None and WITHOUT_LOSS.matches(part):
                last = WITHOUT_LOSS
            if found is not None or size + begin > FURTHEST:
                return found or last
        size += len(chunk)
    return last
