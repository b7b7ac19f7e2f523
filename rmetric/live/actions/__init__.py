"""What the monitor may do on an alert, one action a file; by default it only logs."""

from rmetric.live.actions.action import Action, Callback, as_action
from rmetric.live.actions.ask_guard import AskGuard
from rmetric.live.actions.cut_learning_rate import CutLearningRate
from rmetric.live.actions.emergency_checkpoint import EmergencyCheckpoint, restore
from rmetric.live.actions.skip_step import SkipStep
from rmetric.live.actions.stop import Stop
from rmetric.live.actions.tensorboard import TensorBoard
from rmetric.live.actions.wandb import WandB
from rmetric.live.actions.webhook import Webhook

__all__ = [
    "Action",
    "AskGuard",
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
