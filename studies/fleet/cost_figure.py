"""Figure of the cost study: break-even of emergency checkpoints."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmetric.reporting.style import BLACK, BLUE, GREEN, GREY, ORANGE, TEXT_WIDTH, VERMILION
from studies.fleet import published
from studies.fleet.cost import RATES, RECALLS, TODAY, a_job
from studies.fleet.cost_tables import BIG, BREAK_EVEN_SIZES, Get, break_even
from studies.fleet.job_settings import FailurePredictor

NAME = "when_emergency_saves_pay"
CAPTION = (
    f"(a) to (c): what warnings add to the ETTR of a job on {BIG:,} GPUs that saves at "
    "Young/Daly's interval, in percentage points with 95 % intervals, against false alarms, by "
    "recall; below 0 the job does better without warnings. Dotted: the false alarms of the "
    "predictor measured in arXiv 2605.09370. (c): after the emergency save the suspected node is "
    "taken out. (d): a predictor pays above the line of its fleet; the marked ones are measured "
    "or, where they are ours, simulated (docs/fleet_risk.md), recall within an hour, over all "
    "interruptions of a job. Failure rate of RSC-1, warnings 10 minutes ahead in the mean, a node "
    "is always there."
)
MOST_ALARMS = 0.1  # in panel (d)
ALARMS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
COLOURS = dict(zip(RECALLS, (BLUE, GREEN, ORANGE, VERMILION), strict=True))
SIZE_COLOURS = dict(zip(BREAK_EVEN_SIZES, (BLUE, ORANGE, VERMILION), strict=True))
LINES = {"synchronous": "--", "asynchronous": "-"}
#: Results of `python -m studies.fleet risk` with an hour's horizon, and what is shown of them.
RISK = Path("risk", "risk_1h.csv")


class Point(NamedTuple):
    """A predictor: share of all interruptions of a job that it announces, false alarms."""

    name: str
    recall: float
    false_alarms_per_gpu_day: float


def build_figure(get: Get, points: Sequence[Point]) -> Figure:
    figure = Figure(figsize=(TEXT_WIDTH, 5.2), layout="constrained")
    axes = figure.subplots(2, 2)
    _gains(axes[0, 0], get, "synchronous", False, "(a) synchronous saves: 120 s")
    _gains(
        axes[0, 1], get, "asynchronous", False, "(b) asynchronous saves: 20 s, durable after 120 s"
    )
    _gains(axes[1, 0], get, "asynchronous", True, "(c) as (b), and the suspected node is dropped")
    _break_even(axes[1, 1], get, points)
    return figure


def _gains(axes: Axes, get: Get, saves: str, drops: bool, title: str) -> None:
    base = get(a_job(BIG, saves))
    for recall in RECALLS:
        gains = [
            get(
                a_job(
                    BIG,
                    saves,
                    FailurePredictor(recall=recall, false_alarms_per_gpu_day=alarms, drops=drops),
                )
            ).gain(base)
            for alarms in ALARMS
        ]
        point, low, high = np.array(gains).T
        axes.plot(ALARMS, point, "o-", color=COLOURS[recall], label=f"{recall:g}")
        axes.fill_between(ALARMS, low, high, color=COLOURS[recall], alpha=0.2, lw=0)
    axes.axhline(0, color=BLACK, lw=0.8)
    axes.axvline(TODAY.false_alarms_per_gpu_day, color=GREY, ls=":")
    axes.set_xscale("symlog", linthresh=1e-4, linscale=0.5)
    axes.set_xticks(ALARMS[:2] + ALARMS[3::2], ["0", "0.0001", "0.001", "0.01"])
    axes.minorticks_off()
    axes.set(title=title, xlabel="false alarms a GPU-day", ylabel="gain in ETTR (points)")
    axes.set_xlim(-1e-5, ALARMS[-1] * 1.1)
    if drops:
        axes.set_ylim(bottom=-8, top=4)
    else:
        axes.legend(title="recall", ncols=2, loc="upper right")


def _break_even(axes: Axes, get: Get, points: Sequence[Point]) -> None:
    alarms = np.geomspace(1e-5, 1e-1, 50)
    failures_per_gpu_day = RATES["RSC-1"] / 8
    for size in BREAK_EVEN_SIZES:
        for saves, line in LINES.items():
            paid_for = break_even(get, size, saves).paid_for.point
            recall = alarms / failures_per_gpu_day / paid_for
            axes.plot(alarms, recall, line, color=SIZE_COLOURS[size],
                      label=f"{size:,} GPUs" if saves == "asynchronous" else None)  # fmt: skip
    axes.plot([], [], "--", color=GREY, label="synchronous saves")
    for point in points:
        _mark(axes, point)
    axes.set(xscale="log", yscale="log", xlim=(1e-5, MOST_ALARMS), ylim=(5e-4, 1.0))
    axes.set(
        title="(d) pays above the line of its fleet",
        xlabel="false alarms a GPU-day",
        ylabel="recall",
    )
    axes.legend(loc="lower right")


def _mark(axes: Axes, point: Point) -> None:
    """Plot a predictor; at the edge with its number if it is out of range."""
    alarms, name, beyond = point.false_alarms_per_gpu_day, point.name, False
    if alarms > MOST_ALARMS:
        alarms, name, beyond = 0.8 * MOST_ALARMS, f"{name}: {alarms:.0f} a GPU-day", True
    place = (max(alarms, 1.2e-5), point.recall)
    axes.plot(*place, ">" if beyond else "*", color=BLACK, ms=5 if beyond else 7)
    axes.annotate(
        name, place, xytext=(-6, 0) if beyond else (6, 0), textcoords="offset points",
        ha="right" if beyond else "left", va="center", fontsize=6.5,
    )  # fmt: skip


def measured_points(results: Path) -> list[Point]:
    """The published predictor, and ours where `results`/risk has the table of the risk study."""
    today = Point("504 B200", TODAY.recall, TODAY.false_alarms_per_gpu_day)
    path = results / RISK
    return [today, *(_risk_points(path) if path.exists() else ())]


def _risk_points(path: Path) -> Iterator[Point]:
    share = published.NUM_OF_A_GPU / published.NUM_INTERRUPTIONS
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            try:
                recall = float(row["GPU failures announced (%)"]) / 100
                alarms = float(row["False alarms a GPU-day"])
            except (KeyError, ValueError):
                raise ValueError(
                    f"{path}: {row} is not as `python -m studies.fleet risk` leaves it"
                ) from None
            if row["Predictor"] in SHOWN:
                yield Point(SHOWN[row["Predictor"]], recall * share, alarms)


#: Of the predictors of that table.
SHOWN = {
    "Score at 0.95 with rules": "our rules",
    "Score as the code behaves, 0.10": "score at 0.10",
}
