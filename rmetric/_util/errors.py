"""Errors of arguments, logs and the standard output; exit codes; Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import nan
from numbers import Real
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, NoReturn, TextIO

from rmetric._util.printed import printable

#: Exit codes that mean the same in every command; docs/commands.md has them all.
FAILED, WRONG, INTERRUPTED = 1, 2, 130


class LogError(ValueError):
    """A log that cannot be read: its file, the line (None for all of it) and the problem."""

    def __init__(self, path: Path | str, line: int | None, problem: str) -> None:
        self.path, self.line, self.problem = Path(path), line, problem
        where = f"{path}, line {line}" if line else f"{path}"
        super().__init__(f"{where}: {problem}")


def exit_code_of(error: Exception) -> int:
    """FAILED for a file that cannot be written or read, WRONG for one that is not there or else.

    >>> exit_code_of(PermissionError()), exit_code_of(FileNotFoundError())
    (1, 2)
    """
    failed = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return FAILED if failed else WRONG


def error_text(error: Exception) -> str:
    """Message of an error; of an OSError the file's name and the system's reason.

    >>> error_text(PermissionError(13, "Permission denied", "a.json"))
    'a.json: Permission denied'
    """
    if isinstance(error, OSError):
        return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
    return str(error)


def fail(error: Exception | str, code: int = WRONG) -> int:
    """Print an error on one line of stderr; returns the exit code."""
    words = error if isinstance(error, str) else error_text(error)
    print(f"error: {printable(words)}", file=sys.stderr)
    return code


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of `main`, and with INTERRUPTED on Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


def as_number(value: object) -> float:
    """The value as float; nan if it is not a number, so that every bound check fails.

    >>> as_number(3), as_number("3"), as_number(True)
    (3.0, nan, nan)
    """
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else nan


def require(name: str, value: object, holds: bool, wanted: str) -> None:
    """Raise ValueError, which names the argument, its value and what is accepted.

    >>> require("window", 0, 0 > 0, "at least 1 value")
    Traceback (most recent call last):
    ValueError: window is 0: it must be at least 1 value
    """
    if not holds:
        raise ValueError(f"{name} is {value!r}: it must be {wanted}")


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within it Ctrl-C ends the process with 130 and no traceback.

    An extension whose import is broken off by an exception may crash, or name another reason.
    """
    before = signal.getsignal(signal.SIGINT)
    own = before is signal.default_int_handler and current_thread() is main_thread()
    if own:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGINT, before)


class OutputError(Exception):
    """Standard output cannot be written; `closed`: its reader has gone, as after `| head -1`.

    Not an OSError, because commands catch OSError of the files that they read and write.
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
    """Make `sys.stdout` raise `OutputError` where it cannot be written, except on a terminal.

    If the command was started without standard output, what it prints is discarded.
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
        stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through,
    )  # fmt: skip
