"""The callback in trainings whose program is not edited: `rmetric run -- COMMAND`.

The folder of this package is put on PYTHONPATH. Each Python of the command finds its
`sitecustomize` there, which waits for a trainer's module to be imported. `attach` then lets the
trainer begin each training with our callback. What it does is set by environment variables.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger("rmetric")

FOLDER = Path(__file__).parent
#: Option of `rmetric run` -> the environment variable that is its default and that children read.
VARIABLES = {
    "log": "RMETRIC_LOG",
    "rescue": "RMETRIC_RESCUE",
    "webhook": "RMETRIC_WEBHOOK",
    "audits": "RMETRIC_AUDITS",
    "lightning": "RMETRIC_LIGHTNING",
}
#: The values where neither is given.
DEFAULTS = {"log": "rmetric.jsonl", "rescue": "0", "audits": "1", "lightning": "0"}


def is_on(option: str, environment: Mapping[str, str]) -> bool:
    """Whether a switch is on. Raises ValueError that names a variable which is neither 1 nor 0."""
    value = environment.get(VARIABLES[option], DEFAULTS[option])
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLES[option]} is {value!r}: 0 and 1 are accepted")
    return value == "1"


def audits_of(environment: Mapping[str, str]) -> bool | list[str]:
    """Argument for `make_audits`, from the environment: 1, 0, or names between commas.

    Raises ValueError, which names the value that is not accepted.

    >>> audits_of({}), audits_of({"RMETRIC_AUDITS": "-resume,-batches"})
    (True, ['-resume', '-batches'])
    """
    value = environment.get(VARIABLES["audits"], DEFAULTS["audits"])
    if value in ("0", "1"):
        return value == "1"
    names = value.split(",")
    import_module("rmetric.audits").make_audits(names)
    return names


def lightning_callbacks() -> list[Any]:
    """Entry point that Lightning asks for callbacks of each Trainer: ours where it is on."""
    try:
        if not is_on("lightning", os.environ):
            return []
        settings = settings_of(os.environ)
        return [import_module("rmetric").LightningCallback(**settings)]
    except Exception as error:  # an error of ours must not end the training
        logger.error("rmetric: %s: no training is watched", error)
        return []


def attach(module: ModuleType) -> None:
    """Let the class `Trainer` of a module, and its subclasses, begin trainings with a callback.

    Only then, and not when a trainer is made, is it known whether it has a callback of its own.
    """
    package = module.__name__.partition(".")[0]
    method, integration, name, add = _WAYS.get(package, _LIGHTNING)
    begin = getattr(module.Trainer, method)

    @wraps(begin)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            add(self, getattr(import_module(f"rmetric.integrations.{integration}"), name))
        except Exception as error:  # an error of ours must not end the training
            logger.error("rmetric: %s: this training is not watched", error)
        return begin(self, *args, **kwargs)

    setattr(module.Trainer, method, watched)


def _add_callback(trainer: Any, callback_class: type) -> None:
    """Add a callback with the settings of the environment, if the trainer has none."""
    handler = getattr(trainer, "callback_handler", trainer)
    if any(isinstance(each, callback_class) for each in handler.callbacks):
        return
    settings = settings_of(os.environ)
    # First: Lightning requires those that save checkpoints to be the last.
    handler.callbacks.insert(0, callback_class(**settings))
    _print_settings(settings)


def _watch_metrics(trainer: Any, watch: Callable[..., Any]) -> None:
    """Watch what torchtitan logs. No step can be left out there, and no step be taken again."""
    settings = settings_of({**os.environ, VARIABLES["rescue"]: "0"}) | {"audits": False}
    if is_on("rescue", os.environ):
        logger.error("rmetric: rescue is off, alarms are only reported: torchtitan cannot go back")
    schedule = trainer.config.parallelism.pipeline_parallel_schedule
    if watch(trainer.metrics_processor, pp_schedule=schedule, **settings):
        _print_settings(settings)


def _print_settings(settings: Mapping[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":
        actions = "".join(f", {type(action).__name__}" for action in settings["actions"])
        print(f"rmetric: log {settings['log']}{actions}", file=sys.stderr, flush=True)


_LIGHTNING = "fit", "lightning", "LightningCallback", _add_callback
#: Package of a trainer -> the method that trains, our module, what it has, and what adds that.
_WAYS = {
    "transformers": ("train", "hugging_face", "HuggingFaceCallback", _add_callback),
    "torchtitan": ("train", "torchtitan", "watch", _watch_metrics),
}


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a callback. Raises ValueError that names a variable with a wrong value."""
    actions: list[Any] = []
    if is_on("rescue", environment):
        actions.append(import_module("rmetric.rescue").Rescue())
    if environment.get(VARIABLES["webhook"]):
        webhook = import_module("rmetric.monitor.actions").Webhook
        actions.append(webhook(variable=VARIABLES["webhook"]))
    return {
        "log": environment.get(VARIABLES["log"], DEFAULTS["log"]),
        "actions": actions,
        "audits": audits_of(environment),
    }
