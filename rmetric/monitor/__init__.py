"""The metric in real training. Every module that needs torch is imported when it is asked for.

Start with `Monitor`; docs/live.md shows it in plain PyTorch, in the Hugging Face Trainer
(`RMetricCallback`) and in Lightning (`rmetric.monitor.lightning.RMetricCallback`).
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.monitor.alerts import Alert, Verdict
    from rmetric.monitor.config import MonitorConfig
    from rmetric.monitor.hugging_face import RMetricCallback
    from rmetric.monitor.monitor import Monitor
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.monitor.alerts": "Alert Verdict",
            "rmetric.monitor.config": "MonitorConfig",
            "rmetric.monitor.hugging_face": "RMetricCallback",
            "rmetric.monitor.monitor": "Monitor",
        },
    )

__all__ = [
    "Alert",
    "Monitor",
    "MonitorConfig",
    "RMetricCallback",
    "Verdict",
]
