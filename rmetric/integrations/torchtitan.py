"""The monitor beside torchtitan's MetricsProcessor (0.3); it needs nothing of torchtitan itself.

class Watched(MetricsProcessor):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        watch(self, "run.jsonl")

`rmetric run` does the same where a Trainer of torchtitan begins to train.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import nn

from rmetric.monitor.actions.action import rank
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

#: The pipeline schedule whose loss is on the first rank.
_LOSS_ON_FIRST_RANK = "ZBVZeroBubble"


def watch(
    processor: Any,
    log: Any = None,
    *,
    pp_schedule: str = "1F1B",
    config: MonitorConfig | None = None,
    **settings: Any,
) -> Monitor | None:
    """Judge what a MetricsProcessor logs: loss, gradient norm before clipping, validation loss.

    The first rank alone watches, at the steps that torchtitan logs (`log_freq`), so nothing more
    is read from a device. `close` of the processor closes the monitor.

    Its weakness: torchtitan's loop takes no verdict, so no step can be left out and the training
    cannot go back or stop; learning rates and step times are not recorded. The first rank has no
    loss under most pipeline schedules, which is one line of the log.

    Args:
        processor: with `parallel_dims`, `log`, `log_validation` and `close`.
        log: see `Monitor`.
        pp_schedule: torchtitan's name of the pipeline schedule.
        config: see `MonitorConfig`.
        **settings: further arguments of `Monitor`.

    Returns:
        The monitor; None where nothing is watched.
    """
    if rank() != 0 or "log" in vars(processor):  # watched already
        return None
    if processor.parallel_dims.pp_enabled and pp_schedule != _LOSS_ON_FIRST_RANK:
        logger.error(
            "rmetric: with the pipeline schedule %s the first rank has no loss: nothing is watched",
            pp_schedule,
        )
        return None
    config = replace(config or MonitorConfig(), exchange=False, step_times=False)
    monitor = Monitor(nn.Module(), log=log, config=config, **settings)

    def logged(
        step: int, global_avg_loss: float, _: Any = None, grad_norm: Any = None, **__: Any
    ) -> None:
        monitor.step = monitor.weights_step = step - 1
        monitor.check_before_step(global_avg_loss, gradient_norm=grad_norm)

    def validated(loss: float, *_: Any, **__: Any) -> None:
        monitor.evaluated(loss)

    for name, take in ("log", logged), ("log_validation", validated), ("close", monitor.close):
        setattr(processor, name, _followed(getattr(processor, name), take))
    return monitor


def _followed(method: Callable[..., Any], take: Callable[..., Any]) -> Callable[..., Any]:
    """A method that passes on its arguments to `take` once it has run."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        try:
            take(*args, **kwargs)
        except Exception as error:  # an error of ours must not end the training
            logger.error("rmetric: %s: this training is not watched", error)
        return result

    return call
