"""What the options of several subcommands accept."""

from __future__ import annotations

import argparse


def seconds(text: str) -> float:
    """A number of seconds from 0, for `argparse`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds from 0 is accepted")
    return value
