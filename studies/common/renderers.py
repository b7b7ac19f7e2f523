"""The forms of a table: csv for machines; Markdown, LaTeX and plain text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
from pathlib import Path
from textwrap import wrap

import pandas as pd

from rmetric._util.durable import write_atomically
from rmetric._util.printed import csv_cell
from rmetric.evaluation import Estimate
from studies.common.table import Cell, Table

#: Characters a line of a wide cell may take on a terminal.
WRAP_AT = 30


def to_csv(table: Table) -> str:
    """Numbers to six digits; an interval takes two columns more."""
    parts = []
    for place, column in enumerate(table.columns):
        cells = [row[place] for row in table.rows]
        ends = ("", " low", " high") if any(isinstance(c, Estimate) for c in cells) else ("",)
        heads = [csv_cell(f"{column.label}{end}") for end in ends]
        rows = [(c if isinstance(c, Estimate) else (c, None, None))[: len(ends)] for c in cells]
        parts.append(pd.DataFrame(rows, columns=heads, dtype=object))
    frame = pd.concat(parts, axis=1)
    return frame.map(lambda cell: csv_cell(_plain(cell))).to_csv(index=False, lineterminator="\n")


def to_markdown(table: Table) -> str:
    """A GitHub table under its title, with the notes as a list."""
    lines = [f"### {table.heading}", ""]
    lines.append(_bar(column.label for column in table.columns))
    lines.append(_bar("---" if table.is_text(i) else "---:" for i in range(len(table.columns))))
    lines += [_bar(cells) for cells in table.shown()]
    lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def to_tex(table: Table) -> str:
    """A floating LaTeX table; needs booktabs and graphicx, and shrinks only if too wide."""
    kinds = [
        r"p{4.2cm}" if column.wide else "l" if table.is_text(i) else "r"
        for i, column in enumerate(table.columns)
    ]
    body = []
    for index, cells in enumerate(table.shown()):
        if index and table.starts_group(index):
            body.append(r"\midrule")
        body.append(tex_row(cells))
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table*}[tp]",
        r"\centering\footnotesize",
        rf"\caption{{{escape_tex(table.title)}}}",
        rf"\label{{tab:{table.name}}}",
        r"\sbox8{%",
        rf"\begin{{tabular}}{{{''.join(kinds)}}}",
        r"\toprule",
        tex_row([column.label for column in table.columns]),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\ifdim\wd8>\textwidth\resizebox{\textwidth}{!}{\usebox8}\else\usebox8\fi",
        r"\par\smallskip",
        r"\begin{minipage}{\textwidth}\raggedright\scriptsize",
        *(rf"{escape_tex(note)}\par" for note in table.notes),
        r"\end{minipage}",
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def to_text(table: Table) -> str:
    """Aligned columns for a terminal, long cells wrapped, notes below.

    The first cell of a grouped table becomes a heading over its group.
    """
    skip = int(table.grouped)
    header = tuple(column.label for column in table.columns[skip:])
    blocks = []
    for cells in table.shown():
        pairs = list(zip(cells, table.columns, strict=True))[skip:]
        wrapped = (wrap(cell, WRAP_AT) or [""] if column.wide else [cell] for cell, column in pairs)
        blocks.append(list(zip_longest(*wrapped, fillvalue="")))
    widths = [max(map(len, cells)) for cells in zip(header, *chain(*blocks), strict=True)]
    on_the_left = [table.is_text(i) for i in range(skip, len(table.columns))]

    def aligned(cells: Iterable[str]) -> str:
        padded = (
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(cells, widths, on_the_left, strict=True)
        )
        return "  ".join(padded).rstrip()

    lines = [table.heading, "", aligned(header), aligned("-" * width for width in widths)]
    for index, block in enumerate(blocks):
        if table.starts_group(index):
            lines += ["", f"{table.columns[0].label}: {table.rows[index][0]}"]
        lines += map(aligned, block)
    lines.append("")
    for note in table.notes:
        lines += wrap(note, 100, initial_indent="* ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"


#: Beyond ASCII, what our own words use; longest first.
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$",
    "#": r"\#", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"$<$", ">": r"$>$", "|": r"$|$", "λ": r"$\lambda$", "σ": r"$\sigma$", "Δ": r"$\Delta$",
    "²": r"$^2$", "≤": r"$\leq$", "≥": r"$\geq$", "×": r"$\times$", "−": "$-$", "–": "--",
}  # fmt: skip


def escape_tex(text: str) -> str:
    """Text as LaTeX sets it, whatever characters a log brought along."""
    return "".join(_TEX.get(character, character) for character in text)


def tex_row(cells: Iterable[str]) -> str:
    """A row of a LaTeX table."""
    # Braces keep a cell that begins with [ from being read as an option of the row before.
    return " & ".join(f"{{{escape_tex(cell)}}}" for cell in cells) + r" \\"


def _bar(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _plain(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


#: File suffix -> its renderer.
RENDERERS: dict[str, Callable[[Table], str]] = {
    "csv": to_csv,
    "md": to_markdown,
    "tex": to_tex,
}


def write_tables(tables: Iterable[Table], folder: Path) -> None:
    """NAME.csv and NAME.md of each table; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        for suffix in ("csv", "md"):
            content = RENDERERS[suffix](table).encode()
            write_atomically(folder / f"{table.name}.{suffix}", [content])
