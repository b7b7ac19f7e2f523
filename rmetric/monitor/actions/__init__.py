"""Actions that a monitor runs on an alert; by default it only logs."""

from rmetric.monitor.actions.action import (
    Action,
    Callback,
    CutLearningRate,
    SkipStep,
    Stop,
    as_action,
)
from rmetric.monitor.actions.checkpoint_file import EmergencyCheckpoint, restore
from rmetric.monitor.actions.dashboards import MLflow, TensorBoard, Trackio, WandB
from rmetric.monitor.actions.exports import Prometheus, Webhook

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
