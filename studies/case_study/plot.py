"""The figure of a case study: the run with the fault above, its twin without it below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from rmetric.readers.scored_run import ScoredRun, alarm_spans
from rmetric.records import Record
from rmetric.reporting.style import COLUMN_WIDTH, MEANING

ORDER = ("fault", "control")
LOSSES = {"training_loss": 0.6, "validation_loss": 1.2}  # width of the line
_BLOCK, _LEGEND, _AXIS = 2.15, 0.55, 0.35  # inches: a run, and what stands above and below all
_ALERT_SHADE = 0.22
#: Highest loss over the lowest, above which the axis is logarithmic, and has decades only.
_WIDE, _VERY_WIDE = 20.0, 1000.0


def plot_twins(runs: Mapping[str, ScoredRun]) -> Figure:
    """For each run its losses and R over the steps; draw it inside `style()`."""
    shown = [runs[name] for name in ORDER if name in runs]
    height = _BLOCK * len(shown) + _LEGEND + _AXIS
    figure = Figure(figsize=(COLUMN_WIDTH, height))
    grid = figure.add_gridspec(
        len(shown), 1, left=0.18, right=0.965, bottom=_AXIS / height,
        top=1 - _LEGEND / height, hspace=0.25,
    )  # fmt: skip
    losses, last = _loss_range(shown), max(map(_length, shown))
    for number, scored in enumerate(shown):
        block = grid[number].subgridspec(2, 1, height_ratios=(3, 2), hspace=0.12)
        panels: Any = block.subplots(sharex=True)
        panels[0].set(ylabel="loss (nats)", **losses)
        _plain_ticks(panels[0])
        panels[0].set_title(outcome_of(scored), loc="left")
        _plot_losses(panels[0], scored.run.records)
        _plot_score(panels[1], scored)
        for axes in panels:
            _mark_truth(axes, scored)
        panels[1].set_xlim(0, last)
        panels[1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        figure.align_ylabels(panels)
    panels[1].set_xlabel("step")
    figure.legend(handles=_meanings(shown), loc="upper center", ncols=4)
    return figure


def outcome_of(scored: ScoredRun) -> str:
    """The fault and what became of the run, in words."""
    truth = scored.run.truth
    if truth is None:
        return "outcome unknown"
    fault = "control, no fault" if truth.fault == "NONE" else truth.fault
    kind = str(truth.failure_kind).replace("_", "-")
    return f"{fault}: {f'{kind}, step {truth.failure_step}' if truth.failed else truth.outcome}"


def _length(scored: ScoredRun) -> int:
    """Steps planned, so that a run that ended early is seen to."""
    planned = scored.run.config.get("total_training_steps")
    last = scored.scores[-1].step
    return max(planned, last) if isinstance(planned, int) else last


def _loss_range(runs: Sequence[ScoredRun]) -> dict[str, Any]:
    """The height that all runs share, logarithmic where a loss leaves the others far behind."""
    losses = [
        value
        for scored in runs
        for record in scored.run.records
        for name in LOSSES
        if (value := getattr(record, name)) is not None and value > 0 and isfinite(value)
    ]
    if not losses:
        return {}
    low, high = min(losses), max(losses)
    if high > _WIDE * low:
        return {"yscale": "log", "ylim": (low / 1.1, high * 1.1)}
    return {"ylim": (max(0.0, low - 0.05 * (high - low)), high + 0.05 * (high - low))}


def _plain_ticks(axes: Axes) -> None:
    """0.5, 1, 2 and 1000 instead of powers of ten."""
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        between = (1, 2, 5) if high < _VERY_WIDE * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _plot_losses(axes: Axes, records: Iterable[Record]) -> None:
    for name, width in LOSSES.items():
        points = [(r.step, v) for r in records if (v := getattr(r, name)) is not None]
        axes.plot(
            [step for step, _ in points],
            [value if isfinite(value) else nan for _, value in points],
            color=MEANING[name],
            linewidth=width,
        )


def _plot_score(axes: Axes, scored: ScoredRun) -> None:
    top = 1.06 * sum(scored.config.weights)
    steps = [score.step for score in scored.scores]
    spans = [(first, last - first) for first, last in alarm_spans(scored.scores)]
    axes.broken_barh(
        spans, (-0.06, top + 0.06), color=MEANING["alert"], alpha=_ALERT_SHADE, linewidth=0
    )
    values = [score.score for score in scored.scores]
    axes.step(steps, values, where="post", color=MEANING["score"], linewidth=0.6)
    axes.axhline(scored.config.threshold, color=MEANING["alert"], linestyle="--", linewidth=0.8)
    first = scored.alert_steps[:1]
    axes.plot(first, [top] * len(first), "v", color=MEANING["alert"], clip_on=False, markersize=4)
    axes.set(ylim=(-0.06, top), ylabel="R", yticks=(0, 0.5, 1))


def _mark_truth(axes: Axes, scored: ScoredRun) -> None:
    truth = scored.run.truth
    if truth is not None and truth.failure_step is not None:
        axes.axvline(truth.failure_step, color=MEANING["failure"], linewidth=0.9)
    if truth is not None and truth.onset_step is not None:
        axes.axvline(truth.onset_step, color=MEANING["onset"], linestyle=":", linewidth=1.2)


def _meanings(runs: Sequence[ScoredRun]) -> list[Artist]:
    colour, threshold = MEANING, runs[0].config.threshold
    failed = any(scored.run.truth is not None and scored.run.truth.failed for scored in runs)
    return [
        Line2D([], [], color=colour["training_loss"], label="training loss"),
        Line2D([], [], color=colour["validation_loss"], label="validation loss"),
        Line2D([], [], color=colour["onset"], linestyle=":", label="onset"),
        *[Line2D([], [], color=colour["failure"], linewidth=0.9, label="failure")] * failed,
        Line2D([], [], color=colour["score"], linewidth=0.6, label="R"),
        Line2D([], [], color=colour["alert"], linestyle="--", label=f"threshold {threshold:g}"),
        Line2D([], [], color=colour["alert"], linestyle="", marker="v", label="first alert"),
        Patch(color=colour["alert"], alpha=_ALERT_SHADE, linewidth=0, label="alerted"),
    ]
