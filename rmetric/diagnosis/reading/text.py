"""The text of a line: cleaned, its log level, and which of many literals occur in it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: First words of an exception's report by Python.
TRACEBACK = "Traceback (most recent call last)"
_CONTROL = dict.fromkeys([*range(9), *range(10, 32), 127])
#: Characters in which a level is sought.
_HEAD = 160
_LEVELS = {
    "error": "error err fatal critical crit emerg alert panic severe exception",
    "warning": "warning warn notice",
    "info": "info information debug trace verbose",
}
_LEVEL = {word: level for level, words in _LEVELS.items() for word in words.split()}
_WORDS = "|".join(sorted(_LEVEL, key=len, reverse=True))
#: How a level is marked, so that it is none of prose: as the value of a key, in capitals beside a
#: bracket, a colon or a bar, or small between two of them.
_MARKED = re.compile(
    rf"(?i:(?:level|lvl|severity)\"?\s*[=:]\s*\"?(?P<key>{_WORDS}))\b"
    rf"|(?:^|[\[<(|/\d]\s*|\s-\s|\]\s*|(?:NCCL|UCX|UCC)\s+)(?P<capitals>{_WORDS.upper()})\b(?![\w.])"
    rf"|(?<![\w.])(?P<before>{_WORDS.upper()})(?=\s*[\]>):|])"
    rf"|(?i:(?:^|[\[<(|:/])\s*(?P<between>{_WORDS})(?=\s*[\]>):|]))"
)
#: The letter of glog, PyTorch and XLA: E0503 12:00:01, [E ProcessGroupNCCL.cpp:828], : E external/
_LETTER = re.compile(
    r"(?P<letter>[IWEFC])(?<![^\[\s][IWEFC])(?=\d{1,4} \d{1,2}:\d|(?:0|\d{4,8})-\d"
    r"| [\w/.-]+\.(?:cc|cpp|h|cu|py):\d| external/| (?:0|\d{4})-\d| \d+ \d+\])"
)
#: A line end within a JSON string, however often it was quoted, and what ends such a string.
_IN_JSON = re.compile(r"\\+n")
_REST = re.compile(r'(?m)(?<=\w|[.)\]\'])\\*"(?:\}|, ?\\*"\w+\\*":)[^\n]*$')
_QUOTE = re.compile(r'\\+"')
_LETTERS = {"I": "info", "W": "warning", "E": "error", "F": "error", "C": "error"}


def clean(line: bytes) -> str:
    """As UTF-8, what is none replaced; no blanks at its end, no control characters but tabs."""
    text = line.rstrip().decode("utf-8", "replace")
    if text.isprintable() or text.replace("\t", "").isprintable():  # as nearly every line is
        return text
    return text.translate(_CONTROL)


def level(text: str) -> str:
    """One of "error" (fatal and critical too), "warning", "info" (debug too), "" for none."""
    head = text[:_HEAD]
    if match := _MARKED.search(head):
        return _LEVEL[match[match.lastgroup or 0].lower()]
    letter = _LETTER.search(head)
    return _LETTERS[letter["letter"]] if letter else ""


def unescaped(text: str) -> str:
    r"""An entry whose JSON holds a traceback in one line, with the traceback's own lines.

    torchelastic (`py_callstack`) and loggers of JSON write the exception so.

    >>> print(unescaped(r'{"exc": "Traceback (most recent call last):\nKeyError: 3", "at": "1"}'))
    {"exc": "Traceback (most recent call last):
    KeyError: 3
    """
    if TRACEBACK not in text or "\\n" not in text:
        return text
    found = _IN_JSON.sub("\n", text)
    # What follows the exception is the rest of the JSON.
    begin = found.index(TRACEBACK)
    return found[:begin] + _QUOTE.sub('"', _REST.sub("", found[begin:]))


#: Letters of a run; shorter literals are sought in every line.
RUN = 3


class WordIndex(Generic[Item]):
    """Items by literals in lower case: the one prefilter of all patterns.

    Each literal is filed under the run of letters of it that the fewest others have.
    """

    def __init__(self, literals: Iterable[tuple[bytes, Item]]) -> None:
        literals = list(literals)
        number = Counter(run for literal, _ in literals for run in runs_of(literal))
        self._by_run: dict[bytes, list[tuple[bytes, Item]]] = defaultdict(list)
        for literal, item in literals:
            run = min(runs_of(literal), key=lambda one: (number[one], one), default=b"")
            self._by_run[run].append((literal, item))
        self._short = self._by_run.pop(b"", [])

    def items(self, line: bytes, runs: Collection[bytes] | None = None) -> list[Item]:
        """Items of the literals that occur in a line in lower case; an item may recur."""
        found = self._by_run.keys() & (runs_of(line) if runs is None else runs)
        candidates = [self._short, *map(self._by_run.__getitem__, found)]
        return [item for each in candidates for literal, item in each if literal in line]


def runs_of(line: bytes) -> set[bytes]:
    """All runs of `RUN` bytes in a line, each once."""
    return {line[at : at + RUN] for at in range(len(line) - RUN + 1)}
