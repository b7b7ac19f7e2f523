"""Draw records, alerts and decisions: in TensorBoard, Weights & Biases, MLflow and trackio."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cached_property
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rmetric._util.background import Background
from rmetric.metric import RMetric
from rmetric.monitor.actions.action import RESCUE, Action, decision_words, rank
from rmetric.monitor.alerts import Alert
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

_LARGEST_BATCH = 1000  # metrics that MLflow takes in one call
_LONGEST_TAG = 5000  # characters, in MLflow
#: Fields of a record that are not numbers, or are not measured in live training.
LEFT_OUT = {"step", "time", "events", "failure_rate", "gradient_variance", "loss_drift"}


class Dashboard(Action):
    """Hands records, alerts and decisions to a writer in the background, on the first rank.

    The executed step of a record, which includes those repeated so far in this process, rises also
    after a return. What fails is reported once, and nothing more is written.
    """

    notifies = True

    def __init__(self, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        self._background = Background(what=type(self).__name__)
        self._failed = self._behind = False
        self._executed = self._repeated = 0
        self._decisions: Counter[str] = Counter()

    def start(self, monitor: Monitor) -> None:
        self._executed = self._repeated = 0
        self._decisions.clear()

    def record(self, record: Record, monitor: Monitor) -> None:
        self._repeated = max(self._repeated, self._executed + 1 - record.step)
        self._executed = executed = record.step + self._repeated
        if rank() == 0:
            values = scalars(record, monitor.metric)
            self._submit(lambda: self.draw(values, record.step, executed))

    def decided(self, entry: Mapping[str, Any], monitor: Monitor) -> None:
        name = str(entry["action"])
        self._decisions[name] += 1
        count = {f"rescue_decisions/{name}": float(self._decisions[name])}
        words, executed = decision_words(entry), self._executed
        self._submit(lambda: self.draw(count, None, executed))
        self._submit(lambda: self.write_alert(RESCUE, name, words, executed))

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self._submit(lambda: self.write_alert(alert.source, "", str(alert), alert.step))

    def close(self) -> None:
        self._submit(self.finish)
        self._background.close()

    def draw(self, values: dict[str, float], step: int | None, executed: int) -> None:
        """Write the numbers of a record; `step` is None for the count of a decision."""
        raise NotImplementedError

    def write_alert(self, source: str, decision: str, words: str, step: int) -> None:
        """Write an alert, or a `decision`, whose source is `RESCUE` and whose step is executed."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write what is left; nothing follows."""

    def _submit(self, write: Callable[[], None]) -> None:
        def attempt() -> None:
            if self._failed:
                return
            try:
                write()
            except Exception:
                self._failed = True
                raise

        if rank() == 0 and not self._background.submit(attempt) and not self._behind:
            self._behind = True
            name = type(self).__name__
            logger.error("rmetric: %s does not keep up; some steps are left out", name)


class TensorBoard(Dashboard):
    """Writes every record's numbers as scalars, and every alert and decision as a text.

    After a return of a rescue the curves go back: the repeated steps have two values.
    ``rmetric/executed_step`` goes on. The texts ``rmetric/rescue`` and the counters
    ``rmetric/rescue_decisions/...`` stand at the executed step, which never falls.

    Args:
        folder: for the event files.
        on: sources of alerts that are written, ``rescue`` for decisions; None for every one.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path | str, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("TensorBoard needs the Python package tensorboard") from None
        self.folder = Path(folder)
        self._make: Callable[[str], Any] = SummaryWriter

    def draw(self, values: dict[str, float], step: int | None, executed: int) -> None:
        if step is not None:
            values["executed_step"] = executed
        for name, value in values.items():
            self._writer.add_scalar(f"rmetric/{name}", value, executed if step is None else step)

    def write_alert(self, source: str, decision: str, words: str, step: int) -> None:
        self._writer.add_text(f"rmetric/{source}", words, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()

    @cached_property
    def _writer(self) -> Any:  # made in the background: it makes the folder and a file
        return self._make(str(self.folder))


class RunDashboard(Dashboard):
    """Logs every record's numbers to a run, over the executed step, and alerts and decisions.

    Args:
        run: of the package; None for the run that is active.
        on: sources of alerts that are logged, ``rescue`` for decisions; None for every one.

    Raises:
        ImportError: the package is not installed.
        ValueError: no run was passed, and none is active on the first rank.
    """

    package: ClassVar[str]
    begin: ClassVar[str]  # the call that makes a run active
    needs_package: ClassVar[bool] = True  # with a run that was passed in, too

    def __init__(self, run: Any = None, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        self.run: Any = run
        if run is None or self.needs_package:
            try:
                module = import_module(self.package)
            except ImportError:
                needs = f"{type(self).__name__} needs the Python package {self.package}"
                raise ImportError(needs) from None
            active = self.prepare(module)
            self.run = active if run is None else run
        if self.run is None and rank() == 0:
            raise ValueError(f"there is no active run: call {self.begin} first, or pass run")

    def draw(self, values: dict[str, float], step: int | None, executed: int) -> None:
        place: dict[str, float] = {"executed_step": executed}
        if step is not None:
            place["step"] = step
        self.log({f"rmetric/{name}": n for name, n in (place | values).items()}, executed)

    def prepare(self, module: Any) -> Any:
        """Keep what is needed of the package; returns its active run, None for none."""
        raise NotImplementedError

    def log(self, values: dict[str, float], executed: int) -> None:
        raise NotImplementedError


class WandB(RunDashboard):
    """Logs to a run of Weights & Biases; every alert and decision is an alert of it.

    The numbers are named ``rmetric/...`` and drawn over ``rmetric/executed_step``, which is the
    step, and goes on where a rescue has gone back; ``rmetric/step`` falls there. Decisions are
    counted in ``rmetric/rescue_decisions/...``. They come without a step of W&B's own, so each
    moves its counter on by one, which a loop that passes its own `step` less often than that does
    not notice. For arguments and errors see `RunDashboard`.
    """

    package, begin, needs_package = "wandb", "wandb.init()", False

    def __init__(self, run: Any = None, *, on: Collection[str] | None = None) -> None:
        super().__init__(run, on=on)
        if self.run is not None:
            self.run.define_metric("rmetric/step")
            self.run.define_metric("rmetric/executed_step")
            self.run.define_metric("rmetric/*", step_metric="rmetric/executed_step")

    def prepare(self, module: Any) -> Any:
        return module.run

    def log(self, values: dict[str, float], executed: int) -> None:
        self.run.log(values)

    def write_alert(self, source: str, decision: str, words: str, step: int) -> None:
        self.run.alert(title=f"rmetric: {source} {decision}".rstrip(), text=words)


class MLflow(RunDashboard):
    """Logs to a run of MLflow; of alerts and decisions, which it has not, the run has tags.

    ``rmetric.alert.SOURCE`` is the newest alert of a source, ``rmetric.rescue.ACTION`` the newest
    decision of a kind, and ``rmetric/rescue_decisions/ACTION`` counts them. A search is
    ``tags.`rmetric.alert.non_finite` LIKE '%'``. For arguments and errors see `RunDashboard`.
    """

    package, begin = "mlflow", "mlflow.start_run()"

    def prepare(self, module: Any) -> Any:
        self._metric = module.entities.Metric
        self._client = module.MlflowClient()  # of the store that is set now, for another thread
        return module.active_run()

    def log(self, values: dict[str, float], executed: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(k, float(v), now, executed) for k, v in values.items()]
        for first in range(0, len(metrics), _LARGEST_BATCH):
            self._client.log_batch(self.run.info.run_id, metrics[first : first + _LARGEST_BATCH])

    def write_alert(self, source: str, decision: str, words: str, step: int) -> None:
        name = f"{RESCUE}.{decision}" if decision else f"alert.{source}"
        self._client.set_tag(self.run.info.run_id, f"rmetric.{name}", words[:_LONGEST_TAG])


class Trackio(RunDashboard):
    """Logs to a run of trackio; every alert and decision is an alert of it.

    ``rmetric/rescue_decisions/...`` counts decisions. Alerts of numbers that are not finite and a
    hold have trackio's level ERROR, the others WARN. For arguments and errors see `RunDashboard`.
    """

    package, begin = "trackio", "trackio.init()"

    def prepare(self, module: Any) -> Any:
        self._levels = module.AlertLevel
        return module.context_vars.current_run.get()

    def log(self, values: dict[str, float], executed: int) -> None:
        self.run.log(values, step=executed)

    def write_alert(self, source: str, decision: str, words: str, step: int) -> None:
        severe = source in self.severe or decision == "hold"
        level = self._levels.ERROR if severe else self._levels.WARN
        title = f"rmetric: {source} {decision}".rstrip()
        self.run.alert(title, words, level=level, step=step)


def scalars(record: Record, metric: RMetric) -> dict[str, float]:
    """The measurements of a step and the components of the metric, by name.

    A field with one number a layer or a worker gives ``field/layer`` or ``field/0``.
    What was not measured is absent; nan and ±inf are kept.
    """
    found: dict[str, float] = {"r_metric": metric.score}
    components = zip(metric.raw._fields, metric.raw, metric.normalised, strict=True)
    for name, raw, normalised in components:
        if not isnan(raw):
            found |= {name: raw, f"{name}_normalised": normalised}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in LEFT_OUT or value is None:
            continue
        if isinstance(value, dict):
            found |= {f"{field.name}/{key}": number for key, number in value.items()}
        elif isinstance(value, tuple):
            numbers = ((i, n) for i, n in enumerate(value) if isinstance(n, (int, float)))
            found |= {f"{field.name}/{index}": number for index, number in numbers}
        else:
            found[field.name] = value
    if record.events is not None:
        found["hardware_events"] = sum(event.is_hardware for event in record.events)
    return found
