"""Shorten text to a width and keep its essential part.

Of a path that is the file name, of prose the main clause, of a log entry the matched text or the
exception.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

from rmetric._util.printed import printable
from rmetric.diagnosis.reading.text import TRACEBACK
from rmetric.diagnosis.result import Evidence

#: Where prose may end early: an explanation or an addition follows.
_CLAUSE = re.compile(r"; |(?<=\.) (?=[A-Z])|, (?:(?:most )?often|which|so that) ")
#: Least share of the room that a clause fills to stand for the whole.
_LEAST = 0.25
#: Characters that are given up to end, or begin, with a whole word.
_WORD = 24
#: A file's name, with its folders.
_PATH = re.compile(r"""(?:[^\s/'"()\[\]=,]*/)+(?=[^\s/]*\w\.\w)""")
_TRACEBACK = (
    TRACEBACK,
    "During handling of the above exception",
    "The above exception was the direct cause",
)
#: Lines of an entry that name a place in the code, and those that a line of code follows.
_FRAME = re.compile(
    r'\s*(?:File ".+", line \d+|#\d+:? |frame #\d+: |[~^][~^ ]*$)'
    r"|.*\(most recent call (?:first|last)\):\s*$"
)
_CODE_FOLLOWS = re.compile(r'\s*File ".+", line \d+, in ')


def shortened(text: str, most: int) -> str:
    """`text` at no more than `most` characters: its head and its tail."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def brief(text: str, most: int) -> str:
    """Prose at no more than `most` characters: without its last clauses, else its beginning.

    >>> brief("A kernel failed, most often an address out of range", 20)
    'A kernel failed'
    >>> brief("An operation over libfabric failed", 20)
    'An operation over…'
    """
    if len(text) > most:
        text = _PATH.sub("…/", text)
    ends = [one.start() for one in _CLAUSE.finditer(text) if one.start() <= most]
    whole = len(text) <= most or not ends or ends[-1] < _LEAST * most
    return _begun(text, most) if whole else text[: ends[-1]]


def partly(text: str, most: int) -> str:
    """As `brief`, and it shows that something is left out."""
    if len(text) <= most:
        return text
    short = brief(text, most - 2)
    return short if short.endswith("…") else f"{short} …"


def _begun(text: str, most: int, least: int = 0) -> str:
    """The beginning of a text, to a whole word; at least `least` characters of it."""
    if len(text) <= most:
        return text
    start = text[: most - 1]
    space = start.rfind(" ", max(least, len(start) - _WORD))
    return (start[:space] if space > 0 else start).rstrip(" ,;:") + "…"


def file_name(path: str, most: int) -> str:
    """A path, at no more than `most` characters, without its first folders."""
    slash = path.find("/", max(0, len(path) - most + 1))
    return f"…{path[slash:]}" if len(path) > most and slash >= 0 else shortened(path, most)


def without_folders(text: str) -> str:
    """Prose with each file's name alone."""
    return _PATH.sub("", text)


def around(text: str, most: int, *, point: str) -> str:
    """`text` at no more than `most` characters, with `point`: first go folders, then the head.

    >>> around("[E407 12:00:01.5 Watch.cpp:61] [Rank 3] timed out at 600 s", 32, point="timed out")
    '…[Rank 3] timed out at 600 s'
    >>> around("OSError: No space left on device: '/a/b.pt'", 30, point="OSError")
    'OSError: No space left on…'
    """
    if len(text) > most:
        text, point = _PATH.sub("…/", text), _PATH.sub("…/", point)
    at = text.find(point) if point else -1
    if len(text) <= most or at < 0:
        return shortened(text, most)
    start = min(at, len(text) - most + 1)
    if start and at + len(point) >= most:
        space = text.find(" ", start - 1, min(start + _WORD, at))
        text = f"…{text[start if space < 0 else space + 1 :]}"
    return _begun(text, most, text.find(point) + len(point))


def excerpt(evidence: Evidence) -> str:
    """Logged text on one line; of a traceback the exception, not the frames."""
    lines = [line for line in evidence.text.splitlines() if line.strip()]
    raised, whole = _raised(lines), _without_frames(lines)
    pointed = [one for one in raised if evidence.point and evidence.point in "\n".join(one)]
    if not pointed and evidence.point and plain(evidence.point) in whole:
        return whole
    return _without_frames((pointed or raised or [[]])[0]) or whole or "(an empty line)"


def point(evidence: Evidence | None) -> str:
    """Part of the logged text to keep visible: the matched text, else the exception."""
    if evidence is None:
        return ""
    if evidence.point:
        return plain(evidence.point.strip().split("\n")[0])
    raised = _raised(evidence.text.splitlines())
    return plain(raised[0][0]) if raised else ""


def _raised(lines: Sequence[str]) -> list[list[str]]:
    """The exceptions of a chain of tracebacks, each with its message."""
    raised: list[list[str]] = []
    inside = new = False
    for line in lines:
        if line.lstrip().startswith(_TRACEBACK):
            inside = new = True
        elif inside and line.strip() and not (new and line.startswith((" ", "\t"))):
            if new:
                raised.append([])
            raised[-1].append(line)
            new = False
    return raised


def _without_frames(lines: Sequence[str]) -> str:
    """On one line, without places in the code and the code there; with them if that is all."""
    kept = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if not _FRAME.match(line)
        and not (_CODE_FOLLOWS.match(before) and line.startswith((" ", "\t")))
    ]
    return plain(" ".join(kept or lines))


def wrapped(
    text: str, width: int, most: int, cut: Callable[[str, int], str] = shortened
) -> list[str]:
    """At most `most` lines of at most `width`; `cut` shortens what is too long."""
    room, lines = most * width, textwrap.wrap(text, width, break_on_hyphens=False)
    while most and len(lines) > most:
        lines = textwrap.wrap(cut(text, room), width, break_on_hyphens=False)
        room -= 5
    return lines if most else []


def plain(text: str) -> str:
    """On one line, control characters escaped."""
    # Not str.split alone: it also removes control characters that are to be shown.
    words = text.replace("\t", " ").replace("\n", " ").split(" ")
    return printable(" ".join(filter(None, words)))
