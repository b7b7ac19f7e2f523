"""Request a checkpoint from a running training."""

from __future__ import annotations

import argparse
import time

from rmetric._util.errors import FAILED, fail
from rmetric._util.options import path_in, wait_seconds
from rmetric._util.printed import printable
from rmetric.guard.run_folder import RunFolder

EXAMPLES = """examples:
  rmetric save runs/7b --reason "before the driver update"
  rmetric save runs/7b --now --wait 600 && sudo reboot
  rmetric save runs/7b --stop --wait 1800

exit codes: 0 the request is left or, with --wait, answered by a durable checkpoint, 1 it was
not answered in time, withdrawn or cannot be left, 2 the command line is wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=path_in, metavar="FOLDER", help="the run folder")
    add("--reason", default="asked for by rmetric save", metavar="WORDS",
        help="reason, for the log")  # fmt: skip
    add("--now", action="store_true",
        help="save at the next step, even shortly after the last checkpoint")  # fmt: skip
    add("--stop", action="store_true", help="save at the next step, and stop the training once "
        "the checkpoint is durable")  # fmt: skip
    add("--wait", type=wait_seconds, metavar="SECONDS", help="wait up to SECONDS for a durable "
        "checkpoint; inf: without end (default: do not wait)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    folder = RunFolder(options.folder)
    if not (folder.journal.exists() or folder.heartbeats.exists()):
        needed = "heartbeats/ of a training's guard or journal.jsonl of rmetric supervise"
        return fail(f"{options.folder} is not a run folder: one with {needed} is accepted")
    try:
        if why := folder.why_ignored():
            return fail(f"the training ignores requests there: {why}")
        number = folder.ask("user", options.reason, fatal=options.now, stop=options.stop)
    except ValueError as error:  # of RMETRIC_TRUST_FOLDER
        return fail(error)
    except OSError as error:
        return fail(f"no request can be left: {error}", FAILED)
    print(f"request {number} left in {printable(str(options.folder))}", flush=True)
    if options.wait is None:
        return 0
    if not _answered(folder, number, options.wait):
        return fail(f"request {number} is not answered after {options.wait:g} s", FAILED)
    if folder.answered_step() is None:
        words = "the training was started again before it saved: ask again"
        return fail(f"request {number} is withdrawn: {words}", FAILED)
    print(f"request {number} is answered: the checkpoint is durable")
    return 0


def _answered(folder: RunFolder, number: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while folder.answered() < number:
        if time.monotonic() >= until:
            return False
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))
    return True
