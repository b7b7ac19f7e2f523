"""The generated parts of a page of docs: what stands between two markers is replaced.

Where there is nothing for a name, `fill` raises ValueError with the known ones, and writes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from rmetric._util.durable import write_atomically

_PART = re.compile(r"(<!-- begin ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def fill(page: Path, made: Callable[[str], str | None], known: Iterable[str]) -> None:
    """Put `made(NAME)` between each `<!-- begin NAME -->` and the `<!-- end -->` after it."""

    def filled(part: re.Match[str]) -> str:
        text = made(part[2])
        if text is None:
            raise ValueError(f"{page}: cannot fill {part[2]!r}: known are {', '.join(known)}")
        return f"{part[1]}\n{text}\n{part[4]}"

    text = page.read_text(encoding="utf-8")
    write_atomically(page, [_PART.sub(filled, text).encode()])


def parts(page: Path) -> dict[str, str]:
    """Text between the markers, by name; `fill` with it leaves the page as it is."""
    text = page.read_text(encoding="utf-8")
    return {name: part[1:-1] for _, name, part, _ in _PART.findall(text)}


def relative_figure(page: Path, folder: Path, name: str, caption: str) -> str:
    """A figure of `folder` with its caption, as it is shown on `page`."""
    to_folder = Path(os.path.relpath(folder, page.parent)).as_posix()
    return f"![{name}]({to_folder}/{name}.png)\n\n*{caption}*\n"
