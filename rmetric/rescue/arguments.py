"""Checks of the arguments of `Rescue`: each error names the argument and what is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from rmetric.rescue.policy import RescueConfig

#: A snapshot folder of such a name was meant to be something else; with ``./`` it is a folder.
_NO_FOLDERS = frozenset({"", "cpu", "cuda", "device", "disk", "gpu", "host", "memory", "ram"})


def checked_config(config: object) -> None:
    """Raise ValueError unless it is None or a RescueConfig."""
    if config is not None and not isinstance(config, RescueConfig):
        raise ValueError(f"config is {config!r}: a RescueConfig is accepted")


def checked_where(where: object) -> None:
    """Raise ValueError unless it is ``host``, ``device`` or a folder."""
    wrong = not isinstance(where, (str, Path)) or (
        where not in ("host", "device") and isinstance(where, str) and where.lower() in _NO_FOLDERS
    )
    if wrong:
        raise ValueError(f"where is {where!r}: host, device or a folder (./gpu) are accepted")


def checked_parts(scheduler: object, extra: object) -> None:
    """Raise ValueError unless all of them can be kept in a snapshot."""
    schedulers = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    named = {f"scheduler {i}": one for i, one in enumerate(schedulers) if one is not None}
    if extra is not None:
        if not isinstance(extra, Mapping):
            raise ValueError(f"extra is {extra!r}: a mapping from names to objects is accepted")
        for name in extra:
            if name == "scaler" or str(name).startswith("scheduler "):
                raise ValueError(f"extra[{name!r}]: this name is the rescue's own")
        named |= {f"extra[{name!r}]": one for name, one in extra.items()}
    for name, one in named.items():
        for method in ("state_dict", "load_state_dict"):
            if isinstance(one, type) or not callable(getattr(one, method, None)):
                raise ValueError(f"{name} is {one!r}: it has no {method}")


def checked_steps(loader: object, total: Any, per_step: Any) -> None:
    """Raise ValueError unless a training can be made of them."""
    iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if isinstance(loader, type) or not iterable:
        raise ValueError(f"loader is {loader!r}: it cannot be iterated")
    for name, value, least in (("total", total, 0), ("per_step", per_step, 1)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} is {value!r}: it must be a whole number from {least}")
