"""Training monitor: computes the R-Metric and further signals at every step."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rmetric._util.background import Background
from rmetric._util.state import restore_or_keep, state_of
from rmetric._util.strict_json import encode_line
from rmetric.audits import Auditor, Finding, Training, make_audits
from rmetric.audits.replicas import WIDTH as AUDIT_WIDTH
from rmetric.log_entries import record_from_json, record_to_json
from rmetric.logs import metrics_line, start_line
from rmetric.monitor.actions.action import Action, is_distributed, rank
from rmetric.monitor.alert_delivery import AlertDelivery
from rmetric.monitor.alerts import Alert, Verdict
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.judges import DetectorJudge, RuleJudge, StepTimeJudge, UpdateJudge
from rmetric.monitor.log_file import MonitorLog, path_of_rank
from rmetric.monitor.optimizer_steps import OptimizerSteps, is_scaling, scaler_of
from rmetric.monitor.pending import AUDIT, Pending, to_host
from rmetric.monitor.protocol import (
    ArgumentError,
    Protocol,
    check_arguments,
    check_settings,
    checked_config,
    found,
)
from rmetric.monitor.rank_sync import (
    CLOSED,
    DISABLED,
    RUNNING,
    WIDTH,
    Exchange,
    RankSync,
    complete_from_ranks,
)
from rmetric.monitor.stalls import StepTimes
from rmetric.monitor.step_recorder import Hardware, StepRecorder, unwrapped
from rmetric.monitor.step_time import StepTimer
from rmetric.records import HardwareEvent, Record

if TYPE_CHECKING:
    from rmetric.monitor.fsdp import WholeNorm

logger = logging.getLogger("rmetric")
Method = TypeVar("Method", bound=Callable[..., Any])

_OPEN: weakref.WeakSet[Monitor] = weakref.WeakSet()
#: Calls of a loop that record something, and nothing once the monitor is closed.
_OF_A_LOOP = frozenset({"check_before_step", "micro_batch", "evaluated"})


def fail_safe(otherwise: Any = None) -> Callable[[Method], Method]:
    """Disable the monitor at the first exception in the method, and report it once.

    A monitoring error must never stop training. An `ArgumentError` is the caller's. In place of a
    result `otherwise` is returned (called first, if it is callable).
    """

    def wrap(method: Method) -> Method:
        @wraps(method)
        def guarded(self: Monitor, *args: Any, **kwargs: Any) -> Any:
            if self.is_open:
                began = time.perf_counter()
                self._depth += 1
                try:
                    return method(self, *args, **kwargs)
                except ArgumentError:
                    raise
                except Exception as error:
                    self.disable(method.__name__, error)
                finally:
                    self._depth -= 1
                    if self._depth == 0:
                        self.seconds += time.perf_counter() - began
            elif self.usable and method.__name__ in _OF_A_LOOP:
                self.protocol.warn("closed", call=method.__name__)
            return otherwise() if callable(otherwise) else otherwise

        return guarded  # type: ignore[return-value]

    return wrap


def _close_all() -> None:
    """Write the last lines of a script that raises or does not call `close`."""
    for monitor in tuple(_OPEN):
        monitor.close()


class Monitor:
    """Monitors one training run: measures each step, logs it and raises alerts.

    Call `check_before_step(loss)` once a step, after backward (and after `scaler.unscale_`), before
    the optimiser's step. What it measures stays on the device and is read when the next step is
    checked, so an accelerator is not made to wait; then the record is completed, the metric and the
    detectors take it, and it goes to the log. By default it logs and nothing else.

    It never ends, slows or changes a training unless an action that was passed in does: the weights
    come out bit for bit the same. An exception inside is reported once through `logging`; it
    disables the monitor, and training continues.

    Args:
        model: as trained, before or after DistributedDataParallel or compile.
        optimizer: its learning rate and update norms are watched; None for neither.
        log: JSONL file, the same form as the simulator's; None for none. With several ranks the
            first one writes; each where ``{rank}`` is in the name.
        run_id: names the run in the log.
        config: see `MonitorConfig`.
        actions: called on an alert; a plain function is called with it.
        scaler: the GradScaler of a half-precision training, if there is one. One that is not
            passed in is found when it first calls the optimiser's step.
        hardware: where hardware events come from; None where none are logged.
        probe: returns the loss on a small fixed batch; called without gradients, the model in
            evaluation mode; of several ranks each calls it for itself, so it must go to the bare
            model (``model.module``).
        about: further keys for the log's description of the run.
        audits: look for silent errors (`rmetric.audits`); True for all, names of some, or names
            with a minus (``"-resume"``) of those that are left out.

    Raises:
        TypeError: an argument has another type. So does a call of a loop with a wrong number, until
            a step has been checked; later one warning reports that.

    Attributes:
        step: steps checked so far.
        weights_step: last step whose update was applied or skipped; while an action is asked before
            the update, the step before. `check_before_step` counts its step when it returns.
        metric: the R-Metric, as of `last`.
        last: the last completed record; None before the first.
        alerts: the last 100, of each episode the first of each source and rank.
        rank, log_path: of this process, from 0; of its log, None for none.
        should_stop: an action asks the training loop to end.
        usable, problem: False and why, once an internal error has disabled the monitor.
        seconds: time spent in here.
        model, optimizer, scaler, background, updates: for actions.
        protocol: slips of the loop that were warned about.
        schedulers: of the learning rate, as far as a trainer's callback or an action knows them.
        ema: averages of the weights, for the audit of a resume: a module (AveragedModel), an object
            with `state_dict`, or tensors in a dict; None for none. Set it again where loading a
            checkpoint makes a new one.
        training: what the audits see; a trainer's callback sets its epoch and loader.
        findings: of the audits so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        log: Path | str | None = None,
        run_id: str = "run",
        config: MonitorConfig | None = None,
        actions: Iterable[Action | Callable[[Alert], None]] = (),
        scaler: Any = None,
        hardware: Hardware | None = None,
        probe: Callable[[], Tensor] | None = None,
        about: Mapping[str, Any] | None = None,
        audits: bool | Iterable[str] = False,
    ) -> None:
        check_arguments(model, optimizer, scaler, hardware)
        check_settings(log, run_id, about, probe)
        self.model, self.optimizer = model, unwrapped(optimizer)
        self.scaler = scaler = scaler or scaler_of(optimizer)
        self.schedulers: list[Any] = []
        self.ema: Any = None
        self.training = Training(model, self.optimizer)
        self._auditor = Auditor(self.training, make_audits(audits), self._found)
        self.findings = self._auditor.findings
        self.config = config = checked_config(config)
        self.step, self.weights_step, self.seconds = 0, 0, 0.0
        self.last: Record | None = None
        self.should_stop, self.usable = False, True
        self.problem: str | None = None
        self.background = Background(what="the monitor")
        self.rank, self.run_id = rank(), run_id
        start = start_line(dict(about or {}), run_id, config.metric, "FULL_METRIC")
        self.log_path = path_of_rank(log, self.rank)
        self._log = MonitorLog(self.log_path, self.background, start)
        self._delivery = AlertDelivery(self, actions)
        self._recorder = StepRecorder(
            model, self.optimizer, config, scaler=scaler, hardware=hardware, probe=probe
        )
        self._rule_judge = RuleJudge(config, self._recorder, self._delivery)
        self._detector_judge = DetectorJudge(config, self._delivery)
        self.updates = UpdateJudge(self.optimizer, self._delivery)
        self.alerts, self.metric = self._delivery.alerts, self._detector_judge.metric
        self.parameters = self._recorder.parameters
        self._steps = OptimizerSteps(model, self.optimizer, scaler, self._after_optimizer)
        self.protocol = Protocol(
            model, self.optimizer, self._steps, quiet=self.rank > 0 and config.exchange
        )
        self._leave_next_out = False
        self._timer = StepTimer(model, several_ranks=is_distributed())
        self._rank_sync: RankSync | None = None
        self._exchanges: list[Exchange] = []
        self._whole_norm: WholeNorm | None = None
        self._depth, self._closed = 0, False
        self._pending: Pending | None = None
        self._waiting_for_ranks: Pending | None = None  # read; the ranks' messages are missing
        _OPEN.add(self)
        # Registered again: functions registered before a monitor began run after it.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self._prepare()

    @fail_safe()
    def _prepare(self) -> None:
        self._recorder.install()
        self._steps.sharded = self._recorder.sharded
        self._recorder.removers += self._steps.install()
        self._recorder.sees_updates = self._steps.hooked
        if is_distributed() and self.config.exchange:
            # The other ranks need not know of actions that run on one rank alone.
            waits_for_norm = self._recorder.sharded and any(
                a.needs_verdict_now and a.on_all_ranks for a in self._delivery.actions
            )
            if waits_for_norm:
                from rmetric.monitor.fsdp import WholeNorm  # slow to import

                self._whole_norm = WholeNorm(self.run_id, self.config.join_seconds)
            exchange = self._new_exchange(WIDTH, self.run_id)
            self._rank_sync = RankSync(self.config, exchange, waits_for_norm=waits_for_norm)
            self._rank_sync.scaled = is_scaling(self.scaler)
            self._delivery.rank_sync, self._delivery.whole_norm = self._rank_sync, self._whole_norm
        ranks = self._rank_sync.exchange.ranks if self._rank_sync is not None else []
        if self._auditor:
            self.training.log = self.log_event
            if ranks:
                self.training.rank, self.training.ranks = self.rank, len(ranks)
                channel = self._new_exchange(AUDIT_WIDTH, f"{self.run_id}-audits")
                self.training.channel = channel
                self._recorder.removers.append(channel.close)
            self._recorder.removers += self._auditor.install()
        self._step_time_judge = StepTimeJudge(self.config, self._delivery, self.rank, ranks)
        if self.config.step_times:
            self._timer.install()
            self._recorder.removers.append(self._timer.remove)
        self._arm_next_step()
        others = [other.protocol for other in _OPEN if other is not self and other.is_open]
        self.protocol.begins(self.log_path, self._delivery.actions, others, self.config.alert_on)
        self._delivery.each(lambda action: action.start(self))

    def _new_exchange(self, width: int, name: str) -> Exchange:
        exchange = Exchange(
            width,
            name,
            group=getattr(self.model, "process_group", None),  # of DistributedDataParallel
            join_seconds=self.config.join_seconds,
            patience=self.config.patience,
        )
        self._exchanges.append(exchange)
        return exchange

    def _found(self, finding: Finding) -> None:
        error = finding.severity == "error"
        quiet = self.rank > 0 and not finding.ranks
        logger.log(logging.WARNING if error and not quiet else logging.INFO, "%s", finding)
        self.log_event("AUDIT", **finding.as_entry(), rank=self.rank)

    # -- what a training loop calls

    @fail_safe(otherwise=partial(Verdict, tuple))
    def check_before_step(
        self, loss: Tensor | float | None = None, *, gradient_norm: Tensor | float | None = None
    ) -> Verdict:
        """Measure a step that is about to be taken, and complete the record of the last one.

        Args:
            loss: of this step, nats per token; None where `micro_batch` was called with it.
            gradient_norm: before clipping, where the loop has it already (it is what
                clip_grad_norm_ returns); it spares a pass over the gradients.

        Returns:
            True where the step may be taken. Nothing waits for the device until it is used.
        """
        loss = self.protocol.number("loss", loss)
        gradient_norm = self.protocol.number("gradient_norm", gradient_norm)
        times = self._timer.check_begins()
        self.weights_step = self.step  # also after a check that an interrupt broke off
        self._steps.leaves_out = False
        if self.scaler is None and self._steps.scaler is not None:
            self._use_scaler(self._steps.scaler)
        before = self._pending
        self._complete_pending(times=times)
        self.protocol.check_begins(before)
        self._delivery.run_joint_actions(self.step + 1)
        self.step += 1
        pending = self._recorder.measure(self.step, loss, gradient_norm)
        if self._auditor:
            self.training.scaler = self.scaler
            self.training.schedulers, self.training.ema = self.schedulers, self.ema
            audits = self._auditor.measure(self.step)
            pending.measured |= {f"{AUDIT}{name}": value for name, value in audits.items()}
        if not self._recorder.sees_updates:  # nothing more comes
            pending.send()
        self._pending = pending
        self._arm_next_step()
        verdict = Verdict(lambda: self._judge_before_update(pending))
        self._complete_norm(pending)
        self.updates.before_update(pending.record, self.schedulers)
        if self._delivery.needs_verdict_now:
            _ = verdict.ok
            known = set(self.config.alert_on)
            broken = [b for b in pending.broken_rules or () if b[0] in known]
            self._delivery.each(lambda action: action.before_update(broken, self))
        if self._leave_next_out:
            self._leave_next_out, pending.record.skipped = False, True
            self._steps.leave_out()
        self.weights_step = self.step
        self._timer.check_ends()
        return verdict

    @fail_safe()
    def micro_batch(self, loss: Tensor | float | None = None) -> None:
        """With accumulation: one micro-batch's backward pass, of that undivided loss, has ended.

        The micro-batches of a step are taken for workers; its loss is the mean.
        """
        loss = self.protocol.number("loss", loss)
        self._timer.micro_batch()
        self._recorder.add_micro_batch(loss)

    @fail_safe()
    def batch_ready(self, batch: Any = None) -> None:
        """The data of the step are there; optional where the loop calls the model itself.

        Its forward pass shows that too, unless the model is compiled in place (`model.compile()`)
        or the loop calls nothing but its parts. `batch` is for the audits of data: a tensor, or
        lists and dicts of them.
        """
        self._timer.batch_ready()
        if batch is not None:
            self.audit_batch(batch)

    @fail_safe()
    def audit_batch(self, batch: Any) -> None:
        """Show the audits of data a step's tensor, or lists and dicts of tensors."""
        if self._auditor:
            self._auditor.on_batch(batch)

    @fail_safe()
    def paused(self) -> None:
        """Exclude the time from the last step to the next one from the wait for data.

        It is optional for evaluations without gradients, and where `evaluated` or `state_dict` is
        called. A checkpoint without this monitor's state is such a pause.
        """
        self._timer.pause()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, sharing the pass of the check before it.

        Returns the norm before clipping; of gradients in half precision it is measured in float32,
        and may differ from torch's in the third digit.
        """
        return self._recorder.clip(max_norm, self._pending, active=not self._closed)

    @fail_safe()
    def evaluated(self, validation_loss: Tensor | float) -> None:
        """Record an evaluation after the step just made; nats per token."""
        self._timer.pause()
        number = self.protocol.number("validation_loss", validation_loss)
        if self._pending is not None and number is not None:
            [loss] = to_host({"loss": number})["loss"]
            self._pending.record.validation_loss = loss
        self._auditor.on_evaluation()

    @fail_safe()
    def policy(self, values: Mapping[str, float]) -> None:
        """Record the reinforcement-learning metrics of the step just made; see `Record.policy`."""
        if self._pending is not None and values:
            self._pending.record.policy = {name: float(value) for name, value in values.items()}

    @fail_safe()
    def planned(self, kind: str, details: str = "") -> None:
        """Announce a planned change that begins with the next step, such as batch_size."""
        self._recorder.planned.append(f"{kind}: {details}" if details else kind)

    def record_change(self, change: str) -> None:
        """Log a change that an action has made, in words; it applies to the next step."""
        pending = self._pending
        if pending is None or pending.record.step <= self.weights_step:
            self._recorder.changes.append(change)
            return
        record = pending.record
        record.actions = (*(record.actions or ()), change)
        record.learning_rate = self._recorder.learning_rate

    def leave_step_out(self) -> None:
        """Leave the step at hand out, for an action; after an alert on the past, the next one."""
        pending = self._pending
        if pending is None or pending.record.step <= self.weights_step:
            self._leave_next_out = True
            return
        pending.record.skipped = True
        self._steps.leave_out()

    def log_event(self, event: str, **values: Any) -> None:
        """Write an entry of an action to the log: its name in capitals, and JSON values."""
        self._log.write(encode_line({"event": event} | values), now=True)

    def pass_decision(self, by: Action, entry: Mapping[str, Any]) -> None:
        """Pass a decision of an action to all other actions; for the entry see `Action.decided`."""
        self._delivery.pass_decision(by, entry)

    def leave_workers_out(self, ranks: Iterable[int]) -> None:
        """Leave all these ranks out of the records, as an action does with their gradients."""
        if self._rank_sync is not None:
            self._rank_sync.left_out = frozenset(ranks)

    def detector(self, name: str) -> Any:
        """The detector of that name, or the R-Metric; None if it does not run."""
        return self._detector_judge.detectors.get(name)

    @fail_safe()
    def hardware_event(self, kind: str, worker: int | None = None) -> None:
        """Report a hardware event that the training itself has observed."""
        self._recorder.events.report(kind, worker)

    @fail_safe(otherwise=False)
    def wait_for_ranks(self, seconds: float) -> bool:
        """Wait until the monitors of all ranks are connected; False after `seconds`. Optional."""
        until = time.monotonic() + seconds
        return all(e.wait_joined(max(0.0, until - time.monotonic())) for e in self._exchanges)

    @fail_safe(otherwise=dict)
    def state_dict(self, *, audited: bool = True) -> dict[str, Any]:
        """State for a checkpoint of the present weights: plain values, of a bounded size.

        With `audited` it holds, read from the device, what the audits need to judge a resume.
        """
        self._timer.pause()
        self._receive_ranks()
        pending, last = self._pending, None
        if pending is not None and pending.record.step <= self.weights_step:
            self._read(pending)
            self._judge_rules(pending)
            last = record_to_json(pending.record)
        # A run that resumes from the checkpoint expects the lines before it in the log.
        self._log.flush()
        return {
            "step": self.weights_step,
            "time": self._recorder.events.now(),
            "pending": last,
            **self._detector_judge.state_dict(),
            "rules": state_of(self._rule_judge.rules),
            "episodes": self._delivery.state_dict(),
            "step_times": self._step_time_judge.state_dict(),
            "actions": self._delivery.action_states(),
            **({"audits": self._auditor.on_save()} if audited and self._auditor else {}),
        }

    @fail_safe()
    def newest_record(self) -> Record | None:
        """This rank's record of the step just made, before any detector takes it; else None."""
        pending = self._pending
        return None if pending is None else pending.read()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the step of that state, in the log too; TypeError for another value."""
        if state and (not isinstance(state, Mapping) or "step" not in state):
            raise ArgumentError(f"state is {found(state)}: what state_dict gave is accepted")
        self._load(state)
        if state and self.is_open:
            self._delivery.load_action_states(state.get("actions", {}))

    @fail_safe()
    def _load(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self.step = self.weights_step = state["step"]
        if self._rank_sync is not None:
            self._rank_sync.reset()
        last, self._pending, self._waiting_for_ranks = state["pending"], None, None
        if last is not None:
            record = record_from_json(last)
            if record.validation_loss is None:
                record.validation_loss = self._log.validation_loss(record.step)
            self._pending = Pending.of(record)
        self._log.resume_step = self.step if last is None else self.step - 1
        self._recorder.events.resume(state["time"])
        restore_or_keep(self._rule_judge.rules, state["rules"], "the step rules")
        self._detector_judge.load_state_dict(state)
        self._delivery.load_state_dict(state["episodes"])
        self._timer.reset()
        if self._auditor:
            self._auditor.loaded(state.get("audits", {}), self._log.entries("BATCHES"))
        self.updates.restart()
        self._step_time_judge.load_state_dict(state["step_times"])
        self._arm_next_step()

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Return to an earlier `state_dict` of this run, for an action on all ranks.

        The actions' own states stay as they are. The log's lines of the steps that are about to be
        measured again go to the file of the same name with ``.abandoned`` after it.
        """
        before = self._log.resume_step
        self._load(state)
        self._leave_next_out = False
        self._recorder.planned, self._recorder.changes = [], []
        step, self._log.resume_step = self._log.resume_step, before
        if step is not None:
            self._log.cut(step)

    def close(self) -> None:
        """Complete the last record and end the log; harmless when called again."""
        self._complete_last()
        self._detach()
        if self in _OPEN:
            _OPEN.discard(self)
            endings = [self._delivery.close, *(action.close for action in self._delivery.actions)]
            _run_all([*endings, self.background.close])

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._add_final_event("torch_out_of_memory")
        elif isinstance(error, getattr(torch, "AcceleratorError", ())):
            self._add_final_event("torch_accelerator_error")
        self.close()

    # -- the course of a step

    @property
    def is_open(self) -> bool:
        """True until it is closed or an internal error disables it."""
        return self.usable and not self._closed

    def _arm_next_step(self) -> None:
        connected = self._rank_sync is not None and self._rank_sync.alive
        self._recorder.arm(self.step + 1, ranks_connected=connected)

    @fail_safe()
    def _after_optimizer(self) -> None:
        self._timer.optimizer_ends()
        self._recorder.after_optimizer(self._pending)

    def _use_scaler(self, scaler: Any) -> None:
        words = "a GradScaler calls the optimiser and was not passed in: it is used from now on"
        logger.warning("rmetric: %s; pass it as Monitor(scaler=...)", words)
        self.scaler = self._recorder.scaler = scaler
        self._rule_judge.rules.scaled = is_scaling(scaler)
        if self._rank_sync is not None:
            self._rank_sync.scaled = True

    def _complete_norm(self, pending: Pending) -> None:
        """Wait for the whole norm of a sharded gradient, while all ranks take part."""
        whole, rank_sync = self._whole_norm, self._rank_sync
        if whole is None or rank_sync is None or not rank_sync.agreed(self.step):
            return
        if pending.shard_norm is None:  # the loop knows the whole norm, on all ranks
            return
        norm = whole.of_step(self.step, pending.read_shard_norm())
        if norm is not None:
            pending.norm, pending.shard_norm = norm, None
        self._delivery.report_exchange(whole.problem)

    def _judge_before_update(self, pending: Pending) -> tuple[Alert, ...]:
        if pending.sharded and pending.norm is None and self._whole_norm is None:
            self.protocol.warn("unknown_norm")
        if pending is not self._pending:  # late: the step was judged when it was completed
            return self._judge_rules(pending)
        before, self.weights_step = self.weights_step, pending.record.step - 1
        try:
            return self._judge_rules(pending)
        finally:
            self.weights_step = before

    @fail_safe(otherwise=tuple)
    def _judge_rules(self, pending: Pending) -> tuple[Alert, ...]:
        before_update = self.weights_step < pending.record.step
        return self._rule_judge.judge(pending, before_update=before_update)

    def _complete_pending(self, leaving: int = RUNNING, *, times: StepTimes | None = None) -> None:
        """Read the pending step from the device; with several ranks, send the message on it."""
        self._receive_ranks()
        pending = self._pending
        if pending is None:
            return
        self._read(pending)
        if self.config.step_times and times is not None:
            pending.add_times(times)
        self._judge_rules(pending)
        self._pending = None
        step, sync = pending.record.step, self._rank_sync
        if sync is not None and sync.post(step, pending.message, leaving):
            self._waiting_for_ranks = pending
        else:
            self._step_time_judge.judge(pending)
            self._finish(pending.record)

    def _read(self, pending: Pending) -> None:
        """One transfer: loss and norm for the rules, and what the audits measured, too."""
        record = pending.read()
        self._auditor.received(pending.audited, record.training_loss)

    def _receive_ranks(self) -> None:
        """Take the ranks' messages on the step before, if they have arrived; finish its record."""
        if self._rank_sync is None:
            return
        messages = self._rank_sync.take()
        alerts = self._rank_sync.new_alerts(messages) if messages is not None else []
        steps = (alert.step for alert in alerts if alert.source == "non_finite")
        self._delivery.non_finite_step = max([self._delivery.non_finite_step, *steps])
        awaiting, self._waiting_for_ranks = self._waiting_for_ranks, None
        if awaiting is not None:
            if messages is not None and messages.is_complete_for(awaiting.record.step):
                complete_from_ranks(awaiting.record, messages, self._rank_sync.places)
            if awaiting.sharded and awaiting.norm is None:
                self._rule_judge.judge_whole_norm(awaiting.record)
            self._step_time_judge.judge(awaiting, messages)
            self._finish(awaiting.record)
        for alert in alerts:
            self._delivery.deliver(alert, shared=False)
        self._delivery.report_exchange(self._rank_sync.problem)

    def _finish(self, record: Record) -> None:
        alarms = self._detector_judge.update(record)
        self.updates.update(record)
        own_norm = not self._recorder.norm_handed_over
        self.protocol.finished(record, sharded=self._recorder.sharded, own_norm=own_norm)
        self.last = record
        if self._log.is_wanted:
            self._log.write(metrics_line(record, self.metric, alarms))
        self._detector_judge.alert_new_alarms(record.step, alarms)
        self._delivery.end_episodes(record.step)
        self._delivery.each(lambda action: action.record(record, self))

    # -- the end

    @fail_safe()
    def _add_final_event(self, kind: str) -> None:
        """An event after which no step follows belongs to the last step."""
        if self._pending is not None:
            record = self._pending.record
            event = HardwareEvent(self._recorder.events.now(), kind)
            record.events = (*(record.events or ()), event)

    @fail_safe()
    def _complete_last(self) -> None:
        self._complete_pending(CLOSED, times=self._timer.finish())
        self._receive_ranks()
        for event, words in self.updates.closing(self.rank).items():
            logger.warning("rmetric: %s", words)
            self.log_event(event, reason=words, rank=self.rank)

    def disable(self, where: str, error: Exception) -> None:
        """End the measurements after an internal error and report it; training continues."""
        self.usable, self.problem = False, f"{where}: {type(error).__name__}: {error}"
        words = "rmetric monitor disabled after an internal error; training continues. %s"
        logger.error(words, self.problem)
        self._detach()  # without the actions: the training would wait for what they still write

    def _detach(self) -> None:
        """Remove every hook, leave the other ranks and hand over the last lines; waits for none."""
        if self._closed:
            return
        self._closed = True
        endings = list(self._recorder.removers)
        if self._whole_norm is not None:
            endings.append(self._whole_norm.leave)
        if self._rank_sync is not None:
            endings.append(partial(self._rank_sync.leave, CLOSED if self.usable else DISABLED))
        endings.append(self._log.close)
        if close := getattr(self._recorder.events.hardware, "close", None):
            endings.append(close)
        _run_all(endings)


def _run_all(functions: Iterable[Callable[[], Any]]) -> None:
    """Call each function; one that fails does not stop the others."""
    for function in functions:
        try:
            function()
        except Exception as error:
            logger.error("rmetric: %s", error)
