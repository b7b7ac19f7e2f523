r"""The literals that each match of a pattern has: what is looked for before a pattern is compiled.

>>> needed(r"(?i)NVRM: Xid \(PCI:(?<gpu>[0-9a-f:.]+)\): (?:31|pid=\d+, name)\b")
[(b'nvrm: xid (pci:',)]
>>> needed(r"(?:Runtime|Value)Error: (?:a )?size \d+ is wrong")
[(b'size  is wrong',), (b'error: ',), (b'runtime', b'value')]
"""

from __future__ import annotations

from rmetric.diagnosis.library.any_digits import TIMES, TOKEN, Unknown, end_of_group

#: Letters of the shortest literal that is worth to be sought.
SHORTEST = 3
#: Escapes that take digits, which a form has none of, or no letter at all.
_NOTHING = "dbBAZ"

Rows = list[tuple[bytes, ...]]


def needed(pattern: str) -> Rows:
    """Rows of literals, the longest first; a match of the pattern has one of each row.

    In the match as `form_of` gives it: in lower case and without digits.
    """
    try:
        rows, _ = _rows(pattern, 0)
    except Unknown:
        return []
    return sorted(rows, key=_worth, reverse=True)


def _worth(row: tuple[bytes, ...]) -> int:
    return min(map(len, row))


def _rows(pattern: str, at: int) -> tuple[Rows, int]:
    """The rows of a pattern, or a group of one, from a place on, and the place behind it."""
    branches: list[Rows] = [[]]
    run = ""
    while at < len(pattern):
        token = TOKEN.match(pattern, at)
        if token is None:
            raise Unknown(pattern)
        kind, at = token.lastgroup or "", token.end()
        if kind == "close":
            break
        letter, rows = _letter(kind, token[0]), Rows()
        if kind == "look":
            at = end_of_group(pattern, at)
        elif kind == "group" and token[0][-1] != ")":
            rows, at = _rows(pattern, at)
        least, at = _times(pattern, at)
        if letter == "":
            continue  # it is not in the form, however often it comes
        if least:
            run += letter or ""
        if letter is None or least != 1:
            _add(branches[-1], run)
            run = ""
        if least:
            branches[-1] += rows
        if token[0] == "|":
            branches.append([])
    _add(branches[-1], run)
    return (branches[0] if len(branches) == 1 else _of_one(branches)), at


def _of_one(branches: list[Rows]) -> Rows:
    """What a match has of whichever branch: the longest row of each; nothing without one."""
    if not all(branches):
        return []
    return [tuple(one for rows in branches for one in max(rows, key=_worth))]


def _add(rows: Rows, run: str) -> None:
    if len(run.strip()) >= SHORTEST:
        rows.append((run.encode(),))


def _times(pattern: str, at: int) -> tuple[int, int]:
    """How often at least what is before a place comes (2: once or more), and the place behind."""
    found = TIMES.match(pattern, at)
    if found is None:
        return 1, at
    times = found["times"]
    some = times[0] == "+" or (times[0] == "{" and times[1] not in "0,")
    return 2 * some, found.end()


def _letter(kind: str, token: str) -> str | None:
    """What a token adds to the literal before it; None where anything may stand there."""
    if kind == "escape":
        token = "" if token[1] in _NOTHING else token[1:]
        return None if token.isalnum() else token
    if kind in ("digit", "look") or token in ("^", "$"):
        return ""
    return token.lower() if kind == "literal" and token.isascii() and token.isprintable() else None
