"""What the guard saves by; `Checkpoints` is one, the Trainer and Megatron are others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rmetric.guard.good import Done, Failed, Good


class Saver(Protocol):
    """One save at a time, begun on all ranks together; see `Checkpoints` for the methods.

    Attributes:
        saves_later: `begin` only asks, and the save is made when the step's end is over:
            the guard must not wait for it there.
    """

    saves_later: bool

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        *,
        own: Any = None,
        request: int = 0,
        problem: str = "",
    ) -> None: ...

    def poll(self) -> Done | Failed | None: ...

    def wait(self, timeout: float | None = None) -> Done | Failed | None: ...

    def newest_good(self) -> Good | None: ...

    def load(self, good: Good, state: dict[str, Any]) -> dict[str, Any]: ...
