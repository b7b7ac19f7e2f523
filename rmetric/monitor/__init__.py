"""The metric in real training. Every module that needs torch is imported when it is asked for.

Start with `Monitor`; docs/live.md shows it in plain PyTorch, and `rmetric.integrations` has the
callbacks for the Hugging Face Trainer and for Lightning.
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.monitor.alerts import Alert, Verdict
    from rmetric.monitor.config import MonitorConfig
    from rmetric.monitor.monitor import Monitor
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.monitor.alerts": "Alert Verdict",
            "rmetric.monitor.config": "MonitorConfig",
            "rmetric.monitor.monitor": "Monitor",
        },
    )

__all__ = ["Alert", "Monitor", "MonitorConfig", "Verdict"]
