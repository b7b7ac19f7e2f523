"""What the callbacks need of the Hugging Face Trainer beside what it passes to them."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from rmetric.monitor.monitor import Monitor


class RMetricState(TrainerCallback, ExportableState):
    """Keeps the monitor's state in the Trainer's checkpoints; exists while a training runs.

    It is not RMetricCallback itself: with `restore_callback_states_from_checkpoint` the
    Trainer makes such callbacks anew from what it saved, and actions cannot be saved.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self._monitor.state_dict()}


def loop_methods(trainer: Trainer) -> list[tuple[Any, str]]:
    """Methods through which an exception leaves the steps, or what lies between them.

    Args:
        trainer: whose loop has begun.

    Returns:
        Pairs of an object and the name of its method. The loop of transformers before 5.5 has no
        method of its own for an epoch: there the batches, the callbacks and the evaluations
        are followed, and an exception of the optimiser itself is not seen.
    """
    if hasattr(trainer, "_run_epoch"):
        return [(trainer, "_run_epoch")]
    methods = ("get_batch_samples", "_maybe_log_save_evaluate")
    parts = [(trainer, name) for name in methods if hasattr(trainer, name)]
    return [*parts, (trainer.callback_handler, "call_event")]


def calling_trainer() -> Trainer | None:
    """The Trainer that has just called, from the stack: callbacks are not passed it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None
