"""What the core of the supervisor is told, and what it asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rmetric.guard.supervisor.allocation import Allocation, Gpu

#: How a launch can fail.
KINDS = ("exit", "signal", "exception", "hang", "gpu")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a launch is no good.

    Attributes:
        kind: one of `KINDS`.
        words: for people.
        code: exit code of the process that failed first, below 0 for a signal; None unknown.
        rank: of that process; None where it is not known.
        node: on which it ran; empty where it is not known or there is one.
        gpu: that may be the cause; None where nothing says so.
    """

    kind: str
    words: str
    code: int | None = None
    rank: int | None = None
    node: str = ""
    gpu: Gpu | None = None

    @property
    def signature(self) -> str:
        """What two failures of the same cause have in common: the words without the numbers."""
        return f"{self.kind} {self.code} {self.rank} {re.sub(r'[0-9]+', '#', self.words)}"

    @property
    def from_outside(self) -> bool:
        """Killed by somebody: trying again is no mistake."""
        return self.code in (-9, -15)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something was noticed at `time`, seconds on the supervisor's clock."""

    time: float


@dataclass(frozen=True, kw_only=True)
class Began(Event):
    """The supervisor runs."""


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """What `End` asked for is done.

    Attributes:
        left: processes that are still there.
        unreachable: nodes on which it could not be done.
    """

    left: int = 0
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Exited(Event):
    """The launch is over by itself; without a failure it exited with 0.

    Attributes:
        stopped: it did so because a request that was not the supervisor's asked it to stop.
        early: by its heartbeats it had not finished.
    """

    failure: Failure | None = None
    stopped: bool = False
    early: bool = False


@dataclass(frozen=True, kw_only=True)
class Hung(Event):
    """It runs and does nothing."""

    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Verdict(Event):
    """Telemetry thinks something else of a GPU than before; see `GpuVerdict`."""

    gpu: Gpu
    level: str
    action: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Wanted(Event):
    """Somebody wants a checkpoint: `source` as in `rmetric.guard.policy.SOURCES`."""

    source: str
    words: str


@dataclass(frozen=True, kw_only=True)
class StopWanted(Event):
    """A user has left a request to save and then to stop."""


@dataclass(frozen=True, kw_only=True)
class Stepped(Event):
    """The present launch is at `step`; it came back at `resumed`."""

    step: int
    resumed: int


@dataclass(frozen=True, kw_only=True)
class Durable(Event):
    """The checkpoint that was asked for before stopping, by us or a user, is durable."""


@dataclass(frozen=True, kw_only=True)
class Woke(Event):
    """The time of a `WakeAt` has come, or any other."""


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """The supervisor got a signal that asks it to end."""

    signal: int


@dataclass(frozen=True)
class Launch:
    """Start the training: launch `number`, counted over the life of the folder."""

    number: int
    allocation: Allocation


@dataclass(frozen=True)
class Ask:
    """Leave a request for a checkpoint in the run folder."""

    source: str
    reason: str
    fatal: bool = False
    stop: bool = False


@dataclass(frozen=True)
class End:
    """End every process of every launch; answer with `Ended`."""

    why: str


@dataclass(frozen=True)
class WakeAt:
    """Send `Woke` at `time`."""

    time: float


@dataclass(frozen=True)
class Drop:
    """These GPUs are used no more."""

    gpus: tuple[Gpu, ...]
    why: str


@dataclass(frozen=True)
class Note:
    """Something for the journal: the name of the event, and words."""

    event: str
    words: str
    failure: Failure | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Finish:
    """The supervisor is done: `outcome` of `finished`, `stopped`, `gave up`."""

    outcome: str
    words: str
    code: int


Action = Launch | Ask | End | WakeAt | Drop | Note | Finish
