"""Figure 4: the scores at every threshold, under each protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rmetric.detectors import DETECTORS
from rmetric.evaluation import Scores, Trace, evaluate
from rmetric.evaluation import scores as of
from rmetric.evaluation.protocols import Windows, first_alerts, judge_alerts
from rmetric.metric import RMetricConfig
from rmetric.records import Run
from rmetric.reporting.style import BLACK, GREY, MEANING, TEXT_WIDTH, VERMILION
from studies.paper.analysis import is_measured

#: Protocol -> its rule in a few words.
PROTOCOLS = {
    "published": "published rule: any alert, at any step",
    "causal": "causal rule: first alert between fault and failure",
}
#: Wide below narrow, so that curves that coincide are all seen.
LINES: dict[str, dict[str, Any]] = {
    "r_metric": {"color": MEANING["score"], "linewidth": 2, "markersize": 7},
    "r_metric_lambda": {"color": MEANING["failure_rate"], "linewidth": 1.3, "markersize": 5.5},
    "r_metric_sigma": {
        "color": MEANING["gradient_variance"], "linewidth": 1.3, "markersize": 4,
        "linestyle": (0, (4, 2)),
    },
    "r_metric_delta_l": {
        "color": MEANING["loss_drift"], "linewidth": 1.3, "markersize": 2.5,
        "linestyle": (0, (1, 1.5)),
    },
}  # fmt: skip
#: Detectors with one threshold of their own.
MARKS: dict[str, dict[str, Any]] = {
    "loss_rise": {"marker": "P"},
    "loss_z_score": {"marker": "X"},
    "gradient_norm": {"marker": "D", "markersize": 3.5},
    "always": {"marker": "*", "markersize": 8, "markeredgecolor": VERMILION},
}
DETECTORS_NEEDED = (*LINES, *MARKS)
THRESHOLD = RMetricConfig.simulation().threshold
#: R is at most the sum of its weights, here of the larger preset's.
LARGEST = max(sum(preset().weights) for preset in (RMetricConfig, RMetricConfig.authors_simulator))
#: Thresholds in hundredths, so that 0.57 is one of them.
THRESHOLDS = [k / 100 for k in range(round(100 * LARGEST) + 1)]


class Curve(NamedTuple):
    """One detector under one protocol: at each of `THRESHOLDS`, and with its own threshold."""

    sweep: pd.DataFrame
    operating: Scores


def threshold_sweep(
    runs: Sequence[Run], traces: Sequence[Trace], thresholds: Sequence[float], protocol: str
) -> pd.DataFrame:
    """Counts and ratios of one detector with an alarm wherever its scores exceed each threshold."""
    windows = Windows.of(runs)
    # nan is above nothing
    alarms = (trace.scores[:, None] > np.asarray(thresholds) for trace in traces)
    alerts = first_alerts(windows, [trace.steps for trace in traces], alarms)
    outcomes, once = judge_alerts(windows, alerts, protocol), np.ones(len(runs))
    return pd.DataFrame({
        "threshold": thresholds,
        "hits": outcomes.hit @ once,
        "false_alarms": outcomes.false_alarm @ once,
        "precision": of.precision(outcomes, once),
        "recall": of.recall(outcomes, once),
        "f1": of.f1(outcomes, once),
    })  # fmt: skip


def curves(runs: Sequence[Run], traces: dict[str, list[Trace]], protocol: str) -> dict[str, Curve]:
    """The metric and its ablations; the runs of one mode serve all, as modes share theirs."""
    return {
        name: Curve(
            sweep=threshold_sweep(runs, traces[name], THRESHOLDS, protocol),
            operating=evaluate(runs, traces[name], protocol),
        )
        for name in LINES
        if name in traces
    }


def threshold_curves(runs: Sequence[Run], traces: dict[str, list[Trace]]) -> Figure:
    """Precision against recall, and F1 against the threshold; a row for each protocol."""
    figure = Figure(figsize=(TEXT_WIDTH, 4.6))
    panels = figure.subplots(2, 2, gridspec_kw=_CURVE_MARGINS)
    letters = iter("abcd")
    # What the logs do not hold is left out, of the curves and of the legend.
    measured = {name: traces[name] for name in traces if is_measured(traces[name])}
    for (of_recall, of_threshold), (protocol, rule) in zip(panels, PROTOCOLS.items(), strict=True):
        shown = curves(runs, measured, protocol)
        others = {
            name: evaluate(runs, measured[name], protocol) for name in MARKS if name in measured
        }
        _plot_precision(of_recall, shown, others)
        _plot_f1(of_threshold, shown, others["always"])
        for axes in (of_recall, of_threshold):
            axes.set_title(f"({next(letters)}) {rule}", loc="left", fontsize=7.5)
    figure.legend(handles=_meanings(measured), loc="upper center", ncols=4)
    return figure


_CURVE_MARGINS = {
    "left": 0.065, "right": 0.985, "bottom": 0.085, "top": 0.84, "wspace": 0.36, "hspace": 0.45
}  # fmt: skip


def _plot_precision(axes: Axes, shown: dict[str, Curve], others: dict[str, Scores]) -> None:
    recall = np.linspace(0.01, 1, 200)
    for f1 in (0.2, 0.4, 0.6, 0.8):
        possible = recall > f1 / (2 - f1)
        precision = f1 * recall[possible] / (2 * recall[possible] - f1)
        axes.plot(recall[possible], precision, **_EQUAL, zorder=0.5)
        axes.text(1.03, f1 / (2 - f1), f"F1 {f1}", color=GREY, fontsize=7, va="center")
    for name, curve in shown.items():
        here = curve.operating
        axes.plot(curve.sweep.recall, curve.sweep.precision, **LINES[name])
        axes.plot(here.recall.point, here.precision.point, **_point(name), clip_on=False)
    for name, scores in others.items():
        axes.plot(scores.recall.point, scores.precision.point, **_mark(name), clip_on=False)
    if not others["always"].num_failed:
        axes.text(0.5, 0.5, "no run failed: no recall", ha="center")
    axes.set(xlim=(-0.02, 1.0), ylim=(-0.02, 1.02), xlabel="recall", ylabel="precision")


def _plot_f1(axes: Axes, shown: dict[str, Curve], always: Scores) -> None:
    axes.axvline(THRESHOLD, **_THRESHOLD)
    axes.axhline(always.f1.point, **_ALWAYS)
    for name, curve in shown.items():
        axes.plot(curve.sweep.threshold, curve.sweep.f1, **LINES[name])
        f1 = curve.operating.f1
        axes.plot(THRESHOLD, f1.point, **_point(name), clip_on=False)
        if name == "r_metric":
            axes.plot([THRESHOLD] * 2, [f1.low, f1.high], color=GREY, linewidth=3, zorder=1.5)
    axes.set(xlim=(0, max(THRESHOLDS)), ylim=(-0.02, 1.02), xlabel="threshold", ylabel="F1")


_EQUAL: dict[str, Any] = {"color": "#d0d0d0", "linewidth": 0.6}
_THRESHOLD: dict[str, Any] = {"color": VERMILION, "linestyle": "--", "linewidth": 0.8}
_ALWAYS: dict[str, Any] = {"color": VERMILION, "linestyle": ":", "linewidth": 1.0}


def _point(name: str) -> dict[str, Any]:
    """The detector at its own threshold."""
    return {key: LINES[name][key] for key in ("color", "markersize")} | {"marker": "o"}


def _mark(name: str) -> dict[str, Any]:
    plain = {"linestyle": "", "markersize": 5, "markerfacecolor": "white", "zorder": 4}
    return plain | {"markeredgecolor": BLACK, "markeredgewidth": 0.8} | MARKS[name]


def _meanings(measured: Collection[str]) -> list[Artist]:
    lines = {name: look for name, look in LINES.items() if name in measured}
    marks = [name for name in MARKS if name in measured]
    absent = [name for name in (*LINES, *MARKS) if name not in measured]
    return [
        *(Line2D([], [], **look, label=DETECTORS[name].title) for name, look in lines.items()),
        *(Line2D([], [], **_mark(name), label=DETECTORS[name].title) for name in marks),
        Line2D([], [], **_THRESHOLD, label=f"threshold {THRESHOLD:g}"),
        Line2D([], [], **_point("r_metric"), linestyle="", label=f"R-Metric at {THRESHOLD:g}"),
        Line2D([], [], color=GREY, linewidth=3, label="its 95 % interval"),
        Line2D([], [], **_ALWAYS, label="F1 of always alarm"),
        # Without a word a reader would look for the curve.
        *(
            Line2D([], [], linestyle="", label=f"{DETECTORS[name].title}: not logged")
            for name in absent
        ),
    ]
