"""The plot of a case study: a column for each run, losses, R and the calibrated score below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import isfinite, nan
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from rmetric.evaluation import Trace
from rmetric.replay.scored_run import ScoredRun
from rmetric.reporting.page.series import spans
from rmetric.reporting.style import FAILURE_LINE, MEANING, ONSET_LINE, TEXT_WIDTH

LOSSES = {"training_loss": 0.6, "validation_loss": 1.2}  # width of the line
PANELS, LEGEND, AXIS = 3.3, 0.55, 0.38  # inches: a run's panels, the legend, the lowest axis
SHADE = 0.22  # of an alarm
#: On the axis of the calibrated score, logarithmic above its threshold, 1.
TICKS = (0, 1, 3, 10, 30, 100)
#: The axis of the losses ends at this multiple of the highest loss of a run that did not fail.
ABOVE = 2.0
#: Highest loss over the lowest, above which the axis is logarithmic, and has decades only.
WIDE, VERY_WIDE = 20.0, 1000.0
FONT = 7.0  # points: the least that is read in print
TEXT: dict[str, Any] = dict(
    fontsize=FONT, path_effects=(withStroke(linewidth=1.6, foreground="white"),)
)


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
        points = [(one.step, one.score, one.alarm) for one in scored.scores]
        _plot_score(published, points, threshold, top, (0, threshold, 1))
        found = calibrated[name]
        points = list(zip(found.steps, found.scores, found.alarms, strict=True))
        own.set_yscale("symlog", linthresh=1.0)
        _plot_score(own, points, 1.0, 1.3 * highest, tuple(t for t in TICKS if t <= highest))
        own.yaxis.set_minor_locator(NullLocator())
        if not found.alarms.any():
            own.text(0.02, 0.94, "no alarm", transform=own.transAxes, va="top", fontsize=FONT)
        truth = scored.run.truth
        marks = (
            ((truth.failure_step, FAILURE_LINE), (truth.onset_step, ONSET_LINE)) if truth else ()
        )
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
    for axes, label in zip(
        panels[:, 0], ("loss (nats)", "R (published)", "calibrated"), strict=True
    ):
        axes.set_ylabel(label)
    figure.align_ylabels(panels[:, 0])
    handles = _legend(shown)
    figure.legend(
        handles=handles, loc="upper center", ncols=len(handles), fontsize=FONT,
        columnspacing=0.9, handletextpad=0.5,
    )  # fmt: skip
    return figure


def _title(scored: ScoredRun) -> str:
    """The fault with its severity and the outcome of the run, in two lines."""
    truth = scored.run.truth
    assert truth is not None
    severity = "" if truth.severity is None else f" {truth.severity:g}"
    fault = "control, no fault" if truth.fault == "NONE" else f"{truth.fault}{severity}"
    kind = str(truth.failure_kind).replace("_", "-")
    return f"{fault}\n{f'{kind} at {truth.failure_step}' if truth.failed else truth.outcome}"


def _losses(scored: ScoredRun) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each kind of loss; one that is not finite is a gap."""
    return {
        name: [
            (record.step, value if isfinite(value) else nan)
            for record in scored.run.records
            if (value := getattr(record, name)) is not None
        ]
        for name in LOSSES
    }


def _plot_losses(axes: Axes, scored: ScoredRun, shown: Sequence[ScoredRun]) -> None:
    """On an axis that all runs share; a loss that leaves the others far behind leaves the axis."""

    def positive(*runs: ScoredRun) -> list[float]:
        return [v for run in runs for points in _losses(run).values() for _, v in points if v > 0]

    axes.set_title(_title(scored), loc="left")
    for name, points in _losses(scored).items():
        axes.plot(
            *zip(*points, strict=True), color=MEANING[name], linewidth=LOSSES[name]
        )  # fmt: skip
    every = positive(*shown)
    calm = positive(*(run for run in shown if not (run.run.truth and run.run.truth.failed)))
    low, high = min(every, default=1.0), max(every, default=2.0)
    if calm:
        high = min(high, ABOVE * max(calm))
    if high <= WIDE * low:
        axes.set_ylim(max(0.0, low - 0.05 * (high - low)), high + 0.05 * (high - low))
    else:
        axes.set(yscale="log", ylim=(low / 1.1, high * 1.1))
        between = (1, 2, 5) if high < VERY_WIDE * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")  # 0.5 and 1000 instead of powers of ten
    most = max(positive(scored), default=0.0)
    if most > high:
        axes.text(0.98, 0.97, f"up to {most:,.0f}", transform=axes.transAxes, ha="right", va="top",
                  **TEXT)  # fmt: skip


def _plot_score(
    axes: Axes, points: Sequence[tuple[int, float, bool]], threshold: float, top: float,
    ticks: tuple[float, ...],
) -> None:  # fmt: skip
    """A detector's score, of (step, score, alarm); an alarm is shaded until the next record."""
    steps, values, alarms = zip(*points, strict=True)
    pairs = spans(np.array(alarms, dtype=bool)).tolist()
    bars = [(steps[a], steps[b] - steps[a]) for a, b in pairs]
    axes.broken_barh(bars, (-0.06, top + 0.06), color=MEANING["alert"], alpha=SHADE, linewidth=0)
    axes.step(steps, values, where="post", color=MEANING["score"], linewidth=0.6)
    axes.axhline(threshold, color=MEANING["alert"], linestyle="--", linewidth=0.8)
    first = [step for step, _, alarm in points if alarm][:1]
    axes.plot(first, [top] * len(first), "v", color=MEANING["alert"], clip_on=False, markersize=4)
    for step in first:
        side = "left" if step < 0.3 * steps[-1] else "right"
        axes.annotate(f" {step} ", (step, top), ha=side, va="top", zorder=3,
                      color=MEANING["alert"], **TEXT)  # fmt: skip
    axes.set(ylim=(-0.06, top), yticks=ticks)
    axes.yaxis.set_major_formatter("{x:g}")


def _legend(runs: Sequence[ScoredRun]) -> list[Artist]:
    colour = MEANING
    failed = any(scored.run.truth is not None and scored.run.truth.failed for scored in runs)
    return [
        Line2D([], [], color=colour["training_loss"], label="training loss"),
        Line2D([], [], color=colour["validation_loss"], label="validation loss"),
        Line2D([], [], **ONSET_LINE, label="onset"),
        *[Line2D([], [], **FAILURE_LINE, label="failure")] * failed,
        Line2D([], [], color=colour["score"], linewidth=0.6, label="score"),
        Line2D([], [], color=colour["alert"], linestyle="--", label="threshold"),
        Line2D([], [], color=colour["alert"], linestyle="", marker="v", label="first alarm"),
        Patch(color=colour["alert"], alpha=SHADE, linewidth=0, label="alarm"),
    ]
