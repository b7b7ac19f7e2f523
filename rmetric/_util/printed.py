"""Text of foreign logs for a terminal or a CSV cell."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TextIO, TypeVar

T = TypeVar("T")


def printable(text: str) -> str:
    r"""`text` on one line, with invisible characters written as Python escapes them.

    A run's id comes from a log: raw, its escape sequences would be obeyed by the terminal.

    >>> print(printable("run\x1b[2J\n7 λ"))
    run\x1b[2J\n7 λ
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(number: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "alarm"), counted(1000, "record"), counted(2, "launch"), counted(3, "copy")
    ('1 alarm', '1,000 records', '2 launches', '3 copies')
    """
    if number == 1:
        return f"1 {word}"
    if word.endswith(("s", "ch")):
        return f"{number:,} {word}es"
    return f"{number:,} {word[:-1]}ies" if word.endswith("y") else f"{number:,} {word}s"


def short_number(value: float | None) -> str:
    """Three digits; without an exponent from a thousand to a million.

    >>> short_number(0.69314), short_number(123456), short_number(None)
    ('0.693', '123,000', 'nan')
    """
    if value is None:
        return "nan"
    if 999.5 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short.

    >>> number_ranges([0, 1, 2, 4])
    '0-2,4'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


_COLOURS = {"bad": "31;1", "warning": "33;1", "good": "32;1", "unknown": "36;1"}


def coloured(text: str, severity: str, stream: TextIO) -> str:
    """`text` in the colour of a severity where `stream` is a terminal that shows colours.

    The environment variable NO_COLOR, with any value, and TERM=dumb switch them off.
    """
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[severity]}m{text}\x1b[0m"


#: First characters with which a spreadsheet begins a formula, by the OWASP page on CSV injection.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def csv_cell(value: T) -> T | str:
    """A cell with an apostrophe before text that a spreadsheet would run; numbers are unchanged.

    >>> csv_cell("=cmd|' /C calc'!A0"), csv_cell("-0.5"), csv_cell(-2), csv_cell("run-1")
    ("'=cmd|' /C calc'!A0", '-0.5', -2, 'run-1')
    """
    if not isinstance(value, str) or len(value) < 2 or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return f"'{value}" if value[0] in "\t\r\n" else value
