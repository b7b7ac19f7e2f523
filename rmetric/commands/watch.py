"""Follow a log that is still being written, and say when a detector is alarmed.

The training need not know: any log of lines will do that replay reads, such as JSONL,
CSV or what a program prints. A file that is cut short or replaced is begun again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rmetric.detectors import DETECTORS, make_detector
from rmetric.detectors.registry import CALIBRATED
from rmetric.logs import LogError
from rmetric.replay.arguments import add_mapping, add_thresholds
from rmetric.replay.follow import Follower
from rmetric.replay.watch import Watch, Webhook, message

NAME = "watch"
HELP = "follow a log that is being written, and alarm (replay --follow)"
DEFAULT_DETECTOR = "calibrated"
#: What `add_following` adds; None or False where it was not given.
FOLLOWING = ("detector", "webhook", "exit_on_alarm", "stop_after", "wait")
ALARMED = 3
EXAMPLES = """examples:
  rmetric watch run.jsonl --detector calibrated
  rmetric watch train.log --wait --exit-on-alarm && echo healthy
  rmetric watch metrics.csv --webhook https://example.org/hook --stop-after 3600

exit codes: 0 the log did not grow for --stop-after seconds, 1 it cannot be read,
2 the command line is wrong, 3 an alarm with --exit-on-alarm, 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="the log")
    add_mapping(parser)
    add_thresholds(parser)
    add_following(parser)


def add_following(parser: argparse.ArgumentParser) -> None:
    """The options that `watch` and `replay --follow` share."""
    online = sorted(name for name, entry in DETECTORS.items() if not entry.sees_future)
    parser.add_argument(
        "--detector", choices=online, metavar="NAME",
        help=f"which judges the records (default: {DEFAULT_DETECTOR}): {', '.join(online)}",
    )  # fmt: skip
    parser.add_argument(
        "--webhook", metavar="URL", help="post each alarm there as JSON; it is tried three times"
    )
    parser.add_argument(
        "--exit-on-alarm", action="store_true", help="end with code 3 at the first alarm"
    )
    parser.add_argument(
        "--stop-after", type=seconds, metavar="SECONDS",
        help="end with code 0 when the log has not grown for so long (default: never)",
    )  # fmt: skip
    parser.add_argument("--wait", action="store_true", help="wait for a log that is not there yet")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds from 0 is accepted")
    return value


def run(options: argparse.Namespace) -> int:
    return follow(options.path, options)


def follow(path: Path, options: argparse.Namespace) -> int:
    """Follow one log as the options say; returns the exit code."""
    options.detector = options.detector or DEFAULT_DETECTOR
    try:
        check_thresholds(options)
        hook = Webhook(options.webhook, _say) if options.webhook else None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def alarmed(id: str, step: int, score: float, reason: str) -> None:
        print(f"ALARM {id}: step {step}: {reason or f'score {score:.4g}'}", flush=True)
        if hook:
            hook.post(message(path, options.detector, id, step, score, reason))
        if options.exit_on_alarm:
            follower.stop()

    def begun_again(words: str) -> None:
        _say(words)
        watch.begin_again()

    watch = Watch(lambda: make_detector(options.detector, thresholds=options.thresholds), alarmed)
    follower = Follower(
        path,
        watch.take,
        begun_again,
        mapping=dict(options.map),
        stop_after=options.stop_after,
        wait=options.wait,
    )
    code = _run(follower)
    if hook:
        hook.close()
    _say(f"{path}: {watch.num_records} records, {watch.num_alarms} alarms ({options.detector})")
    return ALARMED if code == 0 and options.exit_on_alarm and watch.num_alarms else code


def check_thresholds(options: argparse.Namespace) -> None:
    """Raise ValueError for a threshold file that the detector would not look at."""
    if options.thresholds is not None and options.detector not in CALIBRATED:
        known = " or ".join(sorted(CALIBRATED))
        raise ValueError(
            f"--thresholds is for --detector {known}: {options.detector} has no such file"
        )


def _run(follower: Follower) -> int:
    try:
        follower.run()
    except LogError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
