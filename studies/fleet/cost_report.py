"""`python -m studies.fleet cost`: value of a guard to a job."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmetric._util.errors import require
from rmetric.evaluation import Estimate
from rmetric.reporting.style import BLACK, BLUE, GREEN, GREY, ORANGE, TEXT_WIDTH, VERMILION, style
from studies.common.csv_rows import read_dicts
from studies.common.markers import fill, parts
from studies.common.renderers import to_text, write_tables
from studies.common.table import Table
from studies.fleet import cost, published, training_failures
from studies.fleet.closed_form import most_an_emergency_saves
from studies.fleet.cost import RATES, RECALLS, SAVES, TODAY, Measured, a_job, measure
from studies.fleet.cost_tables import (
    BIG,
    BREAK_EVEN_SIZES,
    LEADS,
    VARIANTS,
    Get,
    break_even,
    shrink_jobs,
    tables,
    variant,
    ways,
)
from studies.fleet.guarded_job import SHARES
from studies.fleet.job_settings import FailurePredictor, FleetJob
from studies.fleet.training_failures import Outcomes, outcomes, table
from studies.fleet.writing import bullets, refresh, write

NAME = "cost"
HELP = "what emergency saves, shrinking and quick restarts are worth to a job on many GPUs"
OUT = Path("studies", "fleet", "results", "cost")
PAGE = Path("docs", "fleet_cost.md")  # made anew with the results in OUT
COMMAND = "python -m studies.fleet cost"
PACKAGES = ("numpy", "scipy", "joblib", "simpy")
REPLICATIONS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replications", type=int, default=REPLICATIONS, metavar="N",
        help="seeds of each job, at least 2 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only-closed-forms", action="store_true",
        help="make only table 8, which needs no simulation, and its part of the page",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    require("--replications", options.replications, options.replications >= 2, "at least 2")
    if options.only_closed_forms:
        return closed_forms(options.out)
    points = measured_points(options.out.parent)
    jobs: dict[FleetJob, None] = {}

    def note(job: FleetJob) -> Measured:
        jobs[job] = None
        return PLACEHOLDER

    # Made twice: once to see which jobs are requested, once of what they gave.
    everything(note, points)
    found = measure(jobs, options.replications, options.jobs)
    made, figure = everything(found.__getitem__, points)
    about = provenance(points, options.replications)
    write(options.out, made, {FIGURE: figure}, about, PACKAGES)
    if options.out == OUT and PAGE.exists():
        refresh(PAGE, OUT, (FIGURE, CAPTION_OF_COST), sentences(found.__getitem__))
    print(f"tables, figure and provenance.json: {options.out}")
    return 0


def closed_forms(folder: Path, page: Path = PAGE) -> int:
    """Make table 8 and its sentences; all else in the folder and on the page stays."""
    found = outcomes()
    made = table(found)
    write_tables([made], folder)
    if folder == OUT and page.exists():
        new = {f"words {made.name}": bullets(training_failure_lines(found))}
        fill(page, (parts(page) | new).get, new)
    print(to_text(made))
    return 0


#: Of a job that is not simulated yet.
PLACEHOLDER = Measured(np.array([0.5, 0.6]), {name: np.zeros(2) for name in SHARES})


def everything(get: Get, points: Sequence[Point]) -> tuple[list[Table], Figure]:
    with np.errstate(divide="ignore", invalid="ignore"), style():
        return tables(get), build_figure(get, points)


def provenance(points: Sequence[Point], replications: int) -> dict[str, Any]:
    """Settings and inputs that the results depend on."""
    return {
        "command": COMMAND,
        "replications": replications,
        "seeds": [0, replications - 1],
        "failures_per_node_day": cost.RATES,
        "by_hand": {
            "saves": {name: asdict(saves) for name, saves in cost.SAVES.items()},
            "fleet": asdict(cost.a_job(8, "synchronous").fleet),
            "mean_lead_seconds": cost.TODAY.mean_lead_seconds,
            "failures_of_a_job": [cost.LEAST_FAILURES, cost.MOST_FAILURES],
            "saves_of_a_job": cost.MOST_SAVES,
        },
        "points": [point._asdict() for point in points],
    }


# -- findings


def sentences(get: Get) -> dict[str, str]:
    """The page's lists of sentences, by the names of their places."""
    found = {
        "words most": _most(get),
        "words warning": _warning(get),
        "words shrinking": _shrinking(get),
        "words matters": _matters(get),
        "words training_failures": training_failure_lines(outcomes()),
    }
    return {name: bullets(lines) for name, lines in found.items()}


def points(gain: Estimate) -> str:
    return f"{gain.point:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}] points"


def _most(get: Get) -> list[str]:
    lines = []
    for saves in SAVES:
        job = a_job(BIG, saves)
        mtbf, interval = job.fleet.seconds_between_failures, job.saves.interval_seconds or 0.0
        bound = 100 * most_an_emergency_saves(
            mtbf=mtbf, interval=interval, durable=job.saves.durable_seconds, recall=TODAY.recall
        )
        won = get(a_job(BIG, saves, FailurePredictor(recall=1.0))).gain(get(job))
        lines.append(
            f"{BIG:,} GPUs, {saves} saves: a failure every {mtbf / 3600:.1f} h, a save every "
            f"{interval / 60:.0f} minutes. A predictor with a recall of {TODAY.recall:g} can gain "
            f"at most {bound:.1f} points of ETTR; a predictor with recall 1 and no false alarms "
            f"gains {points(won)} in the simulation."
        )
    return lines


def verdict(gain: Estimate) -> str:
    """Word for a gain, decided by its interval and not by the point estimate."""
    return "pays" if gain.low > 0 else "costs" if gain.high < 0 else "makes no clear difference"


def _warning(get: Get) -> list[str]:
    short, *_, long = LEADS
    usual, _, again, dropped = VARIANTS
    alarms = TODAY.false_alarms_per_gpu_day

    def gain(lead: float, words: str, rate: float = 0.0) -> str:
        return points(variant(get, "asynchronous", lead, words, rate))

    return [
        f"Earlier is not better. With a recall of 0.5, no false alarms and asynchronous saves on "
        f"{BIG:,} GPUs, one save at the first sign wins {gain(short, usual)} with a mean lead of "
        f"{short / 60:.0f} minutes and {gain(long, usual)} with {long / 60:.0f}: the save is old "
        "when the failure comes, and the regular ones would have been made anyway.",
        f"Saving again while the sign stands wins {gain(short, again)} and {gain(long, again)}; "
        f"with today's false alarms {gain(short, again, alarms)} and {gain(long, again, alarms)}.",
        f"Taking the node out wins {gain(short, dropped)} and {gain(long, dropped)}, however early "
        f"the sign; with today's false alarms, each of which costs a restart, "
        f"{gain(short, dropped, alarms)} and {gain(long, dropped, alarms)}.",
    ]


def _shrinking(get: Get) -> list[str]:
    lines = []
    for size, share, words in ((64, 0.0, "no spare"), (BIG, 0.0, "no spare"), (BIG, 0.01, "1 %")):
        waits, shrinks, _ = (100 * get(job).ettr.point for job in shrink_jobs(size, share).values())
        lines.append(
            f"{size:,} GPUs, {words}{' of spares' if share else ''}: ETTR {waits:.1f} % waiting, "
            f"{shrinks:.1f} % shrinking."
        )
    return lines


def _matters(get: Get) -> list[str]:
    jobs = ways(BIG)
    first, second, *others = jobs
    gains = {f"{second.capitalize()} instead of synchronous ones": (second, first)}
    gains |= {w.removeprefix("asynchronous, ").capitalize(): (w, second) for w in others}
    return [
        f"{words}: {points(get(jobs[new]).gain(get(jobs[old])))}."
        for words, (new, old) in gains.items()
    ]


def training_failure_lines(found: Outcomes) -> list[str]:
    lines = []
    for rate in training_failures.DIVERGENCE_RATES:
        lost = training_failures.losses(rate, 3600.0, found)
        saved = training_failures.gain(rate, 3600.0, found)
        lines.append(
            f"{rate:g} failures in 1,000 GPU-days, a person acts after 1 h: {lost.hourly:.2f} of "
            f"1,000 GPU-days are lost with hourly saves, {lost.quick:.2f} with asynchronous saves "
            f"and fast restarts, {lost.rescue:.2f} with rescue, which {verdict(saved)} "
            f"({saved.point:+.2f} [{saved.low:+.2f}, {saved.high:+.2f}] GPU-days) before its "
            f"snapshots: they may take {max(saved.point, 0) / 10:.2g} % of a step's time."
        )
    return lines


# -- the figure

FIGURE = "when_emergency_saves_pay"
CAPTION_OF_COST = (
    f"(a) to (c): what warnings add to the ETTR of a job on {BIG:,} GPUs that saves at "
    "Young/Daly's interval, in percentage points with 95 % intervals, against false alarms, by "
    "recall; below 0 warnings do harm. Dotted: the false alarms of the "
    "predictor measured in arXiv 2605.09370. (c): after the emergency save the suspected node is "
    f"taken out. (d): a predictor pays above the line of its fleet; at {BIG:,} GPUs both lines "
    "coincide. The marked ones are measured or, ours, simulated "
    "(docs/fleet_risk.md), recall within an hour, over all interruptions of a job. Failure rate "
    "of RSC-1, warnings 10 minutes ahead in the mean, a node is always there."
)
MOST_ALARMS = 0.1  # in panel (d)
ALARMS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
COLOUR_OF_RECALL = dict(zip(RECALLS, (BLUE, GREEN, ORANGE, VERMILION), strict=True))
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
        predictor = FailurePredictor(recall=recall, drops=drops)
        warned = (replace(predictor, false_alarms_per_gpu_day=alarms) for alarms in ALARMS)
        gains = [get(a_job(BIG, saves, noisy)).gain(base) for noisy in warned]
        point, low, high = np.array(gains).T
        axes.plot(ALARMS, point, "o-", color=COLOUR_OF_RECALL[recall], label=f"{recall:g}")
        axes.fill_between(ALARMS, low, high, color=COLOUR_OF_RECALL[recall], alpha=0.2, lw=0)
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
        axes.legend(title="recall", ncols=2, loc="upper right", columnspacing=0.6, handlelength=1.2)


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
        name, place, xytext=(-6, 0) if beyond else (6, 0), textcoords="offset points", va="center",
        ha="right" if beyond else "left", fontsize=6.5, bbox=dict(fc="w", ec="none", pad=0.8),
    )  # fmt: skip


def measured_points(results: Path) -> list[Point]:
    """The published predictor, and ours where `results`/risk has the table of the risk study."""
    today = Point("504 B200", TODAY.recall, TODAY.false_alarms_per_gpu_day)
    path = results / RISK
    return [today, *(_risk_points(path) if path.exists() else ())]


def _risk_points(path: Path) -> Iterator[Point]:
    share = published.NUM_OF_A_GPU / published.NUM_INTERRUPTIONS
    for row in read_dicts(path):
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
