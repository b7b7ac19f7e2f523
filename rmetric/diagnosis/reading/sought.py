"""A pattern that is sought only in lines of forms that it may match.

Whether it may is asked once for each form of line, of the line without its digits. All lines of the
form share the answer, whatever their numbers are and wherever they stand.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from rmetric.diagnosis.library.any_digits import any_digits

#: Characters of a form; longer ones may match.
LONGEST_FORM = 2000


class Sought:
    """A pattern with a looser one, which matches a line without its digits if the pattern matches.

    The pattern for any digits (any_digits.py) can do without each of them. Only the borders of
    words may be others when digits are gone, so it is used without those.

    Args:
        pattern: as `re` has it.
        rows: texts in lower case without digits: a match has one of each row, in the order of the
            rows. To look for them is quicker than to try the pattern.

    Attributes:
        pattern: compiled.
    """

    __slots__ = ("_loose", "_rows", "pattern")

    def __init__(self, pattern: str, *rows: Sequence[str]) -> None:
        self.pattern, self._rows = re.compile(pattern), rows
        self._loose = any_digits(pattern).replace(r"\b", "")

    def may_match(self, bare: str, lower: str) -> bool:
        """Return False only if the pattern matches no line of a form.

        Args:
            bare: the line without its digits.
            lower: the same in lower case.
        """
        # `re` keeps what it has compiled; most of these patterns no log needs. Without the borders
        # of its words a pattern may take the square of a line's length.
        return has_in_order(lower, self._rows) and (
            len(bare) > LONGEST_FORM or re.search(self._loose, bare) is not None
        )


def those_that_may(sought: Collection[Sought], bare: str) -> frozenset[Sought]:
    """Those of several that may match a line of a form, given without its digits."""
    lower = bare.lower()
    return frozenset(one for one in sought if one.may_match(bare, lower))


def has_in_order(text: str, rows: Sequence[Sequence[str]]) -> bool:
    """Return True if a text has one of each row, each behind the first of the row before.

    >>> has_in_order("init rank 3", [["init"], ["rank"]])
    True
    >>> has_in_order("rank 3 init", [["init"], ["rank"]])
    False
    """
    at = 0
    for row in rows:
        places = [place for part in row if (place := text.find(part, at)) >= 0]
        if not places:
            return False
        at = min(places) + 1
    return True
