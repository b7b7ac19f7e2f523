"""`python -m studies.fleet risk`: failure warnings and false alarms of risk predictors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rmetric.evaluation import intervals
from rmetric.evaluation.intervals import Estimate
from rmetric.reporting.style import style
from studies.common.renderers import to_text
from studies.common.table import Table, percent, show
from studies.fleet import gpu_failures, published
from studies.fleet.gpu_usage import JobConditions
from studies.fleet.recorded import evaluate_recorded
from studies.fleet.risk_estimates import Strata, firing, precision
from studies.fleet.risk_evaluation import EvaluationPlan, evaluate
from studies.fleet.risk_figure import CAPTION, build_figure
from studies.fleet.risk_figure import NAME as FIGURE
from studies.fleet.risk_tables import KNOWN_FIRING, SHARE, tables
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
    write(options.out, made, {FIGURE: figure}, provenance(plan, job), PACKAGES)
    if options.out == OUT and PAGE.exists():
        refresh(PAGE, OUT, (FIGURE, CAPTION), {"summary": bullets(summary(made, strata))})
    print("\n".join(to_text(table) for table in made))
    print(f"tables, figure and provenance.json: {options.out}")
    return 0


def provenance(plan: EvaluationPlan, job: JobConditions) -> dict[str, Any]:
    """Provenance: everything needed to reproduce the results besides the code."""
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
            "signs": gpu_failures.SIGNS_OF,
            "ends": gpu_failures.ENDS_OF,
            "median_lead_hours": gpu_failures.MEDIAN_LEAD_HOURS,
            "lead_spread": gpu_failures.LEAD_SPREAD,
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
