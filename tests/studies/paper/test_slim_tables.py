"""Slim tables: 7-point type that fits one column of a two-column page, or both."""

import re
from functools import cache
from pathlib import Path

import matplotlib
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from rmetric.evaluation import Estimate
from rmetric.reporting.style import COLUMN_WIDTH, LEAST_POINTS, TEXT_WIDTH
from studies.common.renderers import _TEX, escape_tex
from studies.common.table import Table
from studies.paper.slim_tables import SLIM, slim_tex

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


def test_the_letters_are_as_wide_as_those_of_times():
    # Of Adobe's metrics of Times-Roman: H 722, a 444, m 778, . 250 thousandths of the size.
    assert width("HamHamHamHam.", 1000) == pytest.approx(4 * (722 + 444 + 778) + 250, rel=0.03)


@pytest.mark.parametrize("name", SLIM)
def test_the_slim_tables_of_the_published_study_fit(name):
    check((ROOT / "results" / "tables" / f"{name}_slim.tex").read_text())


@pytest.mark.parametrize("name", SLIM)
def test_the_numbers_are_those_of_the_full_table(name):
    folder = ROOT / "results" / "tables"
    full = (folder / f"{name}.tex").read_text()
    for row in check((folder / f"{name}_slim.tex").read_text()).rows[1:]:
        for cell in row:
            assert escape_tex(cell) in full


#: The widest cells that a study of ours gives.
CELLS = {
    "Architecture": "GPT-4-MoE", "Fault": "NETWORK_DEGRADATION", "Fitted on": "Llama-3-8B",
    "Tested on": "GPT-4-MoE", "Detector": "Bayesian change point of the loss", "n": 720,
    "Failed": 720, "Verdict": "nothing failed", "Approach": "Our R-Metric (Full)",
    "Kind (qualitative)": "Proactive", "Paper: lead": "12.8 min",
    "Onset to failure, 50 % (steps)": 2000, "Claim": "F1 " * 30,
    "Paper": "0.973 " * 10, "Measured here": "0.986 " * 40, "TP": 720, "FP": 720, "FN": 720,
}  # fmt: skip


@pytest.mark.parametrize("name", SLIM)
def test_the_slim_tables_of_our_studies_fit(name):
    """With intervals in every other column, as theirs have."""
    labels = [label for label in ("Protocol", *SLIM[name].columns) if label not in PUBLISHED]
    row = tuple(CELLS.get(label, Estimate(0.98, 0.93, 1.0)) for label in labels)
    rows = [("published", *row[1:]), ("causal", *row[1:])]
    table = Table(name, "T", labels, rows, number=1, grouped=True)
    check(slim_tex(table))


#: Labels of the published study's tables alone.
PUBLISHED = {
    "Reactive/proactive", "Paper: lead (min)", "Lead, this study (min)", "Lead over seeds (min)",
    "Method", "F1 over seeds", "Causal F1", "Causal F1 over seeds", "Failures",
}  # fmt: skip
