r"""A pattern for lines whose digits do not matter.

What a line's digits are is not looked at until it is known that a signature may match it. So for
each pattern there is a looser one that matches the line with "0" for every number whenever the
pattern matches the line with any numbers. Whatever may take a digit may also take nothing, for
"0" stands for a run of digits that several parts of the pattern share.

>>> any_digits(r"Xid \(PCI:(?<gpu>[0-9a-f:.]+)\): (?:13|31)\b")
'Xid \\(PCI:(?:[00-9a-f:.]*)\\): (?:0?0?|0?0?)\\b'
"""

from __future__ import annotations

import re

TOKEN = re.compile(
    r"""(?P<look>\(\?<?[=!])
    | (?P<back>\\[1-9]|\(\?P=\w+\))
    | (?P<group>\((?:\?(?:P?<[A-Za-z_]\w*>|:|>|[aimsux]+:|[aimsux]+\)))?)
    | (?P<close>\))
    | (?P<cls>\[\^?\]?(?:\\.|[^\]\\])*\])
    | (?P<escape>\\.)
    | (?P<bare>[|^$])
    | (?P<any>\.)
    | (?P<digit>[0-9])
    | (?P<literal>[^\\(\[*+?{])
    """,
    re.VERBOSE | re.DOTALL,
)
TIMES = re.compile(r"(?P<times>\*|\+|\?|\{(?P<least>\d*)(?P<comma>,)?(?P<most>\d*)\})[+?]?")
_ANYTHING = r"[\s\S]"
#: Escapes that may take a digit, that take none, and that take nothing.
_DIGITS, _OTHERS, _PLACES = "dwS", "DWsntrfv", "bBAZ"


class Unknown(ValueError):
    """A pattern with a part that is not known here."""


def any_digits(pattern: str) -> str:
    """Raises `Unknown`."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        token = TOKEN.match(pattern, at)
        if token is None:
            raise Unknown(pattern)
        kind, at = token.lastgroup or "", token.end()
        if kind == "look":
            at = end_of_group(pattern, at)
            continue
        atom, loose = _atom(kind, token[0])
        times = TIMES.match(pattern, at)
        if times is not None:
            at = times.end()
            out.append(atom + _times(times, loose or kind == "close"))
        else:
            out.append(atom + ("?" if loose else ""))
    return "".join(out)


def _atom(kind: str, token: str) -> tuple[str, bool]:
    """Replacement of a pattern part, and whether the part may match a digit."""
    if kind == "group":
        scoped = re.match(r"\(\?[aimsux]+[:)]", token)
        return (token if scoped else "(?:"), False
    if kind == "cls":
        return _class(token)
    if kind == "back":
        return f"{_ANYTHING}*", False
    if kind == "escape":
        letter = token[1]
        if letter.isalnum() and letter not in _DIGITS + _OTHERS + _PLACES:
            raise Unknown(token)
        return token, letter in _DIGITS
    if kind == "digit":
        return "0", True
    return token, kind == "any"


def _class(token: str) -> tuple[str, bool]:
    if re.search(r"\[:|&&|--|\|\||~~", token[1:]):
        raise Unknown(token)  # sets of the package regex
    names_digits = re.search(r"[0-9]|\\[dDwWS]|[ -/]-[^\]]", token) is not None
    if token.startswith("[^"):
        return (_ANYTHING if names_digits else token), True
    return (f"[0{token[1:]}", True) if names_digits else (token, False)


def _times(times: re.Match[str], loose: bool) -> str:
    if times["times"] in ("*", "?"):
        return times["times"]
    if times["times"] == "+":
        return "*" if loose else "+"
    least = "0" if loose else times["least"] or "0"
    most = times["most"] if times["comma"] else times["least"]
    return f"{{{least},{most}}}"


def end_of_group(pattern: str, at: int) -> int:
    depth = 1
    while depth:
        token = TOKEN.match(pattern, at) or TIMES.match(pattern, at)
        if token is None:
            raise Unknown(pattern)
        if pattern[at] == "(" and token[0][-1] != ")":
            depth += 1
        elif pattern[at] == ")":
            depth -= 1
        at = token.end()
    return at
