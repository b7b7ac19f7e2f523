"""The plot of a case study: a column for each run, losses, R and the calibrated score below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf, isfinite, nan
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from rmetric.evaluation import Trace
from rmetric.records import Truth
from rmetric.replay.scored_run import ScoredRun
from rmetric.reporting.page import trace_of_r_metric
from rmetric.reporting.page.series import spans
from rmetric.reporting.style import FAILURE_LINE, LEAST_POINTS, MEANING, ONSET_LINE, TEXT_WIDTH

LABELS = ("loss (nats)", "R (published)", "calibrated")
LOSSES = {"training_loss": 0.6, "validation_loss": 1.2}  # width of the line
PANELS, LEGEND, AXIS = 3.3, 0.55, 0.38  # inches: a run's panels, the legend, the lowest axis
SHADE = 0.22  # of an alarm
#: On the axis of the calibrated score, logarithmic above its threshold, 1.
TICKS = (0, 1, 3, 10, 30, 100)
#: The axis of the losses ends at this multiple of the highest loss of a run that did not fail.
ABOVE = 2.0
#: Highest loss over the lowest, above which the axis is logarithmic, and has decades only.
WIDE, VERY_WIDE = 20.0, 1000.0
OUTLINE = withStroke(linewidth=1.6, foreground="white")
TEXT: dict[str, Any] = dict(fontsize=LEAST_POINTS, path_effects=(OUTLINE,))
ALERT = MEANING["alert"]


def plot_twins(runs: Mapping[str, ScoredRun], calibrated: Mapping[str, Trace]) -> Figure:
    """A column for each run: losses, R and the calibrated score; draw it inside `style()`."""
    shown = list(runs.values())
    height = PANELS + LEGEND + AXIS
    figure = Figure(figsize=(TEXT_WIDTH, height))
    panels: Any = figure.subplots(
        3, len(shown), sharex=True, sharey="row", squeeze=False,
        gridspec_kw={
            "height_ratios": (3, 2, 2), "hspace": 0.14, "wspace": 0.08, "right": 0.985,
            "left": 0.55 / TEXT_WIDTH, "bottom": AXIS / height, "top": 1 - LEGEND / height,
        },
    )  # fmt: skip
    highest = max(2.0, *(float(np.nanmax(calibrated[n].scores, initial=0.0)) for n in runs))
    for column, (name, scored) in zip(panels.T, runs.items(), strict=True):
        losses, published, own = column
        _plot_losses(losses, scored, shown)
        top, threshold = 1.06 * sum(scored.config.weights), scored.config.threshold
        r_metric = trace_of_r_metric(scored)
        _plot_score(published, r_metric, threshold, top, (0, threshold, 1))
        own.set_yscale("symlog", linthresh=1.0)
        ticks = tuple(tick for tick in TICKS if tick <= highest)
        _plot_score(own, calibrated[name], 1.0, 1.3 * highest, ticks)
        own.yaxis.set_minor_locator(NullLocator())
        if not calibrated[name].alarms.any():
            own.text(
                0.02, 0.94, "no alarm", transform=own.transAxes, va="top", fontsize=LEAST_POINTS
            )
        truth = _truth(scored)
        marks = ((truth.failure_step, FAILURE_LINE), (truth.onset_step, ONSET_LINE))
        for axes, (step, line) in product(column, marks):
            if step is not None:
                axes.axvline(step, **line)
    # Steps planned: a run that ended early is seen to.
    last = max(scored.run.config["total_training_steps"] for scored in shown)
    for axes in panels[2]:
        axes.set_xlim(0, last)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
        axes.set_xlabel("step")
        if axes is not panels[2, -1]:  # clear of the next column's first
            axes.get_xticklabels()[-1].set_horizontalalignment("right")
    for axes, label in zip(panels[:, 0], LABELS, strict=True):
        axes.set_ylabel(label)
    figure.align_ylabels(panels[:, 0])
    handles = [
        Line2D([], [], color=MEANING["training_loss"], label="training loss"),
        Line2D([], [], color=MEANING["validation_loss"], label="validation loss"),
        Line2D([], [], **ONSET_LINE, label="onset"),
        *[Line2D([], [], **FAILURE_LINE, label="failure")] * any(_truth(s).failed for s in shown),
        Line2D([], [], color=MEANING["score"], linewidth=0.6, label="score"),
        Line2D([], [], color=ALERT, linestyle="--", label="threshold"),
        Line2D([], [], color=ALERT, linestyle="", marker="v", label="first alarm"),
        Patch(color=ALERT, alpha=SHADE, linewidth=0, label="alarm"),
    ]
    figure.legend(
        handles=handles, loc="upper center", ncols=len(handles), fontsize=LEAST_POINTS,
        columnspacing=0.9, handletextpad=0.5,
    )  # fmt: skip
    return figure


def _truth(scored: ScoredRun) -> Truth:
    return scored.run.truth or Truth()


def _plot_losses(axes: Axes, scored: ScoredRun, shown: Sequence[ScoredRun]) -> None:
    """On an axis that all runs share; a loss that leaves the others far behind leaves the axis."""
    truth = _truth(scored)
    severity = "" if truth.severity is None else f" {truth.severity:g}"
    fault = "control, no fault" if truth.fault == "NONE" else f"{truth.fault}{severity}"
    kind = str(truth.failure_kind).replace("_", "-")
    end = f"{kind} at {truth.failure_step}" if truth.failed else truth.outcome
    axes.set_title(f"{fault}\n{end}", loc="left")

    def points(run: ScoredRun, name: str) -> list[tuple[int, float]]:
        pairs = ((record.step, getattr(record, name)) for record in run.run.records)
        return [(step, x if isfinite(x) else nan) for step, x in pairs if x is not None]

    def positive(*runs: ScoredRun) -> list[float]:
        return [x for run in runs for name in LOSSES for _, x in points(run, name) if x > 0]

    for name, width in LOSSES.items():
        axes.plot(*zip(*points(scored, name), strict=True), color=MEANING[name], linewidth=width)
    every = positive(*shown)
    calm = positive(*(run for run in shown if not _truth(run).failed))
    low = min(every, default=1.0)
    high = min(max(every, default=2.0), ABOVE * max(calm, default=inf))
    if high <= WIDE * low:
        axes.set_ylim(max(0.0, low - 0.05 * (high - low)), high + 0.05 * (high - low))
    else:
        axes.set(yscale="log", ylim=(low / 1.1, high * 1.1))
        between = (1, 2, 5) if high < VERY_WIDE * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")  # 0.5 and 1000 instead of powers of ten
    if (most := max(positive(scored), default=0.0)) > high:
        at: dict[str, Any] = dict(transform=axes.transAxes, ha="right", va="top")
        axes.text(0.98, 0.97, f"up to {most:,.0f}", bbox=dict(fc="w", lw=0, pad=1), **at, **TEXT)


def _plot_score(
    axes: Axes, found: Trace, threshold: float, top: float, ticks: tuple[float, ...]
) -> None:
    """A detector's score; an alarm is shaded until the next record."""
    steps = found.steps
    bars = [(steps[a], steps[b] - steps[a]) for a, b in spans(found.alarms).tolist()]
    axes.broken_barh(bars, (-0.06, top + 0.06), color=ALERT, alpha=SHADE, linewidth=0)
    axes.step(steps, found.scores, where="post", color=MEANING["score"], linewidth=0.6)
    axes.axhline(threshold, color=ALERT, linestyle="--", linewidth=0.8)
    first = found.alert_steps[:1].tolist()
    axes.plot(first, [top] * len(first), "v", color=ALERT, clip_on=False, markersize=4)
    for step in first:
        side = "left" if step < 0.3 * steps[-1] else "right"
        axes.annotate(f" {step} ", (step, top), ha=side, va="top", zorder=3, color=ALERT, **TEXT)
    axes.set(ylim=(-0.06, top), yticks=ticks)
    axes.yaxis.set_major_formatter("{x:g}")
