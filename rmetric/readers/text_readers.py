"""The readers of text logs, by `text_parts.TextFormat`: a line such as ``iter 5: loss 2.31``."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping

from rmetric.readers import text_formats, text_pairs, text_programs
from rmetric.readers.columns import Columns, named_by_target
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream, stream_rows
from rmetric.readers.text_formats import DEEPSPEED
from rmetric.readers.text_parts import LONGEST, TextFormat, without_colours

#: Bytes in which a mark is looked for at a time.
WINDOW = 1 << 16
#: Bytes of start-up, or of the program's own source, that may come before the first step.
FURTHEST = 4 << 20

_SPACES = re.compile(r" +")
_NUMBERS = re.compile(r" ?[-+]?(?:\d[\d.,]*(?:e[-+]?\d*)?|nan|inf)", re.IGNORECASE)

TEXT_FORMATS = (*text_programs.PROGRAMS, *text_formats.FORMATS)


def as_reader(text: TextFormat) -> Reader:
    """A text format as one of `READERS`."""

    def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
        wanted = {t: name for t, name in mapping.items() if name in text.other_names}
        columns = Columns(by_target=named_by_target().by_target | wanted)
        head = without_colours(source.head_text())
        notes = [] if wanted else text.notes(head)
        if len(wanted) < len(mapping):
            notes.append("--map is not needed for this format and was not used")
        rows = text.rows_of(head) if text.rows_of else text.rows
        return stream_rows(source, columns, rows(whole_lines(source, notes)), notes)

    return Reader(
        text.name, lambda head: bool(text.mark.search(without_colours(head))), stream, follows=True
    )


def _stream_pairs(source: Source, mapping: Mapping[str, str]) -> Stream:
    """The records by `text_pairs`, which follows --map and notes what it guessed."""
    head = without_colours(source.head.decode("utf-8", "replace"))
    notes, mapping = text_pairs.guessed(head, mapping)
    if text_pairs.lacks_steps(head, mapping):
        return _stream_without_step(source, mapping)
    rows = text_pairs.rows(whole_lines(source, notes), mapping, text_pairs.Place(notes=notes))
    return stream_rows(source, named_by_target(), rows, notes)


def _stream_without_step(source: Source, mapping: Mapping[str, str]) -> Stream:
    notes = ["no step is stated, or on few lines: those with a training loss are counted from 0"]
    rows = text_pairs.counted_rows(whole_lines(source, notes), mapping)
    return stream_rows(source, named_by_target(), rows, notes)


def whole_lines(source: Source, notes: list[str]) -> Iterator[tuple[int, str]]:
    """The lines, without a last one that was cut off, which a note states.

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
    return _NUMBERS.sub("0", _SPACES.sub(" ", text[:LONGEST].rstrip()))


#: Asked after all that know a program's lines, and before a table, which any commas look like.
LAST_READERS: tuple[Reader, ...] = (
    Reader(
        text_pairs.NAME, lambda head: text_pairs.matches(without_colours(head)), _stream_pairs, True
    ),
    as_reader(DEEPSPEED),
)
#: Asked where no other reader knows any part of the file.
WITHOUT_STEP = Reader(
    text_pairs.NAME_WITHOUT_STEP,
    lambda head: text_pairs.is_without_step(without_colours(head)),
    _stream_without_step,
    follows=True,
)
#: Reads any text, if --map names the loss: without a name any number may be one.
MAPPED = Reader(
    "text with name=value (needs --map loss=NAME)", lambda head: False, _stream_pairs, True
)
#: It knows no loss: whatever else is in the file goes first.
WITHOUT_LOSS = LAST_READERS[-1]


def reader_further_on(source: Source) -> Reader | None:
    """The reader of a text whose first step comes after where a mark was looked for."""
    readers = (*map(as_reader, TEXT_FORMATS), *LAST_READERS[:-1])
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
