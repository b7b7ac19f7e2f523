"""Slim forms of tables 1 to 6 for a two-column page: 7-point type, which nothing scales.

Each has the columns that a reader of the paper needs; the full form beside it has all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from studies.common.renderers import escape_tex, tex_row
from studies.common.table import Table, show

#: Points, of the type and from one line to the next.
SIZE, LEADING = 7.0, 8.4
#: Points between a column and its neighbour, half of it on each side.
BETWEEN = 6.0


@dataclass(frozen=True, kw_only=True)
class Slim:
    """Slim form of one table.

    Attributes:
        heads: labels of the full table, with ``= label`` where it is another here.
        both: as wide as both columns of the page, else as one.
        points: labels of the columns that are shown without their intervals.
        wraps: label -> width in cm of a column whose cells are wrapped.
    """

    heads: str
    both: bool = False
    points: tuple[str, ...] = ()
    wraps: dict[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, str]:
        """Label in the full table -> label here."""
        pairs = (head.partition(" = ") for head in self.heads.split(" | "))
        return {label: here or label for label, _, here in pairs}


SLIM = {
    "table1_approaches": Slim(
        heads="Approach | Reactive/proactive = Kind | Kind (qualitative) = Kind | "
        "Paper: lead (min) = Paper (min) | Paper: lead = Paper | "
        "Lead, this study (min) = Here (min) | Lead over seeds (min) = Over seeds (min) | "
        "Lead, causal rule (min) = Causal (min)",
        points=("Lead, causal rule (min)",),
    ),
    "table2_scenarios": Slim(
        heads="Architecture | Fault | n | Failed | "
        "Onset to failure, 50 % (steps) = Steps to failure",
    ),
    "table3_detectors": Slim(
        heads="Method | Detector | TP | FP | FN | F1 | F1 over seeds | Lead (min) | Causal F1 | "
        "Causal F1 over seeds | Paper: F1 = Paper",
        both=True,
    ),
    "table4_faults": Slim(
        heads="Fault | n | Failures | Failed | Precision = Prec. | Recall | F1 | "
        "Causal F1 = Causal",
        points=("Precision", "Recall", "F1"),
    ),
    "table5_claims": Slim(
        heads="Claim | Paper | Measured here | n | Verdict",
        both=True,
        wraps={"Claim": 4.4, "Paper": 3.0, "Measured here": 5.6},
    ),
    "table6_transfer": Slim(
        heads="Fitted on | Tested on | F1, own weights = Own | F1, weights moved = Moved | "
        "Loss (%)",
        points=("F1, own weights", "F1, weights moved"),
    ),
}


def slim_tex(table: Table) -> str:
    """The slim form as LaTeX, which needs the packages array and booktabs."""
    slim = SLIM[table.name]
    labels = [column.label for column in table.columns]
    places = [labels.index(label) for label in slim.columns if label in labels]
    kinds = {place: "l" if table.is_text(place) else "r" for place in places}
    for label, width in slim.wraps.items():
        kinds[labels.index(label)] = rf">{{\raggedright\arraybackslash}}p{{{width:g}cm}}"
    environment = "table*" if slim.both else "table"
    lines = [
        r"% \usepackage{array,booktabs}",
        rf"\begin{{{environment}}}[tp]",
        rf"\centering\fontsize{{{SIZE:g}}}{{{LEADING:g}}}\selectfont",
        rf"\setlength{{\tabcolsep}}{{{BETWEEN / 2:g}pt}}",
        rf"\caption{{{escape_tex(table.title)} (short form; the notes are in the full one)}}",
        rf"\label{{tab:{table.name}_slim}}",
        rf"\begin{{tabular}}{{@{{}}{''.join(kinds.values())}@{{}}}}",
        r"\toprule",
        tex_row(slim.columns[labels[place]] for place in places),
    ]
    for index, row in enumerate(table.rows):
        if index == 0 or table.starts_group(index):
            lines.append(r"\midrule")
        if table.starts_group(index):
            group = escape_tex(str(row[0]))
            lines.append(rf"\multicolumn{{{len(places)}}}{{@{{}}l}}{{\emph{{{group}}}}} \\")
        cells = []
        for place in places:
            point = getattr(row[place], "point", row[place])
            cell = point if labels[place] in slim.points else row[place]
            cells.append(show(cell, table.columns[place].digits))
        lines.append(tex_row(cells))
    lines += [r"\bottomrule", r"\end{tabular}", rf"\end{{{environment}}}"]
    return "\n".join(lines) + "\n"
