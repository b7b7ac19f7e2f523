"""The metric in real training: everything that needs torch.

Start with `Monitor`; docs/live.md shows it in plain PyTorch, in the Hugging Face
Trainer and in Lightning.
"""

from rmetric.live.alerts import Alert, Verdict
from rmetric.live.config import MonitorConfig
from rmetric.live.monitor import Monitor

__all__ = ["Alert", "Monitor", "MonitorConfig", "Verdict"]
