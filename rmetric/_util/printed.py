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

    >>> counted(1, "alarm"), counted(1000, "record"), counted(2, "launch"), counted(3, "copy")
    ('1 alarm', '1,000 records', '2 launches', '3 copies')
    """
    if number == 1:
        return f"1 {word}"
    if word.endswith(("s", "ch")):
        return f"{number:,} {word}es"
    return f"{number:,} {word[:-1]}ies" if word.endswith("y") else f"{number:,} {word}s"
