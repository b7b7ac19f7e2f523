"""Supervisor that starts, monitors and restarts a training: `rmetric supervise`.

core.py            state machine: events in, actions out; pure. Read this first.
allocation.py      GPUs, nodes and layout of a launch
processes.py       commands of a launch, the spare launcher of the next, the end of all by pid
warm_launcher.py   script of the spare launcher; it may fork the ranks
attempt.py         one launch from start to exit; GPU verdicts and alarms of its log meanwhile
launch_failure.py  a launch that fails or hangs: its heartbeats, its cause, whether it may pass
stacks.py          what the ranks of a hang do; the diagnosis of a hang or failure
journal.py         event log and lock of the run folder; the text of its lines
summary.py         summary of a journal
supervise.py       event loop that connects these parts
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rmetric._util.errors import require


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and delays of the supervisor; `rmetric supervise` has an option of each name.

    Attributes:
        max_restarts: restarts in a row without progress, from 0. Progress is a step beyond the
            farthest so far.
        backoff_seconds: wait before a restart without progress since the failure before,
            doubled with each in a row; after progress there is none.
        suspect_after: failures in a row of one GPU or node until it is dropped, at least 1.
        save_seconds: longest wait for a checkpoint before a bad GPU is dropped.
        stop_seconds: longest wait for a checkpoint after a signal to the supervisor.
        start_seconds: longest time without a sign of life until training begins, and to exit once
            it finished. Until the first heartbeat output counts as a sign of life.
        hang_seconds: the same while training.
        saving_seconds: the same while saving, when heartbeats may stop.
        quiet_seconds: without new output, once there was some, for a program without heartbeats;
            None for no limit.
        poll_seconds: between two polls of the run folder.
        progress_seconds: between two `progress` lines of the journal.
        grace_seconds: from TERM to KILL; less after a rank has died or hung.
        look_seconds: for a diagnosis, at most; the processes of a hang are ended after it. 0 for
            none.
    """

    max_restarts: int = 10
    backoff_seconds: float = 1.0
    suspect_after: int = 3
    save_seconds: float = 120.0
    stop_seconds: float = 20.0
    start_seconds: float = 600.0
    hang_seconds: float = 300.0
    saving_seconds: float = 1800.0
    quiet_seconds: float | None = None
    poll_seconds: float = 1.0
    progress_seconds: float = 30.0
    grace_seconds: float = 15.0
    look_seconds: float = 60.0

    def __post_init__(self) -> None:
        above_0 = ["start", "hang", "saving", "quiet", "poll", "progress"]
        for name, value in vars(self).items():
            if name.removesuffix("_seconds") in above_0:
                require(name, value, value is None or 0 < value < inf, "a number above 0")
            else:
                least = int(name == "suspect_after")
                require(name, value, least <= value < inf, f"a number of at least {least}")

    def timeout(self, phase: str) -> float:
        """Longest time without a heartbeat in a phase, seconds."""
        limits = {"training": self.hang_seconds, "saving": self.saving_seconds}
        return limits.get(phase, self.start_seconds)
