"""The text of a line, and the level that it gives itself."""

from __future__ import annotations


def clean(line: bytes) -> str:
    """Decoded as UTF-8, what is none replaced; control characters other than tabs removed."""
    raise NotImplementedError


def level(text: str) -> str:
    """ "error" (fatal and critical too), "warning", "info" (debug too), or "" where none is given."""
    raise NotImplementedError
