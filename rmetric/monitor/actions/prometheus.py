"""Action that exports a training to Prometheus: over HTTP, or as a text file."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmetric._util.background import Background
from rmetric._util.errors import as_number, require
from rmetric._util.prometheus import family, serve, stop, write_textfile
from rmetric.monitor.actions.action import Action, rank
from rmetric.monitor.alerts import Alert
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

CLOSE_SECONDS = 5.0
_LEVELS = ("quiet", "watch", "alarm")
#: Metric -> its HELP text and, where it has one beside ``run``, its label.
_METRICS = {
    "step": ["Step of the last record; it falls when the training goes back."],
    "loss": ["Training loss of that step, nats per token."],
    "gradient_norm": ["L2 norm of the averaged gradient, before clipping."],
    "r_metric": ["R-Metric after that step."],
    "detector_score": [
        "Score of a detector after that step; 1 is the threshold of the calibrated one.",
        "detector",
    ],
    "detector_level": [
        "Level of a detector after that step: 0 quiet, 1 watch, 2 alarm.",
        "detector",
    ],
    "alerts": ["Alerts, one an episode and source that joins it.", "source"],
    "rescue_decisions": ["Decisions of the rescue.", "action"],
    "steps_repeated": ["Steps that were taken again after a return."],
}
_COUNTERS = {"alerts", "rescue_decisions", "steps_repeated"}


class Prometheus(Action):
    """Exports the last record, and counts alerts and the decisions of a rescue.

    Gauges are ``rmetric_step``, ``rmetric_loss``, ``rmetric_gradient_norm``, ``rmetric_r_metric``,
    ``rmetric_detector_score{detector}`` and ``rmetric_detector_level{detector}`` (0 quiet,
    1 watch, 2 alarm). Counters, from 0 in each process, are
    ``rmetric_alerts_total{source}``, ``rmetric_rescue_decisions_total{action}`` and
    ``rmetric_steps_repeated_total``. All have the label ``run``. A value that was not measured
    has no sample. The first rank alone exports.

    Args:
        port: TCP port of the HTTP server; 0 for any free one; None for no server.
        address: that the server binds.
        textfile: for node_exporter's textfile collector, which reads names that end with
            ``.prom``; None for no file.
        seconds: between two writes of the file, above 0. It is written at once after an alert or
            a decision, and at the end.
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
        seconds: float = 15.0,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        if port is None and textfile is None:
            raise ValueError("Prometheus needs port or textfile")
        if port is not None and (type(port) is not int or not 0 <= port <= 65535):
            raise ValueError(f"port is {port!r}: a whole number from 0 to 65535 is accepted")
        if textfile is not None and Path(textfile).suffix != ".prom":
            raise ValueError(f"textfile is {str(textfile)!r}: a name that ends with .prom is read")
        require("seconds", seconds, as_number(seconds) > 0, "above 0")
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            raise ImportError("Prometheus needs the Python package prometheus-client") from None
        self.port, self.address, self.seconds = port, address, seconds
        self.textfile = None if textfile is None else Path(textfile)
        self._begin("run")

    def _begin(self, run: str) -> None:
        self._run, self._written, self._problem = run, -float("inf"), ""
        self._background = Background(size=20)
        self._server: Any = None
        self._values: dict[str, float | None] = {}
        self._scores: dict[str, float] = {}
        self._levels: dict[str, int] = {}
        self._alerts: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._repeated = 0

    def start(self, monitor: Monitor) -> None:
        """Start the server. Raises OSError that names address and port if it cannot."""
        self._begin(monitor.run_id)
        if self.port is None or rank() != 0:
            return
        self._server = serve(self, self.port, self.address)
        self.port = self._server.server_port

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self._alerts[alert.source] += 1
        self._write(now=True)

    def decided(self, entry: Mapping[str, Any], monitor: Monitor) -> None:
        self._decisions[str(entry["action"])] += 1
        self._repeated += entry.get("repeated") or 0
        self._write(now=True)

    def record(self, record: Record, monitor: Monitor) -> None:
        detectors = {name: monitor.detector(name) for name in monitor.config.detectors}
        self._values = {
            "step": record.step,
            "loss": record.training_loss,
            "gradient_norm": record.gradient_norm,
            "r_metric": monitor.metric.score,
        }
        self._scores = {name: float(d.score) for name, d in detectors.items() if d is not None}
        self._levels = {
            name: _LEVELS.index(d.level) for name, d in detectors.items() if hasattr(d, "level")
        }
        self._write()

    def close(self) -> None:
        self._write(now=True)
        self._background.close(CLOSE_SECONDS)
        server, self._server = self._server, None
        stop(server)

    def collect(self) -> Iterator[Any]:
        """The metrics as of now, for a registry of prometheus_client."""
        alone = {**self._values, "steps_repeated": self._repeated}
        labelled: dict[str, Mapping[str, float]] = {
            "detector_score": self._scores,
            "detector_level": self._levels,
            "alerts": self._alerts,
            "rescue_decisions": self._decisions,
        }
        for name, (words, *label) in _METRICS.items():
            samples: list[tuple[list[str], float | None]] = [([self._run], alone.get(name))]
            if label:
                samples = [([self._run, one], n) for one, n in tuple(labelled[name].items())]
            yield family(name, words, ["run", *label], samples, counter=name in _COUNTERS)

    def _write(self, *, now: bool = False) -> None:
        path = self.textfile
        if path is None or rank() != 0:
            return
        moment = time.monotonic()
        if now or moment - self._written >= self.seconds:
            self._written = moment
            self._background.submit(lambda: self._write_file(path))

    def _write_file(self, path: Path) -> None:
        try:
            write_textfile(path, self)
        except OSError as error:
            if not self._problem:
                self._problem = f"{path} cannot be written: {error.strerror}"
                logger.error("rmetric: %s; it is tried again", self._problem)
