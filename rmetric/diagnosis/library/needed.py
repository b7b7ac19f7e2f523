"""A looser form of a pattern: what is looked for before the pattern itself is."""

from __future__ import annotations

from typing import Any

import regex

#: A look, a border or a name, which go; an atom and how often it comes; the same of a group.
_TOKEN = regex.compile(
    r"\(\?<?[=!](?<in>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\[\\]|\((?&in)\))*)\)|\\[bB]"
    r"|(?<named>\(\?P?<\w+>)"
    r"|(?<atom>\[\^?\]?(?:\\.|[^\]\\])*\]|\\x\w\w|\\u\w{4}|\\.|[.\d])"
    r"(?<times>[+*?]|\{(?:\d*,)?(?<most>\d*)\})?|(?<other>\{[\d,]*\})"
)
#: Atoms that may take a digit.
_TAKES_DIGITS = regex.compile(r"\\[dwS1-9]|[.\d]$|\[(?:\^|.*(?:\d|\\[dwWDS]|[ -/]-[^\]]))")


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
