"""Begin each training of a trainer's class with our callback or monitor, unless it has one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from rmetric.integrations.startup import DEFAULTS, VARIABLES, is_on

logger = logging.getLogger("rmetric")


def attach(module: ModuleType) -> None:
    """Let the class `Trainer` of a module begin its trainings with a callback.

    Subclasses, as those of TRL are, inherit it. It is added when a training begins, and not when
    a trainer is made: only then is it known that nobody else adds one.

    Args:
        module: of the Trainer of Hugging Face, Lightning or torchtitan.
    """
    package = module.__name__.partition(".")[0]
    method, integration, add = _WAYS.get(package, _LIGHTNING)
    begin = getattr(module.Trainer, method)

    @wraps(begin)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            add(self, import_module(f"rmetric.integrations.{integration}"))
        except Exception as error:  # of ours: it costs the monitor, not the training
            logger.error("rmetric: %s: this training is not watched", error)
        return begin(self, *args, **kwargs)

    setattr(module.Trainer, method, watched)


def _add_callback(trainer: Any, integration: ModuleType) -> None:
    """Add a callback with the settings of the environment, if the trainer has none."""
    handler = getattr(trainer, "callback_handler", trainer)
    if any(isinstance(one, integration.RMetricCallback) for one in handler.callbacks):
        return
    settings = settings_of(os.environ)
    # First: Lightning wants those that save checkpoints to be the last.
    handler.callbacks.insert(0, integration.RMetricCallback(**settings))
    _tell(settings)


def _watch_metrics(trainer: Any, integration: ModuleType) -> None:
    """Watch what torchtitan logs. No step can be left out there, and no step be taken again."""
    settings = settings_of({**os.environ, VARIABLES["rescue"]: "0"}) | {"audits": False}
    if is_on("rescue", os.environ):
        logger.error("rmetric: torchtitan's loop cannot go back: rescue is off, alarms are told")
    schedule = trainer.config.parallelism.pipeline_parallel_schedule
    if integration.watch(trainer.metrics_processor, pp_schedule=schedule, **settings):
        _tell(settings)


def _tell(settings: Mapping[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":
        actions = "".join(f", {type(action).__name__}" for action in settings["actions"])
        print(f"rmetric: log {settings['log']}{actions}", file=sys.stderr, flush=True)


_LIGHTNING = "fit", "lightning", _add_callback
#: Package of a trainer -> the method that trains, our module for it, and what adds us to it.
_WAYS = {
    "transformers": ("train", "hugging_face", _add_callback),
    "torchtitan": ("train", "torchtitan", _watch_metrics),
}


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a callback, from the variables of `VARIABLES`.

    Raises:
        ValueError: a variable has a value that is not accepted; the message names it.
    """
    actions: list[Any] = []
    if is_on("rescue", environment):
        actions.append(import_module("rmetric.rescue").Rescue())
    if environment.get(VARIABLES["webhook"]):
        actions.append(import_module("rmetric.monitor.actions").Webhook(
            variable=VARIABLES["webhook"]
        ))  # fmt: skip
    return {
        "log": environment.get(VARIABLES["log"], DEFAULTS["log"]),
        "actions": actions,
        "audits": is_on("audits", environment),
    }
