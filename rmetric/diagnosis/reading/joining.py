"""Join lines into entries: tracebacks, stack frames, reports of launchers."""

from __future__ import annotations

import re
from enum import IntEnum

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
    Kind.PART: State.TRACE,
    Kind.FRAME: State.FRAMED,
    Kind.BOX: State.TRACE,
    Kind.EXCEPTION: State.RAISED,
    Kind.CHAIN: State.CHAINED,
    Kind.LEAD: State.LED,
}
#: State of an open entry -> kinds of lines that belong to it, with the state after them.
_JOINED: dict[State, dict[Kind, State]] = {
    State.PLAIN: {},
    State.TRACE: _IN_TRACE,
    State.FRAMED: {**_IN_TRACE, Kind.PLAIN: State.TRACE},
    State.RAISED: {
        Kind.PART: State.RAISED,
        Kind.FRAME: State.RAISED,
        Kind.CHAIN: State.CHAINED,
        Kind.LEAD: State.LED,
        Kind.DOUBLE: State.RULED,
    },
    State.CHAINED: {
        Kind.START: State.TRACE,
        Kind.EXCEPTION: State.RAISED,
        Kind.BOX: State.TRACE,
        Kind.PART: State.TRACE,
        Kind.FRAME: State.FRAMED,
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
_LAID_OUT = ("FRAME", "PART")
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
    if text.endswith(b" raised:") and (found is None or found.lastgroup not in _LAID_OUT):
        return Kind.CHAIN  # torch's compiler: the exception of the backend stands below
    return Kind[found.lastgroup or ""] if found else Kind.PLAIN


def shortened(text: str) -> str:
    """At most `MAX_TEXT` characters; a line "..." stands for what was cut from the middle."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else text[:half] + _CUT + text[len(_CUT) - half :]
