"""What the options of several subcommands accept; each is for `argparse`."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(text: str, what: str = "a number") -> float:
    """A finite number from 0.

    Args:
        what: it is called in the error.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: {what} from 0 is accepted")
    return value


def seconds(text: str) -> float:
    """A number of seconds from 0."""
    return number(text, "a number of seconds")


def share(text: str) -> float:
    """A share from 0 to below 1."""
    try:
        value = number(text)
    except argparse.ArgumentTypeError:
        value = 1.0
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a share from 0 to below 1 is accepted")
    return value


def whole(least: int) -> Callable[[str], int]:
    """A whole number from `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {least} is accepted")
        return int(text)

    return read
