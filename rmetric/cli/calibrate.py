"""`rmetric calibrate`: thresholds of the calibrated detector from one's own healthy logs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from rmetric._util.durable import write_atomically
from rmetric._util.errors import FAILED, LogError, fail
from rmetric._util.options import path_in, path_out, share
from rmetric._util.printed import counted, printable
from rmetric._util.strict_json import encode
from rmetric.cli.log_arguments import add_mapping
from rmetric.detectors.calibrated import thresholds_to_json
from rmetric.detectors.calibrated.calibration import NotHealthy, Shown, thresholds_from, watch
from rmetric.detectors.calibrated.recall import Recall, failing_runs, logged_by, raised_by, recall
from rmetric.detectors.calibrated.thresholds import Thresholds, read_thresholds
from rmetric.readers import find_logs, read_runs

ARCHIVE = ".tar.xz"
_MOST_NAMED = 12
EXAMPLES = """examples:
  rmetric calibrate healthy_runs/ --budget 0.02 --out mine.json
  rmetric watch run.jsonl --thresholds mine.json

exit codes:
  0  the threshold file is written
  1  a log could not be read (the file is made of the others), or nothing was written: no healthy
     run, more than a tenth of the failing runs would be lost, or --out cannot be written
  2  an argument is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=path_in, metavar="PATH", help="logs of healthy runs: files, "
        "folders, globs, or archives of the fault laboratory. Include runs with changes that are "
        "benign for you, or such changes will alarm")  # fmt: skip
    add("--budget", type=share, default=0.02, metavar="SHARE", help="share of these runs that may "
        "alarm, from 0 to below 1 (default: %(default)s)")  # fmt: skip
    add("--out", type=path_out, default=Path("thresholds.json"), metavar="FILE",
        help="(default: %(default)s)")  # fmt: skip
    add_mapping(parser)
    add("--keep", action="append", default=[], metavar="RUN", help="use this run although it "
        "looks like a failure; may be given more than once")  # fmt: skip
    add("--force", action="store_true", help="write the thresholds although they lose more than a "
        "tenth of the shipped failing runs")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    failed: list[str] = []
    mapping = dict(options.map)
    try:
        shown = list(_healthy(options.paths, options.out, mapping, failed))
    except ValueError as error:  # of --out
        return fail(error)
    names = sorted(each.run_id for each in shown)
    if unknown := sorted(set(options.keep).difference(names)):
        ids = ", ".join(names[:_MOST_NAMED]) or "none"
        return fail(f"--keep {unknown[0]}: no such run; the first are {ids}")
    suspects = [each for each in shown if each.failure and each.run_id not in options.keep]
    for each in suspects:
        words = f"left out: {each.run_id}: looks like a failure: {each.failure}"
        print(printable(words), file=sys.stderr)
    used = [each for each in shown if each not in suspects]
    if suspects and not any(each.judged for each in used):
        failures = "the only run looks like a failure"
        if len(suspects) > 1:
            failures = f"all {len(suspects)} look like failures"
        return fail(f"no healthy run to calibrate on: {failures} (--keep RUN uses one)", FAILED)
    try:
        thresholds, found = _calibrate(used, suspects, options)
        raised = "; ".join(_raised(thresholds.provenance["raised_by"]))
        if found.loses_recall and not options.force:
            return _refuse(found, raised)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(encode(thresholds_to_json(thresholds)), indent=1) + "\n"
        write_atomically(options.out, [content.encode()])
    except NotHealthy as error:
        return fail(error, FAILED)
    except OSError as error:
        return fail(f"--out {options.out}: cannot be written ({error.strerror})", FAILED)
    _print_summary(thresholds.provenance, raised, found)
    print(f"thresholds: {options.out}")
    return 1 if failed else 0


def _calibrate(
    used: Sequence[Shown], suspects: Sequence[Shown], options: argparse.Namespace
) -> tuple[Thresholds, Recall]:
    thresholds = thresholds_from(used, options.budget)
    found = recall(thresholds, logged_by([each for each in used if each.judged]))
    provenance = {
        **thresholds.provenance,
        "left_out": [{"run": each.run_id, "evidence": each.failure} for each in suspects],
        "raised_by": raised_by(used, options.budget),
        "recall": found.to_json(),
    }
    if kept := [each.run_id for each in used if each.failure]:
        provenance["kept"] = kept
    return replace(thresholds, provenance=provenance), found


def _refuse(found: Recall, raised: str) -> int:
    fail(
        f"nothing was written: of {len(found.before)} failing runs of the laboratory that the "
        f"shipped thresholds detect by {', '.join(found.signals)}, these would no longer detect "
        f"{len(found.lost)}, more than a tenth ({_by_fault(found)})"
    )
    print(
        printable(
            f"raised: {raised}: leave these runs out, let them alarm (--budget), or write these "
            "thresholds all the same (--force)"
        ),
        file=sys.stderr,
    )
    return FAILED


def _by_fault(found: Recall) -> str:
    return ", ".join(f"{fault} {number}" for fault, number in found.lost_by_fault.items())


def _print_summary(provenance: Mapping[str, Any], raised: str, found: Recall) -> None:
    runs, over = provenance["runs"], provenance["alarmed_by_the_floors"]
    print(f"{counted(runs, 'run')}; {over} would alarm under the lowest thresholds that there are")
    if provenance["left_out"]:
        ids = ", ".join(entry["run"] for entry in provenance["left_out"])
        print(printable(f"left out, they look like failures: {ids}"))
    if "too_short" in provenance:
        print(printable(f"left out, too short to be judged: {', '.join(provenance['too_short'])}"))
    if provenance["given_up"]:
        print(printable(f"may alarm, by the budget: {', '.join(provenance['given_up'])}"))
    none = "no threshold was raised: these runs stay within the lowest ones"
    print(printable(f"raised above the lowest: {raised}") if raised else none)
    _print_recall(found)
    budget = provenance["budget"]
    needed = ceil(1 / budget - 1e-9) if budget else 0
    if not budget:
        print(f"0 of {counted(runs, 'run')} alarm; other runs still may")
    elif runs < needed:
        print(
            f"{counted(runs, 'run')} cannot show a share of {100 * budget:g} %: at least {needed} "
            f"are needed to see one alarm in {needed}"
        )


def _print_recall(found: Recall) -> None:
    signals = ", ".join(found.signals) or "these signals"
    if not found.before:
        unknown = "the effect on recall is unknown"
        print(f"no failing run of the laboratory is detected by {signals} alone: {unknown}")
        return
    print(
        f"failing runs of the laboratory detected by {signals}: {len(found.before)} of "
        f"{len(failing_runs())} with the shipped thresholds, {len(found.after)} with these"
    )
    if found.lost:
        print(f"no longer detected: {_by_fault(found)}")


def _raised(raised: dict[str, dict[str, Any]]) -> list[str]:
    """Each threshold that these runs moved, from what to what; the pairs move together."""
    return [
        f"{'all of two together by' if name == 'pairs' else name} {entry['least']:g} to "
        f"{entry['raised_to']:g}, by {entry['run']} ({entry['without_it']:g} without it)"
        for name, entry in raised.items()
    ]


def _healthy(
    paths: Sequence[Path], out: Path, mapping: Mapping[str, str], failed: list[str]
) -> Iterator[Shown]:
    """Runs of all logs but those that their own log labels as not healthy, shown to the detector.

    Logs that cannot be read or shown are printed, added to `failed` and skipped. Raises ValueError
    for an `out` that is one of them, and would be lost.
    """
    from rmetric.readers.archive import read_runs as read_archive

    for path in _logs(paths, failed):
        if path.resolve() == out.resolve():
            try:
                read_thresholds(out)  # an earlier one, in the same folder
            except ValueError:
                raise ValueError(f"--out {out}: it is read too, and would be lost") from None
            continue
        try:
            is_archive = path.name.endswith(ARCHIVE)
            for run in read_archive(path) if is_archive else read_runs(path, mapping=mapping):
                truth = run.truth
                if truth is None or (not truth.failed and (truth.fault == "NONE" or truth.benign)):
                    yield watch(run)
                else:
                    why = f"{truth.fault}, {truth.outcome}"
                    print(f"left out: {run.id}: {why}", file=sys.stderr)
        except LogError as error:
            _failed(failed, str(error))
        except OSError as error:
            _failed(failed, f"{path}: cannot be read ({error.strerror})")
        except Exception as error:  # no log may cost the others
            _failed(failed, f"{path}: cannot be used ({type(error).__name__}: {error})")


def _logs(paths: Sequence[Path], failed: list[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in paths:
        try:
            found |= dict.fromkeys(find_logs([path]))
        except ValueError as error:
            _failed(failed, str(error))
    return list(found)


def _failed(failed: list[str], problem: str) -> None:
    print(f"failed: {problem}", file=sys.stderr)
    failed.append(problem)
