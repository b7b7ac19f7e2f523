"""Action that draws records in MLflow, with alerts and decisions as tags of the run."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from rmetric.monitor.actions.action import RESCUE
from rmetric.monitor.actions.dashboards import Dashboard
from rmetric.monitor.alerts import Alert

_LARGEST_BATCH = 1000  # metrics that MLflow takes in one call
_LONGEST_TAG = 5000  # characters


class MLflow(Dashboard):
    """Logs every record's numbers to a run; of alerts and decisions the run has tags.

    The metrics are drawn over the executed step (`Dashboard`). MLflow has no alerts: the tag
    ``rmetric.alert.SOURCE`` is the newest alert of a source, ``rmetric.rescue.ACTION`` the newest
    decision of a kind, and ``rmetric/rescue_decisions/ACTION`` counts them. A search is
    ``tags.`rmetric.alert.non_finite` LIKE '%'``.

    Args:
        run: what mlflow.start_run() returned; None for the run that is active.
        on: sources of alerts that are logged, ``rescue`` for decisions; None for every one.

    Raises:
        ImportError: mlflow is not installed.
        ValueError: no run was passed, and none is active on the first rank.
    """

    def __init__(self, run: Any = None, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        module, self.run = self._with_run(
            "mlflow", run, "mlflow.start_run()", lambda it: it.active_run()
        )
        self._metric = module.entities.Metric
        self._client = module.MlflowClient()  # of the store that is set now, for another thread

    def draw(self, values: dict[str, float], step: int) -> None:
        self._log({"step": step, **values}, int(values["executed_step"]))

    def add_alert(self, alert: Alert) -> None:
        self._tag(f"alert.{alert.source}", str(alert))

    def add_decision(self, words: str, name: str, count: int, executed: int) -> None:
        self._log({f"rescue_decisions/{name}": count}, executed)
        self._tag(f"{RESCUE}.{name}", words)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(f"rmetric/{k}", float(v), now, step) for k, v in values.items()]
        for first in range(0, len(metrics), _LARGEST_BATCH):
            self._client.log_batch(self.run.info.run_id, metrics[first : first + _LARGEST_BATCH])

    def _tag(self, name: str, words: str) -> None:
        self._client.set_tag(self.run.info.run_id, f"rmetric.{name}", words[:_LONGEST_TAG])
