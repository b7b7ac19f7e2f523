"""Saves a training when somebody asks: the policy, at each step boundary, on all ranks alike."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rmetric.guard.askers import Askers
from rmetric.guard.checkpoints import Checkpoints, Done, Failed, Good
from rmetric.guard.interval import Advice, FailureRate, advise
from rmetric.guard.policy import CheckpointPolicy, PolicyConfig, Request, Vote, check_source
from rmetric.guard.process_signals import SIGNALS
from rmetric.guard.ranks import Ranks
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.saver import Saver
from rmetric.telemetry.sources import VerdictSource

logger = logging.getLogger("rmetric")


class Guard:
    """Checkpoints at each interval, and when risk, a rule, an alarm, a signal or a user asks.

    All ranks call `step` after each step. What each has heard becomes a vote; one
    all-reduce of five numbers on the CPU (gloo) makes it the same everywhere, and so all
    ranks save the same step. Nothing here waits for a device unless a save begins. A save
    that fails is reported and tried again; it never ends the training.

        guard = Guard(
            Checkpoints("checkpoints", fingerprint="tiny, 4 layers"),
            policy=PolicyConfig(interval_steps=100),
            state=lambda: {"training": ModelState(model, optimizer)},
        )
        resumed = guard.resume()
        for step in range(resumed["step"] + 1 if resumed else 1, 1001):
            train(step)
            guard.step(step)
            if guard.should_stop:
                break
        guard.close()

    A signal that ends the training (SIGTERM) and a user's request to stop make a last
    save at the next boundary; the guard waits there until it is durable, after a signal
    for at most `grace_seconds`, and then sets `should_stop` on all ranks at the same step.

    Args:
        checkpoints: or a folder for them, or None for that of the run folder; both need
            `fingerprint`, see `Checkpoints`.
        policy: when to save.
        state: returns what to save: tensors, or what has a `state_dict`, by name.
        about: returns plain values to keep with it, such as the data's position; rank 0's count.
        own: returns plain values of this rank alone, such as `random_values`.
        folder: the run folder; None for that of the supervisor that launched this, if one did.
        signals: number -> ``"stop"`` or ``"save"``; empty to catch none.
        telemetry: verdicts on the GPUs of this rank's node, such as `GpuWatch()`. Give it
            to one rank a node.
        check_every: steps between two boundaries that are looked at, at least 1.
        grace_seconds: from the boundary at which a signal that ends the training is heard
            until it ends, saved or not.
        heartbeat_seconds: least time between two beats in the run folder.
        clock: seconds, for tests.

    Attributes:
        should_stop: the training is to end now; the same on all ranks.
        resumed: the checkpoint that `resume` loaded; None before, or without one.
        own_values: what this rank had given as `own`; None without.
        last: how the last save ended; None before the first.
        problem: why the last save failed; empty where it did not.
    """

    def __init__(
        self,
        checkpoints: Saver | Path | str | None = None,
        *,
        policy: PolicyConfig,
        state: Callable[[], dict[str, Any]],
        about: Callable[[], Mapping[str, Any]] | None = None,
        own: Callable[[], Any] | None = None,
        folder: RunFolder | None = None,
        fingerprint: str | Mapping[str, Any] | None = None,
        signals: Mapping[int, str] = SIGNALS,
        telemetry: VerdictSource | None = None,
        check_every: int = 1,
        grace_seconds: float = 30.0,
        heartbeat_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(check_every) is not int or check_every < 1:
            raise ValueError(f"check_every is {check_every!r}: it must be an int of at least 1")
        if not 0 < grace_seconds < inf:
            raise ValueError(f"grace_seconds is {grace_seconds}: it must be above 0")
        self.folder = folder or RunFolder.of_environment()
        self.checkpoints = self._saver(checkpoints, fingerprint)
        self.ranks = Ranks()
        self.policy = CheckpointPolicy(policy, now=clock(), step=0)
        self.should_stop = False
        self.resumed: Good | None = None
        self.own_values: Any = None
        self.last: Done | Failed | None = None
        self.problem = ""
        self._config, self._state, self._about, self._own = policy, state, about, own
        self._check_every, self._clock = check_every, clock
        self._grace, self._beat_every = grace_seconds, heartbeat_seconds
        self._outcome: Done | Failed | None = None
        self._times: list[Done] = []
        self._calls = self._last_step = 0
        self._beat_at, self._phase, self._said, self._over = -inf, "", "", False
        self._askers = Askers(
            signals=signals,
            folder=self.folder if self.ranks.rank == 0 else None,
            telemetry=telemetry,
            grace_seconds=grace_seconds,
            clock=clock,
        )
        self._beat("starting")

    # -- what a training calls

    def resume(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint into `state()`; what was said about it, with ``step``.

        None where there is none. All ranks call it, before the first step. Raises
        UnfitCheckpoint or ValueError for one that is not of this training.
        """
        good = self.checkpoints.newest_good()
        if good is None:
            return None
        about = self.checkpoints.load(good, self._state())
        self.resumed, self.own_values = good, good.own(self.ranks.rank)
        self.start(good.step)
        if self.folder and good.request > self.folder.answered():
            self._note_answer(good.request, good.step)  # it was killed in between
        return {**about, "step": good.step}

    def start(self, step: int) -> None:
        """The training goes on after `step`, which `resume` or somebody else has loaded."""
        self.policy = CheckpointPolicy(self._config, now=self._clock(), step=step)
        self._askers.forget()
        self._last_step = step
        self._beat("starting")  # at the step where it comes back

    def step(self, step: int) -> None:
        """The step is done, on all ranks. Raises what gloo raises where a rank is lost."""
        self._last_step = step
        self._beat("training")
        self._calls += 1
        if self._calls % self._check_every:
            return
        self._askers.heard(self.policy)
        self.look(step)

    def look(self, step: int) -> None:
        """Ask all ranks, and do what they agree on; part of `step`."""
        goes_on = True
        while goes_on and not self.should_stop:
            agreed = self._agree(step)
            goes_on = self._act(step, agreed) and agreed.ending

    def request(
        self, source: str, reason: str, *, fatal: bool = False, key: str | None = None
    ) -> None:
        """Ask for a checkpoint, from any rank and any thread; heard at the next boundary.

        Raises ValueError for a source that is none of `rmetric.guard.policy.SOURCES`.
        """
        check_source(source)
        self._askers.ask(source=source, reason=reason, fatal=fatal, key=key)

    def adopt(self, step: int) -> None:
        """The training has begun a save of its own, on all ranks; the saver says how it ends."""
        if self.policy.in_flight is None and step != self.policy.durable_step:
            self.policy.begin(self._clock(), step, Vote.REGULAR)
            self._outcome = None

    def save(self, step: int, reason: str = "the training asks") -> Done | Failed | None:
        """Save now and wait until it is durable; all ranks call it, at the end for example.

        None where `step` is durable already.
        """
        if self.policy.in_flight is not None:
            self._settle_together()
        if step == self.policy.durable_step and (self.last or self.resumed):
            return None
        logger.info("rmetric: step %d is saved: %s", step, reason)
        self._begin(step, Vote.REGULAR)
        self._settle_together()
        return self.last

    def close(self, *, finished: bool = False) -> None:
        """Wait for the save in flight and give the signals back; all ranks call it.

        Args:
            finished: the training reached its end, and is not to be started again.
        """
        if self.policy.in_flight is not None:
            self._beat("saving")
            self._settle(self._outcome or self.checkpoints.wait(0.0 if self._over else 600.0))
        self._askers.close()
        if finished:
            self._beat("finished")

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self._askers.close()  # other ranks may be gone: nothing is waited for

    def advice(
        self, *, failures_per_hour: float | FailureRate, restart_seconds: float = 0.0
    ) -> Advice:
        """The interval that this training's own saves ask for; see `rmetric.guard.interval`.

        What a save costs is the median of what it blocked; what it slows down the steps
        beside it is not known here. Raises ValueError before the first save is durable.
        """
        if not self._times:
            raise ValueError("no save is durable yet: there is no time to go by")
        return advise(
            save_seconds=median(done.blocking_seconds for done in self._times),
            durable_seconds=median(done.seconds for done in self._times),
            failures_per_hour=failures_per_hour,
            restart_seconds=restart_seconds,
        )

    # -- what all ranks do

    def _agree(self, step: int) -> _Agreed:
        now = self._clock()
        if self.policy.in_flight is not None and self._outcome is None:
            self._outcome = self.checkpoints.poll()
        vote = self.policy.vote(now, step)
        self._tell_why_not()
        running = self.policy.in_flight is not None and self._outcome is None
        over = self._askers.ends_at <= now
        failed = isinstance(self._outcome, Failed)
        said = (vote, running, failed, self.policy.ending, over)
        greatest = self.ranks.greatest([int(one) for one in said])
        return _Agreed(Vote(greatest[0]), *(bool(one) for one in greatest[1:]))

    def _act(self, step: int, agreed: _Agreed) -> bool:
        """Do what was agreed; whether there was anything to do that is worth asking after."""
        if agreed.over:
            logger.error("rmetric: the time to save is over: the training ends at step %d", step)
            self.should_stop = self._over = True
        elif self.policy.in_flight is not None and not agreed.running:
            self._settle(self._outcome, failed=agreed.failed)
        elif agreed.vote:
            self._begin(step, agreed.vote)
        elif not (agreed.ending and agreed.running):
            return False
        if self.checkpoints.saves_later:
            return False
        if agreed.ending and self.policy.in_flight is not None:
            self._beat("saving")
            self._outcome = self._outcome or self.checkpoints.wait(min(self._grace, 1.0))
        return True

    def _begin(self, step: int, vote: Vote) -> None:
        self._beat("saving")
        self.policy.begin(self._clock(), step, vote)
        self._outcome = None
        state, about, own, problem = {}, None, None, ""
        try:
            state = self._state()
            about = self._about() if self._about else None
            own = self._own() if self._own else None
        except Exception as error:  # the other ranks are to hear of it
            problem = f"its state cannot be had: {type(error).__name__}: {error}"
        answers = self._askers.in_folder(self.policy.pending)
        self.checkpoints.begin(step, state, about, own=own, request=answers, problem=problem)
        self._beat("training")  # what it does now is train, and may hang

    def _settle_together(self) -> None:
        """Wait until the save in flight has ended on all ranks; they agree on how."""
        self._beat("saving")
        outcome = self._outcome or self.checkpoints.wait()
        [failed] = self.ranks.greatest([not isinstance(outcome, Done)])
        self._settle(outcome, failed=bool(failed))

    def _settle(self, outcome: Done | Failed | None, *, failed: bool = False) -> None:
        """The save in flight has ended, on any rank as a failure if `failed`."""
        save, self._outcome = self.policy.in_flight, None
        assert save is not None
        if outcome is None:
            outcome = Failed(step=save.step, problem="it did not end in time")
        elif failed and isinstance(outcome, Done):
            outcome = Failed(step=save.step, problem="on another rank")
        self.last = outcome
        if isinstance(outcome, Failed):
            self.problem = outcome.problem
            wait = self.policy.failed(self._clock())
            logger.error(
                "rmetric: step %d is not saved: %s; next try in %.0f s",
                outcome.step, outcome.problem, wait,
            )  # fmt: skip
            return
        self.problem = ""
        self._times = [*self._times[-19:], outcome]
        self._answer(self.policy.committed(), outcome.step)
        logger.info("rmetric: step %d is durable and good: %s", outcome.step, outcome.path)
        self.should_stop = self.should_stop or save.vote is Vote.FINAL

    def _answer(self, requests: tuple[Request, ...], step: int) -> None:
        number = self._askers.in_folder(one.number for one in requests)
        if number:
            self._note_answer(number, step)

    def _note_answer(self, number: int, step: int) -> None:
        if self.folder is None or self.ranks.rank != 0:
            return
        try:
            self.folder.answer(number, step)
        except OSError as error:
            logger.error("rmetric: request %d is answered, but not noted: %s", number, error)

    # -- small things

    def _saver(self, given: Saver | Path | str | None, fingerprint: Any) -> Saver:
        if given is None and self.folder is not None:
            given = self.folder.checkpoints
        if isinstance(given, (str, os.PathLike)):
            if fingerprint is None:
                raise ValueError(f"a folder ({given}) needs a fingerprint of the model beside it")
            return Checkpoints(given, fingerprint=fingerprint)
        if given is None:
            raise ValueError("checkpoints is None, and no supervisor's folder is known")
        return given

    def _beat(self, phase: str) -> None:
        now = self._clock()
        soon = now - self._beat_at < self._beat_every
        if self.folder is None or (phase == self._phase == "training" and soon):
            return
        self._beat_at, self._phase = now, phase
        try:
            self.folder.beat(
                self.ranks.rank, self._last_step, phase, every=self._beat_every,
                problem=self.problem,
            )  # fmt: skip
        except OSError as error:
            logger.error("rmetric: no heartbeat: %s", error)

    def _tell_why_not(self) -> None:
        why = self.policy.why_not.split(":")[0]
        if self.policy.pending and why and why != self._said:
            logger.info("rmetric: %s", self.policy.why_not)
            self._said = why


class _Agreed(NamedTuple):
    """What any of the ranks said: the greatest vote; a save still runs; it failed; the
    training is to end after a save; the time for that is over."""

    vote: Vote
    running: bool
    failed: bool
    ending: bool
    over: bool
