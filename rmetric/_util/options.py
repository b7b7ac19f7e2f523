"""Options and option types that several commands share; for `argparse`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rmetric._util.durable import refuse_special
from rmetric._util.errors import LogError
from rmetric._util.strict_json import shown

#: GPU that `rmetric plan` and `rmetric supervise` plan for by default.
DEFAULT_GPU = "h100"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_jobs(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, words: str = "processes"
) -> None:
    """Add `--jobs N`, the number of processes; by default one a core. `words` are its help text."""
    parser.add_argument(
        "--jobs", type=whole(1), default=usable_cores(), metavar="N",
        help=f"{words} (default: one a core, here %(default)s)",
    )  # fmt: skip


def number(
    text: str, words: str = "a number from 0 is accepted", below: float = float("inf")
) -> float:
    """A number from 0 to below a bound; `words` of the error."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < below:
        raise argparse.ArgumentTypeError(f"{text!r}: {words}")
    return value


def seconds(text: str) -> float:
    """A number of seconds from 0."""
    return number(text, "a number of seconds from 0 is accepted")


def wait_seconds(text: str) -> float:
    """A number of seconds from 0, or `inf` for a wait without end."""
    words = "a number of seconds from 0 is accepted (inf: without end)"
    return float("inf") if text == "inf" else number(text, words)


def path_in(text: str) -> Path:
    """A path to read from, which may be missing: nothing that `refuse_special` refuses."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: a file or a folder is accepted")
    try:
        refuse_special(text)
    except LogError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


#: A path to write to, on the same terms: a file would replace a device.
path_out = path_in


def refuse_input(name: str, out: Path | None, inputs: Iterable[Path | None]) -> None:
    """Raise ValueError for an output that is one of the inputs, whatever their names."""
    if out is None or not out.exists():
        return
    if any(path is not None and path.exists() and out.samefile(path) for path in inputs):
        raise ValueError(f"--{name} {out}: it is read too, and would be lost")


def share(text: str, whole: float = 1.0, what: str = "a share") -> float:
    """A share from 0 to below 1, or of another whole."""
    return number(text, f"{what} from 0 to below {whole:g} is accepted", whole)


def whole(least: int) -> Callable[[str], int]:
    """A whole number from `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 18 or int(text) < least:
            accepted = f"a whole number from {least} is accepted, below 10^18"
            raise argparse.ArgumentTypeError(f"{shown(text)}: {accepted}")
        return int(text)

    return read


def layout_of(names: Sequence[str]) -> Callable[[str], dict[str, int]]:
    """A layout as NAME=N,...: numbers from 1 by name.

    >>> layout_of(["tensor", "pipeline", "data"])("tensor=2,data=4")
    {'tensor': 2, 'data': 4}
    """

    def read(text: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            if name not in names or not size.isdecimal() or int(size) < 1:
                raise argparse.ArgumentTypeError(
                    f"{part!r}: NAME=N with N from 1 is accepted, NAME of {', '.join(names)}"
                )
            found[name] = int(size)
        return found

    return read
