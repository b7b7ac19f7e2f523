"""The time that a line states."""

from __future__ import annotations


def parse(text: str) -> tuple[float, int] | None:
    """Seconds since 1970 (UTC where no zone is named) and where in `text` the time ends.

    Only at the head of a line: at its beginning, behind a level, a tag or a bracket, or as the
    value of a key such as "time_ms". Seconds since boot in a kernel's log; a time without a year
    is taken to be of 1970, so that differences are right within a year.
    """
    raise NotImplementedError
