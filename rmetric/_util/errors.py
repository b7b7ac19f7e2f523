"""Errors of arguments and logs, and the exit codes of errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import nan
from numbers import Real
from pathlib import Path
from typing import NoReturn

from rmetric._util.interrupt import INTERRUPTED as INTERRUPTED
from rmetric._util.printed import printable

#: Exit codes that mean the same in every command; docs/commands.md has them all.
FAILED, WRONG = 1, 2


class LogError(ValueError):
    """A log that cannot be read: its file, the line (None for all of it) and the problem."""

    def __init__(self, path: Path | str, line: int | None, problem: str) -> None:
        self.path, self.line, self.problem = Path(path), line, problem
        where = f"{path}, line {line}" if line else f"{path}"
        super().__init__(f"{where}: {problem}")


def exit_code_of(error: Exception) -> int:
    """FAILED for a file that cannot be written or read, WRONG for any other error.

    A file that is not there counts as WRONG: the command line names it.

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
    """The value, or nan for what is no number, which no bound admits.

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
