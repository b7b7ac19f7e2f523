"""Monitor action that gets a training out of an alarm by itself."""

from __future__ import annotations

import copy
import logging
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.monitor.actions.action import Action, is_distributed, rank
from rmetric.monitor.optimizer_steps import is_scaling
from rmetric.records import Record
from rmetric.rescue.arguments import checked_config, checked_parts, checked_steps, checked_where
from rmetric.rescue.data_position import DataPosition, LoaderPosition, NoData
from rmetric.rescue.evidence import evidence_of
from rmetric.rescue.hold import (
    HELD,
    ON_HOLD,
    hold_folder,
    remove_go,
    save_held,
    save_verdict,
    signalled,
    wait_to_go_on,
)
from rmetric.rescue.loss_level import LossLevel
from rmetric.rescue.policy import (
    AUTO,
    Decision,
    Evidence,
    PolicyState,
    RescueConfig,
    RescuePolicy,
)
from rmetric.rescue.settings import PlannedSettings
from rmetric.rescue.snapshot import Parts, Snapshot, Snapshots, Stateful
from rmetric.rescue.snapshot_pace import BUDGET, SnapshotPace
from rmetric.rescue.vote import Ballot, RankLeftError, Vote, joint_evidence
from rmetric.rescue.workers_out import WorkersOut, check_most

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

_DECISIONS_SAVED = 50
#: A detector that has seen fewer records knows nothing; it is told what a return takes from it.
_COLD = 40
#: Checks without such a step after which a learning rate that is set back is reported again.
_SET_BACK_AGAIN = 20
_STEPS_ALONE = 3  # without a boundary, until it is reported
_UNCHECKED = 100  # batches in a row that a loop may leave out, once it has checked a step


class Rescue(Action):
    """Gets a training out of an alarm: leaves steps out, goes back, or holds it.

    `RescuePolicy` decides; this action takes the snapshots and carries the decisions out. In a
    loop of your own let `steps` hand out the batches::

        rescue = Rescue(scheduler=scheduler)
        monitor = Monitor(model, optimizer, actions=[rescue], log="run.jsonl")
        for step, batch in rescue.steps(loader, 1000):
            loss = compute(batch)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    A step that must not be taken is left out before the optimiser's step. A learning rate that is
    not its scheduler's is set back there. A decision to go back
    also leaves the step at hand out, and is carried out at the next `boundary`, between two
    steps. Snapshots are taken there too. A trainer's adaptor sets `data` and calls `boundary`.

    Everything that a run is comes back bit for bit: weights of the model and of the optimiser,
    buffers, extra states of modules, the optimiser, the schedulers, the GradScaler, random
    states, the position of the data, the monitor's state.
    The monitor counts from the snapshot again, so `step` repeats; its log is cut back to the
    snapshot, and the lines of the abandoned steps are moved to ``<log>.abandoned``.

    With several ranks every rank makes a `Rescue`, in the same order. A bad step is left out at
    once, by the reduced gradient norm, which is equal on all ranks. Alarms of the detector are
    exchanged after each step on a gloo group and acted upon after the next, so all ranks decide
    by the same numbers: with the monitor's own delay that is 3 steps after the step of the alarm.
    A return that the step rules ask for is one step late. After a return the ranks' monitors
    need 3 steps to agree again; under FSDP2 no step is left out in them.

    A failure (no memory, a hook that raises) is reported once. The training goes on without
    rescue.

    Args:
        config: settings of the policy.
        scheduler: the learning-rate scheduler, or several; None for those of a trainer.
        extra: by name, further objects with `state_dict` and `load_state_dict` that belong to
            the run, such as an average of the weights.
        where: of the snapshots: ``host``, ``device``, or a folder.
        on_hold: ``stop`` sets `monitor.should_stop` and ends `steps`; ``exit`` raises SystemExit
            with code 6; ``wait`` waits for SIGUSR1 to any rank, the file ``go`` in `hold_folder`
            or `hold_seconds`, then goes on from the snapshot.
        hold_folder: where weights and verdict are saved; None for ``rescue-hold`` in the run
            folder of `rmetric supervise`, else beside the log, or in the working directory
            without a log. The supervisor does not restart a training that holds in its folder.
        hold_seconds: longest wait; None for no limit.

    Attributes:
        data: position of the data; set by `steps`, or by the adaptor of a trainer.
        decisions: entries of all decisions, as in the log.
        problem: why the rescue is switched off; empty while it is on.
        held: verdict of the hold; None before one.
    """

    needs_verdict_now = True
    on_all_ranks = True

    def __init__(
        self,
        config: RescueConfig | None = None,
        *,
        scheduler: Any = None,
        extra: Mapping[str, Stateful] | None = None,
        where: str | Path = "host",
        on_hold: str = "stop",
        hold_folder: Path | str | None = None,
        hold_seconds: float | None = None,
    ) -> None:
        super().__init__(on=())
        checked_config(config)
        checked_where(where)
        checked_parts(scheduler, extra)
        if on_hold not in ON_HOLD:
            raise ValueError(f"on_hold is {on_hold!r}: {', '.join(ON_HOLD)} are accepted")
        if hold_seconds is not None and not (isfinite(hold_seconds) and hold_seconds >= 0):
            raise ValueError(f"hold_seconds is {hold_seconds}: it must be finite and at least 0")
        self.config = config or RescueConfig()
        self.scheduler, self.extra, self.where = scheduler, dict(extra or {}), where
        self.on_hold, self.hold_seconds = on_hold, hold_seconds
        self.hold_folder = None if hold_folder is None else Path(hold_folder)
        self._data: DataPosition = NoData()
        self._on = False
        self._monitor_ref: weakref.ref[Monitor] | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget all trainings before."""
        self.policy = RescuePolicy(self.config)
        self.decisions: list[dict[str, Any]] = []
        self.problem = ""
        self.held: dict[str, Any] | None = None
        self._snapshots: Snapshots | None = None
        self._due: tuple[Decision, int] | None = None
        self._own: Evidence | None = None  # of this rank's detector, at its last record
        self._unsent: Evidence | None = None  # to the other ranks
        self._judged = 0  # last step of the training, once its record is judged
        self._vote: Vote | None = None
        # Of the policy: in the newest ballots, and in those before, on which the ranks agreed.
        self._posted = self._agreed = PolicyState()
        self._pace: SnapshotPace | None = None
        self._ended = 0.0  # time of the end of the last boundary
        self._removers: list[Callable[[], Any]] = []
        self._refused, self._announced = False, 0
        self._level = LossLevel()
        self._all_back: bool | None = None  # of several ranks, by their last ballots
        self._first_records: deque[Record] = deque(maxlen=_COLD)
        self._gave_up = False  # in this incident, and it is told
        self._on_plan = _SET_BACK_AGAIN  # checks since a learning rate was set back
        self._steps_alone = 0  # since the last boundary
        self._resumed: Mapping[str, Any] = {}  # of the data, from a checkpoint

    # -- what a training calls

    def steps(
        self, loader: Iterable[Any], total: int, *, per_step: int = 1
    ) -> Iterator[tuple[int, Any]]:
        """Hand out the batches of a training, with the number of each step.

        Epochs follow each other. After a return the numbers and, if the loader can be rewound,
        the batches are those after the snapshot. It ends after `total` steps, when
        `monitor.should_stop` is set, or with the data of an iterator: one warning names the steps
        that are missing then.

        Args:
            loader: of batches: with `state_dict` and `load_state_dict`; or one that can be
                iterated again with the same result under the same random state; or an iterator,
                which cannot be rewound.
            total: steps of the schedule, from 1. A monitor that was resumed at a step counts from
                there; the data begin where the loader does.
            per_step: batches of one step; above 1 each step has a list of them.

        Returns:
            An iterator over (step, batch). It raises RuntimeError where the monitor, while it is
            open, checks none of the steps that are handed out: they would have no end.

        Raises:
            ValueError: an argument is not of that kind.
        """
        checked_steps(loader, total, per_step)
        return self._steps(LoaderPosition(loader, per_step), total)

    def _steps(self, position: LoaderPosition, total: int) -> Iterator[tuple[int, Any]]:
        self.data = position
        step = begun = used = unchecked = 0  # steps' batches, since the first step
        dry = False
        while True:
            self.boundary(last=dry or step >= total)
            monitor = self._monitor_ref() if self._monitor_ref is not None else None
            if monitor is not None and monitor.is_open:
                if monitor.should_stop:
                    return
                step = monitor.weights_step
            if step >= total:
                return
            begun = begun if used else step
            if not used and not dry and step and not position.restores_itself:
                logger.warning(
                    "rmetric: rescue.steps begins at step %d with the first batch of the loader; "
                    "after a restart the loader must be set to its place before",
                    step + 1,
                )
            if used == 1 and not dry and monitor is None:
                logger.warning(
                    "rmetric: no monitor has this rescue, so it does nothing: pass it as "
                    "Monitor(..., actions=[rescue])"
                )
            try:
                batches = position.of_step(step + 1)
            except StopIteration:
                # Of several ranks another one may have data left.
                if dry or step == 0 or is_distributed():
                    again = used - (step - begun)
                    logger.warning(
                        "rmetric: rescue.steps ends at step %d of %d with the data: %d steps are "
                        "missing%s",
                        step,
                        total,
                        total - step,
                        f". The batches of {again} went into steps that were made again: pass a "
                        "loader that can be iterated again, not an iterator"
                        if again
                        else "",
                    )
                    return
                dry = True
                continue
            step, dry, used = step + 1, False, used + 1
            checked = None if monitor is None else monitor.step
            yield step, batches if position.per_step > 1 else batches[0]
            idle = monitor is not None and monitor.is_open and monitor.step == checked
            unchecked = unchecked + 1 if idle else 0
            if unchecked > (_UNCHECKED if used > 1 else 0):
                raise RuntimeError(
                    f"rescue.steps handed out step {step} and the monitor did not check it: call "
                    "monitor.check_before_step(loss) in each step, after backward and before the "
                    "optimizer's step"
                )

    @property
    def data(self) -> DataPosition:
        return self._data

    @data.setter
    def data(self, position: DataPosition) -> None:
        self._data = position
        if self._resumed:
            position.resume(self._resumed)
            self._resumed = {}

    def boundary(self, *, last: bool = False) -> bool:
        """Between two steps: carry out what is due, or take a snapshot.

        Weights, optimiser, schedulers and data are at rest. All ranks call it after the same
        steps.

        Args:
            last: the training is about to end. Then what is known of its last steps is judged
                too: of a single process all of them, of several ranks all but the last two.

        Returns:
            True if the training went back: weights, step and data are those of a snapshot.
        """
        self._steps_alone, back = 0, False
        if self._on:
            try:
                if self._pace is not None and self._ended:
                    self._pace.step_made(time.perf_counter() - self._ended)
                back = self._boundary(last)
            except Exception as error:
                self._fail(error)
        if not self._on:
            self._leave()
        self._ended = time.perf_counter()
        return back

    # -- what the monitor calls

    def start(self, monitor: Monitor) -> None:
        self._begin()
        self._monitor_ref = weakref.ref(monitor)
        if is_distributed():
            if not monitor.config.exchange:
                raise ValueError("several ranks need MonitorConfig(exchange=True)")
            self._vote = Vote()
        size = self._vote.ranks.size if self._vote is not None else 1
        check_most(self.config.most_out, size)
        self._workers = WorkersOut(monitor.model, monitor.parameters, rank(), size)
        if self.config.every == AUTO:
            on_host = all(one.device.type == "cpu" for one in monitor.parameters)
            self._pace = SnapshotPace(beside=not on_host)
        self._planned = PlannedSettings(monitor.optimizer)
        if not monitor.schedulers and self.scheduler is not None:
            monitor.schedulers = several(self.scheduler)
        if hasattr(monitor.optimizer, "register_step_pre_hook"):
            hook = monitor.optimizer.register_step_pre_hook(self._before_optimizer)
            self._removers.append(hook.remove)
        self._removers.append(self._workers.remove)
        if not isinstance(monitor.detector("calibrated"), CalibratedDetector):
            logger.warning("rmetric: rescue without the calibrated detector sees bad steps alone")
        self._on = True

    def record(self, record: Record, monitor: Monitor) -> None:
        if self._on:
            self._try(lambda: self._take_record(record, monitor))

    def before_update(self, broken: Sequence[tuple[str, str]], monitor: Monitor) -> None:
        if self._on:
            self._try(lambda: self._judge(broken, monitor))

    def state_dict(self) -> dict[str, Any]:
        """What a restarted process goes on with: all but the snapshots, which begin anew."""
        if not self._on:
            return {}
        try:
            return {
                "policy": self.policy.state_dict() | {"snapshots": []},
                "ranks": self._workers.ranks,
                "planned": self._planned.state_dict() if self.policy.state.settings else None,
                "data": dict(self.data.resume_state()),
            }
        except Exception as error:
            self._fail(error)
            return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave. Ranks left out come back if their number has changed."""
        if self._on:
            self._try(lambda: self._load(state))

    def _load(self, state: Mapping[str, Any]) -> None:
        policy = RescuePolicy(self.config)
        policy.load_state_dict(state["policy"])
        if policy.state.held:  # the weights are those of the hold
            policy.state.held, policy.state.incident = False, None
        if state["ranks"] != self._workers.ranks:
            policy.state.out = {}
        self._start_policy(policy)
        if state["planned"] is not None:
            self._planned.load_state_dict(state["planned"])
        if isinstance(self.data, NoData):
            self._resumed = state["data"]
        elif state["data"]:
            self.data.resume(state["data"])

    def close(self) -> None:
        if self._on and self._own is not None:
            logger.warning(
                "rmetric: rescue: the training ended during an alarm (%s): do not trust its "
                "weights since step %d",
                self._own.words,
                self._own.since,
            )
        self._switch_off()

    # -- decisions

    @property
    def _monitor(self) -> Monitor:
        monitor = self._monitor_ref() if self._monitor_ref is not None else None
        assert monitor is not None
        return monitor

    def _take_record(self, record: Record, monitor: Monitor) -> None:
        if record.step != self._judged:
            if record.step <= _COLD:
                self._first_records.append(record)
            self._take_evidence(record, monitor.detector("calibrated"))

    def _take_evidence(self, record: Record, detector: Any) -> None:
        """Decide after a step; with several ranks, when all ballots are there."""
        self._own = evidence = self._evidence(record, detector)
        self._unsent = evidence or self._unsent  # a snapshot may complete a second record
        if self._vote is None and self._due is None:
            decision = self.policy.after_step(record.step, evidence, back=self._level.is_back)
            self._follow(decision, record.step)

    def _judge_last_step(self, monitor: Monitor) -> None:
        """Decide after the last step, whose record is else complete when the monitor is closed."""
        record, detector = monitor.newest_record(), monitor.detector("calibrated")
        if record is None or not isinstance(detector, CalibratedDetector):
            return
        detector = copy.deepcopy(detector)
        detector.update(record)
        self._judged = record.step
        self._take_evidence(record, detector)

    def _judge(self, broken: Sequence[tuple[str, str]], monitor: Monitor) -> None:
        """Decide about the step at hand."""
        self._on_plan += 1
        self._set_rates_back()
        self._steps_alone += 1
        if self._steps_alone == _STEPS_ALONE:
            logger.warning(
                "rmetric: rescue cannot go back: nothing calls it between two steps; let "
                "rescue.steps hand out the batches, or call rescue.boundary() before each step"
            )
        if self._due is not None:
            monitor.leave_step_out()
            return
        step, evidence = monitor.step, None
        if broken:
            rule, reason = broken[0]
            kind = "not_finite" if rule == "non_finite" else "explosion"
            evidence = Evidence(step=step, since=step, kind=kind, words=reason)
        decision = self.policy.before_update(step, evidence)
        if decision.action != "go_on":
            monitor.leave_step_out()
        self._follow(decision, step)

    def _evidence(self, record: Record, detector: Any) -> Evidence | None:
        """Evidence of the calibrated detector after a record."""
        if record.skipped:
            return None
        self._level.update(record.step, record.training_loss)
        no_update = self._monitor.updates.no_update
        if no_update.reason and no_update.since <= record.step:
            return Evidence(
                step=record.step, since=no_update.since, kind="no_update", words=no_update.reason
            )
        if not isinstance(detector, CalibratedDetector):
            return None
        evidence = evidence_of(detector, record.step)
        if evidence is not None and evidence.worker is not None:
            left = self._workers.left
            # Of a single process the workers of a record are its micro-batches.
            known = self._workers.ranks > 1 and evidence.worker < len(left)
            evidence = replace(evidence, worker=left[evidence.worker] if known else None)
        return evidence

    def _follow(self, decision: Decision, step: int) -> None:
        """Note what is to be done at the next boundary."""
        incident = self.policy.state.incident
        if incident is None:
            self._level.forget()
            self._gave_up = False
        else:
            self._level.mark(incident.onset)
        if decision.action == "go_on" and decision.reason and not self._gave_up:
            self._gave_up = True
            logger.warning("rmetric: rescue %s", decision.reason)
        if decision.action in ("go_back", "hold"):
            self._due = decision, step
        elif decision.action == "leave_out":
            self._write(decision, step, 0)

    # -- between two steps

    def _boundary(self, last: bool) -> bool:
        monitor = self._monitor
        if not monitor.usable:
            self._switch_off()
            return False
        self._forget_another_course(monitor.weights_step)
        if last and self._vote is None and self._due is None:
            self._judge_last_step(monitor)
        back = self._act(monitor, last)
        if last and not back and self._vote is not None:
            back = self._act(monitor, last)  # by the ballots that were just sent
        return back

    def _act(self, monitor: Monitor, last: bool) -> bool:
        """Carry out what is due, or take a snapshot; true if the training went back."""
        step = monitor.weights_step
        carry_out = self._vote is None or self._count(self._vote, step)
        if not self._on:
            return False
        if last and carry_out and self._due is None:
            agreed = self._level.is_back if self._vote is None else self._all_back
            self._follow(self.policy.at_end(step, back=agreed), step)
        back = False
        if self._due is not None and carry_out:
            (decision, step), self._due = self._due, None
            self._own = self._unsent = None
            if decision.action == "go_back":
                back = self._go_back(decision, step)
            else:
                back = self._hold(decision, step)
        elif self._due is None and self.policy.snapshot_due(monitor.weights_step):
            self._take_snapshot(monitor.weights_step)
        if self._on:
            self._set_workers()
        if self._vote is not None:
            self._post(self._vote)
        return back

    def _count(self, vote: Vote, step: int) -> bool:
        """Take the ballots of the boundary before; True if what is due is carried out now."""
        agreed, self._agreed = self._agreed, self._posted
        ballots = vote.take()
        if ballots is None:
            return False
        if any(ballot.leaving for ballot in ballots):
            self._vote = None
            self._give_up("the rescue of another rank is switched off")
        elif len({one.step for one in ballots}) > 1:
            self._vote = None
            self._give_up("the ranks disagree about the steps that they have taken")
        elif len({(one.policy, one.due) for one in ballots}) > 1:
            return self._go_back_to_agreement(agreed, ballots[0].step, step)
        elif ballots[0].due:
            return True
        elif self._due is None:
            evidence = joint_evidence(ballots, step)
            self._all_back = all(ballot.improving for ballot in ballots)
            self._follow(self.policy.after_step(step, evidence, back=self._all_back), step)
            return True
        return False

    def _go_back_to_agreement(self, before: PolicyState, apart: int, step: int) -> bool:
        """Act on a step that some ranks took and some left out: their weights differ since.

        It happens where the reduced gradient is bad on one rank alone, as by its memory.

        Args:
            before: state of the policy when the ranks last agreed.
            apart: step that they decided differently about.
            step: steps that the weights have taken now.
        """
        state = self.policy.state
        known = [one for one in state.snapshots if one in before.snapshots]
        self.policy.state = replace(before, snapshots=known)
        self._due = None
        words = f"the ranks decided differently about step {apart}"
        evidence = Evidence(step=step, since=apart, words=words)
        self._follow(self.policy.after_step(step, evidence), step)
        if self._due is None:  # no snapshot is old enough
            self._vote = None
            self._give_up(words)
        return self._on

    def _post(self, vote: Vote) -> None:
        self._posted = copy.deepcopy(self.policy.state)
        due = 0
        if self._due is not None:
            decision, step = self._due
            # Without the reason, which names what each rank saw itself.
            equal = (replace(decision, reason=""), step)
            due = zlib.crc32(repr(equal).encode()) or 1
        ballot = Ballot(
            step=self._monitor.weights_step,
            evidence=self._unsent,
            improving=self._level.is_back is not False,
            due=due,
            policy=zlib.crc32(repr(self.policy.state_dict()).encode()),
        )
        self._unsent = None
        vote.post(ballot)

    def _leave(self) -> None:
        """Send the other ranks the last ballot; they wait for one from each rank."""
        vote, self._vote = self._vote, None
        if vote is not None:
            try:
                vote.post(Ballot(step=0, leaving=True))
            except Exception as error:
                logger.error("rmetric: rescue: the other ranks cannot be reached: %s", error)

    def _any_rank(self, value: bool) -> bool:
        """True on all ranks if the value of one is True."""
        return bool(self._most_of_ranks(int(value)))

    def _most_of_ranks(self, value: int) -> int:
        """The largest value of all ranks, which ask at the same place."""
        if self._vote is None:
            return value
        try:
            return self._vote.most(value)
        except RankLeftError:
            self._vote = None
            raise

    def _parts(self) -> Parts:
        monitor = self._monitor
        schedulers = self.scheduler if self.scheduler is not None else monitor.schedulers
        others = {f"scheduler {i}": one for i, one in enumerate(several(schedulers))}
        if is_scaling(monitor.scaler):
            others["scaler"] = monitor.scaler
        parameters = {id(one): one for one in monitor.parameters}
        for group in getattr(monitor.optimizer, "param_groups", ()):
            parameters |= {id(one): one for one in group["params"]}  # of a loss, say
        return Parts(
            model=monitor.model,
            parameters=list(parameters.values()),
            optimizer=monitor.optimizer,
            others={**others, **self.extra},
            data=self.data,
            monitor=monitor,
        )

    def _take_snapshot(self, step: int) -> None:
        if self._pace is not None and self._pace.is_known:
            self._settle_distance(self._pace)
            if not self.policy.snapshot_due(step):
                return
        parts = self._parts()
        if self._any_rank(parts.not_finite()):
            if not self._refused:
                logger.warning("rmetric: no snapshot of step %d: weights are not finite", step)
            self._refused = True
            return
        self._refused = False
        if self._snapshots is None:
            self._snapshots = Snapshots(parts, self.where, snapshots_kept(self.config))
        self._snapshots.parts = parts
        self.policy.snapshot_taken(step)
        self._snapshots.keep_only(self.policy.state.snapshots)
        began = time.perf_counter()
        snapshot = self._snapshots.take(step)
        snapshot.small["losses"] = self._level.state()
        seconds = time.perf_counter() - began
        if self._pace is not None:
            self._pace.snapshot_taken(seconds)
        self._announce(snapshot, seconds)

    def _settle_distance(self, pace: SnapshotPace) -> None:
        """Go on with the distance that the first snapshots allow, on all ranks with the largest."""
        self._pace, every = None, self._most_of_ranks(pace.distance)
        self.policy.state.every = every
        logger.info(
            "rmetric: rescue takes a snapshot every %d steps: %s, and %g %% of the time is allowed",
            every, pace.words, 100 * BUDGET,
        )  # fmt: skip

    def _announce(self, snapshot: Snapshot, seconds: float) -> None:
        """Log the cost of the snapshots, again when it grows."""
        if snapshot.size <= self._announced:
            return
        first, self._announced = not self._announced, snapshot.size
        number = snapshots_kept(self.config)
        grows = first and not snapshot.optimizer_keys and self._monitor.optimizer is not None
        logger.info(
            "rmetric: rescue takes a snapshot of %s every %d steps (%s), at most %d at a time, "
            "%s; this one took %.3g s%s",
            gigabytes(snapshot.size),
            self.policy.every,
            self.where,
            number,
            gigabytes(number * snapshot.size),
            seconds,
            "; the state of the optimizer, which does not exist yet, is added" if grows else "",
        )
        if first and not self.data.rewindable:
            logger.warning(
                "rmetric: rescue cannot rewind these data: after a return the training goes on "
                "with the data that come next"
            )

    def _go_back(self, decision: Decision, step: int) -> bool:
        target = self._restore(decision)
        steps = step - target.step
        self._write(decision, step, steps, skipped=self._skipped(decision))
        return True

    def _restore(self, decision: Decision) -> Snapshot:
        """Restore a snapshot on all ranks, or raise on all and leave the training as it was."""
        snapshots = self._snapshots
        assert snapshots is not None
        assert decision.to is not None
        snapshots.parts = self._parts()
        snapshot = snapshots.kept[decision.to]
        problem: Exception | None = None
        undo = None
        try:
            undo = snapshots.restore_small(snapshot, decision.skip)
        except Exception as error:
            problem = error
        if self._any_rank(problem is not None):
            if undo is not None:
                undo()
            raise problem or RuntimeError("another rank could not go back")
        snapshots.restore_rest(snapshot)
        # A hold may be at an earlier one than the newest.
        kept = [step for step in self.policy.state.snapshots if step <= snapshot.step]
        self.policy.state.snapshots = kept
        self._judged = 0
        snapshots.keep_only(kept)
        self._level.go_back(snapshot.small["losses"])
        self._planned.use(snapshot.groups)
        self._tell_what_was_learnt(snapshot.step)
        return snapshot

    def _tell_what_was_learnt(self, step: int) -> None:
        """Show a detector that went back to its first steps what it knew before the incident."""
        incident, detector = self.policy.state.incident, self._monitor.detector("calibrated")
        known, self._first_records = self._first_records, deque(maxlen=_COLD)
        for record in known:
            if record.step <= step:
                self._first_records.append(record)
            elif incident is not None and record.step < incident.onset and detector is not None:
                detector.update(record)
                self._first_records.append(record)

    def _hold(self, decision: Decision, step: int) -> bool:
        """Save the weights of the snapshot, and stop, end the process or wait."""
        target = self._restore(decision)
        monitor, ranks = self._monitor, None if self._vote is None else self._vote.ranks
        folder = self.hold_folder or hold_folder(monitor.log_path)
        if ranks is not None:
            folder = Path(ranks.broadcast(str(folder)))
        self._write(decision, step, step - target.step, folder=str(folder))
        incident = self.policy.state.incident
        self.held = {
            "step": target.step,
            "found_at": step,
            "reason": decision.reason,
            "tries": 0 if incident is None else incident.tries,
            "repeated": 0 if incident is None else incident.repeated,
            "on_hold": self.on_hold,
            "decisions": self.decisions[-_DECISIONS_SAVED:],
        }
        if self.on_hold == "wait":
            with signalled() as woken:
                self._save_hold(folder, self.held)
                why = wait_to_go_on(folder, self.hold_seconds, self._any_rank, woken)
            save_verdict(folder, {**self.held, "went_on": why})
            monitor.paused()
            self.policy.state.held, self.policy.state.incident = False, None
            logger.warning("rmetric: rescue goes on from step %d: %s", target.step, why)
            return True
        self._save_hold(folder, self.held)
        self._vote = None  # all ranks end
        if self.on_hold == "exit":
            logger.warning("rmetric: rescue ends the process with code %d", HELD)
            monitor.close()
            raise SystemExit(HELD)
        monitor.should_stop = True
        self._switch_off()
        return True

    def _save_hold(self, folder: Path, verdict: dict[str, Any]) -> None:
        """Save weights and verdict; returns on all ranks when the files are there."""
        if rank() == 0:
            remove_go(folder)  # of an earlier hold
        group = None if self._vote is None else self._vote.ranks.group
        try:
            path = save_held(folder, self._parts(), verdict["step"], group)
            verdict["saved"] = str(path)
        except Exception as error:
            logger.error("rmetric: rescue: the held weights are not saved: %s", error)
        save_verdict(folder, verdict)
        # A rank that ends before would make torchrun end the first one, which still writes.
        self._any_rank(False)

    def _skipped(self, decision: Decision) -> list[int] | None:
        """First and last step whose data are not used again."""
        if decision.skip is None or not self.data.rewindable:
            return None
        return list(decision.skip)

    def _set_workers(self) -> None:
        out = self.policy.workers_out
        if set(out) == set(self._workers.out):
            return
        for worker in sorted(set(out) - set(self._workers.out)):
            logger.warning("rmetric: the gradient of rank %d is left out of the mean", worker)
            self._monitor.hardware_event("rescue_left_out", worker)
        for worker in sorted(set(self._workers.out) - set(out)):
            logger.warning("rmetric: the gradient of rank %d counts again, on probation", worker)
        self._workers.set(out)
        self._monitor.leave_workers_out(out)

    def _forget_another_course(self, step: int) -> None:
        """Drop everything if the training was set back by something else."""
        if self.policy.state.snapshots and step < self.policy.state.snapshots[-1]:
            self._start_policy(RescuePolicy(self.config))

    def _start_policy(self, policy: RescuePolicy) -> None:
        """Go on by a policy without snapshots."""
        self.policy = policy
        self._due = self._own = self._unsent = None
        if self._snapshots is not None:
            self._snapshots.keep_only(())

    def _before_optimizer(self, *_: Any) -> None:
        if self._on:
            self._try(self._prepare_update)

    def _set_rates_back(self) -> None:
        """Set learning rates back that are not the planned ones; of unknown plans from a try on."""
        if "settings" not in self.config.remedies:
            return
        monitor, incident = self._monitor, self.policy.state.incident
        tried = incident is not None and incident.tries > 0
        off = [one for one in monitor.updates.rates.off if one.known or tried]
        for one in off:
            group = monitor.optimizer.param_groups[one.group]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(one.planned)
            else:
                group["lr"] = one.planned
        if not off:
            return
        change = f"learning rate set back from {off[0].rate:.4g} to {off[0].planned:.4g}"
        monitor.acted(change)
        if self._on_plan >= _SET_BACK_AGAIN:
            self._write(Decision(action="set_back", reason=f"{change}: {off[0]}"), monitor.step, 0)
        self._on_plan = 0

    def _prepare_update(self) -> None:
        if self._snapshots is not None:
            self._snapshots.wait()
        monitor = self._monitor
        monitor.updates.rates.update(
            monitor.optimizer.param_groups, monitor.schedulers, learn=False
        )
        self._set_rates_back()
        if self.policy.state.settings:
            self._planned.set(list(self._parts().others.values()))

    # -- reports, and the end

    def _write(self, decision: Decision, step: int, repeated: int, **more: Any) -> None:
        incident = self.policy.state.incident
        entry = {
            "step": step,
            "to": decision.to,
            "action": decision.action,
            "reason": decision.reason,
            "try": 0 if incident is None else incident.tries,
            "repeated": repeated,
            "workers": list(decision.workers),
            "settings": decision.settings,
            "data": dict(self.data.describe()),
            **more,
        }
        begins = decision.reason.rpartition("; try ")[0] or None
        again = begins and any(each["reason"].startswith(begins) for each in self.decisions)
        self.decisions.append(entry)
        level = logging.INFO if again else logging.WARNING
        logger.log(level, "rmetric: rescue: %s", decision.reason)
        self._monitor.log_event("RESCUE", **entry)
        self._monitor.decided(self, entry)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, problem: str) -> None:
        if self._on:
            self.problem = problem
            logger.error(
                "rmetric: rescue is switched off, the training goes on without it: %s", problem
            )
        self._switch_off()

    def _switch_off(self) -> None:
        self._on, self._due = False, None
        endings, self._removers = self._removers, []
        if self._snapshots is not None:
            endings = [*endings, self._snapshots.clear]
            self._snapshots = None
        for end in endings:
            try:
                end()
            except Exception as error:
                logger.error("rmetric: rescue: %s", error)


def several(value: Any) -> list[Any]:
    """A list of one or more."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def snapshots_kept(config: RescueConfig) -> int:
    """Largest number of snapshots at a time."""
    policy, most = RescuePolicy(config), 0
    for step in range(0, 4 * config.far + 4 * policy.every, policy.every):
        policy.snapshot_taken(step)
        most = max(most, len(policy.state.snapshots))
    return most


def gigabytes(size: int) -> str:
    """A number of bytes in words."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
