"""Files and page of a fleet study: tables, one figure and their provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rmetric.logs import write_atomically
from rmetric.reporting.style import save, style
from studies.common.markers import fill, relative_figure
from studies.common.provenance import commit, versions
from studies.common.renderers import to_text, write_tables
from studies.common.table import Table


def write(
    folder: Path, made: Sequence[Table], figures: Mapping[str, Figure], about: dict[str, Any],
    packages: Sequence[str],
) -> None:  # fmt: skip
    """The tables, which are printed too, the figures, and provenance.json: `about`, versions."""
    write_tables(made, folder)
    print("\n".join(map(to_text, made)))
    for name, figure in figures.items():
        with style():
            save(figure, folder / name)
    about = {**about, "versions": versions(packages), "commit": commit()}
    write_atomically(folder / "provenance.json", [json.dumps(about, indent=2).encode(), b"\n"])


def refresh(page: Path, out: Path, figure: tuple[str, str], words: Mapping[str, str]) -> None:
    """Fill in the figure (its name and caption), and lists of sentences by their names."""
    parts = {"figure": relative_figure(page, out, *figure), **words}
    fill(page, parts.get, parts)


def bullets(lines: Sequence[str]) -> str:
    """A list in Markdown."""
    return "".join(f"- {line}\n" for line in lines)
