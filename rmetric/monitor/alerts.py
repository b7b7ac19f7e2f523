"""Alert and verdict of the monitor. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert of the monitor.

    Attributes:
        step: that it is about.
        source: ``non_finite``, ``gradient_explosion``, ``learning_rate``, ``no_update``,
            ``stall``, ``slow_rank``, ``slow_drift`` or the name of the detector.
        reason: what was measured, what is usual, and one suggested action.
        rank: the process that saw it, from 0; of a ``slow_rank``, and of a ``stall`` where
            one rank is at fault, that rank.
        since: step at which the condition began, at most `step`; `step` where it is not given.
    """

    step: int
    source: str
    reason: str
    rank: int = 0
    since: int = 0

    def __post_init__(self) -> None:
        if not self.since:
            object.__setattr__(self, "since", self.step)

    def as_entry(self) -> dict[str, Any]:
        """As it stands in a log."""
        return asdict(self)

    def __str__(self) -> str:
        since = f" (since step {self.since})" if self.since < self.step else ""
        return f"step {self.step}{since}, rank {self.rank}: {self.source}: {self.reason}"


class Verdict:
    """Verdict on a step between backward and optimizer.step().

    True where the step may be taken. The answer is found when it is first asked
    for: on an accelerator that reads one number from the device, and a loop
    that never asks never waits.

    >>> bool(Verdict(tuple))
    True
    """

    def __init__(self, find: Callable[[], tuple[Alert, ...]]) -> None:
        self._find: Callable[[], tuple[Alert, ...]] | None = find
        self._alerts: tuple[Alert, ...] = ()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Why not; empty where the step may be taken."""
        if self._find is not None:
            find, self._find = self._find, None
            self._alerts = find()
        return self._alerts

    @property
    def ok(self) -> bool:
        return not self.alerts

    def __bool__(self) -> bool:
        return self.ok
