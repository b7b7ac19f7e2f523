"""Follow a log that is still being written, and print the alarms of a detector.

The training needs no change. Any log of lines that replay reads is accepted: JSONL, CSV or the
output of a program. A file that is truncated or replaced is read again from its beginning.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from rmetric._util.errors import FAILED, INTERRUPTED, LogError, fail
from rmetric._util.options import path_in, seconds, wait_seconds
from rmetric._util.printed import counted, printable
from rmetric._util.webhook import WebhookSender
from rmetric.cli.log_arguments import add_mapping, add_thresholds
from rmetric.detectors import DETECTORS, make_detector
from rmetric.detectors.registry import CALIBRATED
from rmetric.readers import OpenLog
from rmetric.replay.follow import Follower
from rmetric.replay.watch import ALARM, AlarmEvent, Watch, message

ALARMED = 3
EXAMPLES = """examples:
  rmetric watch run.jsonl --detector calibrated
  rmetric watch train.log --wait 600 --exit-on-alarm --stop-after 600 && echo healthy
  rmetric watch metrics.csv --webhook https://example.org/hook --stop-after 3600

exit codes: 0 the log did not grow for --stop-after seconds, 1 it cannot be read, did not appear
or was removed, 2 the command line is wrong, 3 an alarm with --exit-on-alarm, 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=path_in, metavar="PATH", help="the log")
    add_mapping(parser)
    add_thresholds(parser)
    online = sorted(name for name, entry in DETECTORS.items() if not entry.sees_future)
    add("--detector", choices=online, metavar="NAME", default="calibrated",
        help=f"detector to apply (default: %(default)s): {', '.join(online)}")  # fmt: skip
    add("--webhook", metavar="URL", help="post alarms, and alarms that turn into a failure, to "
        "URL, in its service's form or as JSON; three attempts")  # fmt: skip
    add("--exit-on-alarm", action="store_true", help="end with code 3 at the first alarm")
    add("--stop-after", type=seconds, metavar="SECONDS",
        help="end with code 0 when the log has not grown for SECONDS (default: never)")  # fmt: skip
    add("--from-start", action="store_true",
        help="treat alarms in the existing part of the log as new: post them and end with code 3 "
        "(default: they are printed only)")  # fmt: skip
    add("--wait", type=wait_seconds, metavar="SECONDS", default=0.0,
        help="wait up to SECONDS for a log that is not there yet; inf: without end "
        "(default: do not wait)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.thresholds is not None and options.detector not in CALIBRATED:
        known = " or ".join(sorted(CALIBRATED))
        return fail(f"--thresholds is for --detector {known}: {options.detector} has no such file")

    def report(problem: str) -> None:
        _say(f"the webhook {problem}: an alarm was not posted")

    hook = None
    if options.webhook is not None:
        try:
            hook = WebhookSender(options.webhook, "--webhook", report, tries=3)
        except ValueError as error:
            return fail(error)
    code = _Following(options, hook).run()
    if hook:
        hook.close()
    return code


class _Following:
    """One log that is followed: its alarms are new once the existing part is read."""

    def __init__(self, options: argparse.Namespace, hook: WebhookSender | None) -> None:
        self.path, self.options, self.hook = options.path, options, hook
        # Alarms in the existing part are not new, unless --from-start is given.
        self.past = self.path.exists() and not options.from_start
        self.alarmed = False
        self.watch = Watch(
            lambda: make_detector(options.detector, thresholds=options.thresholds), self.print_event
        )
        self.follower = Follower(
            self.path,
            self.watch.take,
            _say,
            mapping=dict(options.map),
            stop_after=options.stop_after,
            wait=options.wait,
            begun_again=self.watch.begin_again,
            caught_up=self.caught_up,
        )

    def run(self) -> int:
        code = 0
        try:
            self.follower.run()
            if self.follower.unread is not None:
                self.watch.finish(self.follower.unread)
        except LogError as error:
            code = fail(error, FAILED)
        except KeyboardInterrupt:
            code = INTERRUPTED
        records = counted(self.watch.num_records, "record")
        alarms = counted(self.watch.num_alarms, "alarm")
        if again := self.watch.num_again:
            alarms += f", {again} already reported"
        _say(f"{self.path}: {records}, {alarms} ({self.options.detector})")
        return ALARMED if self.alarmed and self.options.exit_on_alarm and code == 0 else code

    def print_event(self, event: AlarmEvent) -> None:
        when = " (before watching)" if self.past else ""
        print(f"{event.event} {printable(event.id)}: {printable(event.words)}{when}", flush=True)
        if not self.past:
            self.act_on(event)

    def act_on(self, event: AlarmEvent) -> None:
        if self.hook and event.urgent:
            self.hook.post(message(self.path, self.options.detector, event))
        if event.event == ALARM:
            self.alarmed = True
            if self.options.exit_on_alarm:
                self.follower.stop()

    def caught_up(self, log: OpenLog) -> None:
        """Print the state of the log; runs that are still in alarm count from now on."""
        was_past, self.past = self.past, False
        state = [log.format, *log.guessed, f"{counted(self.watch.num_records, 'record')} so far"]
        _say(f"{self.path}: {'; '.join(state)}; watched by {self.options.detector}")
        if was_past:
            for event in list(self.watch.in_alarm.values()):
                _say(f"{self.path}: {event.id} is in alarm since step {event.began}")
                self.act_on(replace(event, event=ALARM))


def _say(words: str) -> None:
    print(printable(words), file=sys.stderr, flush=True)
