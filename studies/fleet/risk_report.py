"""`python -m studies.fleet risk`: failure warnings and false alarms of risk predictors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from rmetric.evaluation import intervals
from rmetric.evaluation.intervals import Estimate
from rmetric.reporting.style import CYCLE, GREY, TEXT_WIDTH, style
from studies.common.renderers import to_text
from studies.common.table import Table, percent, show
from studies.fleet import gpu_usage, published
from studies.fleet import risk_tables as estimates
from studies.fleet.gpu_usage import JobConditions
from studies.fleet.predictors import CURVES, PREDICTORS
from studies.fleet.recorded import evaluate_recorded
from studies.fleet.risk_evaluation import HORIZONS, EvaluationPlan, evaluate
from studies.fleet.risk_tables import KNOWN_FIRING, SHARE, Strata, firing, precision, tables
from studies.fleet.writing import bullets, refresh, write

NAME = "risk"
HELP = "recall and false alarms of predictors of GPU failures"
OUT = Path("studies", "fleet", "results", "risk")
PAGE = Path("docs", "fleet_risk.md")  # made anew with the results in OUT
COMMAND = "python -m studies.fleet risk"
PACKAGES = ("numpy", "scipy", "joblib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = EvaluationPlan()
    parser.add_argument("--gpus", type=int, default=plan.gpus, help="healthy GPUs (%(default)s)")
    parser.add_argument("--days", type=float, default=plan.days, help="of each (%(default)g)")
    parser.add_argument(
        "--failures", default=str(plan.with_sign), metavar="N|FILE",
        help="simulated, with a sign and as many without (%(default)s); with --recorded a JSONL "
        "file of failures: gpu, time and, where there are several, node",
    )  # fmt: skip
    parser.add_argument(
        "--contained", type=int, default=plan.contained,
        help="contained errors without a failure (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument(
        "--recorded", type=Path, metavar="FILE",
        help="judge recorded readings (JSONL) instead of simulated ones; nothing is written",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.recorded is not None:
        if options.failures.isdigit() and not Path(options.failures).exists():
            raise ValueError("--recorded needs --failures FILE, the failures that you know of")
        print(to_text(evaluate_recorded(options.recorded, Path(options.failures))))
        return 0
    if not options.failures.isdigit():
        raise ValueError(
            f"--failures is {options.failures!r}: a number, unless --recorded is given"
        )
    plan = EvaluationPlan(
        gpus=options.gpus, days=options.days, contained=options.contained, seed=options.seed,
        with_sign=int(options.failures), without=int(options.failures),
    )  # fmt: skip
    job = JobConditions()
    strata = evaluate(plan, job, options.jobs)
    made = tables(strata)
    with style():
        figure = build_figure(strata)
    write(options.out, made, {NAME: figure}, provenance(plan, job), PACKAGES)
    if options.out == OUT and PAGE.exists():
        refresh(PAGE, OUT, (NAME, CAPTION), {"summary": bullets(summary(made, strata))})
    print(f"tables, figure and provenance.json: {options.out}")
    return 0


def provenance(plan: EvaluationPlan, job: JobConditions) -> dict[str, Any]:
    """Settings and inputs that the results depend on."""
    return {
        "command": COMMAND,
        "plan": asdict(plan),
        "published": {
            "interruptions": published.INTERRUPTIONS,
            "gpu_days": published.GPU_DAYS,
            "hours_between_memory_errors": published.HOURS_BETWEEN_MEMORY_ERRORS,
            "share_with_a_sign": SHARE,
        },
        "by_hand": {
            "job": asdict(job),
            "signs": gpu_usage.SIGNS_OF,
            "ends": gpu_usage.ENDS_OF,
            "median_lead_hours": gpu_usage.MEDIAN_LEAD_HOURS,
            "lead_spread": gpu_usage.LEAD_SPREAD,
        },
        "bootstrap": {"seed": intervals.SEED, "resamples": intervals.NUM_RESAMPLES},
    }


def summary(made: Sequence[Table], strata: Strata) -> tuple[str, ...]:
    """Findings of the risk study as sentences with the numbers of the tables."""
    bound, day, hour, *_ = made
    [of_published] = [row for row in bound.rows if row[0] == 100 * SHARE]
    rows = {str(row[0]): row for row in day.rows}
    in_an_hour = {str(row[0]): row for row in hour.rows}
    guard, coded = rows["Score at 0.95 with rules"], rows["Score as the code behaves, 0.10"]
    described = rows["Score as described, 0.95"]
    rare = precision(Estimate(SHARE, SHARE, SHARE), Estimate(0.01, 0.01, 0.01))
    fires = percent(firing(strata, "24 h", "coded_010"))
    return (
        f"{show(of_published[0], 0)} % of a GPU's failures have any sign before them. No predictor "
        f"can announce more of them but by chance, that is {show(of_published[2], 1)} % of all "
        "unexpected interruptions.",
        "Failures are rare: a predictor that announces every failure with a sign and gives one "
        f"false alarm in 100 GPU-days is right in {show(100 * rare.point, 1)} % of its alarms.",
        f"The score as described, at 0.95, announces {show(described[1], 1)} % of a GPU's failures "
        f"with {show(described[10], 1)} false alarms a 1000 GPU-days: it does not fire.",
        f"At 0.10, as the code behaves, it announces {show(coded[1], 1)} %, with "
        f"{show(coded[9], 1)} false alarms a GPU-day; alarms of that rate at random times announce "
        f"{show(coded[4], 1)} %. It fires on {show(fires, 1)} % of the readings of healthy GPUs "
        f"(running the original code on a healthy day of its own showed {KNOWN_FIRING} %).",
        f"With rules, the guard announces {show(guard[1], 1)} % within a day and "
        f"{show(in_an_hour[str(guard[0])][1], 1)} % within an hour, "
        f"{show(guard[2], 1)} % of those with a sign; {show(guard[6], 1)} % of its alarms are "
        f"right, and {show(guard[10], 1)} are false a 1000 GPU-days. "
        f"It detects {show(guard[5], 1)} % only as they happen: too late for a save, in time to "
        "leave the GPU out of the restart.",
    )


# -- the figure

CAPTION = (
    "GPU failures announced against false alarms, where one in five failures has a sign (dotted: "
    "no more can be announced but by chance). Symbols are the predictors, lines what every "
    "threshold on a signal would give; a line turns back where a lower threshold merges alarms "
    "into one. Grey: what random alarms of the same rate announce. Bars are 95 % intervals; no "
    "false alarm was seen of those at the left edge. The vertical axis has a square-root scale."
)
CURVE_TITLES = {
    "risk": "score as described",
    "coded": "score as the code behaves",
    "temperature": "temperature",
    "corrected": "corrected ECC in an hour",
}
COLOURS = dict(zip(CURVES, CYCLE, strict=False))
#: Predictors with a symbol, and the curve whose colour they share, if any.
SYMBOLS = {
    "score_095": ("s", "risk"),
    "score_010": ("o", "risk"),
    "coded_010": ("o", "coded"),
    "guard": ("*", ""),
    "temperature": ("D", "temperature"),
    "uncorrected": ("v", ""),
    "corrected": ("^", "corrected"),
    "xid": ("P", ""),
    "hourly": ("x", ""),
}
LINEAR_BELOW = 1e-4


def build_figure(strata: Strata) -> Figure:
    """A panel for each horizon; draw and save it inside `style()`."""
    figure = Figure(figsize=(TEXT_WIDTH, 3.5))
    panels = figure.subplots(1, len(HORIZONS), sharey=True)
    figure.subplots_adjust(left=0.08, right=0.985, bottom=0.125, top=0.705, wspace=0.08)
    for letter, axes, horizon in zip("ab", panels, HORIZONS, strict=True):
        _chance(axes, horizon)
        for signal in CURVES:
            _curve(axes, strata, horizon, signal)
        for name in SYMBOLS:
            _point(axes, strata, horizon, name)
        _dress(axes, f"({letter}) a failure follows within {horizon}")
    panels[0].set_ylabel("GPU failures announced")
    handles, labels = panels[0].get_legend_handles_labels()
    plain = [getattr(handle, "lines", [handle])[0] for handle in handles]  # without error bars
    figure.legend(plain, labels, loc="upper center", ncols=3)
    return figure


def _chance(axes: Axes, horizon: str) -> None:
    rates = np.concatenate([[0.0], np.geomspace(LINEAR_BELOW, 40.0, 200)])
    found = [estimates.by_chance(estimates.Estimate(rate, rate, rate), horizon) for rate in rates]
    axes.plot(rates, found, color=GREY, linewidth=0.8, label="by chance")
    axes.axhline(SHARE, color=GREY, linewidth=0.8, linestyle=":", label="have a sign")


def _curve(axes: Axes, strata: Strata, horizon: str, signal: str) -> None:
    names = [f"{signal}@{threshold:g}" for threshold in CURVES[signal]]
    along = [estimates.false_alarms(strata, horizon, name).point for name in names]
    up = [estimates.recall(strata, SHARE, horizon, name).point for name in names]
    axes.plot(along, up, color=COLOURS[signal], linewidth=0.9, label=CURVE_TITLES[signal])


def _point(axes: Axes, strata: Strata, horizon: str, name: str) -> None:
    marker, signal = SYMBOLS[name]
    false = estimates.false_alarms(strata, horizon, name)
    found = estimates.recall(strata, SHARE, horizon, name)
    colour = COLOURS.get(signal, "black")
    axes.errorbar(
        false.point, found.point,
        xerr=[[false.point - false.low], [false.high - false.point]],
        yerr=[[found.point - found.low], [found.high - found.point]],
        marker=marker, color=colour, linestyle="", elinewidth=0.5, alpha=0.9,
        # Hollow, so that others at the same place are seen through it.
        markerfacecolor="none" if marker == "s" else colour,
        markersize={"*": 8, "s": 8}.get(marker, 5),
        label=next(predictor.title for predictor in PREDICTORS if predictor.name == name),
        zorder=5, clip_on=False,
    )  # fmt: skip


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=7.5)
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW, linscale=0.5)
    # Roots give room to the few failures that can be announced.
    axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    axes.set(xlim=(-2e-5, 45.0), ylim=(0.0, 1.03), xlabel="false alarms a GPU-day")
    axes.set_yticks([0, 0.01, 0.05, 0.1, SHARE, 0.5, 1])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks([0, 1e-4, 1e-3, 1e-2, 0.1, 1, 10])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
