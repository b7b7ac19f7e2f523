"""Parser, options and exit codes that the scripts and the commands of the studies share."""

from __future__ import annotations

import argparse

from rmetric._util.errors import FAILED, ends_at_once, exit_code_of, exit_with, fail, require  # noqa: F401
from rmetric._util.options import add_jobs  # noqa: F401
from rmetric._util.printed import counted  # noqa: F401


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Parser of `python -m studies.MODULE`, whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m studies.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Add `--preset`, whose weights of R a simulated log states: the paper's or its code's."""
    parser.add_argument(
        "--preset", choices=["simulation", "authors_simulator"], default="simulation",
        help="settings of R: simulation, with the paper's weights 0.10 / 0.45 / 0.70, or "
        "authors_simulator, with 0 / 0.50 / 0.78 of its authors' code (default: %(default)s)",
    )  # fmt: skip
