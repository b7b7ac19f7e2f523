"""The callback in trainings whose program nobody edits: `rmetric run -- COMMAND`.

The folder of this package is put on PYTHONPATH. Each Python of the command finds its
`sitecustomize` there, which waits for a trainer's module to be imported. `attach` then lets the
trainer begin each training with our callback. What it does is set by environment variables.
"""

import logging
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

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
    """Whether a switch is on in an environment.

    Raises:
        ValueError: its variable is neither 1 nor 0; the message names it.

    >>> is_on("rescue", {"RMETRIC_RESCUE": "1"}), is_on("rescue", {}), is_on("audits", {})
    (True, False, True)
    """
    value = environment.get(VARIABLES[option], DEFAULTS[option])
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLES[option]} is {value!r}: 0 and 1 are accepted")
    return value == "1"


def lightning_callbacks() -> list[Any]:
    """Entry point of Lightning, which asks it for callbacks of each Trainer.

    Returns:
        Our callback where RMETRIC_LIGHTNING is 1; nothing else, and then nothing is imported.
    """
    try:
        if not is_on("lightning", os.environ):
            return []
        settings = import_module("rmetric.integrations.startup.attach").settings_of(os.environ)
        return [import_module("rmetric.integrations.lightning").RMetricCallback(**settings)]
    except Exception as error:  # of ours: it costs the monitor, not the training
        logging.getLogger("rmetric").error("rmetric: %s: no training is watched", error)
        return []
