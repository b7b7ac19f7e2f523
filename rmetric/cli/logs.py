"""Learn the events that successful jobs log, so that a diagnosis can disregard them.

`rmetric logs learn` reads the logs of jobs that succeeded and writes the events that they have
in common as JSON, for `rmetric diagnose --pool`. Each PATH, a file or a folder, is one job.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rmetric._util.errors import FAILED, INTERRUPTED, LogError, fail
from rmetric._util.options import add_jobs, path_in, path_out, refuse_input
from rmetric._util.printed import counted, printable
from rmetric.cli.progress import reading

if TYPE_CHECKING:
    from rmetric.diagnosis.facts.job import Job
    from rmetric.diagnosis.library import SignatureLibrary

EXAMPLES = """examples:
  rmetric logs learn --job pretrain-7b logs/4688/ logs/4690/
  rmetric diagnose logs/4711/ --pool pretrain-7b.json

exit codes: 0 the pool is written; 1 a log could not be read, or the pool could not be written;
2 the command line is wrong; 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    learn = actions.add_parser(
        "learn", help="make a pool of events from jobs that succeeded", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = learn.add_argument
    add("paths", nargs="+", type=path_in, metavar="PATH",
        help="file or folder: the logs of one job")  # fmt: skip
    add("--job", required=True, metavar="NAME", help="name of this kind of job")
    add("--out", type=path_out, metavar="FILE", help="(default: NAME.json, in this folder)")
    add_jobs(learn, "processes that read the files of a job")


def run(options: argparse.Namespace) -> int:
    from rmetric.diagnosis.library import SignatureLibrary
    from rmetric.diagnosis.pool import learn

    try:
        out = _out(options)
        refuse_input("out", out, options.paths)
        library = SignatureLibrary.shipped()
        jobs = _read(options, library)
        _warn(options.paths, jobs, library)
        pool = learn(options.job, jobs)
        pool.save(out)
    except (LogError, OSError) as error:
        return fail(error, FAILED)
    except ValueError as error:
        return fail(error)
    except KeyboardInterrupt:
        print("stopped: no pool was written", file=sys.stderr)
        return INTERRUPTED
    lines = sum(job.lines for job in jobs)
    print(f"{counted(len(jobs), 'job')}, {lines:,} lines, {len(pool.events)} events: {out}")
    return 0


def _read(options: argparse.Namespace, library: SignatureLibrary) -> list[Job]:
    from rmetric.diagnosis.ingest import ingest

    jobs = []
    with reading() as bar:
        for path in options.paths:
            jobs.append(ingest([path], library, cores=options.jobs, on_progress=bar.update))
    for path, job in zip(options.paths, jobs, strict=True):
        if not job.events:
            raise LogError(path, None, "empty: there is nothing to learn from")
        for note in job.notes:
            print(printable(f"{path}: {note.removeprefix(f'{path}: ')}"), file=sys.stderr)
    return jobs


def _out(options: argparse.Namespace) -> Path:
    name = options.job.strip()
    if not name:
        raise ValueError("--job: a name is needed")
    if options.out is not None:
        if not options.out.parent.is_dir():
            raise FileNotFoundError(2, "no such folder", f"--out {options.out}")
        return Path(options.out)
    if name.startswith(".") or set(name) & set("/\\:\0"):
        raise ValueError(f"--job {name!r} cannot name a file: give one with --out FILE")
    return Path(f"{name}.json")


def _warn(paths: list[Path], jobs: list[Job], library: SignatureLibrary) -> None:
    """Warn of failed jobs: a pool of their events would hide failures."""
    from rmetric.diagnosis.decide import gathered
    from rmetric.diagnosis.report.render import headline

    for path, job in zip(paths, jobs, strict=True):
        found = gathered(job, library).diagnosis()
        others = any(other.succeeded is not None for other in jobs if other is not job)
        if found.outcome == "healthy" and (job.succeeded is not None or not others):
            continue
        why = "it does not say that it reached its end, and others do"
        why = why if found.outcome == "healthy" else headline(found)
        words = f"warning: {path}: this job does not look healthy: {why}"
        print(printable(words), file=sys.stderr)
        print("  what is learnt from it will not be seen in a diagnosis", file=sys.stderr)
