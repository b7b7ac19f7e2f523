"""The parser that the commands of the studies share."""

from __future__ import annotations

import argparse


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Parser of `python -m studies.MODULE`, whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m studies.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
