"""Words for a terminal, whatever a log brought along."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""`text` on one line, with what is no visible character written as Python escapes it.

    A run's id comes from a log: raw, its escape sequences would be obeyed by the terminal.

    >>> print(printable("run\x1b[2J\n7 λ"))
    run\x1b[2J\n7 λ
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(number: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "alarm"), counted(1000, "record")
    ('1 alarm', '1,000 records')
    """
    return f"{number:,} {word}" + "s" * (number != 1)
