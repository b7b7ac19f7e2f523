"""Action that draws records, alerts and decisions in trackio."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rmetric.monitor.actions.action import RESCUE
from rmetric.monitor.actions.dashboards import Dashboard
from rmetric.monitor.alerts import Alert


class Trackio(Dashboard):
    """Logs every record's numbers to a run, and every alert and decision as an alert of trackio.

    Drawn over the executed step (`Dashboard`); ``rmetric/rescue_decisions/...`` counts decisions.
    Alerts of numbers that are not finite and a hold have trackio's level ERROR, the others WARN.

    Args:
        run: what trackio.init() returned; None for the run that is active.
        on: sources of alerts that are logged, ``rescue`` for decisions; None for every one.

    Raises:
        ImportError: trackio is not installed.
        ValueError: no run was passed, and none is active on the first rank.
    """

    def __init__(self, run: Any = None, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        module, self.run = self._with_run(
            "trackio", run, "trackio.init()", lambda it: it.context_vars.current_run.get()
        )
        self._level = {True: module.AlertLevel.ERROR, False: module.AlertLevel.WARN}

    def draw(self, values: dict[str, float], step: int) -> None:
        named = {f"rmetric/{name}": value for name, value in values.items()}
        self.run.log({"rmetric/step": step, **named}, step=int(values["executed_step"]))

    def add_alert(self, alert: Alert) -> None:
        self._alert(alert.source, str(alert), alert.step, alert.source in self.severe)

    def add_decision(self, words: str, name: str, count: int, executed: int) -> None:
        self.run.log({f"rmetric/rescue_decisions/{name}": count}, step=executed)
        self._alert(f"{RESCUE} {name}", words, executed, name == "hold")

    def _alert(self, title: str, text: str, step: int, severe: bool) -> None:
        self.run.alert(f"rmetric: {title}", text, level=self._level[severe], step=step)
