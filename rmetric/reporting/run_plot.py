"""The card of one run: its verdict above three panels of its page, in the style of the figures."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmetric.evaluation import RunVerdict
from rmetric.replay.scored_run import ScoredRun
from rmetric.reporting.page.columns import charts_of
from rmetric.reporting.page.series import Charts, Floats, Panel, Series, spans
from rmetric.reporting.page.traces import DetectorTrace, trace_of_r_metric, trace_of_stated
from rmetric.reporting.style import (
    BLUE,
    COLUMN_WIDTH,
    FAILURE_LINE,
    MEANING,
    ONSET_LINE,
    SEVERITIES,
)

#: Colours of the page here; others are blue.
_SERIES_COLOURS = {
    "training": MEANING["training_loss"], "validation": MEANING["validation_loss"],
    "score": MEANING["score"], "rate": MEANING["failure_rate"],
    "variance": MEANING["gradient_variance"], "drift": MEANING["loss_drift"],
}  # fmt: skip
_ALARM: dict[str, Any] = {"color": MEANING["alert"], "linestyle": "--", "linewidth": 0.9}
#: Panel -> its vertical axis, where its title is too long.
_SHORT = {"normalised": "component", "score_calibrated": "calibrated", "loss": "loss"}
_HEIGHT = 4.3  # inches
_VERDICT_LINE = 0.135  # inches, and letters of a line of the verdict
_VERDICT_LETTERS = 56
_LEGEND_LETTERS = 42  # that fit beside each other in one line
_FEW = 60  # points up to which each is marked


def plot_run(
    scored: ScoredRun, verdict: RunVerdict | None = None, calibrated: DetectorTrace | None = None
) -> Figure:
    """Three panels on one step axis, as wide as a column; draw it inside `style()`.

    Values that are nan or infinite are marked at the upper edge, at their step.

    Args:
        scored: the run with the published metric at its records.
        verdict: on the whole run, above the panels; its event is marked. None for none.
        calibrated: the calibrated detector's trace for the middle panel; None shows the
            components of the published R there.
    """
    texts = [] if verdict is None else [verdict.text, verdict.numbers_and_advice]
    words = [line for text in texts for line in wrap(_plain(text), _VERDICT_LETTERS)][:4]
    height = _HEIGHT + _VERDICT_LINE * len(words)
    figure = Figure(figsize=(COLUMN_WIDTH, height))
    panels = figure.subplots(3, sharex=True, height_ratios=[3, 2.2, 2.4])
    others = [trace for trace in (calibrated, trace_of_stated(scored)) if trace is not None]
    charts = charts_of(scored, [trace_of_r_metric(scored), *others], verdict)
    rows = []
    by_name = {panel.name: panel for panel in charts.panels}
    # What the verdict is by, the calibrated score or the components of R, and R.
    logged = charts.groups.get("What was logged", [None])[0]
    middle = "normalised" if calibrated is None else f"score_{calibrated.detector}"
    r_metric = by_name.get("r_metric", by_name.get("score_stated"))
    for axes, panel in zip(panels, (logged, by_name.get(middle), r_metric), strict=True):
        if panel is None:  # nothing of it was logged
            axes.set_yticks([])
        else:
            _draw_panel(axes, panel, charts)
        if panel is not None and panel.name == "r_metric" and scored.stated_differs:
            stated = by_name["score_stated"].series[0]
            _draw_series(axes, stated, charts.places, None, label="R as logged",
                         color=MEANING["stated"], linestyle=(0, (4, 1.5)))  # fmt: skip
        _mark_lines(axes, charts, verdict, named=axes is panels[0])
        rows.append(_name_above(axes))
    panels[-1].set_xlabel("record" if charts.by_record else "step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[-1].set_xlim(*charts.range)
    above = 0.25 + _VERDICT_LINE * len(words)
    top = height - above - 0.145 * rows[0]
    figure.subplots_adjust(left=0.19, right=0.96, bottom=0.365 / height, top=top / height,
                           hspace=0.36)  # fmt: skip
    id = scored.run.id
    title = _plain(id if len(id) <= 44 else f"{id[:22]}…{id[-21:]}")
    figure.suptitle(title, y=1 - 0.03 / height, va="top")
    if verdict is not None:
        figure.text(
            0.03, 1 - 0.2 / height, "\n".join(words), va="top", fontweight="bold", fontsize=7,
            linespacing=1.25, color=SEVERITIES[verdict.severity],
        )  # fmt: skip
    figure.align_ylabels()
    return figure


def _draw_panel(axes: Axes, panel: Panel, charts: Charts) -> None:
    places, alarmed = charts.places, ""
    if panel.alarms is not None:
        first = np.flatnonzero(panel.alarms)[:1]
        at = [f"first alarm at {step:,}" for step in charts.steps[first]]
        alarmed = f", {at[0]}" if at else ", no alarm"
        axes.plot(places[first], [1] * len(first), "v", color=MEANING["alert"], markersize=4.5,
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
        held = [(first, last - first) for first, last in places[spans(panel.alarms)].tolist()]
        axes.broken_barh(held, (0, 1), transform=axes.get_xaxis_transform(), alpha=0.2,
                         color=MEANING["alert"], linewidth=0)  # fmt: skip
    for series in panel.series:
        _draw_series(axes, series, places, panel.cap, label=series.label,
                     color=_SERIES_COLOURS.get(series.colour, BLUE))  # fmt: skip
    if panel.threshold is not None:
        axes.axhline(panel.threshold, **_ALARM, label=f"threshold {panel.threshold:g}{alarmed}")
    if panel.bounds is not None:
        edge = 0.06 * (panel.bounds[1] - panel.bounds[0])
        axes.set_ylim(panel.bounds[0] - edge, panel.bounds[1] + edge)
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel(_SHORT.get(panel.name, panel.title))


def _draw_series(
    axes: Axes, series: Series, places: Floats, cap: float | None, **look: Any
) -> None:
    """The finite values as a line; the others as marks at the upper edge."""
    x, values = places[series.positions], series.values
    few = len(values) <= _FEW and not series.stairs
    # A sparse training loss mostly hides under the validation loss: it is drawn broader.
    width = 2.2 if few and series.colour == "training" else 1.0 if len(values) <= 500 else 0.6
    axes.plot(
        x, np.where(np.isfinite(values), np.minimum(values, cap or np.inf), np.nan),
        drawstyle="steps-post" if series.stairs else "default", marker="." if few else None,
        linewidth=width, **look,
    )  # fmt: skip
    for mark, kind, strange in (("x", "nan", np.isnan), ("^", "infinite", np.isinf)):
        at = x[strange(values)]
        if len(at):
            axes.plot(
                at, [0.95] * len(at), mark, color=look["color"], label=f"{look['label']} {kind}",
                transform=axes.get_xaxis_transform(), clip_on=False,
            )  # fmt: skip


def _mark_lines(axes: Axes, charts: Charts, verdict: RunVerdict | None, *, named: bool) -> None:
    """Onsets, alarms and the failure; in the first panel with their names, of spikes one."""
    looks = {"onset": ONSET_LINE, "failure": FAILURE_LINE, "alarm": _ALARM}
    if verdict is not None:
        looks["event"] = {"color": SEVERITIES[verdict.severity], "linewidth": 0.9}
    for line in charts.lines:
        if line.kind in looks:
            label = line.label
            if line.kind in ("event", "alarm"):
                label = f"{line.tag}, step {line.step:,}"
            is_named = named and (line.kind != "event" or line.step == charts.event[0][0])
            axes.axvline(charts.place(line.step), zorder=1, label=_plain(label) if is_named else "",
                         **looks[line.kind])  # fmt: skip


def _name_above(axes: Axes) -> int:
    """A legend above the panel, where it hides nothing; returns its number of rows."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return 0
    fits = sum(map(len, labels)) <= _LEGEND_LETTERS
    num_columns = 3 if fits and len(labels) <= 3 else 1 if len(labels) == 2 else 2
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=num_columns)
    return -(-len(labels) // num_columns)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # a dollar sign would start a formula
