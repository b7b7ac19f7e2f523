"""Guard of a training: applies the checkpoint policy at every step, on all ranks alike."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from rmetric._util.errors import require
from rmetric.guard.checkpoint_dir import (
    CheckpointManifest,
    FailedSave,
    SavedCheckpoint,
    SaveOutcome,
    Saver,
)
from rmetric.guard.checkpoint_requests import SIGNALS, RequestSources
from rmetric.guard.policy import CheckpointPolicy, PolicyConfig, Vote, check_source
from rmetric.guard.ranks import Ranks, restarts_on_a_shared_store
from rmetric.guard.run_folder import RESUME_VARIABLE, RESUMES, RunFolder
from rmetric.telemetry.sources import VerdictSource

logger = logging.getLogger("rmetric")

#: Least time between two heartbeats in the run folder while training.
HEARTBEAT_SECONDS = 1.0
#: Onset in the vote of a rank without an alarm: below every onset.
_NO_ALARM = -(2**62)


class Guard(AbstractContextManager["Guard"]):
    """Saves checkpoints at the interval and on request: GPU risk, rule, alarm, signal or user.

    All ranks call `step` after each step. The requests of each rank become a vote. One
    all-reduce of six integers on the CPU (gloo) makes the decision the same on all ranks,
    so that all save the same step. Nothing waits for a device unless a save begins. A
    failed save is reported and tried again; it never ends the training.

    docs/checkpoints.md has the loop. It ends with ``guard.close(finished=not guard.should_stop)``:
    without ``finished`` the supervisor starts a training that exits with 0 again. As a context
    manager the guard does the same at the end of the block.

    SIGTERM and a user's request to stop cause a last save at the next step. The guard
    waits there until it is durable, after a signal for at most `grace_seconds`, and then
    sets `should_stop` on all ranks at the same step.

    Args:
        checkpoints: saver, or a directory, which needs `fingerprint`; None for the directory of
            the run folder.
        policy: when to save.
        state: returns the state to save: tensors or objects with a `state_dict`, by name.
        about: returns plain values to save with it, such as the position in the data; those of
            rank 0 are kept.
        own: returns plain values of this rank, such as `random_values`.
        folder: run folder; None for that of the supervisor that launched this process.
        fingerprint: identifies the model; see `Checkpoints`.
        signals: signal number -> ``"stop"`` or ``"save"``; empty to handle none.
        telemetry: verdicts on this node's GPUs, such as `GpuWatch()`, for one rank per node.
        check_every: steps between two votes, at least 1.
        grace_seconds: time to stop after the step at which a stop signal was processed.
        alarm_steps: steps after which an alarm that is not repeated is over, unless it `lasts`.
        clock: current time, seconds; for tests.

    Attributes:
        should_stop: training must end now; the same on all ranks.
        resumed: checkpoint that `resume` loaded; None without one.
        own_values: values that this rank had saved as `own`; None without any.
        last_step: last step that was processed, or that of the checkpoint that was loaded.
        last: outcome of the last save; None before the first.
        problem: reason why the last save failed; empty if it did not.

    Raises:
        ValueError: `check_every` below 1, `grace_seconds` not above 0, or no directory and no
            run folder.
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
        alarm_steps: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        whole = type(check_every) is int and check_every >= 1
        require("check_every", check_every, whole, "an int of at least 1")
        require("grace_seconds", grace_seconds, 0 < grace_seconds < inf, "above 0")
        self.folder = folder or RunFolder.of_environment()
        self.checkpoints = self._saver(checkpoints, fingerprint)
        self.ranks = Ranks()
        if self.ranks.rank == 0 and (why := restarts_on_a_shared_store()):
            logger.warning("rmetric: %s", why)
        self.policy = CheckpointPolicy(policy, now=clock(), step=0)
        self.should_stop = False
        self.resumed: CheckpointManifest | None = None
        self.own_values: Any = None
        self.last: SaveOutcome | None = None
        self.problem = ""
        self._config, self._clock = policy, clock
        self._state, self._about, self._own = state, about, own
        self._check_every, self._grace = check_every, grace_seconds
        self._outcome: SaveOutcome | None = None
        self._calls = self.last_step = 0
        self._beat_at = -inf
        self._phase = self._logged_reason = ""
        self._grace_is_over = False
        self._requests = RequestSources(
            signals=signals, folder=self.folder if self.ranks.rank == 0 else None, clock=clock,
            telemetry=telemetry, grace_seconds=grace_seconds, alarm_steps=alarm_steps,
        )  # fmt: skip
        self._alarm_since: int | None = None
        self._beat("starting")

    # -- called by the training

    def resume(self, *, trusted_only: bool | None = None) -> dict[str, Any] | None:
        """Load the newest good checkpoint into `state()`; all ranks call it before the first step.

        Where it is suspect, that is logged with the newest clean one, and its alarm is open for
        another `alarm_steps`. Returns the values saved as `about` and ``step``; None if there is
        no checkpoint.

        Args:
            trusted_only: load the newest that was not saved during an alarm. None: as ``rmetric
                supervise --resume`` says, else False.

        Raises:
            UnfitCheckpoint: the newest checkpoint is of another model.
            ValueError: it lacks a part of the state, or RMETRIC_RESUME is neither ``clean``
                nor ``newest``.
        """
        if trusted_only is None:
            trusted_only = resume_of_environment() == "clean"
        good = self.checkpoints.newest_good(trusted_only=trusted_only)
        if good is None:
            return None
        about = self.checkpoints.load(good, self._state())
        self.resumed, self.own_values = good, good.own(self.ranks.rank)
        self.start(good.step)
        if good.suspect is not None:
            since, reason = good.suspect.since, good.suspect.reason
            self._requests.alarms.open("resumed", since, reason, step=good.step)
        if self.folder and good.request > self.folder.answered():
            self._answer(good.request, good.step)  # killed before it was written
        return {**about, "step": good.step}

    def start(self, step: int) -> None:
        """Continue after `step`, which `resume` or the caller has loaded."""
        self.policy = CheckpointPolicy(self._config, now=self._clock(), step=step)
        self._requests.forget()
        self.last_step = step
        self._beat("starting")  # reports the step of the checkpoint

    def step(self, step: int) -> None:
        """Process the end of a step; all ranks call it.

        Raises:
            RuntimeError: from gloo, if a rank is lost.
        """
        self.last_step = step
        self._beat("training")
        self._calls += 1
        if self._calls % self._check_every:
            return
        self._requests.forward(self.policy, step)
        self.look(step)

    def look(self, step: int) -> None:
        """Vote with all ranks and act on the result; part of `step`."""
        while not self.should_stop:
            agreed = self._agree(step)
            if not (self._act(step, agreed) and agreed.ending):
                return

    def request(
        self,
        source: str,
        reason: str,
        *,
        fatal: bool = False,
        key: str | None = None,
        since: int | None = None,
        lasts: bool = False,
    ) -> None:
        """Request a checkpoint, from any rank and any thread; processed at the next vote.

        A request with `since` opens an alarm on all ranks. Until it ends, every checkpoint
        with a step of at least `since` is marked suspect, those at the interval too; see
        `Checkpoints.set_alarm`. Of several alarms the earliest onset counts. An alarm ends by
        `clear_alarm`, or when it was not repeated in `alarm_steps` steps.

        Args:
            source: one of `rmetric.guard.policy.SOURCES`.
            reason: text for the log.
            fatal: skip the filter on the gap since the last checkpoint.
            key: requests with the same key count once until a checkpoint is durable.
            since: first step whose state is suspect, from 0; None opens no alarm.
            lasts: the alarm ends by `clear_alarm` only.

        Raises:
            ValueError: unknown source, or `since` is not a step.
        """
        check_source(source)
        is_step = since is None or (type(since) is int and since >= 0)
        require("since", since, is_step, "a step, an int from 0, or None")
        self._requests.ask(
            source=source, reason=reason, fatal=fatal, key=key, since=since, lasts=lasts
        )

    def clear_alarm(self, key: str | None = None) -> None:
        """End an alarm of this rank, from any thread; processed at the next vote.

        Later checkpoints are clean again once no rank has an open alarm. `key` is that of the
        request that opened it, or its source if it had none; None ends all alarms of this rank.
        """
        self._requests.ask(ends=key)

    def adopt(self, step: int) -> None:
        """Register a save that the training began itself, on all ranks."""
        if self.policy.in_flight is None and step != self.policy.durable_step:
            self.policy.begin(self._clock(), step, Vote.REGULAR)
            self._outcome = None

    def save(self, step: int, reason: str = "the training asks") -> SaveOutcome | None:
        """Save now and wait until it is durable; all ranks call it, at the end for example.

        `step` is the last completed one. Returns None if it is durable already.
        """
        if self.policy.in_flight is not None:
            self._settle_together()
        if step == self.policy.durable_step and (self.last or self.resumed):
            return None
        logger.info("rmetric: saving step %d: %s", step, reason)
        self._begin(step, Vote.REGULAR)
        self._settle_together()
        return self.last

    def close(self, *, finished: bool = False) -> None:
        """Wait for the save in flight and restore the signal handlers; all ranks call it.

        `finished`: training reached its end and must not be restarted. Its last step is saved,
        unless a checkpoint holds it.
        """
        if finished and self._calls and not self.checkpoints.saves_later:
            self.save(self.last_step, "the training has finished")
        if self.policy.in_flight is not None:
            self._beat("saving")
            timeout = 0.0 if self._grace_is_over else 600.0
            self._settle(self._outcome or self.checkpoints.wait(timeout))
        self._requests.listener.close()
        if finished:
            self._beat("finished")

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close(finished=not self.should_stop)
        else:
            self._requests.listener.close()  # other ranks may be gone: do not wait

    # -- on all ranks

    def _agree(self, step: int) -> _Agreed:
        now = self._clock()
        if self.policy.in_flight is not None and self._outcome is None:
            self._outcome = self.checkpoints.poll()
        vote = self.policy.vote(now, step)
        why = self.policy.why_not.split(":")[0]
        if self.policy.pending and why and why != self._logged_reason:
            logger.info("rmetric: %s", self.policy.why_not)
            self._logged_reason = why
        own = _Agreed(
            vote=vote,
            running=self.policy.in_flight is not None and self._outcome is None,
            failed=isinstance(self._outcome, FailedSave),
            ending=self.policy.ending,
            over=self._requests.deadline <= now,
        )
        alarm = self._requests.alarms.earliest(step)
        onset = _NO_ALARM if alarm is None else -alarm.since
        *agreed, onset = self.ranks.maximum([*map(int, own), onset])
        since = None if onset == _NO_ALARM else -onset
        if since != self._alarm_since:
            self._set_alarm(since, alarm.reason if alarm and alarm.since == since else "", step)
        return _Agreed(Vote(agreed[0]), *map(bool, agreed[1:]))

    def _set_alarm(self, since: int | None, reason: str, step: int) -> None:
        """Follow a change of the alarm that is open; `since` is the same on all ranks."""
        self._alarm_since = since
        reason = next(filter(None, self.ranks.gather(reason)), "")
        if since is None:
            logger.warning("rmetric: the alarm is over: checkpoints after step %d are clean", step)
        else:
            words = "rmetric: checkpoints of step %d and later are suspect: %s"
            logger.warning(words, since, reason)
        set_alarm = getattr(self.checkpoints, "set_alarm", None)
        if set_alarm is not None:
            try:
                set_alarm(since, reason, step)
            except OSError as error:
                logger.error("rmetric: earlier checkpoints cannot be marked suspect: %s", error)

    def _act(self, step: int, agreed: _Agreed) -> bool:
        """Act on the vote; True if another vote should follow."""
        if agreed.over:
            logger.error("rmetric: grace period is over: training ends at step %d", step)
            self.should_stop = self._grace_is_over = True
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
        except Exception as error:  # reported to the other ranks through the save
            problem = f"state cannot be read: {type(error).__name__}: {error}"
        answers = self._requests.in_folder(self.policy.pending)
        self.checkpoints.begin(step, state, about, own=own, request=answers, problem=problem)
        self._beat("training")  # a hang from here on is one of training

    def _settle_together(self) -> None:
        """Wait for the save in flight on all ranks and agree on its outcome."""
        self._beat("saving")
        outcome = self._outcome or self.checkpoints.wait()
        [failed] = self.ranks.maximum([not isinstance(outcome, SavedCheckpoint)])
        self._settle(outcome, failed=bool(failed))

    def _settle(self, outcome: SaveOutcome | None, *, failed: bool = False) -> None:
        """Process the outcome of the save in flight; `failed`: it failed on some rank."""
        save, self._outcome = self.policy.in_flight, None
        assert save is not None
        if outcome is None:
            outcome = FailedSave(step=save.step, problem="timed out")
        elif failed and isinstance(outcome, SavedCheckpoint):
            outcome = FailedSave(step=save.step, problem="failed on another rank")
        self.last = outcome
        if isinstance(outcome, FailedSave):
            self.problem = outcome.problem
            wait = self.policy.failed(self._clock())
            words = "rmetric: save of step %d failed: %s; next attempt in %.0f s"
            logger.error(words, outcome.step, outcome.problem, wait)
            return
        self.problem = ""
        answered = (request.number for request in self.policy.committed())
        self._answer(self._requests.in_folder(answered), outcome.step)
        words = "rmetric: checkpoint of step %d is durable and verified: %s"
        logger.info(words, outcome.step, outcome.path)
        self.should_stop = self.should_stop or save.vote is Vote.FINAL

    def _answer(self, number: int, step: int) -> None:
        """Mark the requests of the run folder up to `number` as answered; 0 for none."""
        if not number or self.folder is None or self.ranks.rank != 0:
            return
        try:
            self.folder.answer(number, step)
        except OSError as error:
            logger.error("rmetric: answer to request %d cannot be written: %s", number, error)

    def _saver(self, given: Saver | Path | str | None, fingerprint: Any) -> Saver:
        if given is None and self.folder is not None:
            given = self.folder.checkpoints
        if isinstance(given, (str, os.PathLike)):
            if fingerprint is None:
                raise ValueError(f"a folder ({given}) needs a fingerprint of the model")
            from rmetric.guard.checkpoints import Checkpoints  # needs a newer torch than a Trainer

            return Checkpoints(given, fingerprint=fingerprint)
        if given is None:
            raise ValueError("checkpoints is None and there is no run folder")
        return given

    def _beat(self, phase: str) -> None:
        now = self._clock()
        soon = now - self._beat_at < HEARTBEAT_SECONDS
        if self.folder is None or (phase == self._phase == "training" and soon):
            return
        self._beat_at, self._phase = now, phase
        rank, step = self.ranks.rank, self.last_step
        try:
            self.folder.beat(rank, step, phase, every=HEARTBEAT_SECONDS, problem=self.problem)
        except OSError as error:
            logger.error("rmetric: heartbeat cannot be written: %s", error)


class _Agreed(NamedTuple):
    """Maximum over the ranks of each value."""

    vote: Vote
    running: bool  # a save is in flight
    failed: bool  # that save failed
    ending: bool  # training ends after the next save
    over: bool  # the grace period is over


def resume_of_environment() -> str:
    """Value of RMETRIC_RESUME. Raises ValueError if it is not one of `RESUMES`."""
    value = os.environ.get(RESUME_VARIABLE) or RESUMES[0]
    require(RESUME_VARIABLE, value, value in RESUMES, f"of {', '.join(RESUMES)}")
    return value
