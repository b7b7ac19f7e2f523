"""Slim tables: 7-point type that fits one column of a two-column page, or both."""

import re
from functools import cache
from pathlib import Path

import matplotlib
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from rmetric.reporting.style import COLUMN_WIDTH, LEAST_POINTS, TEXT_WIDTH
from studies.common.renderers import _TEX, escape_tex
from studies.paper.slim_tables import SLIM

ROOT = Path(__file__).resolve().parents[3]
#: Its letters are as wide as those of Times.
TIMES = FontProperties(fname=Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "STIXGeneral.ttf")
POINTS_PER_INCH, POINTS_PER_CM = 72.27, 28.45
PLAIN = {tex: character for character, tex in _TEX.items()}


@cache
def width(text: str, size: float) -> float:
    """Of a line in Times, points."""
    if not text.strip():
        return 0.0
    # Spaces at the ends have no outline.
    return float(TextPath((0, 0), text, size=size, prop=TIMES).get_extents().width) + 0.5


def plain(cell: str) -> str:
    for tex in sorted(PLAIN, key=len, reverse=True):
        cell = cell.replace(tex, PLAIN[tex])
    return cell.strip("{} ")


class Typeset:
    """A slim table as LaTeX sets it, without LaTeX."""

    def __init__(self, source: str) -> None:
        size, _ = re.search(r"\\fontsize\{([\d.]+)\}\{([\d.]+)\}", source).groups()
        self.size = float(size)
        self.between = 2 * float(re.search(r"\\tabcolsep\}\{([\d.]+)pt", source)[1])
        kinds = re.search(r"\\begin\{tabular\}\{@\{\}(.*)@\{\}\}", source)[1]
        self.wraps = [
            float(wrap) * POINTS_PER_CM if wrap else None
            for _, wrap in re.findall(r"([lr]|p\{([\d.]+)cm\})", kinds.replace(
                r">{\raggedright\arraybackslash}", ""))
        ]  # fmt: skip
        body = source.partition(r"\toprule")[2].partition(r"\bottomrule")[0]
        lines = [line.removesuffix(r" \\") for line in body.splitlines() if line.endswith(r"\\")]
        self.rows = [[plain(cell) for cell in line.split(" & ")]
                     for line in lines if not line.startswith(r"\multicolumn")]  # fmt: skip

    @property
    def columns(self) -> list[float]:
        """Width of each column, points; the longest word counts where cells are wrapped."""
        cells = list(zip(*self.rows, strict=True))
        widest = []
        for column, wrap in zip(cells, self.wraps, strict=True):
            texts = [t for cell in column for t in (cell.split() if wrap else [cell])]
            needed = max(width(text, self.size) for text in texts)
            assert wrap is None or needed <= wrap
            widest.append(wrap or needed)
        return widest

    @property
    def width(self) -> float:
        return sum(self.columns) + self.between * (len(self.wraps) - 1)


def check(source: str) -> Typeset:
    typeset = Typeset(source)
    both = r"\begin{table*}" in source
    page = (TEXT_WIDTH if both else COLUMN_WIDTH) * POINTS_PER_INCH
    assert typeset.size >= LEAST_POINTS
    assert not re.search("resizebox|scalebox|scriptsize|tiny", source)
    assert len(typeset.rows) > 1
    assert typeset.width <= page, f"{typeset.width:.0f} of {page:.0f} points"
    return typeset


@pytest.mark.parametrize("study", ["tables", "emergent/tables", "stress/tables"])
@pytest.mark.parametrize("name", SLIM)
def test_a_slim_table_fits_and_its_numbers_are_those_of_the_full_one(name, study):
    folder = ROOT / "results" / study
    full = (folder / f"{name}.tex").read_text()
    for row in check((folder / f"{name}_slim.tex").read_text()).rows[1:]:
        for cell in row:
            assert escape_tex(cell) in full
