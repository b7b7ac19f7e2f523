"""The R-Metric, and what else is worth knowing, in a training that is under way.

monitor = Monitor(model, optimizer, log="run.jsonl")
...
    loss.backward()
    monitor.check_before_step(loss)
    optimizer.step()
...
monitor.close()
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rmetric._util.background import Background
from rmetric._util.state import restore_state, state_of
from rmetric._util.strict_json import encode_line
from rmetric.detectors.calibrated import read_thresholds
from rmetric.detectors.registry import make_detector
from rmetric.log_entries import record_from_json, record_to_json
from rmetric.logs import metrics_line, start_line
from rmetric.metric import RMetric
from rmetric.monitor.actions.action import Action, as_action
from rmetric.monitor.actions.ranks import is_distributed, rank
from rmetric.monitor.alerts import Alert, Verdict
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.ddp import OwnGradient
from rmetric.monitor.exchange import Exchange
from rmetric.monitor.forward import ForwardProbes
from rmetric.monitor.gradients import (
    gradients_of,
    is_sharded,
    layer_names,
    non_finite_by_layer,
    tensor_norms,
    total_norm,
)
from rmetric.monitor.log_file import LogFile, validation_loss_of
from rmetric.monitor.pending import Pending, to_host
from rmetric.monitor.rules import StepRules
from rmetric.monitor.together import (
    CLOSED,
    STAYS,
    STEPPED_ASIDE,
    WIDTH,
    Together,
    complete,
)
from rmetric.monitor.weights import WeightSample
from rmetric.monitor.workers import MicroBatchWorkers, WorkerStatistics
from rmetric.records import HardwareEvent, Record

logger = logging.getLogger("rmetric")
Method = TypeVar("Method", bound=Callable[..., Any])

_OPEN: weakref.WeakSet[Monitor] = weakref.WeakSet()
ALERTS_KEPT = 100
CLOSE_SECONDS = 5.0


class Hardware(Protocol):
    """A source of hardware events, such as `rmetric.telemetry.nvml.NvmlEvents`."""

    def poll(self) -> Sequence[HardwareEvent]: ...

    def close(self) -> None: ...


def steps_aside(otherwise: Any = None) -> Callable[[Method], Method]:
    """An exception inside is reported once; from then on the monitor does nothing.

    Training must not end because somebody watches it. `otherwise` is returned
    (or, where it is callable, called) in place of a result.
    """

    def wrap(method: Method) -> Method:
        @wraps(method)
        def guarded(self: Monitor, *args: Any, **kwargs: Any) -> Any:
            if self._closed or not self.usable:
                return otherwise() if callable(otherwise) else otherwise
            began = time.perf_counter()
            self._depth += 1
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._step_aside(method.__name__, error)
                return otherwise() if callable(otherwise) else otherwise
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - began

        return guarded  # type: ignore[return-value]

    return wrap


def _close_at_exit(monitor: Monitor) -> None:
    """A script that raises, or forgets to close, still gets its last lines."""
    _OPEN.add(monitor)
    # Once for all, and anew: what was registered before a monitor began ends after it.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for monitor in tuple(_OPEN):
        monitor.close()


def go_on() -> Verdict:
    return Verdict(tuple)


class Monitor:
    """Watches one training run: measures, logs, and says when something is wrong.

    Call `check_before_step(loss)` once a step, after backward (and after
    `scaler.unscale_`), before the optimiser's step. What it measures stays on
    the device and is read when the next step is checked, so an accelerator is
    not made to wait; then the record is completed, the metric and the detectors
    take it, and it goes to the log. By default it logs and nothing else.

    It never ends, slows or changes a training unless an action that was passed
    in does: the weights come out bit for bit the same. An exception inside is
    reported once through `logging`, and the monitor steps aside.

    Args:
        model: as trained, before or after DistributedDataParallel or compile.
        optimizer: its learning rate and update norms are watched; None for neither.
        log: JSONL file, the same form as the simulator's; None for none. With
            several ranks the first one writes; each where ``{rank}`` is in the name.
        run_id: names the run in the log.
        config: see `MonitorConfig`.
        actions: what to do on an alert; a plain function is called with it.
        scaler: the GradScaler of a half-precision training, if there is one.
        hardware: where hardware events come from; None where none are logged.
        probe: returns the loss on a small fixed batch; called without gradients,
            the model in evaluation mode; of several ranks each calls it for itself, so
            it must go to the bare model (``model.module``).
        about: further keys for the log's description of the run.

    Attributes:
        step: steps checked so far.
        weights_step: steps that the weights have taken (or left out): `step`, but
            one less where an action is called before the optimiser's step.
        metric: the R-Metric, as of `last`.
        last: the last completed record; None before the first.
        alerts: the last 100.
        rank: of this process, from 0.
        should_stop: an action asks the training loop to end.
        usable, problem: False and why, once the monitor has stepped aside.
        seconds: time spent in here.
        model, optimizer, scaler, background: for actions.
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
    ) -> None:
        self.model, self.optimizer, self.scaler = model, unwrapped(optimizer), scaler
        self.config = config = config or MonitorConfig()
        self.step, self.weights_step, self.seconds = 0, 0, 0.0
        self.last: Record | None = None
        self.alerts: deque[Alert] = deque(maxlen=ALERTS_KEPT)
        self.should_stop, self.usable = False, True
        self.problem: str | None = None
        self.background = Background()
        self.metric = RMetric(config.metric)
        own = None if config.thresholds is None else read_thresholds(Path(config.thresholds))
        self._detectors = {n: make_detector(n, thresholds=own) for n in config.detectors}
        self._alarmed: set[str] = set()  # detectors that were alarmed at the last record
        self._sounding: set[str] = set()  # rules that the last step broke
        self._non_finite_at = 0  # the last step of which that rule has told
        self._rules = StepRules(
            factor=config.explosion_factor,
            window=config.explosion_window,
            overflows=config.overflows,
            scaled=scales(scaler),
        )
        self._actions = [as_action(action) for action in actions]
        self.rank, self.run_id = rank(), run_id
        self._log_path = path_of_rank(log, self.rank)
        self._log: LogFile | None = None
        self._together: Together | None = None  # with the other ranks
        self._own: Any = None  # this rank's own gradient
        self._shards: Any = None
        self._own_loss_bad = False
        self._awaiting: Pending | None = None  # what the other ranks say of it
        self._start_line = start_line(dict(about or {}), run_id, config.metric, "FULL_METRIC")
        self._hardware, self._probe = hardware, probe
        self._depth, self._closed = 0, False
        self._resumed_at: int | None = None
        self._clock = time.monotonic()
        self._begun_at = 0.0
        self._pending: Pending | None = None
        self._shared_norm: Tensor | None = None  # of the gradients as they are: clipping spends it
        self._said: list[HardwareEvent] = []
        self._planned: list[str] = []
        self._micro_losses: list[Any] = []
        self._accumulates = True  # not known before the first step
        self.parameters = list(model.parameters())
        names = [name for name, _ in model.named_parameters()]
        self._layers = dict(zip(map(id, self.parameters), layer_names(names), strict=True))
        _close_at_exit(self)
        self._prepare()

    @steps_aside()
    def _prepare(self) -> None:
        config = self.config
        self._sample = WeightSample(self.parameters, config.sampled_weights)
        self._workers = MicroBatchWorkers(self.parameters)
        if is_distributed():
            self._meet_the_ranks()
        self._forward = None if is_compiled(self.model) else ForwardProbes(self.model)
        self._remembered = False
        self._hooks = []
        if hasattr(self.optimizer, "register_step_post_hook"):
            self._hooks = [self.optimizer.register_step_post_hook(self._after_optimizer)]
        self._look_ahead()

    def _meet_the_ranks(self) -> None:
        if is_sharded(self.parameters):
            from rmetric.monitor import fsdp  # the sharded part of torch takes its time

            self._shards = fsdp.Shards(self.parameters)
            self._own = fsdp.OwnReducedGradient(self.model)
            if self._probe is not None:
                self._probe = None
                logger.warning("rmetric: no fixed batch: sharded models run on all ranks or none")
        if self.config.exchange:
            self._own = self._own or OwnGradient(self.parameters)
            group = getattr(self.model, "process_group", None)  # of DistributedDataParallel
            exchange = Exchange(
                WIDTH,
                self.run_id,
                group=group,
                join_seconds=self.config.join_seconds,
                patience=self.config.patience,
            )
            self._together = Together(self.config, exchange, scaled=scales(self.scaler))

    # -- what a training loop calls

    @steps_aside(otherwise=go_on)
    def check_before_step(
        self, loss: Tensor | float | None = None, *, gradient_norm: Tensor | float | None = None
    ) -> Verdict:
        """Take a step that is about to be made.

        Args:
            loss: of this step, nats per token; None where `micro_batch` was given them.
            gradient_norm: before clipping, where the loop has it already (it is
                what clip_grad_norm_ returns); it spares a pass over the gradients.

        Returns:
            True where the step may be taken. Nothing waits for the device until
            it is asked.
        """
        self.weights_step = self.step  # a scaler that left the step out did not say so
        self._complete()
        self._act_together()
        self.step += 1
        pending = Pending(self._new_record())
        pending.loss = self._loss_of_step(loss)
        self._measure_gradients(pending, gradient_norm)
        if self._forward is not None and self._forward.armed:
            pending.forward = self._forward.take()
        if self._probe is not None and _due(self.step, self.config.probe_every):
            pending.probe_loss = self._on_fixed_batch()
        if self._hooks and _due(self.step, self.config.update_every):
            # Here and not in a hook on step(): a closure's backward runs inside of that.
            self._sample.remember()
            self._remembered = True
        self._pending = pending
        self._look_ahead()
        verdict = Verdict(lambda: self._judge_before_step(pending))
        if any(action.needs_verdict_now for action in self._actions):
            _ = verdict.ok
        self.weights_step = self.step
        return verdict

    @steps_aside()
    def micro_batch(self, loss: Tensor | float | None = None) -> None:
        """With accumulation: one micro-batch's backward pass has ended.

        The micro-batches of a step are taken for workers. `loss` is the
        micro-batch's own, not divided by their number; the step's is the mean.
        """
        if loss is not None:
            self._micro_losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        self._accumulates = True
        if self._workers.active:
            self._workers.next()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, sharing the pass of the check before it.

        Gradients in half precision are measured in float32 here, so their norm
        may differ from torch's in the third digit. Returns the norm before clipping.
        """
        if self._shards is not None:
            return self._shards.clip(max_norm, None if self._closed else self._pending)
        norm, self._shared_norm = self._shared_norm, None
        if norm is None or self._closed:
            return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return norm

    @steps_aside()
    def evaluated(self, validation_loss: Tensor | float) -> None:
        """An evaluation after the step just made; nats per token."""
        if self._pending is not None:
            [loss] = to_host({"loss": validation_loss})["loss"]
            self._pending.record.validation_loss = loss

    @steps_aside()
    def planned(self, kind: str, details: str = "") -> None:
        """Announce a change that begins with the next step: learning_rate, batch_size, ..."""
        self._planned.append(f"{kind}: {details}" if details else kind)

    @steps_aside()
    def hardware_event(self, kind: str, worker: int | None = None) -> None:
        """Report an event that the training itself has seen."""
        self._said.append(HardwareEvent(self._now(), kind, worker))

    @steps_aside(otherwise=False)
    def wait_for_ranks(self, seconds: float) -> bool:
        """Whether the monitors of all ranks are in touch, after `seconds` at most.

        Nobody has to call it; without, they meet while the first steps go by.
        """
        return self._together is None or self._together.exchange.wait_joined(seconds)

    @steps_aside(otherwise=dict)
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the present weights should hold: plain values, of a bounded size."""
        self._settle()
        pending, last = self._pending, None
        if pending is not None and pending.record.step <= self.weights_step:
            pending.read()
            self._judge(pending)
            last = record_to_json(pending.record)
        if self._log is not None:
            # Who goes on from a checkpoint expects the lines before it in the log.
            self._log.flush()
            self.background.wait(CLOSE_SECONDS)
        return {
            "step": self.weights_step,
            "time": self._now(),
            "pending": last,
            "metric": state_of(self.metric),
            "detectors": {name: state_of(d) for name, d in self._detectors.items()},
            "alarmed": sorted(self._alarmed),
            "rules": state_of(self._rules),
        }

    @steps_aside()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of that state; the log goes on there too."""
        if not state:
            return
        self.step = self.weights_step = state["step"]
        if self._together is not None:
            self._together.rewind()
        last, self._awaiting = state["pending"], None
        self._pending = None if last is None else Pending.of(self._last_record(last))
        self._resumed_at = self.step if last is None else self.step - 1
        self._begun_at, self._clock = state["time"], time.monotonic()
        restore_state(self.metric, state["metric"])
        restore_state(self._rules, state["rules"])
        for name, detector in self._detectors.items():
            if name in state["detectors"]:
                restore_state(detector, state["detectors"][name])
        self._alarmed = set(state["alarmed"])
        self._look_ahead()

    def _last_record(self, state: dict[str, Any]) -> Record:
        record = record_from_json(state)
        if record.validation_loss is None and self._log_path is not None:
            record.validation_loss = validation_loss_of(self._log_path, record.step)
        return record

    def close(self) -> None:
        """Complete the last record and end the log; harmless when called again."""
        self._complete_quietly()
        self._let_go()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._late_event("torch_out_of_memory")
        elif isinstance(error, getattr(torch, "AcceleratorError", ())):
            self._late_event("torch_accelerator_error")
        self.close()

    # -- measuring

    def _new_record(self) -> Record:
        record = Record(step=self.step, time=self._now(), learning_rate=self._learning_rate())
        record.events = self._new_events()
        if self._planned:
            record.planned_events, self._planned = tuple(self._planned), []
        return record

    def _new_events(self) -> tuple[HardwareEvent, ...] | None:
        said, self._said = self._said, []
        if self._hardware is None:
            return tuple(said) or None
        try:
            if hasattr(self._hardware, "start"):
                self._hardware.start = self._clock  # it may have begun before the run did
            seen = self._hardware.poll()
        except Exception as error:
            logger.error("rmetric: going on without hardware events: %s", error)
            self._hardware = None
            return tuple(said) or None
        events = (*said, *(replace(event, time=event.time + self._begun_at) for event in seen))
        # What cannot be read has not reported that all is well.
        return events if getattr(self._hardware, "available", True) else events or None

    def _learning_rate(self) -> float | None:
        groups = getattr(self.optimizer, "param_groups", None)
        return float(groups[0]["lr"]) if groups else None

    def _loss_of_step(self, loss: Tensor | float | None) -> Tensor | float | None:
        losses, self._micro_losses = self._micro_losses, []
        if loss is not None:
            # A captured graph writes the next loss to the same place.
            return loss.detach().clone() if isinstance(loss, Tensor) else float(loss)
        return sum(losses) / len(losses) if losses else None

    def _measure_gradients(self, pending: Pending, norm: Tensor | float | None) -> None:
        self._shared_norm = None
        if self._workers.active:
            self._accumulates = self._workers.several
            pending.workers = self._unscaled(self._workers.stop())
        if self._own is not None and self._own.active:
            pending.own = self._unscaled(self._own.stop())
        if self._shards is not None:
            self._shards.measure(pending, norm)
            return
        layers_due = _due(self.step, self.config.layers_every)
        if norm is None or layers_due:
            present = [p for p in self.parameters if p.grad is not None]
            norms = tensor_norms(gradients_of(present))
            if layers_due and present:
                pending.tensor_norms = norms
                pending.layers = [self._layers[id(p)] for p in present]
            if norm is None and present:
                norm = self._shared_norm = total_norm(norms)
        pending.norm = norm

    def _unscaled(self, workers: WorkerStatistics | None) -> WorkerStatistics | None:
        """In the units of the gradient: a scaler's factor is still on what backward gave."""
        if workers is None or self.scaler is None:
            return workers
        factor = self.scaler.scale(workers.norms.new_ones(()))
        return workers._replace(norms=workers.norms / factor)

    def _on_fixed_batch(self) -> Tensor | None:
        assert self._probe is not None
        modes = [(m, m.training) for m in self.model.modules()]
        try:
            self.model.eval()
            devices = {p.device.index for p in self.parameters if p.device.type == "cuda"}
            with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
                return self._probe().detach()
        finally:
            for module, mode in modes:
                module.training = mode

    def _look_ahead(self) -> None:
        """Listen to what is due at the next step, and to nothing else."""
        due = self.step + 1
        self._workers.stop()
        if _due(due, self.config.workers_every):
            alone = self._together is None or not self._together.alive
            if self._own is not None and not alone:
                self._own.start()
            elif self._accumulates:
                self._workers.start()
        if self._forward is not None:
            self._forward.disarm()
            if _due(due, self.config.forward_every):
                self._forward.arm()

    @steps_aside()
    def _after_optimizer(self, *_: Any) -> None:
        self._shared_norm = None
        if self._remembered and self._pending is not None:
            self._pending.moved = self._sample.moved()
        self._remembered = False

    # -- judging

    def _judge_before_step(self, pending: Pending) -> tuple[Alert, ...]:
        if pending is not self._pending:  # asked late, when it had been found already
            return self._judge(pending)
        self.weights_step = pending.record.step - 1
        try:
            return self._judge(pending)
        finally:
            self.weights_step = pending.record.step

    @steps_aside(otherwise=tuple)
    def _judge(self, pending: Pending) -> tuple[Alert, ...]:
        """The rules on one step, once; alerts and actions follow at once."""
        step = pending.record.step
        if pending.broken is None:
            loss, norm = pending.read_loss_and_norm()
            if norm is not None and not isfinite(norm) and scales(self.scaler):
                pending.record.skipped = True  # what a scaler does with an overflow
            if norm is not None and not isfinite(norm) and self.weights_step < step:
                self._locate_non_finite(pending)
            # Of several ranks each has its own loss; what they decide upon is the same on all.
            broken = self._rules.update(loss if self._together is None else None, norm)
            where = f" ({pending.where})" if pending.where else ""
            pending.broken = [(rule, f"{reason}{where}") for rule, reason in broken]
            self._break(step, pending.broken)
            if self._together is not None and not pending.broken:
                self._own_loss(step, loss)
        if self._together is not None and not self._together.agreed(step):
            return ()
        return tuple(
            self._alert(step, rule, reason)
            for rule, reason in pending.broken
            if rule in self.config.alert_on
        )

    def _locate_non_finite(self, pending: Pending) -> None:
        """While the gradient is still there: how much of it is no number, and where."""
        counts = non_finite_by_layer(self.parameters, self._layers)
        pending.record.non_finite_gradients = sum(counts.values())
        if counts:
            pending.where = (
                f"{sum(counts.values())} entries are not finite, first in {next(iter(counts))}"
            )

    def _break(self, step: int, broken: list[tuple[str, str]]) -> None:
        for rule, reason in broken:
            if rule == "non_finite" and rule in self.config.alert_on:
                self._non_finite_at = step
            self._raise(self._alert(step, rule, reason), again=rule in self._sounding)
        self._sounding = {rule for rule, _ in broken}

    def _own_loss(self, step: int, loss: float | None) -> None:
        """A loss that is no number, of a gradient that is fine: no other rank sees it."""
        assert self._together is not None
        bad = loss is not None and not isfinite(loss)
        if bad and "non_finite" in self.config.alert_on:
            alert = self._alert(step, "non_finite", f"loss is {loss:g}")
            self._non_finite_at = step
            self._together.raised(alert, own=True)
            self._raise(alert, again=self._own_loss_bad, shared=False)
        self._own_loss_bad = bad

    def _alert(self, step: int, source: str, reason: str) -> Alert:
        return Alert(step=step, source=source, reason=reason, rank=self.rank)

    def _complete(self, leaves: int = STAYS) -> None:
        """Read the pending step from the device; with several ranks, tell them of it."""
        self._settle()
        pending = self._pending
        if pending is None:
            return
        pending.read()  # all in one transfer, loss and norm for the rules among it
        self._judge(pending)
        self._pending = None
        if self._together is not None and self._together.post(
            pending.record.step, pending.told, leaves
        ):
            self._awaiting = pending
        else:
            self._finish(pending.record)

    def _settle(self) -> None:
        """What all ranks say of the step before, where it has come; nobody waits for long."""
        if self._together is None:
            return
        messages = self._together.take()
        alerts = self._together.heard(messages) if messages is not None else []
        heard = (alert.step for alert, _ in alerts if alert.source == "non_finite")
        self._non_finite_at = max([self._non_finite_at, *heard])
        awaiting, self._awaiting = self._awaiting, None
        if awaiting is not None:
            if messages is not None and messages.about(awaiting.record.step):
                complete(awaiting.record, messages)
            if awaiting.sharded and awaiting.norm is None:
                broken = self._rules.update(None, awaiting.record.gradient_norm)
                self._break(awaiting.record.step, broken)
            self._finish(awaiting.record)
        for alert, again in alerts:
            self._raise(alert, again=again, shared=False)
        if problem := self._together.news():
            self._tell(self._alert(self.step, "exchange", problem))

    def _act_together(self) -> None:
        """What all ranks do at the check of this same step."""
        due = self._together.due(self.step + 1) if self._together is not None else []
        for alert in due:
            for action in tuple(self._actions):
                later = action.together and not action.needs_verdict_now
                if later and action.hears(alert):
                    self._let_act(action, partial(action, alert, self))

    def _finish(self, record: Record) -> None:
        """The record is complete: the metric, detectors and log take it."""
        alarms = {name: d.update(record).alarm for name, d in self._detectors.items()}
        line = metrics_line(record, self.metric.update(record), alarms)
        self.last = record
        self._write(line)
        self._hear({"r_metric": self.metric.alarm} | alarms)
        for action in tuple(self._actions):
            self._let_act(action, partial(action.record, record, self))

    def _hear(self, alarms: dict[str, bool]) -> None:
        """An alarm is an alert where it begins."""
        assert self.last is not None
        begun = {name for name, alarmed in alarms.items() if alarmed}
        if self._told(self.last.step) and self._non_finite_only():
            begun.discard("calibrated")  # the rule said it, before the step
        for name in alarms:
            if name in begun - self._alarmed:
                detector = self._detectors.get(name, self.metric)
                self._raise(self._alert(self.last.step, name, detector.reason))
            elif name in self._alarmed - begun and name in self.config.alert_on:
                why = getattr(self._detectors.get(name), "ended", "")
                logger.info(
                    "step %d: the %s alarm is over%s", self.last.step, name, why and f": {why}"
                )
        self._alarmed = begun

    def _told(self, step: int) -> bool:
        """Whether the rule has said of this step, or the one before, that it is not finite."""
        return 0 <= step - self._non_finite_at <= 1

    def _non_finite_only(self) -> bool:
        """Whether the calibrated detector has nothing to say but that."""
        detector = self._detectors.get("calibrated")
        evidence = getattr(detector, "evidence", {})
        return evidence.get("not_finite", 0.0) >= 1

    def _raise(self, alert: Alert, *, again: bool = False, shared: bool = True) -> None:
        """`again`: a stretch of bad steps is said once; `shared`: all ranks see it alike."""
        if alert.source not in self.config.alert_on:
            return
        # Of another rank only the name of its detector is known.
        if alert.source == "calibrated" and alert.rank != self.rank and self._told(alert.step):
            return
        self._tell(alert, again=again)
        if self._together is not None and shared:
            self._together.raised(alert)
        for action in tuple(self._actions):
            if action.hears(alert) and self._may_act(action, shared):
                self._let_act(action, partial(action, alert, self))

    def _tell(self, alert: Alert, *, again: bool = False) -> None:
        self.alerts.append(alert)
        if not again:
            said_by_first = self.rank > 0 and self._together is not None and self._together.alive
            logger.log(logging.INFO if said_by_first else logging.WARNING, "%s", alert)
            self._write(encode_line({"event": "ALERT"} | alert.as_entry()), now=True)

    def _may_act(self, action: Action, shared: bool) -> bool:
        """With several ranks: what changes the training is done where all of them do it."""
        if self._together is None or not action.together:
            return True
        at_hand = action.needs_verdict_now and self.weights_step < self.step
        return at_hand and shared and self._together.agreed(self.step)

    def _let_act(self, action: Action, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._actions.remove(action)
            logger.error("rmetric: %s failed and is switched off: %s", action, error)

    # -- the log, and the end

    def _write(self, line: bytes, *, now: bool = False) -> None:
        if self._log_path is None:
            return
        if self._log is None:
            self._log = LogFile(self._log_path, self.background, self._start_line, self._resumed_at)
        self._log.write(line, now=now)
        if self._log.problem:
            logger.error("rmetric: %s; going on without the log", self._log.problem)
            self._log_path = None

    def _now(self) -> float:
        return round(self._begun_at + time.monotonic() - self._clock, 6)

    @steps_aside()
    def _late_event(self, kind: str) -> None:
        """An event after which no step will follow belongs to the last."""
        if self._pending is not None:
            self._pending.add_event(HardwareEvent(self._now(), kind))

    @steps_aside()
    def _complete_quietly(self) -> None:
        self._complete(CLOSED)
        self._settle()

    def _step_aside(self, where: str, error: Exception) -> None:
        self.usable, self.problem = False, f"{where}: {type(error).__name__}: {error}"
        logger.error("rmetric: the monitor steps aside, training goes on. %s", self.problem)
        self._let_go()

    def _let_go(self) -> None:
        """Take every hook off and hand the last lines over; whatever of it fails, fails alone."""
        self._closed = True
        _OPEN.discard(self)
        endings: list[Callable[[], Any]] = [handle.remove for handle in getattr(self, "_hooks", ())]
        if (forward := getattr(self, "_forward", None)) is not None:
            endings.append(forward.disarm)
        if hasattr(self, "_workers"):
            endings.append(self._workers.stop)
        if self._own is not None:
            endings.append(self._own.remove)
        if self._together is not None:
            why = CLOSED if self.usable else STEPPED_ASIDE
            endings.append(partial(self._together.leave, why))
        if self._log is not None:
            endings.append(self._log.close)
        if self._hardware is not None:
            endings.append(self._hardware.close)
        endings += [action.close for action in self._actions]
        endings.append(lambda: self.background.close(CLOSE_SECONDS))
        for end in endings:
            try:
                end()
            except Exception as error:
                logger.error("rmetric: %s", error)


def _due(step: int, every: int) -> bool:
    """Whether something of this cadence is measured at `step`; the first step always is."""
    return every > 0 and (step % every == 0 or step == 1)


def path_of_rank(log: Path | str | None, rank: int) -> Path | None:
    """Where this rank writes: the first one, and each that has a file of its own."""
    if log is None or (rank > 0 and "{rank}" not in str(log)):
        return None
    return Path(str(log).replace("{rank}", str(rank)))


def unwrapped(optimizer: Any) -> Any:
    """The optimiser itself, without the wrappers that trainers put around it."""
    while not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            return optimizer
        optimizer = inner
    return optimizer


def scales(scaler: Any) -> bool:
    """Whether it overflows on purpose: not where a loop has switched it off."""
    return scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled())


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of the model runs through torch.compile."""
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod")
        for m in model.modules()
    )
