"""Every detector on every data set: one command makes all tables, figures and the page.

    python -m rmetric.evaluation                                  everything
    python -m rmetric.evaluation --data lab --detectors ewma      a new detector beside the rest

With `--detectors` the rows that are there already stay, and tables, figures and page are made
of the old and the new ones. See docs/benchmark.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from rmetric.evaluation.benchmark import (
    chosen_detectors,
    merged,
    results_of,
    trace_detectors,
    with_references,
    write_results,
)
from rmetric.evaluation.data_sets import LAB_FOLDER, LAB_PARTS, DataSet, lab, stress
from rmetric.evaluation.verdicts import Costs
from rmetric.logs import LogError

DATA_SETS = ("stress", "lab", "real")
OUT = Path("results", "detection")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m rmetric.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--data", nargs="+", choices=DATA_SETS, default=["stress", "lab"])
    out.add_argument(
        "--detectors", nargs="+", metavar="NAME",
        help="only these; rows of others that are in --out already stay (default: all, anew)",
    )  # fmt: skip
    out.add_argument("--out", type=Path, default=OUT, help=f"where results go (default: {OUT})")
    out.add_argument("--lab", type=Path, default=LAB_FOLDER, metavar="FOLDER")
    out.add_argument(
        "--lab-part", nargs="+", choices=LAB_PARTS, default=["calibration", "development"]
    )
    out.add_argument("--open-sealed", action="store_true", help="allow --lab-part test")
    out.add_argument("--stress", type=Path, default=Path("stress_study"), metavar="FOLDER")
    costs = Costs()
    for name, what in (
        ("false_alarm", "minutes lost by a false alarm"),
        ("missed_failure", "minutes lost by a failure that was not announced"),
        ("lead_step", "minutes saved by each step of lead"),
        ("lead_cap", "steps of lead beyond which nothing more is saved"),
    ):
        out.add_argument(
            f"--cost-{name.replace('_', '-')}", type=float, default=getattr(costs, name),
            metavar="X", help=f"{what} (default: {getattr(costs, name):g})",
        )  # fmt: skip
    out.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all well; 1: some inputs could not be used; 2: nothing was done."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except (ValueError, OSError, LogError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    from rmetric.reporting.detection.report import report

    names = chosen_detectors(options.detectors)
    costs = Costs(
        **{
            name: getattr(options, f"cost_{name}")
            for name in ("false_alarm", "missed_failure", "lead_step", "lead_cap")
        }
    )
    skipped = 0
    for name in options.data:
        data = LOADERS[name](options)
        for problem in data.skipped:
            print(f"skipped {problem}", file=sys.stderr)
        skipped += len(data.skipped)
        judge(data, names, costs, options)
    for line in report(options.out, options.data):
        print(line)
    return 1 if skipped else 0


def judge(data: DataSet, names: Sequence[str], costs: Costs, options: argparse.Namespace) -> None:
    with tqdm(total=len(data.runs), unit="run", desc=data.name, disable=None) as bar:
        traces = trace_detectors(
            with_references(names), data.runs, num_processes=options.processes, advance=bar.update
        )
    results = {
        "name": data.name,
        "title": data.title,
        "notes": [*data.notes, f"{data.num_groups} groups are drawn: {data.group}."],
        "inputs": data.inputs,
        "costs": vars(costs),
        "rows": results_of(data, traces, names, costs),
    }
    path = options.out / f"{data.name}.json"
    write_results(path, merged(path, results) if options.detectors else results)


def _lab(options: argparse.Namespace) -> DataSet:
    return lab(options.lab_part, options.lab, open_sealed=options.open_sealed)


def _stress(options: argparse.Namespace) -> DataSet:
    return stress(options.stress)


LOADERS: dict[str, Callable[[argparse.Namespace], DataSet]] = {"lab": _lab, "stress": _stress}


if __name__ == "__main__":
    sys.exit(main())
