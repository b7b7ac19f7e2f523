"""Watch this machine's NVIDIA GPUs: readings, risk and recommended actions.

Prints a line with the reasons whenever the verdict on a GPU changes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from math import inf
from pathlib import Path

from rmetric._util.errors import FAILED, INTERRUPTED, LogError, error_text, fail
from rmetric._util.options import path_in, refuse_input, seconds
from rmetric._util.printed import printable
from rmetric._util.prometheus import serve, stop, write_textfile
from rmetric.guard.run_folder import RunFolder
from rmetric.telemetry.export import JsonlFile, PrometheusCollector
from rmetric.telemetry.judge import rule_of
from rmetric.telemetry.lines import LEVELS, GpuVerdict, TelemetryEvent
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import GpuWatch, ReplayedReadings

UNWELL = 3
LOOPBACK = "127.0.0.1"
#: Seconds between two looks at what the thread that reads has brought.
LOOK_SECONDS = 0.5
ASKS = {
    "none": "",
    "watch": ", to be watched",
    "restart_application": ", restart the application",
    "reset": ", reset the GPU",
    "drain": ", take it out of use",
    "reboot": ", reboot the node",
}
EXAMPLES = """examples:
  rmetric telemetry --once
  rmetric telemetry --jsonl gpus.jsonl --http 9401
  rmetric telemetry --textfile /var/lib/node_exporter/rmetric.prom
  rmetric telemetry --run runs/llama        ask that run for a checkpoint when a GPU is at risk
  rmetric telemetry --play gpus.jsonl       replay a recording

exit codes: 0 ended by SIGTERM, or all GPUs are healthy after --once or --play; 1 no GPU can be
read, or a file cannot be read or written (a watch goes on without it); 2 the command line is wrong;
3 after --once or --play a GPU is not healthy; 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--interval", type=seconds, default=10.0, metavar="SECONDS",
        help="seconds between readings, above 0 (default: 10)")  # fmt: skip
    add("--threshold", type=float, default=RiskConfig.threshold, metavar="R",
        help="risk at which a GPU counts as at risk, above 0 to 1 (default: 0.95)")  # fmt: skip
    add("--jsonl", type=Path, metavar="FILE",
        help="append readings, signs and verdicts to this file")  # fmt: skip
    add("--textfile", type=Path, metavar="FILE",
        help="write metrics there for node_exporter's textfile collector, "
        "after each reading")  # fmt: skip
    add("--http", type=port, metavar="PORT", help="serve metrics for Prometheus on this port")
    add("--address", metavar="A",
        help=f"address for --http (default: {LOOPBACK}, this machine alone)")  # fmt: skip
    add("--run", type=path_in, metavar="FOLDER", dest="run_folder",
        help="run folder: leave a request for a checkpoint there when a GPU is at risk or "
        "fatal, and verdicts in its telemetry/NODE.jsonl")  # fmt: skip
    add("--node", default=None, help="name of this node (default: the host's)")
    add("--once", action="store_true", help="read once, print and end")
    add("--play", type=path_in, metavar="FILE", help="replay readings recorded with --jsonl")


def port(text: str) -> int:
    with suppress(ValueError):
        if 0 <= int(text) < 65536:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: a port from 0 to 65535 is accepted")


def run(options: argparse.Namespace) -> int:
    try:
        return _Telemetry(options).run()
    except (LogError, OSError) as error:
        return fail(error, FAILED)
    except ImportError:
        words = "--textfile and --http need the package prometheus-client"
        return fail(f"{words}: pip install prometheus-client", FAILED)
    except ValueError as error:
        return fail(error)
    except KeyboardInterrupt:
        return INTERRUPTED


class _Telemetry:
    """One run of the command: a source of verdicts and its outputs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        _check(options)
        self.config = RiskConfig(interval=options.interval, threshold=options.threshold)
        self.node = os.uname().nodename if options.node is None else options.node
        self.folder = None if options.run_folder is None else RunFolder(options.run_folder)
        self.jsonl = JsonlFile(options.jsonl) if options.jsonl else None
        self.files = [] if self.jsonl is None else [self.jsonl]
        if self.folder is not None:
            self.folder.telemetry.mkdir(exist_ok=True)
            shared = self.folder.telemetry / f"{self.node}.jsonl"
            self.files.insert(0, JsonlFile(shared, follow_links=False))
        self.changed = False
        self.problem: str | None = None
        self.begun: dict[str, float] = {}
        self.levels: dict[str, str] = {}
        self.unwritten = ""
        self.source: GpuWatch | ReplayedReadings
        if options.play is None:
            self.source = GpuWatch(config=self.config, node=self.node, record=self._record)
        else:
            self.source = ReplayedReadings(options.play, self.config, record=self._record)

    def run(self) -> int:
        server = None
        try:
            if isinstance(self.source, GpuWatch) and not self.source.hardware.ready(30.0):
                return fail(f"no GPU can be read: {self.source.problem}", FAILED)
            if self.options.http is not None:
                address = self.options.address or LOOPBACK
                metrics = PrometheusCollector(self.source)
                server = serve(metrics, self.options.http, address)
                print(f"metrics: http://{address}:{server.server_port}/metrics", flush=True)
            return self._watch()
        finally:
            self.source.close()
            stop(server)
            for file in self.files:
                file.close()

    def _watch(self) -> int:
        ended = threading.Event()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
        while True:
            for verdict in self.source.poll():
                self._report(verdict)
            problem = self.source.problem
            if problem != self.problem and problem is not None:
                print(f"problem: {printable(problem)}", file=sys.stderr, flush=True)
            self.problem = problem
            self._report_reach()
            if self.options.textfile and self.changed:
                metrics = PrometheusCollector(self.source)
                self._write(partial(write_textfile, self.options.textfile, metrics))
            self.changed = False
            if self.options.once or self.options.play is not None:
                levels = {verdict.level for verdict in self.source.verdicts().values()}
                return UNWELL if levels - {"healthy"} else 0
            if ended.wait(LOOK_SECONDS):
                return 1 if self.unwritten else 0

    def _record(self, node: str, event: TelemetryEvent) -> None:
        self.changed = True
        if self.jsonl is not None:
            self._write(partial(self.jsonl.write_event, node, event))

    def _report(self, verdict: GpuVerdict) -> None:
        self.changed = True
        self.begun.setdefault(verdict.key, verdict.time)
        print(printable(verdict_text(verdict)), flush=True)
        if self.folder is not None:
            self._write(partial(self._ask, self.folder, verdict))
        for file in self.files:
            self._write(partial(file.verdict, verdict))

    def _write(self, writes: Callable[[], object]) -> None:
        """Write; a watch prints the same problem once, such as a full disk, and goes on."""
        try:
            writes()
        except OSError as error:
            if self.options.once or self.options.play is not None:
                raise
            words = error_text(error)
            if words != self.unwritten:
                print(f"problem: {printable(words)}", file=sys.stderr, flush=True)
            self.unwritten = words

    def _ask(self, folder: RunFolder, verdict: GpuVerdict) -> None:
        """Ask for a checkpoint when a GPU got worse; once for each level."""
        before = self.levels.get(verdict.key, "healthy")
        self.levels[verdict.key] = verdict.level
        if LEVELS.index(verdict.level) <= LEVELS.index(before):
            return
        rules = [rule.level for kind in verdict.rules if (rule := rule_of(kind)) is not None]
        source = "rule" if verdict.level in rules else "risk"
        reason = f"GPU {verdict.key}: {'; '.join(verdict.reasons)}"
        number = folder.ask(source, reason, fatal=verdict.level == "fatal")
        print(f"request {number} for a checkpoint is left in {folder.path}", flush=True)

    def _report_reach(self) -> None:
        """Once a GPU: whether its score can get to the threshold, when its window has begun."""
        for key, verdict in self.source.verdicts().items():
            least = self.config.least_readings * self.config.interval * 1.5
            if key not in self.begun or verdict.time - self.begun[key] < least:
                continue
            self.begun[key] = inf
            if verdict.reachable is not None and verdict.reachable < self.config.threshold:
                unknown = [name for name, value in verdict.factors.items() if value is None]
                print(
                    f"GPU {key}: its score can reach {verdict.reachable:.2f} at most, below the "
                    f"threshold of {self.config.threshold:g}; not known: {', '.join(unknown)}",
                    flush=True,
                )


def verdict_text(verdict: GpuVerdict) -> str:
    """A verdict on one line.

    >>> print(verdict_text(GpuVerdict(gpu=0, time=0.0, level="fatal", action="reboot",
    ...                           reasons=("Xid 79: the GPU has fallen off the bus",))))
    1970-01-01 00:00:00Z GPU 0: fatal, reboot the node: Xid 79: the GPU has fallen off the bus
    """
    when = datetime.fromtimestamp(verdict.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
    why = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
    return f"{when} GPU {verdict.key}: {verdict.level}{ASKS[verdict.action]}{why}"


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for an option that has no effect here or cannot work."""
    if options.address is not None and options.http is None:
        raise ValueError(f"--address {options.address} is for --http PORT, which is not given")
    if options.once and options.play is not None:
        raise ValueError("--once reads GPUs and --play a file: one of the two is accepted")
    if options.node is not None and Path(options.node).name != options.node:
        raise ValueError(f"--node {options.node!r}: a name that a file can have is accepted")
    for name in ("jsonl", "textfile"):
        refuse_input(name, getattr(options, name), (options.play,))
    folder, text = options.run_folder, options.textfile
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--run {folder}: there is no such folder")
    if text is not None and (text.is_dir() or not text.parent.is_dir()):
        raise ValueError(f"--textfile {text}: a file in a folder that is there is accepted")
