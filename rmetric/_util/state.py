"""The state of a stream as plain values, so that it can travel in a checkpoint.

`state_of` turns a metric, a detector or anything else made of numbers,
containers and rmetric's own objects into what JSON and a `weights_only` load of
torch can hold; `restore_state` puts it back into an object that was made anew.
What a class names in `SETTINGS` stays as it was made.
"""

from __future__ import annotations

import logging
from collections import deque
from copy import deepcopy
from typing import Any

import numpy as np

logger = logging.getLogger("rmetric")

PLAIN = (type(None), bool, int, float, str)


def state_of(value: Any) -> Any:
    """`value` as plain values. Raises TypeError for what cannot be held so."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple, deque)):
        return [state_of(inner) for inner in value]
    if isinstance(value, dict):
        return [[state_of(key), state_of(inner)] for key, inner in value.items()]
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value).__module__.startswith("rmetric."):
        return {name: state_of(inner) for name, inner in _attributes(value).items()}
    raise TypeError(f"{type(value).__name__} has no plain state")


def restore_state(target: Any, state: Any) -> Any:
    """Result of `state_of` in the form of `target`; objects are filled in place.

    Raises ValueError where the state is that of something else.
    """
    if isinstance(target, np.random.Generator):
        target.bit_generator.state = state
    elif isinstance(target, np.ndarray):
        return np.asarray(state, dtype=target.dtype)
    elif isinstance(target, deque):
        return deque(state, maxlen=target.maxlen)
    elif isinstance(target, dict):
        return dict(state)
    elif isinstance(target, tuple):
        return tuple(
            restore_state(of, inner) for of, inner in zip(target or state, state, strict=True)
        )
    elif isinstance(target, list):
        if len(target) == len(state) and not all(isinstance(of, PLAIN) for of in target):
            return [restore_state(of, inner) for of, inner in zip(target, state, strict=True)]
        return list(state)
    elif not isinstance(target, PLAIN):
        _fill(target, state)
    else:
        return state
    return target


def restore_or_keep(target: Any, state: Any, name: str) -> bool:
    """Restore `target` in place and return True, unless the state does not fit.

    Such a one, of other settings or of an earlier version, leaves it as it is, with one warning.
    """
    try:
        restore_state(deepcopy(target), state)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning(
            "rmetric: the saved state of %s does not fit; it starts anew: %s", name, error
        )
        return False
    restore_state(target, state)
    return True


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes that change while a stream runs: all but its settings."""
    names = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    names += getattr(value, "__dict__", ())
    return {n: getattr(value, n) for n in names if n != "config" and hasattr(value, n)}


def _fill(target: Any, state: Any) -> None:
    attributes = _attributes(target)
    if not isinstance(state, dict) or set(state) != set(attributes):
        raise ValueError(f"the state is not that of a {type(target).__name__} with these settings")
    settings = getattr(type(target), "SETTINGS", ())
    for name, of in attributes.items():
        if name in settings:
            continue
        restored = restore_state(of, state[name])
        if restored is not of:
            setattr(target, name, restored)
