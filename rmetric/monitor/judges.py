"""Decide which alerts a step gives: by the step rules, the R-Metric and the detectors.

An alarm is the state of a detector (`alarm`, where its score passes its threshold). `DetectorJudge`
makes an alert, the message, of each alarm that is new; `alert_delivery.py` delivers it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from rmetric._util.state import restore_or_keep, state_of
from rmetric.detectors.calibrated import read_thresholds
from rmetric.detectors.contract import leave_out_or_roll_back
from rmetric.detectors.input_wait import InputWait
from rmetric.detectors.memory_slope import ADVICE as MEMORY_ADVICE
from rmetric.detectors.memory_slope import MemorySlope
from rmetric.detectors.no_learning import ADVICE as LEARNING_ADVICE
from rmetric.detectors.no_learning import NoLearning
from rmetric.detectors.no_update import ADVICE, NoUpdate
from rmetric.detectors.policy_collapse import PolicyCollapse
from rmetric.detectors.registry import make_detector
from rmetric.metric import RMetric
from rmetric.monitor.alert_delivery import AlertDelivery
from rmetric.monitor.alerts import Alert
from rmetric.monitor.config import LEARNING_RATE, MEMORY, NO_UPDATE, POLICY, MonitorConfig
from rmetric.monitor.optimizer_steps import is_scaling
from rmetric.monitor.pending import Pending
from rmetric.monitor.rank_sync import RankMessages
from rmetric.monitor.rules import LearningRates, StepRules
from rmetric.monitor.stalls import StepTimeRules
from rmetric.monitor.step_recorder import StepRecorder
from rmetric.records import Record

logger = logging.getLogger("rmetric")


class RuleJudge:
    """Applies the step rules to each step once and gives an alert for each broken rule."""

    def __init__(
        self, config: MonitorConfig, recorder: StepRecorder, delivery: AlertDelivery
    ) -> None:
        self.rules = StepRules(
            factor=config.explosion_factor, window=config.explosion_window,
            overflows=config.overflows, scaled=is_scaling(recorder.scaler),
        )  # fmt: skip
        self._alert_on, self._recorder, self._delivery = config.alert_on, recorder, delivery

    def judge(self, pending: Pending, *, before_update: bool) -> tuple[Alert, ...]:
        """The alerts against taking a step, which the first call raises; none unless of all ranks.

        `before_update`: the optimiser has not taken the step, so its gradient exists.
        """
        step, rank_sync = pending.record.step, self._delivery.rank_sync
        if pending.broken_rules is None:
            loss, norm = pending.read_loss_and_norm()
            overflow = norm is not None and not isfinite(norm)
            if overflow and self.rules.scaled:
                pending.record.skipped = True  # a scaler leaves out a step that overflows
            if overflow and before_update:
                self._recorder.locate_non_finite(pending)
            # Each rank has its own loss; the rules use what is equal on all ranks.
            broken = self.rules.update(loss if rank_sync is None else None, norm)
            where = f" ({pending.where})" if pending.where else ""
            pending.broken_rules = [(rule, f"{reason}{where}") for rule, reason in broken]
            self._alert_broken(step, pending.broken_rules)
            # A non-finite loss with a finite gradient: no other rank can see it.
            alone = rank_sync is not None and not broken and "non_finite" in self._alert_on
            if alone and loss is not None and not isfinite(loss):
                self._delivery.non_finite_step = step
                alert = self._alert(step, "non_finite", f"loss is {loss:g}")
                self._delivery.deliver(alert, own=True)
        if rank_sync is not None and not rank_sync.agreed(step):
            return ()
        broken = [pair for pair in pending.broken_rules if pair[0] in self._alert_on]
        return tuple(self._alert(step, rule, reason) for rule, reason in broken)

    def judge_whole_norm(self, record: Record) -> None:
        """Judge a gradient norm that is known only after the ranks' shards were added up."""
        self._alert_broken(record.step, self.rules.update(None, record.gradient_norm))

    def _alert_broken(self, step: int, broken_rules: list[tuple[str, str]]) -> None:
        for rule, reason in broken_rules:
            if rule == "non_finite" and rule in self._alert_on:
                self._delivery.non_finite_step = step
            self._delivery.deliver(self._alert(step, rule, reason))

    def _alert(self, step: int, rule: str, reason: str) -> Alert:
        since = step - self.rules.overflows_before if rule == "non_finite" else step
        alert = self._delivery.new_alert(step, rule, reason, since)
        return replace(alert, reason=f"{reason}: {leave_out_or_roll_back(alert.since)}")


class UpdateJudge:
    """Raises alerts on rates off their plan, steps that change nothing, lost rewards, memory."""

    def __init__(self, optimizer: Any, delivery: AlertDelivery) -> None:
        self.rates, self.no_update, self._learning = LearningRates(), NoUpdate(), NoLearning()
        self.restart()
        self._optimizer, self._delivery = optimizer, delivery

    def before_update(self, record: Record, schedulers: Iterable[Any]) -> None:
        if self._optimizer is None:
            return
        if any(event.startswith(LEARNING_RATE) for event in record.planned_events or ()):
            self.rates.restart()
        self.rates.update(self._optimizer.param_groups, schedulers)
        if self.rates.off:
            advice = "set it back, or announce it: monitor.planned('learning_rate')"
            self._raise(record.step, LEARNING_RATE, f"{self.rates.off[0]}: {advice}", record.step)

    def update(self, record: Record) -> None:
        self.no_update.update(record)
        if reason := self.no_update.reason:
            self._raise(record.step, NO_UPDATE, f"{reason}: {ADVICE}", self.no_update.since)
        if found := self._policy.update(record).alarming:
            self._raise(record.step, POLICY, self._policy.reason, found[0].since)
        self._input_wait.update(record)
        self._learning.update(record)
        self._memory.update(record)
        if reason := self._memory.reason:
            self._raise(record.step, MEMORY, f"{reason}: {MEMORY_ADVICE}", self._memory.since)

    def closing(self, rank: int) -> dict[str, str]:
        """Findings that only the end of a training shows: event -> words, the same as in replay."""
        events = {"INPUT_BOUND": self._input_wait.words}
        if rank == 0 and self._policy.has_reward:
            for found in self._policy.findings:
                if found.kind == "learns_nothing":
                    events["LEARNS_NOTHING"] = f"{found.title}; {found.levels}: {found.advice}"
        elif rank == 0 and (lost := self._learning.judge()) is not None:
            events["LEARNS_NOTHING"] = f"{lost.text}; {lost.detail}: {LEARNING_ADVICE}"
        return {event: words for event, words in events.items() if words}

    def restart(self) -> None:
        self.no_update.restart()
        self._policy, self._memory, self._input_wait = PolicyCollapse(), MemorySlope(), InputWait()

    def _raise(self, step: int, source: str, reason: str, since: int) -> None:
        alert = self._delivery.new_alert(step, source, reason, since)
        self._delivery.deliver(alert, own=True)


class DetectorJudge:
    """Updates the R-Metric and the detectors; raises an alert where an alarm begins."""

    def __init__(self, config: MonitorConfig, delivery: AlertDelivery) -> None:
        path = config.thresholds
        thresholds = None if path is None else read_thresholds(Path(path))
        self.metric = RMetric(config.metric)
        self.alarmed: set[str] = set()  # names, at the last record
        self.detectors: dict[str, Any] = {
            name: make_detector(name, thresholds=thresholds) for name in config.detectors
        }
        self.detectors["r_metric"] = self.metric
        self._alert_on, self._delivery = config.alert_on, delivery

    def update(self, record: Record) -> dict[str, bool]:
        """Take the next record; return the alarm of each detector."""
        return {name: bool(d.update(record).alarm) for name, d in self.detectors.items()}

    def alert_new_alarms(self, step: int, alarms: Mapping[str, bool]) -> None:
        alarmed = {name for name, alarm in alarms.items() if alarm}
        if self._delivery.already_reported(step) and self._only_non_finite():
            alarmed.discard("calibrated")  # the rule has raised it, before the step
        for name in alarms:
            detector = self.detectors[name]
            if name in alarmed - self.alarmed:
                since = getattr(detector, "since", None)
                alert = self._delivery.new_alert(step, name, detector.reason, since)
                self._delivery.deliver(alert)
            elif name in alarmed:
                self._delivery.lasts(name, step)
            elif name in self.alarmed and name in self._alert_on:
                why = getattr(detector, "ended", "")
                logger.info("step %d: the %s alarm is over%s", step, name, why and f": {why}")
        self.alarmed = alarmed

    def state_dict(self) -> dict[str, Any]:
        states = {name: state_of(detector) for name, detector in self.detectors.items()}
        return {"detectors": states, "alarmed": sorted(self.alarmed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; what it lacks or does not fit starts anew."""
        saved = state["detectors"]
        restored = {
            name
            for name, detector in self.detectors.items()
            if name in saved and restore_or_keep(detector, saved[name], name)
        }
        for name in sorted(self.detectors.keys() - saved):
            logger.warning("rmetric: the saved state has no %s: it starts anew", name)
        self.alarmed = set(state["alarmed"]) & restored

    def _only_non_finite(self) -> bool:
        """True if non-finite values are the calibrated detector's own evidence already."""
        evidence = getattr(self.detectors.get("calibrated"), "evidence", {})
        return bool(evidence.get("not_finite", 0.0) >= 1)


class StepTimeJudge:
    """Makes alerts of the alarms of `StepTimeRules` for each step once its times are known.

    With the messages of all ranks, every rank judges the same numbers and so has the same
    alarms; without them, a rank judges its own times. `ranks` take part in the exchange.
    """

    def __init__(
        self, config: MonitorConfig, delivery: AlertDelivery, rank: int, ranks: list[int]
    ) -> None:
        self.rules = StepTimeRules(
            stall_seconds=config.stall_seconds,
            slow_rank_factor=config.slow_rank_factor,
            slow_drift=config.slow_drift,
        )
        self._delivery, self._rank, self._ranks = delivery, rank, ranks

    def judge(self, pending: Pending, messages: RankMessages | None = None) -> None:
        if pending.times is None:
            return
        record = pending.record
        rows, ranks = [pending.times], [self._rank]
        if messages is not None and messages.is_complete_for(record.step):
            if messages.of_all("step_seconds") is None:  # some rank has compiled
                return
            rows, ranks = messages.step_times(), self._ranks
        planned = record.planned_events is not None
        for alarm in self.rules.update(record.step, rows, ranks=ranks, planned=planned):
            rank = self._rank if alarm.rank is None else alarm.rank
            alert = Alert(step=record.step, source=alarm.source, reason=alarm.reason, rank=rank)
            self._delivery.deliver(alert)
        for source in self.rules.alarmed:
            self._delivery.lasts(source, record.step)

    def state_dict(self) -> Any:
        return state_of(self.rules)

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` gave; the first steps of the new process are not judged."""
        restore_or_keep(self.rules, state, "the step times")
        self.rules.settle()
