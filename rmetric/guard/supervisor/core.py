r"""What the supervisor decides. Pure: events in, actions out; no clock, no files, no processes.

ending --------> running --------> saving     a checkpoint before it is stopped
  ^  \              |                 |
  |   v             v                 v
  |  waiting <--- ending <------------'       all processes are ended, verified
  '------'          |
                    v
                   over                       finished, stopped, gave up
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from rmetric.guard.layout import Layout
from rmetric.guard.supervisor.allocation import (
    Gpu,
    NothingFitsError,
    Planner,
    Pool,
    all_of,
    without,
)
from rmetric.guard.supervisor.diagnosis import signal_name
from rmetric.guard.supervisor.events import (
    Action,
    Ask,
    Began,
    Drop,
    Durable,
    End,
    Ended,
    Event,
    Exited,
    Failure,
    Finish,
    Hung,
    Interrupted,
    Launch,
    Note,
    Stepped,
    StopWanted,
    Verdict,
    WakeAt,
    Wanted,
    Woke,
)

FINISHED, STOPPED, GAVE_UP = "finished", "stopped", "gave up"
#: Exit codes of the supervisor; ended by a signal it is 128 + the signal.
CODE_FINISHED, CODE_GAVE_UP, CODE_STOPPED = 0, 1, 4
#: What a fatal verdict may ask for that the GPU does not outlive here.
DROPPING = ("reset", "drain", "reboot")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """When to try again and when to give up.

    Attributes:
        max_restarts: in a row, from 0; counted anew after `enough_steps`.
        enough_steps: steps beyond the farthest so far that count as progress, at least 1.
        backoff_seconds: wait before the first restart, doubled with each in a row, from 0.
        longest_backoff_seconds: and no longer than this, before jitter.
        jitter: share of the wait that is added at random, up to so much, from 0.
        suspect_after: failures in a row of one rank's GPU, or node, until it is dropped.
        at_once_seconds: a launch that made no step and lived shorter failed at once.
        save_seconds: the longest wait for a checkpoint before a bad GPU is given up.
        stop_seconds: the same when the supervisor itself is asked to end.
        settle_seconds: for the training to exit by itself once that checkpoint is durable.
    """

    max_restarts: int = 10
    enough_steps: int = 100
    backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 300.0
    jitter: float = 0.25
    suspect_after: int = 3
    at_once_seconds: float = 600.0
    save_seconds: float = 120.0
    stop_seconds: float = 20.0
    settle_seconds: float = 5.0

    def __post_init__(self) -> None:
        least = {"max_restarts": 0, "enough_steps": 1, "suspect_after": 1}
        for name, value in vars(self).items():
            if not least.get(name, 0) <= value < inf:
                raise ValueError(
                    f"{name} is {value}: a number of at least {least.get(name, 0)} is accepted"
                )


@dataclass(kw_only=True)
class Past:
    """What the journal of the folder says of earlier supervisors.

    Attributes:
        launches: so far.
        restarts: in a row, at the end.
        best_step: the farthest that was seen.
        dropped: GPUs that are used no more.
        outcome: of the last supervisor; empty where it was cut off.
    """

    launches: int = 0
    restarts: int = 0
    best_step: int = 0
    dropped: list[Gpu] = field(default_factory=list)
    outcome: str = ""


class Core:
    """Decides; one a supervisor.

    Args:
        settings: see `Settings`.
        pool: GPUs that there are.
        plan: from those left and the layout until now to an allocation.
        rng: for the jitter.
        past: what the journal says.
        again: run a folder that is finished.
    """

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        plan: Planner,
        *,
        rng: np.random.Generator,
        past: Past | None = None,
        again: bool = False,
    ) -> None:
        past = past or Past()
        self.settings, self.plan, self.rng = settings, plan, rng
        self.pool = without(pool, past.dropped)
        self.phase = "idle"
        self.launches, self.restarts = past.launches, past.restarts
        self.best_step = self._best_at_failure = past.best_step
        self._finished_before = past.outcome == FINISHED and not again
        if past.outcome:  # whoever starts it again has looked at it
            self.restarts = 0
        self._used: set[Gpu] = set()
        self._layout: Layout | None = None
        self._then, self._signal = "", 0
        self._until = inf
        self._launched_at, self._stepped = 0.0, False
        self._failure: Failure | None = None
        self._at_once = ""
        self._stop_wanted, self._saved = False, False
        self._suspect: tuple[Gpu, ...] = ()
        self._suspected = 0

    def on(self, event: Event) -> list[Action]:
        """What to do about it."""
        if self.phase == "over":
            return []
        actions: Iterable[Action] = getattr(self, f"_on_{type(event).__name__.lower()}")(event)
        return list(actions)

    def _on_began(self, event: Began) -> Iterable[Action]:
        if self._finished_before:
            return self._over(FINISHED, "it had finished before", CODE_FINISHED)
        return self._end("launch", "what an earlier supervisor left behind")

    def _on_stepped(self, event: Stepped) -> Iterable[Action]:
        self._stepped = self._stepped or event.step > event.resumed
        self.best_step = max(self.best_step, event.step)
        if self.best_step - self._best_at_failure >= self.settings.enough_steps:
            self.restarts, self._at_once = 0, ""
        return ()

    def _on_exited(self, event: Exited) -> Iterable[Action]:
        if self.phase == "running":
            if event.failure is not None:
                return self._failed(event.time, event.failure)
            if event.stopped:
                return self._end("asked", "it was asked to stop")
            # One that never says that it has finished comes back here with nothing left to do.
            if event.early and self._stepped:
                words = "it ended with exit code 0 before it had finished"
                return self._failed(event.time, Failure(kind="exit", words=words, code=0))
            return self._end("finish", "it finished")
        if self.phase == "saving":
            return self._end(
                self._then, event.failure.words if event.failure else "it ended as was asked"
            )
        return ()

    def _on_hung(self, event: Hung) -> Iterable[Action]:
        if self.phase == "running":
            return self._failed(event.time, event.failure)
        return ()

    def _on_verdict(self, event: Verdict) -> Iterable[Action]:
        if event.gpu[1] not in self.pool.get(event.gpu[0], ()) or event.level == "healthy":
            return ()
        fatal = event.level == "fatal" and event.action in (*DROPPING, "restart_application")
        if not fatal:
            return self._ask("risk", event.words)
        used = event.gpu in self._used
        drops = event.action in DROPPING
        dropped: list[Action] = [self._drop((event.gpu,), event.words)] if drops else []
        if self.phase != "running" or not used:
            return dropped
        failure = Failure(kind="gpu", words=event.words, node=event.gpu[0], gpu=event.gpu)
        deadline = event.time + self.settings.save_seconds
        noted, *saving = self._save("rule", event.words, deadline, "replace", failure)
        return [noted, *dropped, *saving]

    def _on_wanted(self, event: Wanted) -> Iterable[Action]:
        return self._ask(event.source, event.words)

    def _on_stopwanted(self, event: StopWanted) -> Iterable[Action]:
        self._stop_wanted, self._saved = True, False
        if self.phase == "waiting":
            return self._obey()
        return ()

    def _on_durable(self, event: Durable) -> Iterable[Action]:
        self._saved = True
        if self.phase != "saving":
            return ()
        self._until = min(self._until, event.time + self.settings.settle_seconds)
        return [WakeAt(self._until)]

    def _on_woke(self, event: Woke) -> Iterable[Action]:
        if event.time < self._until:
            return ()
        if self.phase == "saving":
            return self._end(self._then, "it did not end by itself")
        if self.phase == "waiting":
            return self._launch(event.time)
        return ()

    def _on_interrupted(self, event: Interrupted) -> Iterable[Action]:
        self._signal = event.signal
        if self.phase == "running":
            deadline = event.time + self.settings.stop_seconds
            return self._save("signal", signal_name(-event.signal), deadline, "stop", None)
        if self.phase == "saving":
            if self._then == "stop":
                return self._end("stop", "a second signal came")
            self._then = "stop"
            self._until = min(self._until, event.time + self.settings.stop_seconds)
            return [WakeAt(self._until)]
        if self.phase == "ending":
            if self._then != "finish":
                self._then = "stop"
            return ()
        return self._stop()

    def _on_ended(self, event: Ended) -> Iterable[Action]:
        if self.phase != "ending":
            return ()
        if event.left:
            words = f"{event.left} processes of the training cannot be ended: look after them"
            return self._over(GAVE_UP, words, CODE_GAVE_UP)
        if self._then == "finish":
            return self._over(FINISHED, "the training exited with 0", CODE_FINISHED)
        lost = [self._drop(gpus, f"{node} cannot be reached") for node in event.unreachable
                if (gpus := tuple((node, gpu) for gpu in self.pool.get(node, ())))]  # fmt: skip
        return [*lost, *self._go_on(event.time)]

    def _go_on(self, time: float) -> Iterable[Action]:
        if self._then == "stop":
            return self._stop()
        if self._then == "asked" or self._stop_wanted:
            return self._obey()
        if self._then == "launch":
            return self._launch(time)
        return self._retry(time)

    def _ask(self, source: str, words: str) -> Iterable[Action]:
        return [Ask(source, words)] if self.phase == "running" else []

    def _save(
        self, source: str, words: str, deadline: float, then: str, failure: Failure | None
    ) -> list[Action]:
        """A checkpoint, and then it stops."""
        self.phase, self._then, self._until = "saving", then, deadline
        self._failure = failure
        noted: list[Action] = [Note("failure", words, failure=failure)] if failure else []
        return [*noted, Ask(source, words, fatal=True, stop=True), WakeAt(deadline)]

    def _failed(self, time: float, failure: Failure) -> Iterable[Action]:
        self._failure = failure
        lived = time - self._launched_at
        at_once = not self._stepped and lived < self.settings.at_once_seconds
        same = at_once and failure.signature == self._at_once and not failure.from_outside
        self._at_once = failure.signature if at_once else ""
        then = "same" if same else "retry"
        return [Note("failure", failure.words, failure=failure), *self._end(then, failure.words)]

    def _end(self, then: str, why: str) -> list[Action]:
        self.phase, self._then, self._until = "ending", then, inf
        return [End(why)]

    def _retry(self, time: float) -> Iterable[Action]:
        words = self._failure.words if self._failure else "it failed"
        if self._then == "same":
            return self._over(GAVE_UP, f"it fails the same way at once: {words}", CODE_GAVE_UP)
        if self.restarts >= self.settings.max_restarts:
            many = f"{self.restarts} restarts in a row were of no use, the last failure: {words}"
            return self._over(GAVE_UP, many, CODE_GAVE_UP)
        actions: list[Action] = []
        if self._then == "retry":
            actions += self._suspects()
        replaced = self._then == "replace" and not self._used <= set(all_of(self.pool))
        seconds = 0.0 if replaced else self._backoff()
        self.restarts += 1
        self._best_at_failure = self.best_step
        self.phase, self._until = "waiting", time + seconds
        return [*actions, Note("waiting", "before the next launch", seconds=seconds),
                WakeAt(self._until)]  # fmt: skip

    def _backoff(self) -> float:
        """Seconds to wait before the next restart."""
        wait = self.settings.backoff_seconds * 2.0 ** min(self.restarts, 60)
        wait = min(wait, self.settings.longest_backoff_seconds)
        return wait * (1.0 + self.settings.jitter * float(self.rng.random()))

    def _suspects(self) -> list[Action]:
        """Drop the GPU, or the node, that failed too often in a row, if it can be done without."""
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

    def _suspect_of(self, failure: Failure | None) -> tuple[Gpu, ...]:
        if failure is None:
            return ()
        if failure.gpu is not None:
            return () if failure.from_outside else (failure.gpu,)
        # Of a rank's own failure its node knows no more than its GPU does.
        if len(self.pool) > 1 and failure.rank is None and failure.kind != "exception":
            return tuple((failure.node, gpu) for gpu in self.pool.get(failure.node, ()))
        return ()

    def _drop(self, gpus: tuple[Gpu, ...], why: str) -> Drop:
        self.pool = without(self.pool, gpus)
        return Drop(gpus, why)

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
        words = f"{allocation}: {allocation.words}"
        return [*([Note("plan", words)] if changed else []), Launch(self.launches, allocation)]

    def _obey(self) -> Iterable[Action]:
        """Somebody asked it to stop, and that stays so when it fails before it has saved."""
        words = "a request asked it to stop"
        if self._failure is not None and not self._saved:
            words += ", but it failed before the checkpoint for it was made"
        return self._over(STOPPED, words, CODE_STOPPED)

    def _stop(self) -> Iterable[Action]:
        return self._over(STOPPED, signal_name(-self._signal), 128 + self._signal)

    def _over(self, outcome: str, words: str, code: int) -> list[Action]:
        self.phase = "over"
        return [Finish(outcome, words, code)]
