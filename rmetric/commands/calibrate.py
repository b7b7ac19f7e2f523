"""`rmetric calibrate`: thresholds of the calibrated detector from one's own healthy logs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rmetric.detectors.calibrated import thresholds_to_json
from rmetric.detectors.calibrated.calibration import NotHealthy, calibrate
from rmetric.logs import LogError, write_atomically
from rmetric.records import Run
from rmetric.replay import find_logs, read_runs
from rmetric.strict_json import encode

NAME = "calibrate"
HELP = "make a threshold file for the calibrated detector from healthy logs"
ARCHIVE = ".tar.xz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH",
        help="logs of healthy runs: files, folders, globs, or archives of the fault laboratory. "
        "Include runs with changes that are benign for you, or such changes will alarm",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=share, default=0.02, metavar="SHARE",
        help="share of these runs that may alarm, from 0 to below 1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("thresholds.json"), help="(default: %(default)s)"
    )


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a share from 0 to below 1 is accepted")
    return value


def run(options: argparse.Namespace) -> int:
    failed: list[str] = []
    try:
        thresholds = calibrate(_healthy(options.paths, options.out, failed), options.budget)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(encode(thresholds_to_json(thresholds)), indent=1) + "\n"
        write_atomically(options.out, [content.encode()])
    except NotHealthy as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: --out {options.out}: cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    _tell(thresholds.provenance, options.out)
    return 1 if failed else 0


def _tell(provenance: Any, out: Path) -> None:
    print(f"{provenance['runs']} runs; {provenance['alarmed_by_the_floors']} alarm by the floors")
    if "too_short" in provenance:
        print(f"left out, too short to be judged: {', '.join(provenance['too_short'])}")
    if provenance["given_up"]:
        print(f"may alarm, by the budget: {', '.join(provenance['given_up'])}")
    print(f"thresholds: {out}")


def _healthy(paths: Sequence[str], out: Path, failed: list[str]) -> Iterator[Run]:
    """The runs of all logs but those whose own log says that they are not healthy.

    What cannot be read is told, added to `failed`, and costs none of the others.
    """
    for path in _logs(paths, failed):
        if path.resolve() == out.resolve():  # an earlier one, in the same folder
            continue
        try:
            for each in _runs_of(path):
                if _may_be_healthy(each):
                    yield each
                else:
                    assert each.truth is not None
                    why = f"{each.truth.fault}, {each.truth.outcome}"
                    print(f"left out: {each.id}: {why}", file=sys.stderr)
        except LogError as error:
            _failed(failed, str(error))
        except OSError as error:
            _failed(failed, f"{path}: cannot be read ({error.strerror})")


def _logs(paths: Sequence[str], failed: list[str]) -> list[Path]:
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


def _runs_of(path: Path) -> Iterator[Run]:
    if path.name.endswith(ARCHIVE):
        from rmetric.lab.archive import read_runs as read_archive

        yield from read_archive(path)
    else:
        yield from read_runs(path)


def _may_be_healthy(run: Run) -> bool:
    truth = run.truth
    return truth is None or (not truth.failed and (truth.fault == "NONE" or truth.benign))
