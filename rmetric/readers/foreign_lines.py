"""Unreadable lines in a log, as left by a crashing program or a second writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rmetric._util.errors import LogError
from rmetric._util.printed import counted


class ForeignLines:
    """Counts the lines that could not be read, beside those that could.

    Args:
        say: called with a sentence at the first of them.

    Attributes:
        good: lines that were read; the reader counts them up.
        bad: lines that were left out.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self.good = self.bad = 0
        self._first = ""
        self._good_before = self._closing = 0

    def add(self, line: int, problem: str) -> None:
        """Leave out one line; `problem` says what it holds or lacks."""
        if not self.bad:
            self._first = f"line {line}: {problem}"
            if self._say is not None:
                self._say(f"a line could not be read and was left out, {self._first}")
        self._closing = self._closing + 1 if self.good == self._good_before else 1
        self._good_before = self.good
        self.bad += 1

    def note(self) -> str:
        """The number of lines and the first of them, as a sentence; empty if there are none."""
        if not self.bad:
            return ""
        were, first = ("was", "namely") if self.bad == 1 else ("were", "the first is")
        lines = counted(self.bad, "line")
        return f"{lines} could not be read and {were} left out, {first} {self._first}"

    def check(self, path: Path) -> None:
        """Raise LogError where more than half are bad: then it is another kind of file.

        What stands below the last good line does not count against the log: a crash
        writes as many lines as it likes.
        """
        closing = self._closing if self.good == self._good_before and self.good else 0
        inside = self.bad - closing
        if inside > self.good:
            share = f"{inside:,} of {inside + self.good:,} lines could not be read"
            raise LogError(path, None, f"{share}, half are allowed; the first is {self._first}")
