"""Events that the supervisor core receives, and actions that it returns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rmetric.guard.supervisor.allocation import Allocation, Gpu


@dataclass(frozen=True, kw_only=True)
class LaunchFailure:
    """Cause of a failed launch.

    Attributes:
        kind: `exit`, `signal`, `exception`, `hang` or `gpu`.
        words: human-readable cause.
        code: exit code of the first failed process, below 0 for a signal; None if unknown.
        rank: rank of that process; None if unknown.
        node: node of that process; empty if unknown or with a single node.
        gpu: GPU implicated by the evidence; None for none.
        lasting: it occurs again at each start; see `failure_class`.
    """

    kind: str
    words: str
    code: int | None = None
    rank: int | None = None
    node: str = ""
    gpu: Gpu | None = None
    lasting: bool = False

    @property
    def signature(self) -> str:
        """Key of failures with the same cause: kind, code, rank and words without numbers."""
        return f"{self.kind} {self.code} {self.rank} {re.sub(r'[0-9]+', '#', self.words)}"

    @property
    def from_outside(self) -> bool:
        """The process was killed from outside; a restart may succeed."""
        return self.code in (-9, -15)


@dataclass(frozen=True, kw_only=True)
class SupervisorEvent:
    """An observation at `time`, seconds on the supervisor's clock."""

    time: float


class SupervisorStarted(SupervisorEvent):
    """The supervisor started."""


@dataclass(frozen=True, kw_only=True)
class ProcessesEnded(SupervisorEvent):
    """`EndProcesses` was carried out."""

    left: int = 0  # processes that are still alive
    unreachable: tuple[str, ...] = ()  # nodes on which it failed


@dataclass(frozen=True, kw_only=True)
class LaunchExited(SupervisorEvent):
    """The launch exited; without a failure its exit code is 0."""

    failure: LaunchFailure | None = None
    stopped: bool = False  # because of a request that the supervisor did not make
    early: bool = False  # its heartbeats do not report the end of training
    unsaved: str = ""  # it exited with 0, but its last steps are in no good checkpoint: why
    held: str = ""  # by its rescue, with any exit code: why, and where the weights are


@dataclass(frozen=True, kw_only=True)
class LaunchHung(SupervisorEvent):
    """The launch runs without progress."""

    failure: LaunchFailure


@dataclass(frozen=True, kw_only=True)
class GpuVerdictChanged(SupervisorEvent):
    """The telemetry verdict on a GPU changed; see `GpuVerdict`."""

    gpu: Gpu
    level: str
    action: str
    words: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRequested(SupervisorEvent):
    """A checkpoint was requested; `source` is one of `rmetric.guard.policy.SOURCES`."""

    source: str
    words: str


class StopRequested(SupervisorEvent):
    """A user requested a checkpoint and a stop."""


@dataclass(frozen=True, kw_only=True)
class StepReached(SupervisorEvent):
    """The current launch reached `step`; it resumed at step `resumed`."""

    step: int
    resumed: int


@dataclass(frozen=True, kw_only=True)
class CheckpointMade(SupervisorEvent):
    """A good checkpoint of `step` exists that is newer than any before."""

    step: int


class CheckpointDurable(SupervisorEvent):
    """The checkpoint requested before a stop is durable."""


class TimerFired(SupervisorEvent):
    """The time of a `SetTimer` has come; it may also fire early."""


@dataclass(frozen=True, kw_only=True)
class SignalReceived(SupervisorEvent):
    """The supervisor received a termination signal."""

    signal: int


@dataclass(frozen=True)
class StartLaunch:
    """Start launch `number`, counted over the life of the run folder."""

    number: int
    allocation: Allocation


@dataclass(frozen=True)
class RequestCheckpoint:
    """Write a checkpoint request to the run folder."""

    source: str
    reason: str
    fatal: bool = False
    stop: bool = False


@dataclass(frozen=True)
class EndProcesses:
    """End every process of every launch; answered by `ProcessesEnded`.

    `answers`: the processes may still handle TERM. After a rank has died or hangs the others
    wait for it in a collective, where they do not.
    """

    why: str
    answers: bool = True


@dataclass(frozen=True)
class SetTimer:
    """Send `TimerFired` at `time`."""

    time: float


@dataclass(frozen=True)
class DropGpus:
    """Stop using these GPUs."""

    gpus: tuple[Gpu, ...]
    why: str


@dataclass(frozen=True)
class WriteJournal:
    """Write an event to the journal."""

    event: str
    words: str
    failure: LaunchFailure | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Finish:
    """End the supervisor; `outcome` is one of those of `core`."""

    outcome: str
    words: str
    code: int


Action = (
    StartLaunch | RequestCheckpoint | EndProcesses | SetTimer | DropGpus | WriteJournal | Finish
)
