"""The callback in trainings whose program nobody edits: `rmetric run -- COMMAND`.

The folder of this package is put on PYTHONPATH. Each Python of the command finds its
`sitecustomize` there, which waits for a trainer's module to be imported. `attach` then lets the
trainer begin each training with our callback. What it does is set by environment variables.
"""

from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
#: Option of `rmetric run` -> the environment variable that is its default and that children read.
VARIABLES = {
    "log": "RMETRIC_LOG",
    "rescue": "RMETRIC_RESCUE",
    "webhook": "RMETRIC_WEBHOOK",
    "audits": "RMETRIC_AUDITS",
}
#: The values where neither is given.
DEFAULTS = {"log": "rmetric.jsonl", "rescue": "0", "audits": "1"}


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
