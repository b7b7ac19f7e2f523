r"""State machine of the supervisor. Pure: events in, actions out; no clock, files or processes.

Each public method of `Core` is an event, and returns the actions that answer it.

ending --------> running --------> saving     a checkpoint before the stop
  ^  \              |                 |
  |   v             v                 v
  |  waiting <--- ending <------------'       all processes are ended and verified
  '------'          |
                    v
                   over                       finished, not saved, held, stopped, gave up
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from math import inf
from typing import Concatenate, NamedTuple, ParamSpec

import numpy as np

from rmetric.guard.layout import Layout
from rmetric.guard.supervisor import Settings
from rmetric.guard.supervisor.allocation import (
    Allocation,
    Gpu,
    NothingFitsError,
    Planner,
    Pool,
    all_of,
    without,
)
from rmetric.guard.supervisor.launch_failure import LaunchFailure, signal_name, with_disk_full_first

P = ParamSpec("P")

FINISHED, STOPPED, GAVE_UP = "finished", "stopped", "gave up"
#: The training ended, but its last steps are in no good checkpoint.
NOT_SAVED = "not saved"
#: Its rescue holds it: a restart would meet the same condition again.
HELD = "held"
#: Exit codes of the supervisor; ended by a signal it is 128 + the signal.
CODE_FINISHED, CODE_GAVE_UP, CODE_STOPPED, CODE_NOT_SAVED, CODE_HELD = 0, 1, 4, 5, 6
#: Upper bound of the wait before a restart, and the greatest share of it added at random.
LONGEST_BACKOFF_SECONDS, JITTER = 300.0, 0.25
#: A launch without a step that ends sooner failed at once.
AT_ONCE_SECONDS = 600.0
#: Time for training to exit by itself once the checkpoint before a stop is durable.
SETTLE_SECONDS = 5.0
#: Actions of a fatal verdict after which the GPU is no longer used.
DROPPING = ("reset", "drain", "reboot")


@dataclass(kw_only=True)
class JournalState:
    """State that earlier supervisors left in the journal."""

    launches: int = 0
    restarts: int = 0  # in a row, at the end
    best_step: int = 0
    dropped: list[Gpu] = field(default_factory=list)  # no longer used
    outcome: str = ""  # of the last supervisor; empty if it was killed


class StartLaunch(NamedTuple):
    """Start launch `number`, counted over the life of the run folder."""

    number: int
    allocation: Allocation


class RequestCheckpoint(NamedTuple):
    """Write a checkpoint request to the run folder."""

    source: str
    reason: str
    fatal: bool = False
    stop: bool = False


class EndProcesses(NamedTuple):
    """End every process of every launch; answered by `processes_ended`.

    `answers`: the processes may still handle TERM. After a rank has died or hangs the others
    wait for it in a collective, where they do not.
    """

    why: str
    answers: bool = True


class SetTimer(NamedTuple):
    """Send `timer_fired` at `time`."""

    time: float


class DropGpus(NamedTuple):
    """Stop using these GPUs."""

    gpus: tuple[Gpu, ...]
    why: str


class WriteJournal(NamedTuple):
    """Write an event to the journal."""

    event: str
    words: str
    failure: LaunchFailure | None = None
    seconds: float | None = None


class Finish(NamedTuple):
    """End the supervisor; `outcome` is one of those of `core`."""

    outcome: str
    words: str
    code: int


Action = (
    StartLaunch | RequestCheckpoint | EndProcesses | SetTimer | DropGpus | WriteJournal | Finish
)


def _event(
    method: Callable[Concatenate[Core, P], Iterable[Action]],
) -> Callable[Concatenate[Core, P], list[Action]]:
    """An event of `Core`, to which nothing is done once all is over."""

    @wraps(method)
    def handle(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> list[Action]:
        return [] if core.phase == "over" else list(method(core, *args, **kwargs))

    return handle


class Core:
    """Decides on launches, checkpoints and restarts.

    `rng` is the source of the jitter; with `again` a training that has finished is run once more.
    `time` is that of the event, seconds on the supervisor's clock.
    """

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        plan: Planner,
        *,
        rng: np.random.Generator,
        state: JournalState | None = None,
        again: bool = False,
    ) -> None:
        state = state or JournalState()
        self.settings, self.plan, self.rng = settings, plan, rng
        self.pool = without(pool, state.dropped)
        self.phase = "idle"
        self.launches, self.restarts = state.launches, state.restarts
        self.best_step = self._best_at_failure = state.best_step
        self._finished_before = state.outcome == FINISHED and not again
        if state.outcome:  # it was restarted by a user
            self.restarts = 0
        self._progressed = False  # since the last failure
        self._used: set[Gpu] = set()
        self._layout: Layout | None = None
        #: What follows when the processes are ended; "over": `_last`.
        self._then, self._last, self._signal = "", list[Action](), 0
        self._until = inf
        self._launched_at, self._stepped = 0.0, False
        self._failure: LaunchFailure | None = None
        self._at_once = ""
        self._stop_wanted, self._saved = False, False
        self._suspect: tuple[Gpu, ...] = ()
        self._suspected = 0

    @_event
    def supervisor_started(self) -> Iterable[Action]:
        if self._finished_before:
            return self._over(FINISHED, "it had finished before", CODE_FINISHED)
        return self._end("launch", "remains of an earlier supervisor")

    @_event
    def step_reached(self, step: int, resumed: int) -> Iterable[Action]:
        """The current launch reached `step`; it resumed at step `resumed`."""
        self._stepped = self._stepped or step > resumed
        self.best_step = max(self.best_step, step)
        if self.best_step > self._best_at_failure:
            self.restarts, self._at_once, self._progressed = 0, "", True
        return ()

    @_event
    def launch_exited(
        self,
        time: float,
        *,
        failure: LaunchFailure | None = None,
        stopped: bool = False,
        early: bool = False,
        unsaved: str = "",
        held: str = "",
    ) -> Iterable[Action]:
        """The launch exited; without a failure its exit code is 0.

        `stopped`: it ended because of a request that the supervisor did not make. `early`: its
        heartbeats do not report the end of training. `unsaved`: why its last steps are in no good
        checkpoint, although it exited with 0. `held`: why its rescue holds it, with any exit code.
        """
        if held and self.phase in ("running", "saving") and self._then != "stop":
            return self._end_for_good(HELD, held, CODE_HELD)
        if self.phase == "saving":
            return self._end(self._then, failure.words if failure else "it stopped as requested")
        if self.phase != "running":
            return ()
        if failure is not None:
            return self._failed(time, failure)
        if stopped:
            return self._end("asked", "stop was requested")
        if unsaved:
            return self._end_for_good(NOT_SAVED, unsaved, CODE_NOT_SAVED)
        # A training that never reports its end is restarted and then makes no step.
        if early and self._stepped:
            words = "it ended with exit code 0 before it had finished"
            return self._failed(time, LaunchFailure(kind="exit", words=words, code=0))
        over = "the training exited with 0"
        return self._end_for_good(FINISHED, over, CODE_FINISHED, why="it finished")

    @_event
    def launch_hung(self, time: float, failure: LaunchFailure) -> Iterable[Action]:
        """The launch runs without progress."""
        return self._failed(time, failure) if self.phase == "running" else ()

    @_event
    def gpu_verdict(
        self, time: float, *, gpu: Gpu, level: str, action: str, words: str
    ) -> Iterable[Action]:
        """The telemetry verdict on a GPU changed; see `GpuVerdict`."""
        if gpu[1] not in self.pool.get(gpu[0], ()) or level == "healthy":
            return ()
        drops = action in DROPPING
        if level != "fatal" or not (drops or action == "restart_application"):
            return self.checkpoint_requested("risk", words)
        dropped: list[Action] = [self._drop((gpu,), words)] if drops else []
        if self.phase != "running" or gpu not in self._used:
            return dropped
        failure = LaunchFailure(kind="gpu", words=words, node=gpu[0], gpu=gpu)
        deadline = time + self.settings.save_seconds
        noted, *saving = self._save("rule", words, deadline, "replace", failure)
        return [noted, *dropped, *saving]

    @_event
    def checkpoint_requested(self, source: str, words: str) -> Iterable[Action]:
        """A checkpoint was requested; `source` is one of `rmetric.guard.policy.SOURCES`."""
        return [RequestCheckpoint(source, words)] if self.phase == "running" else []

    @_event
    def stop_requested(self) -> Iterable[Action]:
        """A user requested a checkpoint and a stop."""
        self._stop_wanted, self._saved = True, False
        return self._stop_as_requested() if self.phase == "waiting" else ()

    @_event
    def checkpoint_durable(self, time: float) -> Iterable[Action]:
        """The checkpoint requested before a stop is durable."""
        self._saved = True
        if self.phase != "saving":
            return ()
        self._until = min(self._until, time + SETTLE_SECONDS)
        return [SetTimer(self._until)]

    @_event
    def timer_fired(self, time: float) -> Iterable[Action]:
        """The time of a `SetTimer` has come; it may also fire early."""
        if time < self._until:
            return ()
        if self.phase == "saving":
            return self._end(self._then, "it did not exit in time")
        return self._launch(time) if self.phase == "waiting" else ()

    @_event
    def signal_received(self, time: float, signal: int) -> Iterable[Action]:
        self._signal = signal
        deadline = time + self.settings.stop_seconds
        if self.phase == "running":
            return self._save("signal", signal_name(-signal), deadline, "stop", None)
        if self.phase == "saving":
            if self._then == "stop":
                return self._end("stop", "a second signal came")
            self._then = "stop"
            self._until = min(self._until, deadline)
            return [SetTimer(self._until)]
        if self.phase == "ending":
            if self._then != "over":
                self._then = "stop"
            return ()
        return self._stop()

    @_event
    def processes_ended(
        self, time: float, *, left: int = 0, unreachable: Iterable[str] = ()
    ) -> Iterable[Action]:
        """`EndProcesses` was carried out; `left` processes are alive, some nodes `unreachable`."""
        if self.phase != "ending":
            return ()
        if left:
            words = f"{left} processes of the training cannot be ended: end them by hand"
            return self._over(GAVE_UP, words, CODE_GAVE_UP)
        if self._then == "over":
            self.phase = "over"
            return self._last
        lost = [self._drop(gpus, f"{node} cannot be reached") for node in unreachable
                if (gpus := tuple((node, gpu) for gpu in self.pool.get(node, ())))]  # fmt: skip
        if self._then == "stop":
            then = self._stop()
        elif self._then == "asked" or self._stop_wanted:
            then = self._stop_as_requested()
        else:
            then = (self._launch if self._then == "launch" else self._retry)(time)
        return [*lost, *then]

    def _save(
        self, source: str, words: str, deadline: float, then: str, failure: LaunchFailure | None
    ) -> list[Action]:
        """Request a checkpoint and stop after it."""
        self.phase, self._then, self._until = "saving", then, deadline
        self._failure = failure
        noted = [WriteJournal("failure", words, failure=failure)] if failure else []
        return [*noted, RequestCheckpoint(source, words, fatal=True, stop=True), SetTimer(deadline)]

    def _failed(self, time: float, failure: LaunchFailure) -> Iterable[Action]:
        self._failure = failure
        at_once = not self._stepped and time - self._launched_at < AT_ONCE_SECONDS
        same = at_once and failure.signature == self._at_once and failure.lasting
        self._at_once = failure.signature if at_once else ""
        noted = WriteJournal("failure", failure.words, failure=failure)
        return [noted, *self._end("same" if same else "retry", failure.words, answers=False)]

    def _end_for_good(
        self, outcome: str, words: str, code: int, *, why: str = ""
    ) -> Iterable[Action]:
        self._last = [Finish(outcome, words, code)]
        return self._end("over", why or words)

    def _end(self, then: str, why: str, *, answers: bool = True) -> list[Action]:
        self.phase, self._then, self._until = "ending", then, inf
        return [EndProcesses(why, answers)]

    def _retry(self, time: float) -> Iterable[Action]:
        words = self._failure.words if self._failure else "it failed"
        if self._then == "same":
            return self._over(GAVE_UP, f"repeated immediate failure: {words}", CODE_GAVE_UP)
        if self.restarts >= self.settings.max_restarts:
            many = f"{self.restarts} restarts in a row failed, the last: {words}"
            return self._over(GAVE_UP, many, CODE_GAVE_UP)
        actions: list[Action] = []
        if self._then == "retry":
            actions += self._suspects()
        replaced = self._then == "replace" and not self._used <= set(all_of(self.pool))
        seconds = 0.0
        if not replaced and not self._progressed:
            wait = self.settings.backoff_seconds * 2.0 ** min(self.restarts, 60)
            wait = min(wait, LONGEST_BACKOFF_SECONDS)
            seconds = wait * (1.0 + JITTER * float(self.rng.random()))
        self.restarts += 1
        self._best_at_failure, self._progressed = self.best_step, False
        self.phase, self._until = "waiting", time + seconds
        return [*actions, WriteJournal("waiting", "before the next launch", seconds=seconds),
                SetTimer(self._until)]  # fmt: skip

    def _suspects(self) -> list[Action]:
        """Drop the GPU or node that failed too often in a row, if the rest suffices."""
        suspect = self._suspect_of(self._failure)
        self._suspected = self._suspected + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if not suspect or self._suspected < self.settings.suspect_after:
            return []
        try:
            self.plan(without(self.pool, suspect), self._layout)
        except NothingFitsError:
            return []
        self._suspect, self._at_once = (), ""
        return [self._drop(suspect, f"failed {self._suspected} times in a row")]

    def _suspect_of(self, failure: LaunchFailure | None) -> tuple[Gpu, ...]:
        if failure is None:
            return ()
        if failure.gpu is not None:
            killed_from_outside = failure.code in (-9, -15)
            return () if killed_from_outside else (failure.gpu,)
        # A failure of a known rank does not incriminate its node.
        if len(self.pool) > 1 and failure.rank is None and failure.kind != "exception":
            return tuple((failure.node, gpu) for gpu in self.pool.get(failure.node, ()))
        return ()

    def _drop(self, gpus: tuple[Gpu, ...], why: str) -> DropGpus:
        self.pool = without(self.pool, gpus)
        return DropGpus(gpus, why)

    def _launch(self, time: float) -> Iterable[Action]:
        try:
            allocation = self.plan(self.pool, self._layout)
        except NothingFitsError as error:
            return self._over(GAVE_UP, f"no layout fits: {error}", CODE_GAVE_UP)
        self.launches += 1
        self.phase, self._until = "running", inf
        self._launched_at, self._stepped = time, False
        self._failure, self._saved = None, False
        self._used = set(all_of(allocation.gpus))
        changed = allocation.layout != self._layout
        self._layout = allocation.layout
        note = WriteJournal("plan", f"{allocation}: {allocation.words}")
        return [*([note] if changed else []), StartLaunch(self.launches, allocation)]

    def _stop_as_requested(self) -> Iterable[Action]:
        """Stop as requested, also if training failed before its checkpoint."""
        words = "a request asked for a stop"
        if self._failure is not None and not self._saved:
            words += ", but it failed before its checkpoint was made"
        return self._over(STOPPED, words, CODE_STOPPED)

    def _stop(self) -> Iterable[Action]:
        return self._over(STOPPED, signal_name(-self._signal), 128 + self._signal)

    def _over(self, outcome: str, words: str, code: int) -> list[Action]:
        self.phase = "over"
        if outcome == GAVE_UP:
            words = with_disk_full_first(words)
        return [Finish(outcome, words, code)]
