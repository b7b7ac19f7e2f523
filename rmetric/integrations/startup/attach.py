"""Begin each training of a trainer's class with our callback, unless it has one."""

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
        module: of the Hugging Face Trainer or of Lightning's.
    """
    if module.__name__.startswith("transformers."):
        method, integration = "train", "rmetric.integrations.hugging_face"
    else:
        method, integration = "fit", "rmetric.integrations.lightning"
    begin = getattr(module.Trainer, method)

    @wraps(begin)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _add_callback(self, import_module(integration).RMetricCallback)
        except Exception as error:  # of ours: it costs the monitor, not the training
            logger.error("rmetric: %s: this training is not watched", error)
        return begin(self, *args, **kwargs)

    setattr(module.Trainer, method, watched)


def _add_callback(trainer: Any, callback: type) -> None:
    """Add a callback with the settings of the environment, if the trainer has none."""
    handler = getattr(trainer, "callback_handler", trainer)
    if any(isinstance(one, callback) for one in handler.callbacks):
        return
    settings = settings_of(os.environ)
    # First: Lightning wants those that save checkpoints to be the last.
    handler.callbacks.insert(0, callback(**settings))
    if os.environ.get("RANK", "0") == "0":
        actions = "".join(f", {type(action).__name__}" for action in settings["actions"])
        print(f"rmetric: log {settings['log']}{actions}", file=sys.stderr, flush=True)


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
