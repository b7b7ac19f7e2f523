"""Score the diagnosis, its ablations and simple baselines, and write the tables.

    python -m studies.diagnosis_benchmark real --logs DIR
    python -m studies.diagnosis_benchmark injected --injected DIR --split held_out
    python -m studies.diagnosis_benchmark written --written DIR

See docs/diagnosis_evaluation.md.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmetric._util.errors import exit_code_of, exit_with
from rmetric._util.options import add_jobs, renamed
from studies.common.renderers import to_text
from studies.diagnosis_benchmark import written_jobs
from studies.diagnosis_benchmark.injected_jobs import FOLDERS, JOBS, injected_jobs
from studies.diagnosis_benchmark.real_jobs import LOGS, MANIFEST, SPLITS, real_jobs
from studies.diagnosis_benchmark.results import Results
from studies.diagnosis_benchmark.writing import COMMAND, made, report

OUT = Path("studies", "diagnosis_benchmark", "results")
PAGE = Path("docs", "diagnosis_evaluation.md")  # made anew with the results in OUT
#: Source -> its splits.
SOURCES = {"real": SPLITS, "injected": tuple(FOLDERS), "written": written_jobs.SPLITS}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("source", nargs="?", choices=(*SOURCES, "all"), default="all")
    out.add_argument(
        "--split", default="development",
        choices=tuple(dict.fromkeys(split for splits in SOURCES.values() for split in splits)),
        help="blind is of injected jobs; sealed, second and later ones are of written jobs",
    )  # fmt: skip
    out.add_argument(
        "--logs", type=Path, default=LOGS, metavar="DIR",
        help=f"holds the files of {MANIFEST} (default: {LOGS})",
    )  # fmt: skip
    out.add_argument(
        "--injected", type=Path, default=JOBS, metavar="DIR",
        help=f"holds the jobs with injected faults (default: {JOBS})",
    )  # fmt: skip
    out.add_argument(
        "--written", type=Path, default=written_jobs.JOBS, metavar="DIR",
        help=f"holds the splits of the written jobs (default: {written_jobs.JOBS})",
    )  # fmt: skip
    out.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"where results go (default: {OUT})"
    )
    out.add_argument(
        "--report", action="store_true",
        help="judge nothing: tables and page anew from the results in --out",
    )  # fmt: skip
    add_jobs(out)
    renamed(out, processes="jobs")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all well; 1: the tables cannot be written; 2: something could not be judged."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code_of(error)
    return 0


def run(options: argparse.Namespace) -> None:
    if not options.report:
        having = [source for source, splits in SOURCES.items() if options.split in splits]
        for source in having if options.source == "all" else (options.source,):
            judged(source, options).write(options.out)
    for table in report(options.out, PAGE if options.out == OUT else None):
        print(to_text(table))
    print(f"tables and provenance.json: {options.out}")


def judged(source: str, options: argparse.Namespace) -> Results | written_jobs.WrittenResults:
    from studies.diagnosis_benchmark.run_methods import score_all

    if source == "written":
        return judged_written(options)
    with tempfile.TemporaryDirectory() as work:
        if source == "real":
            cases = real_jobs(options.split, options.logs, Path(work))
            inputs: dict[str, Any] = {
                "manifest_sha256": digest(MANIFEST),
                "labels_sha256": digest(MANIFEST.with_name(f"failure_labels_{options.split}.csv")),
            }
        else:
            cases = injected_jobs(options.split, options.injected)
            inputs = {
                "manifests_sha256": digest(
                    *(case.folder.parent / "manifest.json" for case in cases)
                )
            }
        print(f"{source}, {options.split}: {len(cases)} jobs", file=sys.stderr)
        jobs = score_all(cases, options.jobs)
    about = inputs | {"jobs": len(jobs), "lines": sum(job.lines for job in jobs)}
    return Results(source=source, split=options.split, jobs=jobs, made=made(about))


def judged_written(options: argparse.Namespace) -> written_jobs.WrittenResults:
    cases = written_jobs.load(options.split, options.written)
    print(f"written, {options.split}: {len(cases)} jobs", file=sys.stderr)
    jobs = written_jobs.score_all(cases, options.jobs)
    manifests = (one.case.folder.parent / "manifest.json" for one in cases)
    about = {
        "manifests_sha256": digest(*manifests),
        "jobs": len(jobs),
        "lines": sum(job.lines for job in jobs),
    }
    return written_jobs.WrittenResults(split=options.split, jobs=jobs, made=made(about))


def digest(*paths: Path) -> str:
    """sha256 of files, one after another."""
    out = hashlib.sha256()
    for path in paths:
        out.update(path.read_bytes())
    return out.hexdigest()


if __name__ == "__main__":
    exit_with(main)
