"""Compare trainings: is B as good as A, beyond the noise of both?

Each side is a log, a folder or a glob; several runs of one side are its seeds. Losses are compared
at equal steps, up to the last that all reached; --map step=COLUMN compares at equal tokens.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import chain
from pathlib import Path

from rmetric._util.durable import write_atomically
from rmetric._util.errors import FAILED, LogError, fail
from rmetric._util.lazy import check_installed
from rmetric._util.options import path_in, path_out, refuse_input, share
from rmetric._util.printed import printable
from rmetric.cli.log_arguments import add_mapping
from rmetric.evaluation.comparison import Comparison, Side, compare, note
from rmetric.readers import find_logs, read_log
from rmetric.records import Run
from rmetric.reporting.comparison import as_page, write_gate

WORSE, UNKNOWN = 3, 5
EXAMPLES = """examples:
  rmetric compare baseline.jsonl new.jsonl
  rmetric compare 'baseline/seed*.csv' 'new/seed*.csv' --tolerance 0.5 --page compare.html
  rmetric compare last-release/ nightly/ --gate junit.xml --gate "$GITHUB_STEP_SUMMARY"

exit codes: 0 every candidate is as good or better, 1 a log cannot be read or a file cannot be
written, 2 the command line is wrong, 3 a candidate is worse, 5 none is worse and one is
undecided, 130 interrupted"""


percent = partial(share, whole=100.0, what="a number")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("reference", type=path_in, metavar="A", help="what is compared with")
    add("candidates", type=path_in, nargs="+", metavar="B", help="what is judged")
    add_mapping(parser)
    add("--tolerance", type=percent, default=1.0, metavar="PERCENT", help="of the reference's "
        "loss, by which a candidate may be above it (default: %(default)g)")  # fmt: skip
    add("--gate", type=path_out, action="append", default=[], metavar="FILE",
        help="write the verdicts for a CI: JUnit XML if FILE ends in .xml, else Markdown, which is "
        "appended to the file that $GITHUB_STEP_SUMMARY names; may be repeated")  # fmt: skip
    add("--page", type=path_out, metavar="FILE", help="write a page with the table and a plot")


def run(options: argparse.Namespace) -> int:
    names = [str(path) for path in (options.reference, *options.candidates)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return fail(f"{twice} is given twice")
    if options.page:
        check_installed("matplotlib")  # before the logs are read
    try:
        logs = [find_logs([name]) for name in names]
        for option, outputs in (("gate", options.gate), ("page", [options.page])):
            for path in outputs:
                refuse_input(option, path, chain(*logs))
        reference, *candidates = [_runs(side, dict(options.map)) for side in logs]
    except LogError as error:
        return fail(error, FAILED)
    except ValueError as error:
        return fail(error)
    side = Side(reference)
    found = {
        name: compare(side, runs, options.tolerance / 100)
        for name, runs in zip(names[1:], candidates, strict=True)
    }
    for name, result in found.items():
        print(printable(f"{name}: {result.text}"))
        _print_beside(result)
    if words := note(found):
        print(words, file=sys.stderr)
    try:
        _write(options, names[0], found)
    except OSError as error:
        return fail(f"{error.filename}: cannot be written ({error.strerror})", FAILED)
    kinds = {result.kind for result in found.values()}
    return WORSE if "worse" in kinds else UNKNOWN if "cannot_tell" in kinds else 0


def _print_beside(found: Comparison) -> None:
    ratios = {f"{name} a second": ratio for name, ratio in found.speeds.items()}
    for what, ratio in (ratios | {"highest memory": found.memory}).items():
        if ratio is not None:
            print(f"    {what}: {ratio:.3g} times the reference's")
    if any(found.alarms):
        before, now = found.alarms
        print(f"    alarms of the calibrated detector: {now}, the reference's {before}")


def _write(options: argparse.Namespace, reference: str, found: dict[str, Comparison]) -> None:
    for path in options.gate:
        write_gate(path, reference, found)
        print(f"written: {path}", file=sys.stderr)
    if options.page:
        write_atomically(options.page, [as_page(reference, found).encode()])
        print(f"written: {options.page}", file=sys.stderr)


def _runs(logs: list[Path], mapping: dict[str, str]) -> list[Run]:
    return [run for log in logs for run in read_log(log, mapping).runs]
