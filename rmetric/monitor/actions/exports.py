"""Actions that report a training to other programs: a chat or a pager, and Prometheus."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmetric._util.background import Background
from rmetric._util.errors import as_number, require
from rmetric._util.prometheus import family, serve, stop, write_textfile
from rmetric._util.webhook import WebhookSender
from rmetric.monitor.actions.action import RESCUE, Action, decision_words, rank
from rmetric.monitor.alerts import Alert
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

#: Between two writes of Prometheus' file without an alert.
WRITE_SECONDS = 15.0
_LEVELS = ("quiet", "watch", "alarm")
#: Metric -> its HELP text and its label beside ``run``, if there is one.
_METRICS = {
    "step": ("Step of the last record; it falls when the training goes back.", ""),
    "loss": ("Training loss of that step, nats per token.", ""),
    "gradient_norm": ("L2 norm of the averaged gradient, before clipping.", ""),
    "r_metric": ("R-Metric after that step.", ""),
    "detector_score": (
        "Score of a detector after that step; 1 is the threshold of the calibrated one.",
        "detector",
    ),
    "detector_level": (
        "Level of a detector after that step: 0 quiet, 1 watch, 2 alarm.",
        "detector",
    ),
    "alerts": ("Alerts, one an episode and source that joins it.", "source"),
    "rescue_decisions": ("Decisions of the rescue.", "action"),
    "steps_repeated": ("Steps that were taken again after a return.", ""),
}
_COUNTERS = {"alerts", "rescue_decisions", "steps_repeated"}


class Webhook(Action):
    """Posts alerts and decisions of a rescue in the form of Slack, Discord or PagerDuty.

    The form is that of the URL's host, else Slack's, ``{"text": ...}``; ``discord+https://...`` or
    ``pagerduty+https://...`` chooses another. PagerDuty's key is the parameter ``routing_key`` of
    the URL.

    It posts from a thread of its own, on the first rank alone. For each source of alerts, and each
    kind of decision, at most one message is sent in `min_interval`; the next has the number of
    those held back. The address is a secret: it appears in no log, no repr and no exception. A
    message that the server does not take is reported in the log and not sent again.

    Args:
        url: http or https.
        variable: name of the environment variable that holds the URL, instead.
        title: what the message begins with; the machine's name by default.
        min_interval: seconds between messages of one source or kind, at least 0.
        timeout: seconds that the server has to answer, and to wait at the end; above 0.
        on: sources of alerts that it reacts to, ``rescue`` for decisions; None for every one.
    """

    notifies = True

    def __init__(
        self,
        url: str | None = None,
        *,
        variable: str | None = None,
        title: str | None = None,
        min_interval: float = 60.0,
        timeout: float = 5.0,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        require("min_interval", min_interval, as_number(min_interval) >= 0.0, "at least 0 seconds")
        timely = 0.0 < as_number(timeout) < float("inf")
        require("timeout", timeout, timely, "finite and above 0 seconds")
        if (url is None) == (variable is None):
            raise ValueError("a webhook needs either url or variable, one of the two")
        if variable is not None:
            url = os.environ.get(variable)
            if not url:
                raise ValueError(f"variable is {variable!r}: this environment variable is not set")
        self.title = socket.gethostname() if title is None else title
        self.min_interval = min_interval
        self._sender = WebhookSender(
            url or "", "the webhook's url", self._report, timeout=timeout, waiting=20, form="slack"
        )
        self._last_sent: dict[str, float] = {}
        self._held_back: Counter[str] = Counter()

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self._send(str(alert), alert.source, f"alerts of {alert.source}")

    def decided(self, entry: Mapping[str, Any], monitor: Monitor) -> None:
        action = entry["action"]
        self._send(decision_words(entry), f"{RESCUE} {action}", f"decisions {action}")

    def _send(self, words: str, kind: str, kinds: str) -> None:
        if rank() != 0:
            return
        now = time.monotonic()
        if now - self._last_sent.get(kind, -float("inf")) < self.min_interval:
            self._held_back[kind] += 1
            return
        self._last_sent[kind] = now
        held_back = self._held_back.pop(kind, 0)
        more = f" ({held_back} more {kinds} since the last message)" if held_back else ""
        self._sender.post({"text": f"{self.title}: {words}{more}"})

    def close(self) -> None:
        if not self._sender.close():
            logger.error("rmetric: the webhook did not answer in time; alerts were not posted")

    @staticmethod
    def _report(problem: str) -> None:
        logger.error("rmetric: the webhook %s; an alert was not posted", problem)


class Prometheus(Action):
    """Exports the last record, and counts alerts and the decisions of a rescue, on the first rank.

    docs/actions.md has the names of the gauges and the counters, those of `_METRICS`; all have the
    label ``run``. Counters begin at 0 in each process. A value that was not measured has no sample.

    Args:
        port: TCP port of the HTTP server; 0 for any free one; None for no server.
        address: that the server binds.
        textfile: for node_exporter's textfile collector, which reads names that end with
            ``.prom``; None for no file. It is written every 15 s, at once after an alert or a
            decision, and at the end.
        on: sources of alerts that are counted, ``rescue`` for decisions; None for all.

    Attributes:
        port: that the server listens at, once the monitor has begun.

    Raises:
        ImportError: the package prometheus-client is not installed.
    """

    notifies = True

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str = "127.0.0.1",
        textfile: Path | str | None = None,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        if port is None and textfile is None:
            raise ValueError("Prometheus needs port or textfile")
        if port is not None and (type(port) is not int or not 0 <= port <= 65535):
            raise ValueError(f"port is {port!r}: a whole number from 0 to 65535 is accepted")
        if textfile is not None and Path(textfile).suffix != ".prom":
            raise ValueError(f"textfile is {str(textfile)!r}: a name that ends with .prom is read")
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            raise ImportError("Prometheus needs the Python package prometheus-client") from None
        self.port, self.address = port, address
        self.textfile = None if textfile is None else Path(textfile)
        self._begin("run")

    def _begin(self, run: str) -> None:
        self._run, self._written, self._problem = run, -float("inf"), ""
        # One waiting write has the state of when it runs: others beside it would be the same.
        self._background = Background(size=1, what=str(self.textfile))
        self._server: Any = None
        self._gauges: dict[str, Mapping[str, float | None]] = {}  # by metric and label
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._counts["steps_repeated"][""] = 0

    def start(self, monitor: Monitor) -> None:
        """Start the server. Raises OSError that names address and port if it cannot."""
        self._begin(monitor.run_id)
        if self.port is not None and rank() == 0:
            self._server = serve(self, self.port, self.address)
            self.port = self._server.server_port

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self._counts["alerts"][alert.source] += 1
        self._write(now=True)

    def decided(self, entry: Mapping[str, Any], monitor: Monitor) -> None:
        self._counts["rescue_decisions"][str(entry["action"])] += 1
        self._counts["steps_repeated"][""] += entry.get("repeated") or 0
        self._write(now=True)

    def record(self, record: Record, monitor: Monitor) -> None:
        detectors = {name: monitor.detector(name) for name in monitor.config.detectors}
        self._gauges = {
            "step": {"": record.step},
            "loss": {"": record.training_loss},
            "gradient_norm": {"": record.gradient_norm},
            "r_metric": {"": monitor.metric.score},
            "detector_score": {name: float(d.score) for name, d in detectors.items()},
            "detector_level": {
                name: _LEVELS.index(d.level) for name, d in detectors.items() if hasattr(d, "level")
            },
        }
        self._write()

    def close(self) -> None:
        self._write(now=True)
        self._background.close()
        server, self._server = self._server, None
        stop(server)

    def collect(self) -> Iterator[Any]:
        """The metrics as of now, for a registry of prometheus_client."""
        for name, (words, label) in _METRICS.items():
            is_counter = name in _COUNTERS
            found = self._counts[name] if is_counter else self._gauges.get(name, {})
            samples = [([self._run, *([key] if label else [])], n) for key, n in [*found.items()]]
            labels = ["run", *([label] if label else [])]
            yield family(name, words, labels, samples, counter=is_counter)

    def _write(self, *, now: bool = False) -> None:
        if self.textfile is None or rank() != 0:
            return
        moment = time.monotonic()
        if now or moment - self._written >= WRITE_SECONDS:
            self._written = moment
            self._background.submit(self._write_file)

    def _write_file(self) -> None:
        assert self.textfile is not None
        try:
            write_textfile(self.textfile, self)
        except OSError as error:
            if not self._problem:
                self._problem = f"{self.textfile} cannot be written: {error.strerror}"
                logger.error("rmetric: %s; it is tried again", self._problem)
