"""Tables, plots and pages of runs.

Every module is imported when it is asked for, because matplotlib and Jinja are slow to import.
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.reporting.renderers import RENDERERS
    from rmetric.reporting.replay_report import replay_logs
    from rmetric.reporting.run_plot import plot_run
    from rmetric.reporting.table import Table
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.reporting.renderers": "RENDERERS",
            "rmetric.reporting.replay_report": "replay_logs",
            "rmetric.reporting.run_plot": "plot_run",
            "rmetric.reporting.table": "Table",
        },
    )

__all__ = [
    "RENDERERS",
    "Table",
    "plot_run",
    "replay_logs",
]
