"""Names of others and ours: cause classes and stages that mean the same.

Written from the meaning of the words before any result was looked at, with the names that families
were to have. The library calls three otherwise (GPU memory, GPU programs, collectives); their names
alone were put right here. One class, one family: one that is near is wrong.
"""

from __future__ import annotations

import re

#: Class of the published crash logs -> family of our library.
FAMILIES: dict[str, str] = {
    "assertion": "assertion",
    "runtime_error": "runtime error",
    "cuda_oom": "out of GPU memory",
    "cuda_runtime": "GPU program",
    "device_mismatch": "device mismatch",
    "div_zero": "division by zero",
    "file_not_found": "file not found",
    "missing_module": "missing module",
    "nan_loss": "nan loss",
    "nccl": "collective communication",
    "oom_killer": "oom killer",
    "permission": "permission",
    "ram_oom": "host out of memory",
    "segfault": "segmentation fault",
    "traceback": "exception",
}

#: How a published stage begins -> our stages that mean it. A job iterates while it evaluates
#: or saves between two steps, so these are right there too.
STAGES: dict[str, tuple[str, ...]] = {
    "launch": ("launch",),
    "initialis": ("initialise",),
    "initializ": ("initialise",),
    "data loading": ("load data",),
    "load data": ("load data",),
    "compil": ("compile",),
    "iterat": ("train", "evaluate", "checkpoint"),
    "train": ("train",),
    "evaluat": ("evaluate",),
    "checkpoint": ("checkpoint",),
    "tear": ("tear-down",),
}

_RANK = re.compile(r"\b(?:rank|device)[-_ ]?(\d+)$")


def class_is_right(cause_class: str, family: str) -> bool:
    """Return True if the family corresponds to the published class."""
    return FAMILIES.get(cause_class) == family


def stages_of(published: str) -> tuple[str, ...]:
    """Our stages that a published one means; () for none, which is not scored."""
    words = published.lower()
    return next((stages for start, stages in STAGES.items() if words.startswith(start)), ())


def faulty_rank(published: str) -> int | None:
    """The one faulty rank or device that a manifest names; None for words about anything else.

    >>> faulty_rank("w_1 device-1"), faulty_rank("this node")
    (1, None)
    """
    found = _RANK.search(published.strip().lower())
    return int(found[1]) if found else None
