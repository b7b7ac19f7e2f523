"""The card of one run: its verdict, losses, calibrated alarms, and the published R."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isfinite, isinf, isnan, nan
from statistics import median
from textwrap import wrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmetric.evaluation import RunVerdict
from rmetric.replay.scored_run import ScoredRun, StatedMetric
from rmetric.reporting.decisions import decisions_of, kind_words, short_words
from rmetric.reporting.page.downsample import spans
from rmetric.reporting.page.traces import DetectorTrace
from rmetric.reporting.style import COLUMN_WIDTH, FAILURE_LINE, MEANING, ONSET_LINE, SEVERITIES

_SIGNALS = {"gradient_variance": "n(σ²)", "failure_rate": "n(λ)", "loss_drift": "n(ΔL)"}
_SOURCE_WORDS = {
    "trailing": ", one norm over time",
    "logged": ", as logged",
    "logged_normalised": ", as logged",
    "workers": "",
}
_HEIGHT = 4.3  # inches
_VERDICT_LINE = 0.135  # inches, and letters of a line of the verdict
_VERDICT_LETTERS = 56
_HIGHEST = 5.0  # times the threshold, beyond which a score is drawn at the edge
_LEGEND_LETTERS = 42  # that fit beside each other in one line
_FEW = 60  # points up to which each is marked
_NAMED_DECISIONS = 2  # of one kind, up to which each has its step in the legend
_WIDE = 20.0  # highest loss over the median, above which the axis is logarithmic


def plot_run(
    scored: ScoredRun, verdict: RunVerdict | None = None, calibrated: DetectorTrace | None = None
) -> Figure:
    """Three panels on one step axis; draw it inside `style()`.

    Values that are nan or infinite are marked at the upper edge, at their step.

    Args:
        scored: the run with the published metric at its records.
        verdict: on the whole run, above the panels; its event is marked. None for none.
        calibrated: the calibrated detector's trace for the middle panel; None shows the
            components of the published R there.

    Returns:
        The figure, as wide as a column.
    """
    said = [] if verdict is None else [verdict.text, verdict.numbers_and_advice]
    words = [line for text in said for line in wrap(_plain(text), _VERDICT_LETTERS)][:4]
    height = _HEIGHT + _VERDICT_LINE * len(words)
    figure = Figure(figsize=(COLUMN_WIDTH, height))
    panels = figure.subplots(3, sharex=True, height_ratios=[3, 2.2, 2.4])
    rows = []
    middle = _plot_components if calibrated is None else partial(_plot_trace, trace=calibrated)
    for axes, plot in zip(panels, (_plot_losses, middle, _plot_score), strict=True):
        plot(axes, scored)
        _mark_verdict(axes, verdict, calibrated, named=axes is panels[0])
        _mark_truth(axes, scored, named=axes is panels[0])
        _mark_decisions(axes, scored, named=axes is panels[0])
        rows.append(_name_above(axes))
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[-1].set_xlim(*_step_range(scored))
    above = 0.25 + _VERDICT_LINE * len(words)
    top = height - above - 0.145 * rows[0]
    figure.subplots_adjust(left=0.19, right=0.96, bottom=0.365 / height, top=top / height,
                           hspace=0.36)  # fmt: skip
    figure.suptitle(_title(scored.run.id), y=1 - 0.03 / height, va="top")
    if verdict is not None:
        figure.text(
            0.03, 1 - 0.2 / height, "\n".join(words), va="top", fontweight="bold", fontsize=7,
            linespacing=1.25, color=SEVERITIES[verdict.severity],
        )  # fmt: skip
    figure.align_ylabels()
    return figure


def _mark_verdict(
    axes: Axes, verdict: RunVerdict | None, calibrated: DetectorTrace | None, *, named: bool
) -> None:
    if verdict is not None and verdict.onset_step is not None:
        axes.axvline(
            verdict.onset_step, color=SEVERITIES[verdict.severity], linewidth=0.9, zorder=1,
            label=f"onset, step {verdict.onset_step}" if named else None,
        )  # fmt: skip
    if calibrated is not None and calibrated.first_alarm is not None:
        alarms = {calibrated.first_alarm}
        if verdict is not None and verdict.alarm_step is not None:
            alarms.add(verdict.alarm_step)
        for i, step in enumerate(sorted(alarms)):
            label = f"alarm, step {step}" if named and not i else None
            axes.axvline(step, color=MEANING["alert"], linestyle="--", linewidth=0.9, label=label,
                         zorder=1)  # fmt: skip


def _plot_trace(axes: Axes, scored: ScoredRun, trace: DetectorTrace) -> None:
    """A detector's score, at most `_HIGHEST` thresholds, with its alarms shaded."""
    threshold = trace.threshold or 1.0
    for first, last in trace.steps[spans(trace.alarms)].tolist():
        axes.axvspan(first, last, color=MEANING["alert"], alpha=0.2, linewidth=0)
    scores = np.minimum(trace.scores, _HIGHEST * threshold).tolist()
    known = trace.scores[np.isfinite(trace.scores)]
    _staircase(axes, scored, scores, MEANING["score"], "calibrated score")
    axes.axhline(threshold, color=MEANING["alert"], linestyle="--", linewidth=0.8,
                 label=f"alarm above {threshold:g}")  # fmt: skip
    top = min(_HIGHEST * threshold, max(float(known.max(initial=0.0)), 1.5 * threshold))
    axes.set_ylim(-0.06 * top, 1.06 * top)
    axes.set_ylabel("calibrated")


def _step_range(scored: ScoredRun) -> tuple[float, float]:
    """All records, and the failure, which comes after the last where that was its cause."""
    steps = [score.step for score in scored.scores]
    steps += [event.step for event in decisions_of(scored.run)]
    truth = scored.run.truth
    if truth is not None:
        steps += [step for step in (truth.onset_step, truth.failure_step) if step is not None]
    edge = 0.02 * (max(steps) - min(steps)) or 1.0
    return min(steps) - edge, max(steps) + edge


def _name_above(axes: Axes) -> int:
    """A legend above the panel, where it hides nothing; returns its number of rows."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return 0
    fits = sum(map(len, labels)) <= _LEGEND_LETTERS
    num_columns = 3 if fits and len(labels) <= 3 else 1 if len(labels) == 2 else 2
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=num_columns)
    return -(-len(labels) // num_columns)


def _plot_losses(axes: Axes, scored: ScoredRun) -> None:
    shown: list[float] = []
    for name, label in (("training_loss", "training"), ("validation_loss", "validation")):
        points = [
            (record.step, value)
            for record in scored.run.records
            if (value := getattr(record, name)) is not None
        ]
        if points:
            shown += [value for _, value in points if isfinite(value)]
            _line(axes, points, MEANING[name], label)
    if shown and min(shown) > 0 and max(shown) > _WIDE * median(shown):
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if not shown:
        axes.set_yticks([])
    axes.set_ylabel("loss")


def _plot_components(axes: Axes, scored: ScoredRun) -> None:
    for name, label in _SIGNALS.items():
        defined = any(
            not isnan(getattr(score.raw, name)) or getattr(score.normalised, name)
            for score in scored.scores
        )
        if defined and getattr(scored.config.weights, name) > 0:
            if name == "gradient_variance":
                label += _SOURCE_WORDS.get(scored.variance_source or "", ", several sources")
            values = [getattr(score.normalised, name) for score in scored.scores]
            _staircase(axes, scored, values, MEANING[name], label)
    axes.set_ylim(-0.06, 1.06)
    axes.set_yticks([0, 0.5, 1])
    axes.set_ylabel("component")


def _plot_score(axes: Axes, scored: ScoredRun) -> None:
    stated = scored.stated
    if not scored.is_defined and stated is not None:
        # Nothing was logged that the metric could be computed from.
        top = 1.06 * max(_draw_stated(axes, scored, stated), 1.2 * stated.threshold)
        _mark_alerts(axes, stated.threshold, scored.stated_alert_steps, top)
        axes.set_ylabel("R, as logged")
        return
    threshold = scored.config.threshold
    top = max(1.06 * sum(scored.config.weights), 1.2 * threshold)
    if stated is not None and scored.stated_differs:
        top = max(top, 1.06 * _draw_stated(axes, scored, stated))
    steps = [score.step for score in scored.scores]
    alarms = spans(np.array([score.alarm for score in scored.scores])).tolist()
    bars = [(steps[first], steps[last] - steps[first]) for first, last in alarms]
    axes.broken_barh(bars, (-0.06, top + 0.06), color=MEANING["alert"], alpha=0.2, linewidth=0)
    values = [score.score for score in scored.scores]
    _staircase(axes, scored, values, MEANING["score"], "R")
    _mark_alerts(axes, threshold, scored.alert_steps, top)
    axes.set_ylabel("R, published" if scored.config.variant == "paper" else "R")


def _mark_alerts(axes: Axes, threshold: float, steps: Sequence[int], top: float) -> None:
    axes.axhline(
        threshold, color=MEANING["alert"], linestyle="--", linewidth=0.8,
        label=f"threshold {threshold:g}",
    )  # fmt: skip
    axes.plot(
        steps[:1], [top] * len(steps[:1]), "v", color=MEANING["alert"], clip_on=False,
        label=f"first alert, step {steps[0]}" if steps else "no alert", markersize=4.5,
    )  # fmt: skip
    axes.set_ylim(-0.06, top)


def _draw_stated(axes: Axes, scored: ScoredRun, stated: StatedMetric) -> float:
    """Draw R as the log states it; returns the highest value that is finite, or 0."""
    points = [
        (score.step, value)
        for score, value in zip(scored.scores, stated.scores, strict=True)
        if value is not None
    ]
    axes.plot(
        *_broken(points), color=MEANING["stated"], label="R as logged", drawstyle="steps-post",
        linewidth=0.9, linestyle=(0, (4, 1.5)),
    )  # fmt: skip
    return max((value for _, value in points if isfinite(value)), default=0.0)


def _staircase(
    axes: Axes, scored: ScoredRun, values: Sequence[float], colour: str, label: str
) -> None:
    points = [(score.step, value) for score, value in zip(scored.scores, values, strict=True)]
    width = 1.0 if len(points) <= 500 else 0.6
    axes.plot(*_broken(points), color=colour, label=label, drawstyle="steps-post", linewidth=width)


def _line(axes: Axes, points: Sequence[tuple[int, float]], colour: str, label: str) -> None:
    """The finite values as a line; the others as marks at the upper edge."""
    few = len(points) <= _FEW
    # A sparse training loss mostly hides under the validation loss: it is drawn broader.
    width = 2.2 if few and label == "training" else 1.0
    axes.plot(
        *_broken(points), color=colour, label=label, marker="." if few else None, linewidth=width
    )
    for mark, kind, strange in (("x", "nan", isnan), ("^", "infinite", isinf)):
        steps = [step for step, value in points if strange(value)]
        if steps:
            axes.plot(
                steps, [0.95] * len(steps), mark, color=colour, label=f"{label} {kind}",
                transform=axes.get_xaxis_transform(), clip_on=False,
            )  # fmt: skip


def _broken(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Coordinates with gaps where a value is not finite and where the steps fall back."""
    xs: list[float] = []
    ys: list[float] = []
    for step, value in points:
        if xs and step < xs[-1]:
            xs.append(nan)
            ys.append(nan)
        xs.append(step)
        ys.append(value if isfinite(value) else nan)
    return xs, ys


def _mark_truth(axes: Axes, scored: ScoredRun, *, named: bool) -> None:
    truth = scored.run.truth
    if truth is None:
        return
    marks = [(truth.onset_step, ONSET_LINE, f"onset: {truth.fault}")]
    if truth.failed:
        failure = f"failure: {truth.failure_kind}"
        marks.append((truth.failure_step, FAILURE_LINE, failure))
    for step, line, name in marks:
        if step is not None:
            axes.axvline(step, **line, label=name if named else None)


def _mark_decisions(axes: Axes, scored: ScoredRun, *, named: bool) -> None:
    """A line at each decision of a rescue; many of a kind are short marks at the upper edge."""
    decisions, colour = decisions_of(scored.run), MEANING["decision"]
    for name in dict.fromkeys(event.name for event in decisions):
        events = [event for event in decisions if event.name == name]
        if len(events) > _NAMED_DECISIONS:
            axes.plot(
                [event.step for event in events], [0.97] * len(events), "|", color=colour,
                label=_plain(f"{kind_words(name)}, {len(events)} times") if named else None,
                transform=axes.get_xaxis_transform(), markersize=6, markeredgewidth=0.8,
            )  # fmt: skip
            continue
        for event in events:
            label = _plain(f"step {event.step}: {short_words(event)}")
            style = ":" if name == "leave_out" else "-."
            axes.axvline(
                event.step, color=colour, linestyle=style, linewidth=0.8,
                label=label if named else None,
            )  # fmt: skip


def _title(id: str) -> str:
    return _plain(id if len(id) <= 44 else f"{id[:22]}…{id[-21:]}")


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # a dollar sign would start a formula
