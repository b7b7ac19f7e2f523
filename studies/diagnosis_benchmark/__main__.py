"""Score the diagnosis, its ablations and simple baselines, and write the tables.

    python -m studies.diagnosis_benchmark written [--set 2 ... 26 | all]
    python -m studies.diagnosis_benchmark real --logs DIR
    python -m studies.diagnosis_benchmark real --split gpualert --logs DIR
    python -m studies.diagnosis_benchmark injected --split held_out

See docs/diagnosis_evaluation.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmetric._util.errors import exit_code_of, exit_with, fail
from rmetric._util.options import add_jobs
from studies.common.command import command_parser
from studies.common.csv_rows import read_rows, write_rows
from studies.common.processes import mapped
from studies.common.renderers import to_text
from studies.diagnosis_benchmark import gpualert
from studies.diagnosis_benchmark.cases import (
    INJECTED,
    JOBS,
    LOGS,
    MANIFEST,
    REAL,
    injected_jobs,
    real_jobs,
)
from studies.diagnosis_benchmark.results import Results, score_all
from studies.diagnosis_benchmark.tables import FIRST_LOOKS, GPUALERT, WRITTEN, note, report
from studies.diagnosis_benchmark.written_jobs import WrittenScores, score
from studies.diagnosis_benchmark.written_sets import add_sets, digest, opened, written_sets

OUT = Path("studies", "diagnosis_benchmark", "results")
PAGE = Path("docs", "diagnosis_evaluation.md")  # made anew with the results in OUT
#: Tables that are printed.
PRINTED = ("sets", "parts", "calibration", "measures", "gpualert")


def parser() -> argparse.ArgumentParser:
    out = command_parser("diagnosis_benchmark", __doc__)
    sources = ("written", "real", "injected", "all")
    out.add_argument("source", nargs="?", choices=sources, default="all")
    add_sets(out)
    out.add_argument(
        "--split", default="development", choices=dict.fromkeys((*REAL, "gpualert", *INJECTED)),
        help="of real logs (gpualert: that corpus in --logs) or of injected jobs (blind)",
    )  # fmt: skip
    out.add_argument(
        "--logs", type=Path, default=LOGS, metavar="DIR",
        help=f"holds the files of data/{MANIFEST.name} (default: {LOGS})",
    )  # fmt: skip
    out.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"where results go (default: {OUT})"
    )
    out.add_argument(
        "--report", action="store_true",
        help="judge nothing: tables and page anew from the results in --out",
    )  # fmt: skip
    add_jobs(out)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all well; 1: the tables cannot be written; 2: something could not be judged."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError) as error:
        return fail(error, exit_code_of(error))
    return 0


def run(options: argparse.Namespace) -> None:
    judges = {"written": judge_written, "real": judge_real, "injected": judge_injected}
    if not options.report:
        options.out.mkdir(parents=True, exist_ok=True)
        for source in judges if options.source == "all" else (options.source,):
            judges[source](options)
    for table in report(options.out, PAGE if options.out == OUT else None):
        if table.name in PRINTED:
            print(to_text(table))
    print(f"results: {options.out}")


def judge_written(options: argparse.Namespace) -> None:
    """The scores of other sets stay; those of a first look are kept and never written again."""
    with opened(options.sets) as cases:
        print(f"written: {len(cases)} jobs", file=sys.stderr)
        jobs = mapped(score, cases, processes=options.jobs)
    judged, looked = {job.set for job in jobs}, {entry.name for entry in written_sets().values()
                                                 if entry.commit}  # fmt: skip
    for name, new in ((WRITTEN, judged), (FIRST_LOOKS, looked & judged)):
        path = options.out / name
        kept = read_rows(path, WrittenScores)
        if name == FIRST_LOOKS:
            new = new - {job.set for job in kept}
        rows = [job for job in kept if job.set not in new] + [job for job in jobs if job.set in new]
        write_rows(path, WrittenScores, sorted(rows, key=lambda job: (job.set, job.job)))
    note(options.out, "written", {"jobs": len(jobs), "sets": " ".join(sorted(judged))})


def judge_real(options: argparse.Namespace) -> None:
    if options.split == "gpualert":
        logs = gpualert.classified(options.logs, options.jobs)
        write_rows(options.out / GPUALERT, gpualert.Classified, logs)
        labels = options.logs / "labels.jsonl"
        note(options.out, "gpualert", {"labels_sha256": digest([labels]), "logs": len(logs)})
        return
    with tempfile.TemporaryDirectory() as work:
        cases = real_jobs(options.split, options.logs, Path(work), MANIFEST)
        labels = MANIFEST.with_name(f"failure_labels_{options.split}.csv")
        inputs = {"manifest_sha256": digest([MANIFEST]), "labels_sha256": digest([labels])}
        _judge_methods("real", cases, inputs, options)


def judge_injected(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as work:
        cases = injected_jobs(options.split, JOBS, Path(work))
        files = [JOBS / name for name in ("jobs.csv", f"{options.split}.tar.xz")]
        _judge_methods("injected", cases, {"jobs_sha256": digest(files)}, options)


def _judge_methods(
    source: str, cases: Any, inputs: dict[str, Any], options: argparse.Namespace
) -> None:
    print(f"{source}, {options.split}: {len(cases)} jobs", file=sys.stderr)
    jobs = score_all(cases, options.jobs)
    results = Results(source=source, split=options.split, jobs=jobs)
    results.write(options.out)
    about = {"jobs": len(jobs), "lines": sum(job.lines for job in jobs)}
    note(options.out, results.name, inputs | about)


if __name__ == "__main__":
    exit_with(main)
