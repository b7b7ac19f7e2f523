"""The metric in real training: everything that needs torch.

Start with `Monitor`; docs/live.md shows it in plain PyTorch, in the Hugging Face
Trainer and in Lightning.
"""

from rmetric.monitor.alerts import Alert, Verdict
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.monitor import Monitor

__all__ = ["Alert", "Monitor", "MonitorConfig", "Verdict"]
