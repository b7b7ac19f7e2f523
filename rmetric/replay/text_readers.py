"""The readers of text logs: a line that a program prints, such as ``iter 5: loss 2.31``.

Each is a module ``text_<program>.py`` with

    NAME        of the format, as messages and the index print it
    matches     whether the beginning of a file (up to 64 KiB) is in this format
    rows        from numbered lines, without their ends, to rows, as a generator that
                holds no more than it needs: a file may be larger than the memory

A row's cells stand under the names of `TARGETS` (``step``, ``loss``, ``eval_loss``,
``grad_norm``, ``learning_rate``, ``loss_scale``, ``skipped``, ``time``, ``run``, ...), so
nothing about them is guessed: a number, a bool for ``skipped``, or text that
`rows.number` understands; absent where not logged. Lines that say nothing are
passed over. Neighbouring rows of one step that state different things become one
record; steps that start again become another run. A line that cannot be
understood and must not be passed over is `rows.BadRow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from rmetric.replay.columns import named_by_target
from rmetric.replay.rows import Row
from rmetric.replay.source import Source
from rmetric.replay.stream import Stream, stream_rows


class TextReader(Protocol):
    """What the module of a text format has."""

    NAME: str

    def matches(self, head: str) -> bool: ...

    def rows(self, lines: Iterable[tuple[int, str]]) -> Iterator[Row]: ...


#: The first that matches reads the file: the more particular come first.
TEXT_READERS: tuple[TextReader, ...] = ()


class AsReader:
    """A text reader as `stream.Reader`."""

    FOLLOWS = True

    def __init__(self, reader: TextReader) -> None:
        self.NAME, self.matches, self._rows = reader.NAME, reader.matches, reader.rows

    def stream(self, source: Source, mapping: Mapping[str, str]) -> Stream:
        notes = ["--map is not needed for this format and was not used"] if mapping else []
        return stream_rows(source, named_by_target(), self._rows(source.lines()), notes)
