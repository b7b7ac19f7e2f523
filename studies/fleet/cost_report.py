"""`python -m studies.fleet cost`: value of a guard to a job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rmetric._util.errors import require
from rmetric.reporting.style import style
from studies.common.markers import fill, parts
from studies.common.renderers import to_text, write_tables
from studies.common.table import Table
from studies.fleet import cost
from studies.fleet.cost import Measured, measure
from studies.fleet.cost_figure import CAPTION, Point, build_figure, measured_points
from studies.fleet.cost_figure import NAME as FIGURE
from studies.fleet.cost_findings import sentences, training_failure_lines
from studies.fleet.cost_tables import Get, tables
from studies.fleet.guarded_job import SHARES
from studies.fleet.job_settings import FleetJob
from studies.fleet.training_failures import outcomes, table
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

    # Made twice: once to see which jobs are asked for, once of what they gave.
    everything(note, points)
    found = measure(jobs, options.replications, options.jobs)
    made, figure = everything(found.__getitem__, points)
    about = provenance(points, options.replications)
    write(options.out, made, {FIGURE: figure}, about, PACKAGES)
    if options.out == OUT and PAGE.exists():
        refresh(PAGE, OUT, (FIGURE, CAPTION), words(found.__getitem__))
    print("\n".join(to_text(table) for table in made))
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
    """Tables and figure of what `get` has of each job."""
    with np.errstate(divide="ignore", invalid="ignore"), style():
        return tables(get), build_figure(get, points)


def words(get: Get) -> dict[str, str]:
    """The page's sentences, by the names of their places."""
    return {name: bullets(lines) for name, lines in sentences(get).items()}


def provenance(points: Sequence[Point], replications: int) -> dict[str, Any]:
    """Provenance: everything needed to reproduce the results besides the code."""
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
