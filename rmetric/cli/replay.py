"""Replay existing training logs: scores, alarms and a page for each run, and an index.

Reads our own logs and the authors', Hugging Face trainer_state.json, TensorBoard and W&B,
what the usual programs print, and any CSV or JSONL with a step and a loss; files, folders,
globs, .gz, .bz2, .xz and .zst too. See docs/replay.md.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmetric._util.errors import FAILED, INTERRUPTED, fail
from rmetric._util.options import path_in, path_out, whole
from rmetric._util.printed import coloured, counted, printable
from rmetric.cli.log_arguments import add_mapping, add_thresholds
from rmetric.cli.progress import ReplayProgress
from rmetric.evaluation.verdict_words import SEVERITY, counted_runs
from rmetric.metric import HEALTHY_ALARMED, PRESETS
from rmetric.readers import split_files

if TYPE_CHECKING:
    from rmetric.reporting.replay_report import Replayed

DEFAULT_OUT = Path("results/replay")
#: The table in a folder of results, as `replay_report` names it, which takes long to load.
INDEX = "index.csv"
#: Records of one log that are held in memory: up to 1.3 GB, and a minute of work.
MOST_RECORDS = 500_000
_ALL = sys.maxsize
#: Exit codes of --exit-on-alarm by severity, the worst first.
VERDICT_CODES = {"bad": 3, "warning": 4, "unknown": 5}
#: Runs that are printed, those with the worst verdict first.
MOST_LINES = 20
_ENDED = {
    "healthy": "was healthy",
    "absorbed": "absorbed a fault",
    "not_applicable": "was healthy, the fault had nothing to act on",
}
EXAMPLES = """examples:
  rmetric replay checkpoint-500/trainer_state.json --out results/mine
  rmetric replay 'runs/**/*.csv' --map loss=train/ce --map eval_loss=val/ce
  rmetric replay runs/ --exit-on-alarm

exit codes: 0 all logs were replayed; 1 some could not be (the index says which and why), or the
results cannot be written; 2 the command line is wrong; 130 interrupted; with --exit-on-alarm, by
the worst verdict (see docs/commands.md), 3 a run failed, 4 a run recovered, rose to a new level
or learns nothing, or its audits found an error, 5 no verdict is possible, 0 all are healthy"""


def add_arguments(parser: argparse.ArgumentParser, num_plots: int = 0, folder: str = "") -> None:
    """Args: what is taken without an option: runs that are drawn, a folder; empty: none."""
    add = parser.add_argument
    add("paths", nargs="*" if folder else "+", default=[folder], type=path_in, metavar="PATH",
        help="log, folder or glob")  # fmt: skip
    add("--out", type=path_out, metavar="DIR",
        help=f"folder for the results (default: {DEFAULT_OUT}, with a number where its index "
        "holds other runs)")  # fmt: skip
    add("--preset", choices=sorted(PRESETS),
        help="settings of the metric: the paper's simulation (windows of 1000) or its case study "
        "(windows of 100, |ΔL| over 10) (default: the log's own, or simulation)")  # fmt: skip
    add_mapping(parser)
    add_thresholds(parser)
    add("--plots", type=parse_plots, nargs="?", const=_ALL, metavar="all|none|N",
        help="runs to draw as PNG and PDF files too, all or the first ones "
        f"(default: {num_plots or 'none'})")  # fmt: skip
    add("--most-records", type=whole(1), metavar="N",
        help="records of a log that are held in memory, about 2 kB each; of a log with more "
        "every 2nd, 4th, 8th ... is judged, with a note; an evaluation, an event or a value that "
        f"is not finite is left out last (default: {MOST_RECORDS})")  # fmt: skip
    add("--exit-on-alarm", action="store_true",
        help="end with 3, 4 or 5 by the worst verdict, see the exit codes")  # fmt: skip
    parser.set_defaults(num_plots=num_plots)


def parse_plots(text: str) -> int:
    """The number of plots."""
    if text == "all":
        return _ALL
    if text == "none":
        return 0
    if text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: all, none or a number is accepted")


def run(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from rmetric.reporting.replay_report import replay_logs

    try:
        found, rest = split_files(options.paths)
    except ValueError as error:
        return fail(error)
    if options.out is None:
        options.out = free_folder(DEFAULT_OUT, found)
    if code := _refused(options.out):
        return code
    out = options.out.resolve()
    paths = [path for path in found if out not in path.resolve().parents]
    stages = ReplayProgress()
    folders = [Path(given) for given in options.paths if Path(given).is_dir()]
    try:
        result = replay_logs(
            tqdm(paths, unit="log", disable=None if len(paths) > 1 else True),
            options.out,
            preset=options.preset,
            mapping=dict(options.map),
            thresholds=options.thresholds,
            most_plots=options.num_plots if options.plots is None else options.plots,
            most_records=options.most_records or MOST_RECORDS,
            on_progress=stages,
            named=lambda path: ".jsonl" in path.suffixes or not set(folders) & set(path.parents),
        )
    except OSError as error:
        problem = f"the results cannot be written to {options.out} ({error.strerror})"
        return fail(f"{problem}; what was written before is kept", FAILED)
    except KeyboardInterrupt:
        stages.close()
        print(f"stopped; what was replayed is in {options.out}/index.html", file=sys.stderr)
        return INTERRUPTED
    finally:
        stages.close()
    for words in result.thinned[:MOST_LINES]:
        print(printable(words), file=sys.stderr)
    if (more := len(result.thinned) - MOST_LINES) > 0:
        print(f"... and {more} more runs; {options.out}/index.csv has the notes", file=sys.stderr)
    result.passed_over = sorted({*result.passed_over, *rest})
    code = report(result, options.out)
    return code_of(result, code) if options.exit_on_alarm else code


def _refused(out: Path) -> int:
    """Make the folder of the results; returns an exit code where it cannot be used, else 0."""
    kept = out.resolve()
    if (kept / INDEX).exists() and not {"source", "problem"} <= {*next(_index(kept), ())}:
        return fail(f"--out {out}: its {INDEX} was not written by a replay and would be lost")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        return fail(f"--out {out}: cannot be written ({error.strerror})", FAILED)
    return 0


def free_folder(folder: Path, logs: Sequence[Path]) -> Path:
    """`folder`, or the same with a number where its index holds runs of other logs."""
    given = {str(path) for path in logs}
    number, place = 1, folder
    while not _sources(place) <= given:
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    if place != folder:
        print(f"{folder} holds other runs: the results go to {place}", file=sys.stderr)
    return place


def _index(folder: Path) -> Iterator[list[str]]:
    """The header and the rows of the index in a folder, as far as it can be read."""
    errors = suppress(OSError, ValueError, csv.Error)
    with errors, open(folder / INDEX, newline="", encoding="utf-8") as file:
        yield from filter(None, csv.reader(file))


def _sources(folder: Path) -> set[str]:
    """The logs in the index of earlier results; empty where there is none."""
    header, *rows = [*_index(folder)] or [[]]
    return {dict(zip(header, row, strict=False)).get("source", "") for row in rows}


def code_of(result: Replayed, code: int) -> int:
    """The exit code by the worst verdict; a log that could not be read ranks below a failed run."""
    severities = (SEVERITY[row["verdict_kind"]] for row in result.rows if not row["problem"])
    found = {VERDICT_CODES.get(severity, 0) for severity in severities}
    if code and VERDICT_CODES["bad"] not in found:
        return code
    return min(found - {0}, default=0)


def report(result: Replayed, out: Path) -> int:
    """Print the results; returns the exit code."""
    runs = [row for row in result.rows if not row["problem"]]
    times = Counter(row["id"] for row in runs)
    # The worst severity first, of equal ones those with an alarm.
    order = [*VERDICT_CODES, "good"]
    runs.sort(key=lambda row: (order.index(SEVERITY[row["verdict_kind"]]),
                               row["calibrated_first_alarm_step"] == ""))  # fmt: skip
    if runs:
        print(in_short(runs))
    for row in runs[:MOST_LINES]:
        file = f" ({row['source']})" if times[row["id"]] > 1 else ""
        words = coloured(row["verdict"], SEVERITY[row["verdict_kind"]], sys.stdout)
        print(f"{printable(row['id'] + file)}: {words}")
        if row["verdict_detail"]:
            print(f"    {printable(row['verdict_detail'])}")
        found = [f"audits: {', '.join(row['findings'])}"] if row["findings"] else []
        for line in [*in_lines(row), *found, *row["restarts"], *row["left_out"]]:
            print(f"    {printable(line)}")
    if len(runs) > MOST_LINES:
        print(f"... and {len(runs) - MOST_LINES} more")
    if result.passed_over:
        names = ", ".join(printable(path.name) for path in result.passed_over[:5])
        more = ", ..." if len(result.passed_over) > 5 else ""
        files = counted(len(result.passed_over), "file")
        verb = "is not a log" if len(result.passed_over) == 1 else "are not logs"
        print(f"passed over {files} that {verb}: {names}{more}")
    if 0 < result.num_plots < len(runs):
        print(
            f"PNG and PDF beside the page: for {result.num_plots} of {counted(len(runs), 'run')}; "
            "--plots all draws every one"
        )
    for problem in result.failed:
        print(printable(f"failed: {problem}"), file=sys.stderr)
    if not result.rows:
        return fail("none of the files is a log that replay knows", FAILED)
    print(
        f"{counted(len(runs), 'run')} replayed, {len(result.failed)} failed: see {out}/index.html"
    )
    return 1 if result.failed else 0


def in_short(runs: list[dict[str, Any]]) -> str:
    """Number of runs, of alarms, and of outcomes where these are known."""
    alarmed = sum(row["calibrated_first_alarm_step"] != "" for row in runs)
    published = sum(row["first_alert_step"] != "" for row in runs)
    undefined = sum(row["max_r"] == "" for row in runs)
    often = f", which alarms in {HEALTHY_ALARMED} % of healthy public runs" if published else ""
    unknown = f", undefined in {undefined}" if undefined else ""
    unjudged = sum(row["calibrated_judged"] == 0 for row in runs)
    nothing = f", nothing to judge by in {unjudged}" if unjudged else ""
    verdicts = Counter(row["verdict_kind"] for row in runs)
    judged = ", ".join(counted_runs(kind, verdicts[kind]) for kind in SEVERITY if verdicts[kind])
    words = (
        f"{counted(len(runs), 'run')}: {judged}; {alarmed} alarmed (calibrated detector{nothing}), "
        f"{published} alarmed (R-Metric as published{often}{unknown})"
    )
    if any(row["stated_max_r"] != "" for row in runs):
        stated = sum(row["stated_first_alert_step"] != "" for row in runs)
        words += f", {stated} alarmed by R as their logs state it"
    ends = Counter(row["outcome"].replace("_", " ") for row in runs if row["outcome"])
    known = ", ".join(f"{number} {outcome}" for outcome, number in sorted(ends.items()))
    return f"{words}; by their logs {known}" if known else words


def in_lines(row: dict[str, Any]) -> list[str]:
    """The live alarm of one run, and what its log states: alarms of R, and the outcome."""
    stated = []
    if row["stated_max_r"] != "":
        more = f", the first of {row['stated_num_alerts']}" if row["stated_num_alerts"] > 1 else ""
        stated.append(f"R {_alarm(row['stated_first_alert_step'])}{more}")
    if row["outcome"]:
        failure = "" if row["failure_step"] == "" else f" at step {row['failure_step']}"
        stated.append(f"it {_ENDED.get(row['outcome'], row['outcome'])}{failure}")
    lines = [f"live alarm (calibrated detector): {row['live_alarm']}"]
    return lines + ([f"as its log states: {'; '.join(stated)}"] if stated else [])


def _alarm(step: Any) -> str:
    return "has no alarm" if step == "" else f"alarms at step {step}"
