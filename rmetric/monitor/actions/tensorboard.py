"""Draw the records in TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rmetric.monitor.actions.dashboard import Dashboard
from rmetric.monitor.alerts import Alert


class TensorBoard(Dashboard):
    """Writes every record's numbers as scalars, and every alert as a text.

    Args:
        folder: for the event files.
        on: sources of alerts that are written; None for every alert.

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
        self._made: Any = None

    def draw(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"rmetric/{name}", value, step)

    def add_alert(self, alert: Alert) -> None:
        self._writer.add_text(f"rmetric/{alert.source}", str(alert), alert.step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()

    @property
    def _writer(self) -> Any:
        if self._made is None:  # in the background: it makes the folder and a file
            self._made = self._make(str(self.folder))
        return self._made
