"""Draw the records in Weights & Biases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rmetric.monitor.actions.dashboard import Dashboard
from rmetric.monitor.alerts import Alert


class WandB(Dashboard):
    """Logs every record's numbers to a run, and every alert as an alert of W&B.

    The numbers are named ``rmetric/...`` and drawn over ``rmetric/step``. They
    come without a step of W&B's own, so each moves its counter on by one, which
    a loop that passes its own `step` less often than that does not notice.

    Args:
        run: what wandb.init() returned; None for the run that is active.
        on: sources of alerts that are logged; None for every alert.

    Raises:
        ImportError: no run was passed, and wandb is not installed.
        ValueError: no run was passed, and none is active.
    """

    def __init__(self, run: Any = None, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        self.run = _active_run() if run is None else run
        self.run.define_metric("rmetric/step")
        self.run.define_metric("rmetric/*", step_metric="rmetric/step")

    def draw(self, values: dict[str, float], step: int) -> None:
        named = {f"rmetric/{name}": value for name, value in values.items()}
        self.run.log({"rmetric/step": step, **named})

    def add_alert(self, alert: Alert) -> None:
        self.run.alert(title=f"rmetric: {alert.source}", text=str(alert))


def _active_run() -> Any:
    try:
        import wandb
    except ImportError:
        raise ImportError("WandB needs the Python package wandb") from None
    if wandb.run is None:
        raise ValueError("there is no active run: call wandb.init() first, or pass run")
    return wandb.run
