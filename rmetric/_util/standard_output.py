"""Errors of the standard output, told apart from those of other files."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class OutputError(Exception):
    """The standard output takes no more; `closed`: nobody reads it any more, as after `| head -1`.

    It is no OSError: a command catches those of the files that it reads and writes.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.closed = isinstance(error, BrokenPipeError)


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from None


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Within it, `sys.stdout` raises `OutputError` where it takes no more; a terminal does not.

    It is flushed at the end; what could not be written is dropped then. Where a command was
    started without a standard output, what it prints goes nowhere.
    """
    before = sys.stdout
    sys.stdout = _watched(before)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError:
        # What is left in the buffer would be tried again, and complained of, at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.stdout.flush()
        raise
    finally:
        sys.stdout = before


def _watched(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return stream
    stream.flush()
    raw = _Output(stream.fileno(), "w", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
