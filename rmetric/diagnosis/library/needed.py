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

#: Letters of the shortest literal that is worth to be sought.
SHORTEST = 3
#: The parser of Python's own patterns, which are nearly those of the package `regex`.
_PARSER: Any = getattr(re, "_parser", None) or re.sre_parse  # type: ignore[attr-defined]
_NAMED = re.compile(r"\(\?P?<(?![=!])\w+>")
#: What only `regex` reads as it does: sets of sets, fuzzy matches.
_OTHER = re.compile(r"\[\[|\[:|&&|--|\|\||~~|(?<!\\)\{(?!\d*,?\d*\})")
#: Parts that take no text, or only digits, which a form has none of.
_NOTHING = ("AT", "ASSERT", "ASSERT_NOT", "[(CATEGORY, CATEGORY_DIGIT)]", "[(RANGE, (48, 57))]")

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
