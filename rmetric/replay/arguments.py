"""The command-line options that say how a log is read."""

from __future__ import annotations

import argparse

from rmetric.replay.columns import TARGETS


def add_mapping(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--map", action="append", type=parse_mapping, default=[], metavar="TARGET=COLUMN",
        help="read COLUMN as TARGET where guessing by name fails; may be given more than once; "
        f"targets: {', '.join(TARGETS)}",
    )  # fmt: skip


def parse_mapping(text: str) -> tuple[str, str]:
    target, _, column = text.partition("=")
    if target not in TARGETS or not column:
        known = ", ".join(TARGETS)
        raise argparse.ArgumentTypeError(
            f"{text!r}: TARGET=COLUMN is accepted, TARGET one of {known}"
        )
    return target, column
