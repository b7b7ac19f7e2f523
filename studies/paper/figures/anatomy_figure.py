"""Figure 6: the published F1 with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from rmetric.reporting.style import BLACK, COLUMN_WIDTH, GREY, VERMILION
from studies.paper.anatomy import Anatomised
from studies.paper.claims import PAPER_F1

#: Rule -> its colour and marker.
LOOKS = {"published rule": (BLACK, "o"), "causal rule": (VERMILION, "s")}


def scores_frame(results: Sequence[Anatomised]) -> pd.DataFrame:
    """A row for each condition, seed and rule, with the columns `condition`, `rule` and `F1`."""
    frames = [
        pd.DataFrame({"condition": _wrapped(condition.title), "rule": rule, "F1": values})
        for condition, seeds, _ in results
        for rule, values in zip(LOOKS, (seeds.published_f1, seeds.causal_f1), strict=True)
    ]
    return pd.concat(frames, ignore_index=True)


def anatomy_figure(results: Sequence[Anatomised]) -> Figure:
    """A row for each condition: mean F1 by both rules and the range of 95 % of single studies."""
    figure = Figure(figsize=(COLUMN_WIDTH, 0.6 + 0.235 * len(results)))
    axes = figure.subplots(gridspec_kw={"left": 0.5, "right": 0.97, "bottom": 0.1, "top": 0.93})
    colours, markers = zip(*LOOKS.values(), strict=True)
    sns.pointplot(
        scores_frame(results), x="F1", y="condition", hue="rule", errorbar=("pi", 95),
        palette=list(colours), markers=list(markers), markersize=3, markeredgewidth=0.6,
        linestyle="none", dodge=0.28, err_kws={"linewidth": 1.0, "solid_capstyle": "butt"}, ax=axes,
    )  # fmt: skip
    # The ends of the scale, 0 and 1, are results too.
    for artist in axes.lines:
        artist.set_clip_on(False)
    axes.axvline(PAPER_F1, color=GREY, linestyle=":", linewidth=1, label=f"paper: {PAPER_F1}")
    axes.set(xlim=(-0.02, 1.02), ylim=(len(results) - 0.4, -0.6), ylabel="")
    axes.tick_params(axis="y", length=0, labelsize=7)
    axes.yaxis.grid(True)
    handles, labels = axes.get_legend_handles_labels()
    if axes.legend_ is not None:
        axes.legend_.remove()
    figure.legend(handles, labels, loc="upper center", ncols=3, fontsize=7)
    return figure


def _wrapped(title: str) -> str:
    """The title, in two lines where it is too long for the margin of a column."""
    words, lines = title.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 27:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
