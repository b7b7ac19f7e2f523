"""The command-line options that say how a log is read."""

from __future__ import annotations

import argparse
from pathlib import Path

from rmetric.detectors.calibrated import Thresholds, read_thresholds
from rmetric.readers.names import TARGETS


def add_mapping(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--map", action="append", type=parse_mapping, default=[], metavar="TARGET=COLUMN",
        help="read COLUMN as TARGET where guessing by name fails; may be given more than once; "
        f"targets: {', '.join(TARGETS)}")  # fmt: skip


def add_thresholds(parser: argparse.ArgumentParser) -> None:
    help_text = "for the calibrated detector, as `rmetric calibrate` writes them (default: shipped)"
    parser.add_argument("--thresholds", type=parse_thresholds, metavar="FILE", help=help_text)


def parse_thresholds(text: str) -> Thresholds:
    try:
        return read_thresholds(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_mapping(text: str) -> tuple[str, str]:
    target, _, column = text.partition("=")
    if target not in TARGETS or not column:
        known = ", ".join(TARGETS)
        raise argparse.ArgumentTypeError(
            f"{text!r}: TARGET=COLUMN is accepted, TARGET one of {known}"
        )
    return target, column
