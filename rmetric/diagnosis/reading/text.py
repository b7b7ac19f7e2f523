"""The text of a line: cleaned, its log level, its literals; and which lines are one entry."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from enum import IntEnum
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


class Kind(IntEnum):
    """Kind of a single line; independent of its digits, so that it can be cached."""

    PLAIN = 0
    BLANK = 1
    START = 2  # Traceback (most recent call last):
    PART = 3  # indented, or a frame, or what frameworks add below an exception
    EXCEPTION = 4  # ValueError: ...
    CHAIN = 5  # During handling of the above exception, another exception occurred:
    LEAD = 6  # Last error:
    BOX = 7  # a traceback or a table in a frame of lines
    RULER = 8  # ------
    DOUBLE = 9  # ======
    TITLE = 10  # train.py FAILED
    REPORTED = 11  # Failures: and its like in the report of torchrun
    IGNORED = 12  # Exception ignored in: of a destructor, the exception stands below
    FRAME = 13  # File "train.py", line 3, in main: a log may begin in the middle of a traceback


class State(IntEnum):
    """State of a stream's open entry. Initial state: `PLAIN`."""

    PLAIN = 0
    TRACE = 1
    RAISED = 2
    CHAINED = 3
    LED = 4
    BOXED = 5
    RULED = 6
    REPORT = 7
    FRAMED = 8  # the line of code of a frame may follow, even if it is not indented


#: State after a line that begins an entry, `PLAIN` where the kind is not listed.
_BEGUN = {
    Kind.START: State.TRACE,
    Kind.FRAME: State.FRAMED,
    Kind.EXCEPTION: State.RAISED,
    Kind.CHAIN: State.CHAINED,
    Kind.IGNORED: State.CHAINED,
    Kind.LEAD: State.LED,
    Kind.BOX: State.BOXED,
    Kind.RULER: State.RULED,
    Kind.DOUBLE: State.RULED,
}
_IN_TRACE = {
    **dict.fromkeys((Kind.PART, Kind.BOX), State.TRACE),
    **{kind: _BEGUN[kind] for kind in (Kind.FRAME, Kind.EXCEPTION, Kind.CHAIN, Kind.LEAD)},
}
#: State of an open entry -> kinds of lines that belong to it, with the state after them.
_JOINED: dict[State, dict[Kind, State]] = {
    State.PLAIN: {},
    State.TRACE: _IN_TRACE,
    State.FRAMED: {**_IN_TRACE, Kind.PLAIN: State.TRACE},
    State.RAISED: {
        **dict.fromkeys((Kind.PART, Kind.FRAME), State.RAISED),
        **{kind: _BEGUN[kind] for kind in (Kind.CHAIN, Kind.LEAD, Kind.DOUBLE)},
    },
    State.CHAINED: {
        **dict.fromkeys((Kind.PART, Kind.BOX), State.TRACE),
        **{kind: _BEGUN[kind] for kind in (Kind.START, Kind.FRAME, Kind.EXCEPTION)},
    },
    State.LED: dict.fromkeys((Kind.PLAIN, Kind.PART, Kind.FRAME, Kind.EXCEPTION), State.RAISED),
    State.BOXED: dict.fromkeys((Kind.BOX, Kind.PART, Kind.FRAME), State.BOXED),
    State.RULED: {Kind.TITLE: State.REPORT},
    State.REPORT: {
        **dict.fromkeys((Kind.PART, Kind.FRAME, Kind.REPORTED, Kind.RULER), State.REPORT),
        Kind.DOUBLE: State.PLAIN,
    },
}


def _next(state: State, kind: Kind) -> tuple[bool, State]:
    if kind is Kind.BLANK:  # belongs to the entry before and changes nothing
        return True, state
    if kind in _JOINED[state]:
        return True, _JOINED[state][kind]
    return kind is Kind.PART, _BEGUN.get(kind, State.PLAIN)


#: TRANSITIONS[state][kind] = (the line is part of the entry before, the state after it)
TRANSITIONS = [[_next(state, kind) for kind in Kind] for state in State]

_BOX = tuple(letter.encode() for letter in "│╭╰├┌└┃┏┗╮╯║╔╚")
#: What lines of a kind begin with; the first that matches counts.
_BEGINS = {
    Kind.FRAME: rb"\s*File \"[^\"\n]+\", line [^,\n]{0,9}, in \S",
    Kind.PART: (
        # Progress bars, step lines and Kubernetes' events are indented too, and lines of their own.
        rb"(?:  |\t)(?!\s*(?:\d+%\||\d+/\d+\s|(?i:step|iter|epoch)\w*[ :=\[#/]*\d))"
        rb"(?!\s*(?:Normal|Warning)\s{2,}[A-Z])"
        rb"|(?:frame )?#\d+[: ]+\S|\[ ?\d+\] (?:/|0x|\w[\w.]*\()|at (?:[\w$]+\.)+[\w$<>]+\("
        rb"|[~^]{3,}$|@ +0x|nccl\w+(?:Error|Usage|Argument)\w*:"
        rb"|\*\*\* (?:Signal|Associated|Failing|End of error)|\*\*\* \[ ?\d+\]"
        rb"|Exception raised from |(?:Current t|T)hread 0x|Stack \(most recent|Extension modules"
        rb"|CUDA kernel errors might be asynchronously|For debugging consider passing"
        rb"|Compile with `TORCH_USE_CUDA_DSA`|Device-side assertion tracking"
        rb"|To enable traceback see: |(?:NCCL )?WARN(?:ING)? Last error"
        rb"|This may indicate a possible "
    ),
    Kind.DOUBLE: rb"\s*={8,}\s*$",
    Kind.RULER: rb"\s*(?:-{8,}|\*{8,})\s*$",
    Kind.IGNORED: rb"Exception ignored (?:in|on|from)\b|Error in atexit\._run_exitfuncs",
    Kind.EXCEPTION: (
        rb"(?:[A-Za-z_][\w.]*\.)?_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Fault|Failure"
        rb"|Failed|Iteration|Expired|Refused|Warning|Abort|OutOfMemory)\w*(?::|\(|$)"
        rb"|(?:[a-z_]\w*\.)+(?:[A-Z]\w*|error|timeout)(?:: |:?$)"
        rb"|terminate called |Fatal Python error: |\*\*\* Process received signal"
    ),
    Kind.CHAIN: rb"During handling of the above exception|The above exception was the direct cause",
    Kind.LEAD: (
        rb"(?:Last error|The above call|Original error was|Details|Caused by|Missing ranks):\s*$"
    ),
    Kind.REPORTED: rb"(?:Failures|Root Cause[^:]{0,60}):\s*$|\[\d*\]:\s*$|<NO_OTHER_FAILURES>",
    Kind.TITLE: rb"\S.{0,200} (?:FAILED|EXITED)\s*$",
}
_KIND = re.compile(
    b"|".join(b"(?P<%s>%s)" % (kind.name.encode(), begin) for kind, begin in _BEGINS.items())
)


def kind_of(line: bytes) -> Kind:
    """Classify a line without its prefix."""
    text = line.strip()
    if not text:
        return Kind.BLANK
    if b"Traceback (most recent call last)" in text:
        return Kind.START
    if text.startswith(_BOX):
        return Kind.BOX
    found = _KIND.match(line)
    kind = Kind[found.lastgroup or ""] if found else Kind.PLAIN
    if text.endswith(b" raised:") and kind not in (Kind.FRAME, Kind.PART):
        return Kind.CHAIN  # torch's compiler: the exception of the backend stands below
    return kind


def shortened(text: str) -> str:
    """At most `MAX_TEXT` characters; a line "..." stands for what was cut from the middle."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else text[:half] + _CUT + text[len(_CUT) - half :]
