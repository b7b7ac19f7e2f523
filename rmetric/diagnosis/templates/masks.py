"""Mask the variable parts of a line: numbers, times, addresses, paths, hashes, shapes.

Masks apply to lines whose numbers are all "0" (`plain_numbers`), so that the masked text does not
depend on digits. `FactsOf` relies on this for its cache.
"""

from __future__ import annotations

import re

#: Characters of a line that make its template.
MAX_TEMPLATE = 400

_MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = "(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*"
#: Name -> pattern, on text with "0" for each number; the first that matches at a place counts.
MASKS = {
    "TIME": (
        rf"(?i:\b(?:{_DAY},?\ )?(?:0\ {_MONTH}|{_MONTH}\ +0)(?:,?\ 0)??\ 0:0:0(?:[.,]0)?(?:\ 0\b)?)"
        r"|\b0[-/]0[-/]0(?:[-T\ :]+0:0(?::0)?(?:[.,]0)*(?:Z\b|\ ?[-+]0(?::?0)?\b)?)?"
        r"|\b0:0:0(?:[.,]0)?\b(?![:.\w])"
    ),
    "URL": r"\b[a-z][a-z0+.-]*://[^\s'\"<>,;)\]]+",
    "PATH": r"(?<![\w.<])(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@%+=~:-]*[\w@%+=~-]){2,}[/\\]?",
    "IP": r"\b0\.0\.0\.0\b(?::0\b)?",
    "ADDRESS": r"\b0x[0a-fA-F]+\b|(?<![\w.])(?:[0a-fA-F]*:){2,}[0a-fA-F]+(?:\.0)?\b",
    "HASH": (
        r"\b[0a-f]+-(?:[0a-f]+-){2,}[0a-f]+\b"
        r"|\b(?=\w*0)(?!0[eE]0\b)(?:(?:0?[a-f]){3,}0?|0[a-f]+0[0a-f]*|(?:0?[A-F]){4,}0?)\b"
    ),
    "SHAPE": r"torch\.Size\(\[[0,\s]*\]\)|[\[(]0(?:,\ *0)*,?[\])](?:,\ *[\[(]0(?:,\ *0)*,?[\])])*",
    "BAR": r"[▏▎▍▌▋▊▉█]+[▏▎▍▌▋▊▉█\s]*|[#=*.>-]{6,}",
    "RANK": r"(?i:(?<=rank)|(?<=rank[\ =:_\[#])|(?<=rank:\ )|(?<=rank\ =\ ))0\b",
    "N": r"(?:(?<![\w.)\]])[-+])?0(?:[.,]0)*(?:\.(?!\w))?(?:[eE][-+]?0)?",
}  # fmt: skip
_MASK = re.compile("|".join(f"(?P<{name}>{mask})" for name, mask in MASKS.items()), re.X)
_NUMBERS = re.compile(rb"[0-9]+")
_POINTERS = re.compile(rb"\b0x[0a-fA-F]+\b")
_TIME_FIRST = re.compile(r"^(?:[\[(]?<TIME>[\])]?[\s,:|-]*)+(?=\S)")


def plain_numbers(line: bytes) -> bytes:
    """The line with every run of digits as "0"."""
    return _NUMBERS.sub(b"0", line)


def plain_pointers(plain: bytes) -> bytes:
    """A line of `plain_numbers` with every hexadecimal number as "0x0": most are new each time."""
    return _POINTERS.sub(b"0x0", plain) if b"0x" in plain else plain


def masked(text: str) -> str:
    """A line's text with what varies masked, cut to `MAX_TEMPLATE` characters; no time in front.

    Args:
        text: with "0" for every number, as `plain_numbers` leaves it.

    >>> masked("[0-0-0 0:0:0,0] rank 0 loads /data/x/part-0.bin from 0.0.0.0:0, sha 0f0a0c")
    'rank <RANK> loads <PATH> from <IP>, sha <HASH>'
    """
    found = _MASK.sub(lambda match: f"<{match.lastgroup}>", text[: 2 * MAX_TEMPLATE])
    return _TIME_FIRST.sub("", " ".join(found.split()))[:MAX_TEMPLATE]
