"""Figure of the laboratory: outcome and time of each run, and the response of each signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmetric.reporting import style
from studies.fault_lab.signals import SIGNALS, area
from studies.fault_lab.tables import ENDS, by_fault

COLOURS = {
    "non_finite": style.BLACK,
    "diverged": style.VERMILION,
    "degraded": style.ORANGE,
    "absorbed": style.SKY,
}
SHOWN = (
    "validation_rise", "probe_loss", "update_ratio", "weight_growth", "gradient_norm",
    "worst_worker", "worker_variance", "lowest_cosine", "activation_headroom",
    "attention_logit_max", "r_metric",
)  # fmt: skip
ABSORBED_AT = 1300.0  # where runs that did not fail are shown
SPREAD = 0.045  # between dots of one place, in decades
FEWEST = 3  # failing runs that an area is shown for
TICKS = (0, 3, 10, 30, 100, 300)


def fault_figure(found: pd.DataFrame, seen: pd.DataFrame) -> Figure:
    """Left: one dot per run, at the steps from onset to failure. Right: response of each signal."""
    groups = {name: rows for name, rows in by_fault(found).items() if name != "NONE"}
    with style.style():
        figure = Figure(figsize=(style.TEXT_WIDTH, 0.15 * len(groups) + 1.9), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1))
        _dots(left, groups)
        _map(figure, right, list(groups), seen)
    return figure


def _dots(axes: Axes, groups: Mapping[str, pd.DataFrame]) -> None:
    for row, members in enumerate(groups.values()):
        places = members.steps.fillna(ABSORBED_AT).sort_values(kind="stable")
        stacked = places.groupby(places).cumcount()
        ends = members.end[places.index]
        for place, level, end in zip(places, stacked, ends, strict=True):
            # Dots of one place are fanned out sideways.
            axes.plot(
                (place + 1) * 10 ** (SPREAD * level), row, "o", markersize=2.6,
                color=COLOURS.get(end, style.SKY), markeredgewidth=0, clip_on=False,
            )  # fmt: skip
    faults = sum(not rows.benign.iloc[0] for rows in groups.values())
    axes.axhline(faults - 0.5, color=style.GREY, linewidth=0.6)
    axes.text(1, faults - 0.45, "benign changes", ha="left", va="top", fontsize=6, color=style.GREY)
    axes.set_xscale("log")
    axes.set_xlim(0.8, 1.6 * (ABSORBED_AT + 1) * 10 ** (SPREAD * 11))
    absorbed = (ABSORBED_AT + 1) * 10 ** (SPREAD * 5.5)
    axes.set_xticks([*(tick + 1 for tick in TICKS), absorbed])
    axes.set_xticklabels([*map(str, TICKS), "absorbed"])
    axes.minorticks_off()
    axes.set_yticks(range(len(groups)))
    axes.set_yticklabels([name.replace("_", " ").lower() for name in groups], fontsize=6.5)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlabel("steps from onset to failure; a dot is a run")
    for kind, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, markersize=3, label=ENDS[kind])
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 1.0), handletextpad=0.1)


def _map(figure: Figure, axes: Axes, faults: Sequence[str], seen: pd.DataFrame) -> None:
    areas = np.full((len(faults), len(SHOWN)), np.nan)
    for column, signal in enumerate(SHOWN):
        for row, fault in enumerate(faults):
            failing = seen[seen.failed & (seen.signal == signal) & (seen.fault == fault)]
            if len(failing) >= FEWEST:
                areas[row, column] = area(failing)
    axes.set_facecolor("#f2f2f2")
    axes.grid(False)
    image = axes.imshow(areas, aspect="auto", cmap="Blues", vmin=0.5, vmax=1.0)
    axes.set_xticks(range(len(SHOWN)))
    axes.set_xticklabels([SIGNALS[name].label for name in SHOWN], rotation=90, fontsize=6)
    bar = figure.colorbar(image, ax=axes, location="top", shrink=0.8, pad=0.01, aspect=25)
    bar.set_label("seen before the failure (ROC area)", fontsize=6.5)
    bar.ax.tick_params(labelsize=6)
