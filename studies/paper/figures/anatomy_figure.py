"""Figure 6: the published F1 with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rmetric.reporting.style import BLACK, COLUMN_WIDTH, GREY, VERMILION
from studies.paper.anatomy import Condition, SeedScores, spread
from studies.paper.claims import PAPER_F1

#: Rule -> field of `SeedScores`, look and place beside the row's middle.
RULES: dict[str, tuple[str, dict[str, Any], float]] = {
    "published rule": ("published_f1", {"color": BLACK, "marker": "o"}, -0.14),
    "causal rule": ("causal_f1", {"color": VERMILION, "marker": "s"}, 0.14),
}


def anatomy_figure(results: Sequence[tuple[Condition, SeedScores]]) -> Figure:
    """A row for each condition: mean F1 by both rules and where 95 % of single studies fall."""
    figure = Figure(figsize=(COLUMN_WIDTH, 0.6 + 0.235 * len(results)))
    axes = figure.subplots(gridspec_kw={"left": 0.5, "right": 0.97, "bottom": 0.1, "top": 0.93})
    rows = np.arange(len(results))
    for rule, (name, look, shift) in RULES.items():
        estimates = [spread(getattr(seeds, name)) for _, seeds in results]
        points = np.array([estimate.point for estimate in estimates])
        # Of equal values the mean can lie a rounding error outside.
        ends = np.maximum([(e.point - e.low, e.high - e.point) for e in estimates], 0).T
        axes.errorbar(
            points, rows + shift, xerr=ends, linestyle="", markersize=3, elinewidth=1.0,
            label=rule, clip_on=False, **look,
        )  # fmt: skip
    axes.axvline(PAPER_F1, color=GREY, linestyle=":", linewidth=1, label=f"paper: {PAPER_F1}")
    axes.set(xlim=(-0.02, 1.02), ylim=(len(results) - 0.4, -0.6), xlabel="F1")
    axes.set_yticks(rows, [_wrapped(condition.title) for condition, _ in results], fontsize=7)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="upper center", ncols=3, fontsize=7)
    return figure


def _wrapped(title: str) -> str:
    """In two lines where it is too long for the margin of a column."""
    words, lines = title.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 27:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
