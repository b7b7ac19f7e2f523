"""Diagnose a failed job from its text logs: cause, place, time and next steps.

PATH is a file or folder of the job's logs, of any size: one file a rank or node, or one for
all with the ranks' prefixes; .gz, .bz2, .xz and .zst too, and - for standard input. Dumps of
PyTorch's flight recorder and stacks of py-spy beside the logs are read too. The verdict has at most
15 lines and states what the logs leave open. Times are those of the log, in UTC where it names a
zone. See docs/diagnosis.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rmetric._util import __version__
from rmetric._util.durable import write_atomically
from rmetric._util.errors import FAILED, INTERRUPTED, WRONG, error_text, fail
from rmetric._util.options import add_jobs, path_in, path_out, refuse_input
from rmetric._util.strict_json import encode
from rmetric.cli.progress import reading
from rmetric.diagnosis.reading.timestamps import NO_YEAR
from rmetric.diagnosis.report.render import clock, verdict
from rmetric.diagnosis.report.result import Diagnosis

#: Raised where what `--json` holds changes its meaning.
FORMAT = 1
EXIT_CODES = {"healthy": 0, "failed": 3, "terminated": 4, "unknown": 5}
EXAMPLES = """examples:
  rmetric diagnose slurm-4711.out
  kubectl logs job/train | rmetric diagnose -
  rmetric diagnose logs/ --healthy logs_of_yesterday/ logs_of_monday/
  rmetric diagnose logs/ --pool llama.json --json | jq .cause
  rmetric diagnose logs/ --page incident.html --metrics run.jsonl --telemetry gpus.jsonl
  rmetric diagnose logs/ --json-file verdict.json || page-someone

exit codes: 0 healthy: no sign of a failure; 3 failed; 4 terminated: ended from outside
(cancelled, preempted, out of its time); 5 unknown: the logs give no cause; 1 the page or the
JSON could not be written; 2 the command line is wrong, or nothing can be read; 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=path_in, metavar="PATH",
        help="log or folder of logs, of one job; - for standard input")  # fmt: skip
    add("--healthy", nargs="+", type=path_in, action="extend", default=[], metavar="PATH",
        help="logs of similar jobs that succeeded, a file or folder each; events that are common "
        "there do not count as signs of a failure")  # fmt: skip
    add("--pool", type=path_in, metavar="FILE", help="the same, as a file of rmetric logs learn")
    add("--signatures", nargs="+", type=path_in, action="extend", default=[], metavar="FILE",
        help="YAML files of your own signatures, in addition to the shipped ones")  # fmt: skip
    add("--attempt", type=int, metavar="N",
        help="which attempt to diagnose where the logs have several, from 1, or from -1 backwards "
        "(default: the last)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--json-file", type=path_out, metavar="FILE.json",
        help="write that document to a file, in addition to the text")  # fmt: skip
    add("--page", type=path_out, metavar="FILE.html",
        help="write a self-contained page of the incident")  # fmt: skip
    add("--metrics", type=path_in, metavar="LOG", help="with --page: the training's log of "
        "losses, any that rmetric replay reads")  # fmt: skip
    add("--telemetry", type=path_in, metavar="RECORDING",
        help="with --page: GPU readings recorded by rmetric telemetry --jsonl")  # fmt: skip
    add_jobs(parser, "processes that read files")


def run(options: argparse.Namespace) -> int:
    try:
        _check(options)
        with _standard_input(options.paths) as paths:
            options.paths = paths
            diagnosis = _diagnose(options)
        html = b""
        if options.page is not None:
            from rmetric.diagnosis.report.incident import incident_page

            page = incident_page(diagnosis, metrics=options.metrics, telemetry=options.telemetry)
            html = page.encode("utf-8", "replace")
    except (ValueError, OSError) as error:  # LogError, SourceError and SignatureError are such
        return fail(" ".join(error_text(error).split()), WRONG)
    except KeyboardInterrupt:
        print("stopped: nothing was diagnosed", file=sys.stderr)
        return INTERRUPTED
    document = as_json(diagnosis)
    if options.json:
        sys.stdout.buffer.write(document)
    else:
        encoding = sys.stdout.encoding or "utf-8"  # which need not have every character
        print(verdict(diagnosis).encode(encoding, "backslashreplace").decode(encoding))
    try:
        if options.json_file is not None:
            write_atomically(options.json_file, [document])
        if options.page is not None:
            write_atomically(options.page, [html])
    except OSError as error:
        return fail(error, FAILED)
    return EXIT_CODES[diagnosis.outcome]


@contextmanager
def _standard_input(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """The paths, standard input saved to a file: logs are read twice."""
    if Path("-") not in paths:
        yield list(paths)
        return
    if paths.count(Path("-")) > 1:
        raise ValueError("PATH - is given twice: standard input can be read once")
    with tempfile.TemporaryDirectory(prefix="rmetric-") as folder:
        with Path(folder, "standard-input.log").open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        # The folder, not the file, whose path means nothing to the user.
        yield [Path(folder) if path == Path("-") else path for path in paths]


def as_json(diagnosis: Diagnosis) -> bytes:
    """The document of `--json`, in UTF-8, with its line end; the same diagnosis, the same bytes."""
    entry: dict[str, Any] = {"rmetric": __version__, "format": FORMAT}
    entry |= encode(_dated(diagnosis.as_json()))
    text = json.dumps(entry, indent=2, ensure_ascii=False, allow_nan=False)
    # A file's name need not be UTF-8; JSON is.
    return f"{text}\n".encode("utf-8", "replace")


def _dated(found: Any) -> Any:
    """Each time as seconds since 1970, null without a year, and beside it as the log has it."""
    if isinstance(found, (list, tuple)):
        return [_dated(inner) for inner in found]
    if not isinstance(found, dict):
        return found
    entry: dict[str, Any] = {}
    for key, value in found.items():
        entry[key] = _dated(value)
        if key == "time" or key.endswith("_time"):
            known = isinstance(value, (int, float))
            entry[key] = value if known and value >= NO_YEAR[1] else None
            entry[f"{key.removesuffix('time')}clock"] = clock(value) if known else None
    return entry


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for an option without effect, or one that would overwrite another file."""
    for name in ("metrics", "telemetry"):
        if getattr(options, name) is not None and options.page is None:
            raise ValueError(f"--{name} is for --page FILE.html, which is not given")
    outputs = {"json-file": (options.json_file, ".json"), "page": (options.page, ".html")}
    logs = (*options.paths, *options.healthy)
    beside = (*options.signatures, options.pool, options.metrics, options.telemetry)
    for name, (path, suffix) in outputs.items():
        if path is None:
            continue
        # It may be a log that was meant as a PATH, and would be lost.
        if path.suffix != suffix or path.is_dir() or not path.parent.is_dir():
            accepted = f"a file *{suffix} in a folder that is there is accepted"
            raise ValueError(f"--{name} {path}: {accepted}")
        refuse_input(name, path, (*logs, *beside))
        within = any(folder.resolve() in path.resolve().parents for folder in logs)
        if within and path.exists():
            with path.open("rb") as file:
                head = file.read(64).lower().lstrip(b"{ \n")
            if not head.startswith((b'"rmetric"', b"<!doctype")):  # of a diagnosis before
                raise ValueError(f"--{name} {path}: it is read too, and would be lost")
    for path in beside:
        if path is not None and not path.exists():
            raise FileNotFoundError(2, "no such file", str(path))


def _diagnose(options: argparse.Namespace) -> Diagnosis:
    """The diagnosis; what the library warns of is a note in it."""
    from rmetric.diagnosis.decide import diagnose

    bar = reading()
    with warnings.catch_warnings(record=True) as warned, bar:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        diagnosis = diagnose(
            options.paths,
            healthy=options.healthy,
            pool=options.pool,
            signatures=options.signatures,
            attempt=options.attempt,
            jobs=options.jobs,
            on_progress=bar.update,
        )
    notes = dict.fromkeys(str(entry.message) for entry in warned if entry.category is UserWarning)
    return replace(diagnosis, notes=(*diagnosis.notes, *notes))
