"""The text of a line: cleaned, its log level, its literals; and which lines are one entry."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct, convert

from rmetric._util.lazy import read_yaml

Item = TypeVar("Item")

#: First words of an exception's report by Python.
TRACEBACK = "Traceback (most recent call last)"
_CONTROL = dict.fromkeys([*range(9), *range(10, 32), 127])
#: Characters in which a level is sought.
_HEAD = 160
_LINE_TABLES = read_yaml(Path(__file__).with_name("text.yaml"))
_LEVEL: dict[str, str] = {
    word: level for level, words in _LINE_TABLES["levels"].items() for word in words
}
_WORDS = "|".join(sorted(filter(str.islower, _LEVEL), key=len, reverse=True))
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


def clean(line: bytes) -> str:
    """Decode as UTF-8, replace invalid bytes, drop trailing blanks and control characters."""
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
    return _LEVEL[letter["letter"]] if letter else ""


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
            run = min(runs_of(literal), key=lambda run: (number[run], run), default=b"")
            self._by_run[run].append((literal, item))
        self._short = self._by_run.pop(b"", [])

    def items(self, line: bytes, runs: Collection[bytes] | None = None) -> list[Item]:
        """Items of the literals that occur in a line in lower case; an item may recur."""
        found = self._by_run.keys() & (runs_of(line) if runs is None else runs)
        candidates = [self._short, *map(self._by_run.__getitem__, found)]
        return [item for group in candidates for literal, item in group if literal in line]


def runs_of(line: bytes) -> set[bytes]:
    """All runs of `RUN` bytes in a line, each once."""
    return {line[at : at + RUN] for at in range(len(line) - RUN + 1)}


#: Characters of an entry that are kept.
MAX_TEXT = 4000
#: Lines joined to one entry at most.
MAX_LINES = 200
_CUT = "\n ...\n"


class LineKind(Struct, frozen=True):
    """A kind of single lines: a row of text.yaml."""

    begins: tuple[str, ...]
    examples: tuple[str, ...]
    opens: str = ""


KINDS = convert(_LINE_TABLES["kinds"], dict[str, LineKind])
_ANY_KIND = "|".join(f"(?P<{name}>{'|'.join(kind.begins)})" for name, kind in KINDS.items())
_KIND = re.compile(_ANY_KIND.encode())
_JOINED: dict[str, dict[str, str]] = _LINE_TABLES["joined"]


def _next(state: str, kind: str) -> tuple[bool, str]:
    if kind == "blank":
        return True, state
    if kind in _JOINED[state]:
        return True, _JOINED[state][kind]
    return kind == "part", KINDS[kind].opens if kind else ""


#: TRANSITIONS[state][kind] = (the line is part of the entry before, the state after it). The state
#: at first is "", and so is the kind of a plain line.
TRANSITIONS = {state: {kind: _next(state, kind) for kind in ("", *KINDS)} for state in _JOINED}


def kind_of(line: bytes) -> str:
    """The kind of a line without its prefix, of `KINDS`; "" for a plain one."""
    found = _KIND.match(line)
    return (found.lastgroup or "") if found else ""


def shortened(text: str) -> str:
    """At most `MAX_TEXT` characters; a line "..." stands for what was cut from the middle."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else text[:half] + _CUT + text[len(_CUT) - half :]
