"""The two figures of the benchmark: precision against recall, delay against false alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from rmetric._util.strict_json import number
from rmetric.reporting.style import CYCLE, GREY, TEXT_WIDTH
from studies.detector_benchmark.benchmark import Results
from studies.detector_benchmark.measure import CEILINGS
from studies.detector_benchmark.tables import FEATURED

COLOURS = dict(zip(FEATURED, CYCLE, strict=True))
MARKS = dict(zip(FEATURED, "osD^vPX", strict=True))
#: Below this share the axis of false alarms is linear, so that 0 has a place.
LINEAR_BELOW = 0.01


def build_figures(found: Sequence[Results]) -> Iterator[tuple[str, str, Figure]]:
    """Name, caption, figure of both, a panel a data set; draw and save them inside `style()`."""
    yield (
        "figure1_precision_recall",
        "Precision against recall of runs, causal rule, first alarm latched, alarms in absorbed "
        "faults counted separately. Symbols are the detectors at their thresholds, lines are all "
        "thresholds on their score; where a line turns back, a lower threshold alarms before "
        "the onset and the run is missed. Small dots: all other detectors.",
        _figure(found, _precision_recall),
    )
    yield (
        "figure2_delay",
        "Detection delay against false alarms. Vertical: the share of the time from onset to "
        "failure that has passed at the first alarm, mean over the detectable failures; a missed "
        "failure counts as 1. Horizontal: the share of controls and benign runs with an alarm. "
        "For the public logs: the share of the time to two logging intervals after the labelled "
        "onset, and of healthy runs. Lower and further left is better. Symbols and lines as "
        "before.",
        _figure(found, _delay),
    )


def _figure(found: Sequence[Results], draw: Callable[[Axes, Results], None]) -> Figure:
    figure = Figure(figsize=(TEXT_WIDTH, 3.1))
    panels = np.atleast_1d(figure.subplots(1, len(found)))
    figure.subplots_adjust(left=0.09, right=0.975, bottom=0.135, top=0.79, wspace=0.25)
    for letter, axes, results in zip("abcdef", panels, found, strict=False):
        draw(axes, results)
        if axes is not panels[0]:
            axes.set_ylabel("")
        axes.set_title(f"({letter}) {results['title'].split(' (')[0]}", loc="left", fontsize=7.5)
    names = {name for results in found for name in results["rows"]}
    figure.legend(handles=_legend(found, names), loc="upper center", ncols=4)
    return figure


def _precision_recall(axes: Axes, results: Results) -> None:
    recall = np.linspace(0.01, 1, 200)
    for f1 in (0.2, 0.4, 0.6, 0.8):
        possible = recall > f1 / (2 - f1)
        precision = f1 * recall[possible] / (2 * recall[possible] - f1)
        axes.plot(recall[possible], precision, color="#d0d0d0", linewidth=0.6, zorder=0.5)
        axes.text(1.0, f1 / (2 - f1), f" F1 {f1}", color=GREY, fontsize=5, va="bottom", ha="right")
    _draw(axes, results, "recall", "precision")
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel="recall", ylabel="precision")


def _delay(axes: Axes, results: Results) -> None:
    _draw(axes, results, "false_alarm_share", "time_used")
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW, linscale=0.5)
    axes.set(xlim=(-0.002, 1.3), ylim=(-0.03, 1.03), xlabel="healthy runs alarmed")
    axes.set_ylabel("time passed at the first alarm")
    axes.set_xticks([0, 0.01, 0.1, 1])
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))


def _draw(axes: Axes, results: Results, x: str, y: str) -> None:
    """The point of every detector, and the lines of the featured ones."""
    for name, row in results["rows"].items():
        own = [number(row["curve"]["own"][key]) for key in (x, y)]
        if all(map(isfinite, own)):
            axes.plot(*own, **_point(name), clip_on=False)
        if name in COLOURS:
            along, up = (_numbers(row["curve"][key]) for key in (x, y))
            shown = np.isfinite(along) & np.isfinite(up)
            axes.plot(along[shown], up[shown], color=COLOURS[name], linewidth=0.8, alpha=0.7)


def _point(name: str) -> dict[str, Any]:
    if name in COLOURS:
        return {
            "marker": MARKS[name], "color": COLOURS[name], "linestyle": "", "markersize": 5,
            "markeredgecolor": "white", "markeredgewidth": 0.4, "zorder": 5,
        }  # fmt: skip
    if name in CEILINGS:
        return {"marker": "*", "color": GREY, "linestyle": "", "markersize": 7, "zorder": 3}
    return {"marker": ".", "color": GREY, "linestyle": "", "markersize": 3, "zorder": 2}


def _legend(found: Sequence[Results], names: set[str]) -> list[Artist]:
    titles = {name: row["title"] for results in found for name, row in results["rows"].items()}
    return [
        *(Line2D([], [], **_point(name), label=titles[name]) for name in FEATURED if name in names),
        Line2D([], [], **_point(""), label="other detectors"),
        Line2D([], [], **_point("ceiling"), label="ceiling (knows the truth)"),
    ]


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array([number(value) for value in values], dtype=float)
