"""Monitor action that gets a training out of an alarm by itself."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmetric._util.errors import as_number, require
from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.detectors.no_update import NoUpdate
from rmetric.monitor.actions.action import Action, is_distributed, rank
from rmetric.monitor.optimizer_steps import is_scaling
from rmetric.records import Record
from rmetric.rescue.agreement import Agreement, DisagreementError
from rmetric.rescue.data_position import DataPosition, NoData, OwnLoop
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
from rmetric.rescue.judgement import Judgement
from rmetric.rescue.policy import AUTO, Decision, RescueConfig, RescuePolicy
from rmetric.rescue.remedies import PlannedSettings, WorkersOut
from rmetric.rescue.snapshot import Parts, Stateful, assign_in_place
from rmetric.rescue.snapshot_keeper import SnapshotKeeper, SnapshotPace

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

_DECISIONS_SAVED = 50
#: Report a corrected learning rate again after 20 checks that needed no correction.
_REPORT_RATE_AFTER = 20
#: A snapshot folder of such a name was meant to be something else; with ``./`` it is a folder.
_NO_FOLDERS = frozenset({"", "cpu", "cuda", "device", "disk", "gpu", "host", "memory", "ram"})
_STEPS_ALONE = 3  # without a boundary, until it is reported


class Rescue(Action):
    """Gets a training out of an alarm: leaves steps out, goes back, or holds it.

    In a loop of your own let `steps` hand out the batches::

        rescue = Rescue(scheduler=scheduler)
        monitor = Monitor(model, optimizer, actions=[rescue], log="run.jsonl")
        for step, batch in rescue.steps(loader, 1000):
            loss = compute(batch)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    A step that must not be taken is left out before the optimiser's step, where a learning rate
    that is not its scheduler's is set back, too. A return is carried out at the next `boundary`
    between two steps, where snapshots are taken. A trainer's adaptor sets `data` and calls it.

    Everything that a run is comes back bit for bit: weights, buffers and extra states of modules,
    the optimiser, schedulers, the GradScaler, random states, the position of the data, the
    monitor's state. The monitor counts from the snapshot again, so `step` repeats; the log's lines
    of the abandoned steps are moved to ``<log>.abandoned``.

    With several ranks every rank makes a `Rescue`, in the same order. A bad step is left out at
    once, by the reduced gradient norm. Alarms of the detector are exchanged after each step on a
    gloo group, and acted upon 3 steps after the step of the alarm. A rollback that a step rule
    triggers happens one step later than in a single process. After a rollback the ranks' monitors
    need 3 steps to agree again; under FSDP2 no step is left out in them.

    A failure (no memory, a hook that raises) is reported once; the training goes on without rescue.

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
        decisions: entries of all decisions, as in the log.
        is_on: from the beginning of a training until it ends or the rescue fails.
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
        if config is not None and not isinstance(config, RescueConfig):
            raise ValueError(f"config is {config!r}: a RescueConfig is accepted")
        checked_where(where)
        checked_parts(scheduler, extra)
        if on_hold not in ON_HOLD:
            raise ValueError(f"on_hold is {on_hold!r}: {', '.join(ON_HOLD)} are accepted")
        lasts = hold_seconds is None or 0 <= as_number(hold_seconds) < inf
        require("hold_seconds", hold_seconds, lasts, "finite and at least 0")
        self.config = config or RescueConfig()
        self.scheduler, self.extra, self.where = scheduler, dict(extra or {}), where
        self.on_hold, self.hold_seconds = on_hold, hold_seconds
        self.hold_folder = None if hold_folder is None else Path(hold_folder)
        self._data: DataPosition | NoData = NoData()
        self.is_on = False
        self._monitor_ref: Callable[[], Monitor | None] = lambda: None
        self._begin(NoUpdate())

    def _begin(self, no_update: NoUpdate) -> None:
        self._judgement = Judgement(self.config, no_update)
        self.decisions: list[dict[str, Any]] = []
        self.problem = ""
        self.held: dict[str, Any] | None = None
        self._keeper = SnapshotKeeper(self.config, self.where, None, self._most_of_ranks)
        self._agreement: Agreement | None = None  # of several ranks
        self._removers: list[Callable[[], Any]] = []
        self._checks_since_correction = _REPORT_RATE_AFTER
        self._steps_alone = 0  # since the last boundary
        self._resumed: Mapping[str, Any] = {}  # of the data, from a checkpoint

    # -- what a training calls

    def steps(
        self, loader: Iterable[Any], total: int, *, per_step: int = 1
    ) -> Iterator[tuple[int, Any]]:
        """Hand out the batches of a training, with the number of each step: (step, batch).

        Epochs follow each other. After a return the numbers and the batches are those after the
        snapshot: kept ones, at most 1 GiB, or those of a loader with `state_dict` and
        `load_state_dict`. It ends after `total` steps, when `monitor.should_stop` is set, or with
        the data of an iterator: one warning names the steps that are missing then.

        Args:
            loader: of batches: an iterable, or an iterator.
            total: steps of the schedule, from 1. A monitor that was resumed at a step counts from
                there; the data begin where the loader does.
            per_step: batches of one step; above 1 each step has a list of them.

        Raises:
            ValueError: an argument is not of that kind.
            RuntimeError: the open monitor checks none of the steps, so they would never end.
        """
        iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
        if isinstance(loader, type) or not iterable:
            raise ValueError(f"loader is {loader!r}: it cannot be iterated")
        for name, value, least in (("total", total, 0), ("per_step", per_step, 1)):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} is {value!r}: it must be a whole number from {least}")
        return OwnLoop(self, loader, per_step, total).steps()

    @property
    def monitor(self) -> Monitor | None:
        """The monitor that has this rescue; None before it begins, and once it is gone."""
        return self._monitor_ref()

    @property
    def policy(self) -> RescuePolicy:
        return self._judgement.policy

    @property
    def data(self) -> DataPosition | NoData:
        return self._data

    @data.setter
    def data(self, position: DataPosition) -> None:
        self._data = position
        if self._resumed:
            position.resume(self._resumed)
            self._resumed = {}

    def boundary(self, *, last: bool = False) -> bool:
        """Between two steps: carry out what is due, or take a snapshot; all ranks call it.

        Before the training ends (`last`), what is known of its last steps is judged too: of a
        single process all of them, of several ranks all but the last two. True if the training went
        back: weights, step and data are those of a snapshot.
        """
        self._steps_alone = 0
        back = bool(self._try(lambda: self._boundary(last)))
        if not self.is_on and self._agreement is not None:
            agreement, self._agreement = self._agreement, None
            agreement.leave()
        self._keeper.boundary_ends()
        return back

    # -- what the monitor calls

    def start(self, monitor: Monitor) -> None:
        self._begin(monitor.updates.no_update)
        self._monitor_ref = weakref.ref(monitor)
        if is_distributed():
            if not monitor.config.exchange:
                raise ValueError("several ranks need MonitorConfig(exchange=True)")
            self._agreement = Agreement(self._judgement)
        size = self._agreement.ranks.size if self._agreement is not None else 1
        most = self.config.most_out
        self._workers = WorkersOut(monitor.model, monitor.parameters, rank(), size, most)
        pace = None
        if self.config.every == AUTO:
            on_host = all(parameter.device.type == "cpu" for parameter in monitor.parameters)
            pace = SnapshotPace(beside=not on_host)
        self._keeper = SnapshotKeeper(self.config, self.where, pace, self._most_of_ranks)
        self._planned = PlannedSettings(monitor.optimizer)
        if not monitor.schedulers and self.scheduler is not None:
            monitor.schedulers = as_list(self.scheduler)
        if hasattr(monitor.optimizer, "register_step_pre_hook"):
            hook = monitor.optimizer.register_step_pre_hook(self._before_optimizer)
            self._removers.append(hook.remove)
        self._removers.append(self._workers.remove)
        if not isinstance(monitor.detector("calibrated"), CalibratedDetector):
            logger.warning("rmetric: without the calibrated detector rescue sees only bad steps")
        self.is_on = True

    def record(self, record: Record, monitor: Monitor) -> None:
        def take() -> None:
            # The workers of a record of a single process are its micro-batches.
            workers = self._workers.left if self._workers.ranks > 1 else []
            detector, alone = monitor.detector("calibrated"), self._agreement is None
            self._judgement.take_record(record, detector, workers, alone=alone)

        self._try(take)

    def before_update(self, broken: Sequence[tuple[str, str]], monitor: Monitor) -> None:
        self._try(lambda: self._judge(broken, monitor))

    def state_dict(self) -> dict[str, Any]:
        """State for a restart, without the snapshots."""

        def state() -> dict[str, Any]:
            return {
                "policy": self.policy.state_dict() | {"snapshots": []},
                "ranks": self._workers.ranks,
                "planned": self._planned.state_dict() if self.policy.state.settings else None,
                "data": dict(self.data.resume_state()),
            }

        return self._try(state) or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave. Ranks left out come back if their number has changed."""
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
        if self.is_on and self._judgement.own is not None:
            logger.warning(
                "rmetric: rescue: the training ended during an alarm (%s): do not trust its "
                "weights since step %d", self._judgement.own.words, self._judgement.own.since,
            )  # fmt: skip
        self._switch_off()

    # -- the step at hand

    def _judge(self, broken: Sequence[tuple[str, str]], monitor: Monitor) -> None:
        self._checks_since_correction += 1
        self._set_rates_back()
        self._steps_alone += 1
        if self._steps_alone == _STEPS_ALONE:
            logger.warning(
                "rmetric: rescue cannot go back: nothing calls it between two steps; let "
                "rescue.steps hand out the batches, or call rescue.boundary() before each step"
            )
        if self._judgement.due is not None:
            monitor.leave_step_out()
            return
        decision = self._judgement.before_update(monitor.step, broken)
        if decision.action != "go_on":
            monitor.leave_step_out()
        if decision.action == "leave_out":
            self._write(decision, monitor.step, 0)

    def _before_optimizer(self, *_: Any) -> None:
        self._try(self._prepare_update)

    def _prepare_update(self) -> None:
        self._keeper.wait()
        monitor = self._monitor
        monitor.updates.rates.update(
            monitor.optimizer.param_groups, monitor.schedulers, learn=False
        )
        self._set_rates_back()
        if self.policy.state.settings:
            self._planned.set(list(self._parts().others.values()))

    def _set_rates_back(self) -> None:
        """Set learning rates back that are not the planned ones; of unknown plans from a try on."""
        if "settings" not in self.config.remedies:
            return
        monitor, incident = self._monitor, self.policy.state.incident
        tried = incident is not None and incident.tries > 0
        off = [rate for rate in monitor.updates.rates.off if rate.known or tried]
        for rate in off:
            assign_in_place(monitor.optimizer.param_groups[rate.group], {"lr": rate.planned})
        if not off:
            return
        change = f"learning rate set back from {off[0].rate:.4g} to {off[0].planned:.4g}"
        monitor.record_change(change)
        if self._checks_since_correction >= _REPORT_RATE_AFTER:
            self._write(Decision(action="set_back", reason=f"{change}: {off[0]}"), monitor.step, 0)
        self._checks_since_correction = 0

    # -- between two steps

    def _boundary(self, last: bool) -> bool:
        self._keeper.boundary_begins()
        monitor, judgement = self._monitor, self._judgement
        if not monitor.usable:
            self._switch_off()
            return False
        self._forget_another_course(monitor.weights_step)
        if last and self._agreement is None and judgement.due is None:
            # Its record is else complete when the monitor is closed.
            record, detector = monitor.newest_record(), monitor.detector("calibrated")
            if record is not None and isinstance(detector, CalibratedDetector):
                judgement.take_last_record(record, detector)
        back = self._act(monitor, last)
        if last and not back and self._agreement is not None:
            back = self._act(monitor, last)  # by the ballots that were just sent
        return back

    def _act(self, monitor: Monitor, last: bool) -> bool:
        """Carry out what is due, or take a snapshot; true if the training went back."""
        step, judgement, agreement = monitor.weights_step, self._judgement, self._agreement
        carry_out = agreement is None or agreement.count(step)
        if last and carry_out and judgement.due is None:
            level = judgement.level if agreement is None else agreement
            judgement.at_end(step, loss_recovered=level.has_recovered)
        due = judgement.due if carry_out else None
        if due is not None:
            decision, decided_at = due
            judgement.forget_evidence()
            target = self._restore(decision)
            if decision.action == "hold":
                self._hold(decision, decided_at, target)
            else:
                skip = None if isinstance(self.data, NoData) else decision.skip
                self._write(decision, decided_at, decided_at - target, skipped=skip and list(skip))
        elif judgement.due is None and self.policy.snapshot_due(step):
            self._keeper.take(step, self._parts(), self.policy, judgement.level)
        if self.is_on:
            self._set_workers()
        if self._agreement is not None:
            self._agreement.post(monitor.weights_step)
        return due is not None

    def _most_of_ranks(self, value: int) -> int:
        """The largest value of all ranks, which ask at the same place."""
        return value if self._agreement is None else self._agreement.most(value)

    def _parts(self) -> Parts:
        monitor = self._monitor
        schedulers = self.scheduler if self.scheduler is not None else monitor.schedulers
        others = {f"scheduler {i}": each for i, each in enumerate(as_list(schedulers))}
        if is_scaling(monitor.scaler):
            others["scaler"] = monitor.scaler
        parameters = {id(parameter): parameter for parameter in monitor.parameters}
        for group in getattr(monitor.optimizer, "param_groups", ()):  # of a loss, say
            parameters |= {id(parameter): parameter for parameter in group["params"]}
        return Parts(
            model=monitor.model,
            parameters=list(parameters.values()),
            optimizer=monitor.optimizer,
            others={**others, **self.extra},
            data=self.data,
            monitor=monitor,
        )

    def _restore(self, decision: Decision) -> int:
        snapshot = self._keeper.restore(decision, self._parts())
        losses, detector = snapshot.small["losses"], self._monitor.detector("calibrated")
        self._judgement.went_back(snapshot.step, losses, detector)
        self._keeper.keep_only(self.policy.state.snapshots)
        self._planned.use(snapshot.groups)
        return snapshot.step

    def _hold(self, decision: Decision, step: int, target: int) -> None:
        monitor = self._monitor
        folder = self.hold_folder or hold_folder(monitor.log_path)
        if self._agreement is not None:
            folder = Path(self._agreement.ranks.broadcast(str(folder)))
        self._write(decision, step, step - target, folder=str(folder))
        incident = self.policy.state.incident
        self.held = {
            "step": target,
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
                why = wait_to_go_on(folder, self.hold_seconds, self._most_of_ranks, woken)
            save_verdict(folder, {**self.held, "went_on": why})
            monitor.paused()
            self.policy.state.held, self.policy.state.incident = False, None
            logger.warning("rmetric: rescue goes on from step %d: %s", target, why)
            return
        self._save_hold(folder, self.held)
        self._agreement = None  # all ranks end
        if self.on_hold == "exit":
            logger.warning("rmetric: rescue ends the process with code %d", HELD)
            monitor.close()
            raise SystemExit(HELD)
        logger.warning("rmetric: rescue ends the training; its good weights are in %s", folder)
        monitor.should_stop = True
        self._switch_off()

    def _save_hold(self, folder: Path, verdict: dict[str, Any]) -> None:
        """Save weights and verdict; returns on all ranks when the files are there."""
        if rank() == 0:
            remove_go(folder)  # of an earlier hold
        group = None if self._agreement is None else self._agreement.ranks.group
        try:
            path = save_held(folder, self._parts(), verdict["step"], group)
            verdict["saved"] = str(path)
        except Exception as error:
            logger.error("rmetric: rescue: the held weights are not saved: %s", error)
        save_verdict(folder, verdict)
        # A rank that ends before would make torchrun end the first one, which still writes.
        self._most_of_ranks(0)

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
        self._judgement.restart(policy)
        self._keeper.keep_only(())

    # -- reports, and the end

    @property
    def _monitor(self) -> Monitor:
        monitor = self.monitor
        assert monitor is not None
        return monitor

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
        begins = decision.reason.rpartition("; try ")[0] or decision.reason
        again = any(each["reason"].startswith(begins) for each in self.decisions)
        self.decisions.append(entry)
        level = logging.INFO if again else logging.WARNING
        logger.log(level, "rmetric: rescue: %s", decision.reason)
        self._monitor.log_event("RESCUE", **entry)
        self._monitor.pass_decision(self, entry)

    def _try(self, call: Callable[[], Any]) -> Any:
        """Result of a call while the rescue is on; None where it fails, which switches it off."""
        try:
            return call() if self.is_on else None
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            if isinstance(error, DisagreementError):
                self._agreement, self.problem = None, str(error)
            logger.error(
                "rmetric: rescue is switched off, the training goes on without it: %s", self.problem
            )
            self._switch_off()
            return None

    def _switch_off(self) -> None:
        self.is_on, self._judgement.due = False, None
        endings, self._removers = [*self._removers, self._keeper.clear], []
        for end in endings:
            try:
                end()
            except Exception as error:
                logger.error("rmetric: rescue: %s", error)


def checked_where(where: object) -> None:
    known = isinstance(where, Path) or where in ("host", "device")
    if not known and (not isinstance(where, str) or where.lower() in _NO_FOLDERS):
        raise ValueError(f"where is {where!r}: host, device or a folder (./gpu) are accepted")


def checked_parts(scheduler: object, extra: object) -> None:
    schedulers = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    named = {f"scheduler {i}": part for i, part in enumerate(schedulers) if part is not None}
    if extra is not None:
        if not isinstance(extra, Mapping):
            raise ValueError(f"extra is {extra!r}: a mapping from names to objects is accepted")
        for name in extra:
            if name == "scaler" or str(name).startswith("scheduler "):
                raise ValueError(f"extra[{name!r}]: this name is the rescue's own")
        named |= {f"extra[{name!r}]": part for name, part in extra.items()}
    for name, part in named.items():
        for method in ("state_dict", "load_state_dict"):
            if isinstance(part, type) or not callable(getattr(part, method, None)):
                raise ValueError(f"{name} is {part!r}: it has no {method}")


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
