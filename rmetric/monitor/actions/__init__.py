"""Actions that a monitor runs on an alert, one a file; by default it only logs."""

from rmetric.monitor.actions.action import Action, Callback, as_action
from rmetric.monitor.actions.cut_learning_rate import CutLearningRate
from rmetric.monitor.actions.emergency_checkpoint import EmergencyCheckpoint, restore
from rmetric.monitor.actions.skip_step import SkipStep
from rmetric.monitor.actions.stop import Stop
from rmetric.monitor.actions.tensorboard import TensorBoard
from rmetric.monitor.actions.wandb import WandB
from rmetric.monitor.actions.webhook import Webhook

__all__ = [
    "Action",
    "Callback",
    "CutLearningRate",
    "EmergencyCheckpoint",
    "SkipStep",
    "Stop",
    "TensorBoard",
    "WandB",
    "Webhook",
    "as_action",
    "restore",
]
