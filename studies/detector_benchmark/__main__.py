"""Every detector on every data set: one command makes all tables, figures and the page.

    python -m studies.detector_benchmark                                    everything
    python -m studies.detector_benchmark --data lab --detectors loss_ewma   add or replace one row

With `--detectors` the existing rows stay, and tables, figures and page are made from the old and
the new rows. See docs/benchmark.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

import rmetric.detectors
from rmetric._util.errors import exit_code_of, exit_with, fail
from rmetric._util.options import add_jobs
from rmetric._util.strict_json import encode
from rmetric.evaluation import intervals, traces
from rmetric.metric import RMetricConfig
from rmetric.simulation.study import RECIPES, missing_runs, run_study
from studies.common.command import command_parser
from studies.common.provenance import commit, uncommitted_changes, versions
from studies.detector_benchmark.benchmark import (
    PACKAGES,
    Results,
    chosen_detectors,
    left_out,
    merged,
    missed_and_absorbed,
    read_results,
    results_of,
    trace_detectors,
    with_references,
    write_results,
)
from studies.detector_benchmark.cases import Costs
from studies.detector_benchmark.data_sets import (
    LAB_FOLDER,
    LAB_PARTS,
    RESULTS_OF,
    SEALED_RESULTS,
    DataSet,
    Refused,
    lab,
    sha256,
    stress,
)
from studies.detector_benchmark.measure import Judged
from studies.detector_benchmark.peers import installed
from studies.detector_benchmark.real_logs import MANIFEST, real

FROZEN = Path(rmetric.detectors.__file__).parent  # holds what detectors were calibrated to
DATA_SETS = ("stress", "lab", "real")
#: Judged only where --data names them.
SECOND_LAB = {name: part for part, name in RESULTS_OF.items() if part not in LAB_PARTS}
OUT = Path("studies", "detector_benchmark", "results")
PAGE = Path("docs", "benchmark.md")  # made anew with the results in OUT
REAL_LOGS = Path("real_logs")
#: In minutes, by their names in `Costs`.
COSTS = {
    "false_alarm": "minutes lost by a false alarm",
    "missed_failure": "minutes lost by a failure that was not announced",
    "lead_step": "minutes saved by each step of lead",
    "lead_cap": "steps of lead beyond which nothing more is saved",
}


def parser() -> argparse.ArgumentParser:
    out = command_parser("detector_benchmark", __doc__)
    out.add_argument(
        "--data", nargs="+", choices=(*DATA_SETS, *SECOND_LAB), default=list(DATA_SETS)
    )
    out.add_argument(
        "--detectors", nargs="+", metavar="NAME",
        help="only these; rows of others that are in --out already stay (default: all, anew)",
    )  # fmt: skip
    out.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"where results go (default: {OUT})"
    )
    out.add_argument("--lab", type=Path, default=LAB_FOLDER, metavar="DIR")
    out.add_argument(
        "--lab-part", nargs="+", choices=LAB_PARTS, default=["calibration", "development"]
    )
    out.add_argument(
        "--open-sealed", action="store_true",
        help="allow --lab-part test, --data lab2_test, lab3_...: needs --thresholds, keeps date, "
        "commit and digest, and must find what an earlier opening found",
    )  # fmt: skip
    out.add_argument("--thresholds", type=Path, metavar="FILE", help="frozen before the opening")
    out.add_argument("--date", default=str(date.today()), help="of the opening (default: today)")
    out.add_argument(
        "--report", action="store_true",
        help="judge nothing: tables, figures and page anew from the results in --out",
    )  # fmt: skip
    out.add_argument(
        "--stress", type=Path, default=RECIPES["stress"].out, metavar="DIR",
        help=f"simulated where it is not there (default: {RECIPES['stress'].out})",
    )  # fmt: skip
    out.add_argument(
        "--real-logs", type=Path, metavar="DIR", default=REAL_LOGS,
        help=f"holds the files of the manifest, or raw/ with them (default: {REAL_LOGS})",
    )  # fmt: skip
    out.add_argument("--manifest", type=Path, default=MANIFEST, metavar="FILE")
    costs = Costs()
    for name, what in COSTS.items():
        out.add_argument(
            f"--cost-{name.replace('_', '-')}", type=float, default=getattr(costs, name),
            metavar="X", help=f"{what} (default: {getattr(costs, name):g})",
        )  # fmt: skip
    add_jobs(out)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: some inputs could not be used, or no results written; 2: nothing was done."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except (ValueError, OSError) as error:
        return fail(error, exit_code_of(error))


def run(options: argparse.Namespace) -> int:
    from studies.detector_benchmark.report import report

    page = PAGE if options.out == OUT else None
    if options.report:
        print("\n".join(report(options.out, page=page)))
        return 0
    names = chosen_detectors(options.detectors)
    costs = Costs(**{name: getattr(options, f"cost_{name}") for name in COSTS})
    skipped, done = 0, []
    for name in options.data:
        if name == "real" and not options.real_logs.is_dir():
            say(
                f"the public logs are left out: there is no folder {options.real_logs}. Fetch them "
                "(python -m studies.detector_benchmark.fetch) or name theirs with --real-logs"
            )
            skipped += 1
            continue
        data = load(name, options)
        done.append(data.name)
        for problem in data.skipped:
            say(f"skipped {problem}")
        skipped += len(data.skipped)
        judge(data, names, costs, options)
    if not done:
        raise ValueError("there is nothing to judge")
    print("\n".join(report(options.out, done, page)))
    return 1 if skipped else 0


def judge(data: DataSet, names: Sequence[str], costs: Costs, options: argparse.Namespace) -> None:
    say(f"{data.title}: {len(data.runs)} runs, {len(names)} detectors")
    with tqdm(total=len(data.runs), unit="run", desc=data.name, disable=None) as bar:
        seen = trace_detectors(
            with_references(names), data.runs, num_processes=options.jobs, advance=bar.update
        )
    results = {
        "name": data.name,
        "title": data.title,
        "notes": [*data.notes, f"{data.num_groups} groups are drawn: {data.group}."],
        "inputs": data.inputs,
        "costs": vars(costs),
        "made": made(data, options),
        "rows": results_of(data, seen, names, costs, commit()),
    }
    if "calibrated" in names and data.name in ("lab", "lab_test"):
        healthy = data.runs if data.name == "lab" else lab(folder=options.lab).runs
        results["left_out"] = left_out(healthy, data.runs)
    if "calibrated" in names and data.name in ("lab", "lab_test", *SECOND_LAB):
        results |= missed_and_absorbed(data, Judged.of(data.cases, seen["calibrated"]))
    path = options.out / f"{data.name}.json"
    if data.name in SEALED_RESULTS and path.exists():
        check_same(read_results(path), results)
    write_results(path, merged(path, results) if options.detectors else results)


def load(name: str, options: argparse.Namespace) -> DataSet:
    """A data set. A sealed part needs the frozen thresholds, whose digest is recorded."""
    if name == "stress":
        return stress_study(options)
    if name == "real":
        return real(options.real_logs, options.manifest)
    parts = [SECOND_LAB[name]] if name in SECOND_LAB else list(options.lab_part)
    sealed = any(RESULTS_OF[part] in SEALED_RESULTS for part in parts)
    if sealed and options.open_sealed and options.thresholds is None:
        raise Refused("--open-sealed needs --thresholds FILE, whose digest shows what was frozen")
    return lab(parts, options.lab, open_sealed=options.open_sealed)


def stress_study(options: argparse.Namespace) -> DataSet:
    """The study in its folder; missing runs of the default study are simulated first."""
    recipe, config = RECIPES["stress"], RMetricConfig.simulation()
    if options.stress == recipe.out or not options.stress.is_dir():
        specs = missing_runs(recipe.specs(0), recipe.modes, options.stress, config)
        with tqdm(total=len(specs), unit="run", desc="simulating", disable=None) as bar:
            for number in run_study(
                specs, recipe.modes, options.stress, num_processes=options.jobs
            ):
                bar.update(number)
    return stress(options.stress)


def check_same(opened: Results, again: Results) -> None:
    """Raise Refused unless a later opening of the sealed part equals the first; keep its date."""
    for name, row in again["rows"].items():
        there = opened["rows"].get(name)
        now = encode({key: value for key, value in row.items() if key != "commit"})
        if there is None or any(there.get(key) != value for key, value in now.items()):
            raise Refused(
                f"the sealed part was opened on {opened['made']['opened']['date']}, and {name} has "
                "come out otherwise now: what was frozen has changed, so this is no measurement"
            )
    again["made"] = opened["made"]
    for name, row in again["rows"].items():
        row["commit"] = opened["rows"][name]["commit"]


def made(data: DataSet, options: argparse.Namespace) -> dict[str, Any]:
    """Commit, versions, seeds and skipped inputs; for the sealed part also the opening."""
    about: dict[str, Any] = {
        "commit": commit(),
        "uncommitted_changes": uncommitted_changes(),
        "versions": versions([*PACKAGES, *installed()]),
        "skipped": len(data.skipped),
        "thresholds_sha256": {path.name: sha256(path) for path in sorted(FROZEN.rglob("*.json"))},
        "seeds": {"detectors": traces.SEED, "bootstrap": intervals.SEED},
        "bootstrap_resamples": intervals.NUM_RESAMPLES,
    }
    if data.name in SEALED_RESULTS:
        about["opened"] = {
            "date": options.date,
            "thresholds": options.thresholds.name,
            "thresholds_sha256": sha256(options.thresholds),
        }
    return about


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    exit_with(main)
