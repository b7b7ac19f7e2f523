"""A method of one object, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """A method of this one object is another one inside."""
    before = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if vars(owner).get(name) is method:  # else it was replaced once more since
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
