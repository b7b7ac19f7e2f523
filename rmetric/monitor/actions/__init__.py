"""Actions that a monitor runs on an alert; by default it only logs."""

from rmetric.monitor.actions.action import Action, Callback, as_action
from rmetric.monitor.actions.checkpoint_file import restore
from rmetric.monitor.actions.dashboards import MLflow, TensorBoard, Trackio, WandB
from rmetric.monitor.actions.emergency_checkpoint import EmergencyCheckpoint
from rmetric.monitor.actions.prometheus import Prometheus
from rmetric.monitor.actions.training_control import CutLearningRate, SkipStep, Stop
from rmetric.monitor.actions.webhook import Webhook

__all__ = [
    "Action",
    "Callback",
    "CutLearningRate",
    "EmergencyCheckpoint",
    "MLflow",
    "Prometheus",
    "SkipStep",
    "Stop",
    "TensorBoard",
    "Trackio",
    "WandB",
    "Webhook",
    "as_action",
    "restore",
]
