"""Figure 5: lead time of the metric's alerts against the time from fault to failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rmetric.evaluation import Trace, judge
from rmetric.records import Run
from rmetric.reporting.style import GREY, TEXT_WIDTH, VERMILION
from studies.paper.claims import PAPER_LEAD_STEPS
from studies.paper.figures.failure_process import in_order, look_of, name_of

_LEAD_MARGINS = {"left": 0.085, "right": 0.985, "bottom": 0.13, "top": 0.8, "wspace": 0.08}
_TICKS = (0, 1, 10, 100, 1000, 10_000)


def failures(runs: Sequence[Run], traces: Sequence[Trace]) -> pd.DataFrame:
    """The failing runs whose onset and failure are both known, in the order of the runs.

    `time_left` is from onset to failure; leads are failure minus first alarm, nan without one:
    `published` at any time, `causal` if that alarm came in between, `any_alert` of those in
    between.
    """
    found = pd.DataFrame({
        "kind": [name_of(run.truth) if run.truth else "" for run in runs],
        "time_left": [_time_left(run) for run in runs],
        "published": judge(runs, traces, "published").lead_steps,
        "causal": judge(runs, traces, "causal").lead_steps,
        "any_alert": judge(runs, traces, "causal_unlatched").lead_steps,
    })  # fmt: skip
    return found.dropna(subset=["time_left"]).reset_index(drop=True)


def _time_left(run: Run) -> float:
    truth = run.truth
    if not (truth and truth.failed and truth.onset_step is not None and truth.failure_step):
        return np.nan
    return truth.failure_step - truth.onset_step


def lead_times(runs: Sequence[Run], traces: Sequence[Trace]) -> Figure:
    """A point for each failing run: its lead by the published rule and by the causal rule."""
    found = failures(runs, traces)
    figure = Figure(figsize=(TEXT_WIDTH, 3.1))
    left, right = figure.subplots(1, 2, sharex=True, sharey=True, gridspec_kw=_LEAD_MARGINS)
    for axes in (left, right):
        _prepare(axes, found)
    _mark(left, found, "published", filled=True)
    before = (found.published > found.time_left).sum()
    left.set_title(
        f"(a) R-Metric by the published rule: {_number(found.published)} of {len(found)}\n"
        f"announced, {before} before the fault{_mean(found.published)}", loc="left", fontsize=7,
    )  # fmt: skip
    announced = found.causal.notna()
    _mark(right, found[announced], "causal", filled=True)
    _mark(right, found[~announced], "any_alert", filled=False)
    right.set_title(
        f"(b) R-Metric between fault and failure: the first alert in {_number(found.causal)}\n"
        f"of {len(found)} (filled), some alert in {_number(found.any_alert)} (hollow)"
        f"{_mean(found.any_alert)}",
        loc="left", fontsize=7,
    )  # fmt: skip
    left.set_ylabel("lead: failure − alert (steps)")
    right.set_ylabel("")
    looks = [look_of(kind) for kind in in_order(set(found.kind))]
    meanings = [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle="", label=look.title)
        for look in looks
    ]
    meanings += [
        Line2D([], [], color=GREY, linewidth=0.8, label="an alert right at the fault"),
        Line2D([], [], color=VERMILION, linestyle=":",
               label=f"mean lead in the paper: {PAPER_LEAD_STEPS}"),
    ]  # fmt: skip
    figure.legend(handles=meanings, loc="upper center", ncols=6)
    return figure


def _prepare(axes: Axes, found: pd.DataFrame) -> None:
    """Logarithmic from 1 on; what was not announced lies at 0."""
    longest = max([PAPER_LEAD_STEPS, *found.time_left])
    highest = np.nanmax([longest, *found.published])
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    axes.set(
        xlim=(0, 2 * longest), ylim=(-0.25, 2 * highest), xlabel="fault to failure (steps)",
        yticks=[tick for tick in _TICKS if tick < 2 * highest],
        xticks=[tick for tick in _TICKS if tick < 2 * longest],
    )  # fmt: skip
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda lead, _: f"{lead:g}" if lead else "none")
    edge = np.concatenate([[0], np.geomspace(0.01, 2 * longest, 200)])
    axes.plot(edge, edge, color=GREY, linewidth=0.8)
    axes.fill_between(edge, edge, 2 * highest, color=VERMILION, alpha=0.1, linewidth=0)
    axes.axhline(PAPER_LEAD_STEPS, color=VERMILION, linestyle=":", linewidth=1)
    if found.empty:
        axes.text(0.5, 0.5, "no run failed", transform=axes.transAxes, ha="center")
    axes.text(
        0.03, 0.62, "alert before the fault existed", transform=axes.transAxes, va="top",
        color=VERMILION, fontsize=7,
    )  # fmt: skip


def _mark(axes: Axes, found: pd.DataFrame, leads: str, *, filled: bool) -> None:
    """A point for each failure. An alert at or after the failure announces nothing either."""
    if found.empty:
        return
    kinds = in_order(set(found.kind))
    label = axes.get_xlabel()
    shown = found.assign(time_left=found.time_left.clip(lower=0), lead=found[leads].clip(lower=0))
    sns.scatterplot(
        shown.fillna({"lead": 0.0}), x="time_left", y="lead", hue="kind", style="kind", alpha=0.7,
        palette={kind: look_of(kind).colour for kind in kinds}, linewidth=0.8,
        markers={kind: look_of(kind).marker for kind in kinds},
        s=16 if filled else 40, zorder=4 - filled, clip_on=False, legend=False, ax=axes,
    )  # fmt: skip
    axes.set_xlabel(label)
    points = axes.collections[-1]
    points.set_edgecolor(points.get_facecolor())
    if not filled:
        points.set_facecolor("none")


def _number(leads: pd.Series) -> int:
    return int((leads > 0).sum())


def _mean(leads: pd.Series) -> str:
    return f"; mean lead {leads.mean():.0f}" if leads.notna().any() else ""
