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

    Args:
        pattern: as `re` has it.
        rows: texts in lower case without digits: a match has one of each row. To look for them is
            quicker than to try the pattern.

    Attributes:
        pattern: compiled.
    """

    __slots__ = ("_loose", "_rows", "pattern")

    def __init__(self, pattern: str, *rows: Sequence[str]) -> None:
        self.pattern, self._rows = re.compile(pattern), rows
        # Only the borders of words may be others when digits are gone.
        self._loose = any_digits(pattern).replace(r"\b", "")

    def may_match(self, bare: str, lower: str) -> bool:
        """Return False only if the pattern matches no line of a form.

        Args:
            bare: the line without its digits.
            lower: the same in lower case.
        """
        # `re` keeps what it has compiled; most of these patterns no log needs. Without the borders
        # of its words a pattern may take the square of a line's length.
        return all(any(map(lower.__contains__, row)) for row in self._rows) and (
            len(bare) > LONGEST_FORM or re.search(self._loose, bare) is not None
        )


def those_that_may(sought: Collection[Sought], bare: str) -> frozenset[Sought]:
    """Those of several that may match a line of a form, given without its digits."""
    lower = bare.lower()
    return frozenset(one for one in sought if one.may_match(bare, lower))
