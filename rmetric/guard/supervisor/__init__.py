"""Supervisor that starts, monitors and restarts a training: `rmetric supervise`.

Read `core` first, the state machine. `supervise` is the event loop that connects it to the other
modules, whose first lines say what each does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rmetric._util.errors import require


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and delays of the supervisor; `rmetric supervise --help` says what each is."""

    max_restarts: int = 10
    backoff_seconds: float = 1.0
    suspect_after: int = 3
    save_seconds: float = 120.0
    stop_seconds: float = 20.0
    start_seconds: float = 600.0
    hang_seconds: float = 300.0
    saving_seconds: float = 1800.0
    quiet_seconds: float | None = None  # no limit
    poll_seconds: float = 1.0
    progress_seconds: float = 30.0  # between two `progress` lines of the journal
    grace_seconds: float = 15.0
    look_seconds: float = 60.0

    def __post_init__(self) -> None:
        above_0 = ["start", "hang", "saving", "quiet", "poll", "progress"]
        for name, value in vars(self).items():
            if name.removesuffix("_seconds") in above_0:
                above = name == "quiet_seconds" if value is None else 0 < value < inf
                require(name, value, above, "a number of seconds above 0")
            else:
                least = int(name == "suspect_after")
                words = "a number of seconds from" if "seconds" in name else "a number of at least"
                require(name, value, least <= value < inf, f"{words} {least}")

    def timeout(self, phase: str) -> float:
        """Longest time without a heartbeat in a phase, seconds."""
        limits = {"training": self.hang_seconds, "saving": self.saving_seconds}
        return limits.get(phase, self.start_seconds)
