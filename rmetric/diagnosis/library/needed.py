r"""The literals that each match of a pattern has: what is looked for before a pattern is compiled.

>>> needed(r"(?i)NVRM: Xid \(PCI:(?<gpu>[0-9a-f:.]+)\): (?:31|pid=\d+, name)\b")
[(b'nvrm: xid (pci:',)]
>>> needed(r"(?:Runtime|Value)Error: (?:a )?size \d+ is wrong")
[(b'size  is wrong',), (b'error: ',), (b'runtime', b'value')]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import regex

#: Letters of the shortest literal that is worth to be sought.
SHORTEST = 3
#: The parser of Python's own patterns, which are nearly those of the package `regex`.
_PARSER: Any = getattr(re, "_parser", None) or re.sre_parse  # type: ignore[attr-defined]
_NAMED = re.compile(r"\(\?P?<(?![=!])\w+>")
#: What only `regex` reads as it does: sets of sets, fuzzy matches.
_OTHER = re.compile(r"\[\[|\[:|&&|--|\|\||~~|(?<!\\)\{(?!\d*,?\d*\})")
#: Parts that take no text, or only digits, which a form has none of.
_NOTHING = ("AT", "ASSERT", "ASSERT_NOT", "[(CATEGORY, CATEGORY_DIGIT)]", "[(RANGE, (48, 57))]")

#: A look, a border or a name, which go; an atom and how often it comes; the same of a group.
_TOKEN = regex.compile(
    r"\(\?<?[=!](?<in>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\[\\]|\((?&in)\))*)\)|\\[bB]"
    r"|(?<named>\(\?P?<\w+>)"
    r"|(?<atom>\[\^?\]?(?:\\.|[^\]\\])*\]|\\x\w\w|\\u\w{4}|\\.|[.\d])"
    r"(?<times>[+*?]|\{(?:\d*,)?(?<most>\d*)\})?|(?<other>\{[\d,]*\})"
)
#: Atoms that may take a digit.
_TAKES_DIGITS = re.compile(r"\\[dwS1-9]|[.\d]$|\[(?:\^|.*(?:\d|\\[dwWDS]|[ -/]-[^\]]))")

Rows = list[tuple[bytes, ...]]


def needed(pattern: str) -> Rows:
    """Rows of literals, the longest first; a match of the pattern has one of each row.

    In the match as `form_of` gives it: in lower case and without digits.
    """
    if _OTHER.search(pattern):
        return []
    try:
        return sorted(_rows(_PARSER.parse(_NAMED.sub("(?:", pattern))), key=_worth, reverse=True)
    except (re.error, OverflowError, RecursionError):
        return []


def _worth(row: tuple[bytes, ...]) -> int:
    return min(map(len, row))


def _rows(parts: Iterable[tuple[Any, Any]]) -> Rows:
    rows, run = Rows(), ""
    for part, of in [*parts, ("end", None)]:
        kind, inner = str(part), Rows()
        if kind == "LITERAL" and chr(of).isascii() and chr(of).isprintable():
            run += "" if chr(of).isdigit() else chr(of).lower()
            continue
        if kind in _NOTHING or str(of) in _NOTHING:
            continue
        if kind.endswith("REPEAT"):
            if str(of[2]) in [f"[(IN, {one})]" for one in _NOTHING]:
                continue
            inner = _rows(of[2]) if of[0] else inner
        elif kind in ("SUBPATTERN", "ATOMIC_GROUP"):
            inner = _rows(of[-1] if kind == "SUBPATTERN" else of)
        elif kind == "BRANCH" and all(ways := [*map(_rows, of[1])]):
            # Of whichever way the longest row.
            inner = [tuple(one for some in ways for one in max(some, key=_worth))]
        rows += [(run.encode(),)] if len(run.strip()) >= SHORTEST else []
        rows, run = rows + inner, ""
    return rows


def any_digits(pattern: str) -> str:
    r"""A looser pattern, for lines without their digits: what may take one may take nothing.

    >>> any_digits(r"Xid \(PCI:(?<gpu>[0-9a-f:.]+)\): (?:13|31)\b (?!0)")
    'Xid \\(PCI:(?:[0-9a-f:.]*)\\): (?:1?3?|3?1?) '
    """
    return str(_TOKEN.sub(_without_digits, pattern))


def _without_digits(token: Any) -> str:
    atom, times = token["atom"], token["times"] or ""
    if not atom:
        return "(?:" if token["named"] else token["other"] or ""
    if not _TAKES_DIGITS.match(atom):
        return str(token[0])
    if atom[0] == "\\" and atom[1].isdigit():
        return r"[\s\S]*"
    most = f"{{0,{token['most']}}}" if times[:1] == "{" else "*" if times in ("*", "+") else "?"
    return f"{atom}{most}"
