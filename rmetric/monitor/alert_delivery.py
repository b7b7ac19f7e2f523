"""Deliver the monitor's alerts: to its log, to `logging`, to other ranks and to the actions.

`judges.py` decides them. `deliver` calls the actions, and `run_joint_actions` those that all ranks
run together; alerts of the kind "exchange" and findings of audits are only logged.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rmetric.monitor.actions.action import Action, as_actions
from rmetric.monitor.alerts import Alert, Episodes, needs_call
from rmetric.monitor.rank_sync import DISABLED, RankSync

if TYPE_CHECKING:
    from rmetric.monitor.fsdp import WholeNorm
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

ALERTS_KEPT = 100


class AlertDelivery:
    """Delivers alerts to the log and the actions, see `Action`; one that fails is switched off."""

    def __init__(
        self, monitor: Monitor, actions: Iterable[Action | Callable[[Alert], None]]
    ) -> None:
        self.alerts: list[Alert] = []  # of each episode the first of each source and rank
        self.rank_sync: RankSync | None = None  # None: a single process
        self.whole_norm: WholeNorm | None = None  # None: the parameters are not sharded
        self.non_finite_step = 0  # of the last ``non_finite`` alert
        self.actions = as_actions(actions)  # those that have not failed
        self._episodes = Episodes()
        # For actions that all ranks run together, from what is equal on all of them.
        self._joint_episodes = Episodes()
        self._problems: set[str] = set()  # of the exchange
        self._warned: dict[tuple[str, int], int] = {}  # last step of a warning, by source and rank
        self._again: Counter[str] = Counter()  # warnings that were not given again, by source
        # Weak, so that a monitor which is dropped without `close` is freed at once.
        self._monitor_ref = weakref.ref(monitor)

    @property
    def needs_verdict_now(self) -> bool:
        return any(action.needs_verdict_now for action in self.actions)

    def new_alert(self, step: int, source: str, reason: str, since: int | None = None) -> Alert:
        """An alert of this rank, not raised yet, with the onset of its episode if that is open."""
        onset = self._episodes.onset(source, step) or since or step
        return Alert(step=step, source=source, reason=reason, rank=self._monitor.rank, since=onset)

    def deliver(self, alert: Alert, *, shared: bool = True, own: bool = False) -> None:
        """Report an alert, share it with the other ranks and call the actions.

        `shared`: all ranks raise the same alert at the same step; `own`: none but this one can. A
        source that is not in `alert_on` is ignored.
        """
        monitor = self._monitor
        if alert.source not in monitor.config.alert_on:
            return
        # Another rank's message holds the name of the detector but not its evidence.
        from_other_rank = alert.source == "calibrated" and alert.rank != monitor.rank
        if from_other_rank and self.already_reported(alert.step):
            return
        alert, earlier, is_new = self._episodes.take(alert)
        if is_new:
            self.report(alert, joins=not needs_call(alert, earlier))
        if self.rank_sync is not None and (shared or own):
            self.rank_sync.note_alert(alert, own=own)
        for action in tuple(self.actions):
            if _calls_for(action, alert, earlier) and self._may_act(action, shared and not own):
                self._run(action, action, alert, monitor)

    def report(self, alert: Alert, *, joins: bool = False) -> None:
        """Keep an alert; write it to the log and, quietly if it `joins` others, to `logging`."""
        self.alerts.append(alert)
        del self.alerts[:-ALERTS_KEPT]
        sync = self.rank_sync
        rank_0_reports = self._monitor.rank > 0 and sync is not None and sync.alive
        key = alert.source, alert.rank
        again = alert.step <= self._warned.get(key, 0)  # the training went back, and it came again
        quiet = joins or rank_0_reports or again
        logger.log(logging.INFO if quiet else logging.WARNING, "%s", alert)
        if again:
            self._again[alert.source] += 1
        elif not quiet:
            self._warned[key] = alert.step
        self._monitor.log_event("ALERT", **alert.as_entry())

    def close(self) -> None:
        """Log how often alarms came again at steps that an action repeated."""
        if self._again:
            counts = ", ".join(f"{number} of {source}" for source, number in self._again.items())
            logger.warning("rmetric: alarms that came again at repeated steps: %s", counts)

    def report_exchange(self, problem: str) -> None:
        """Report once that the ranks cannot exchange messages; do nothing without a problem."""
        if problem and problem not in self._problems:
            self._problems.add(problem)
            self.report(self.new_alert(self._monitor.step, "exchange", problem))

    def lasts(self, source: str, step: int) -> None:
        self._episodes.lasts(source, step)

    def end_episodes(self, step: int) -> None:
        """End the episodes whose sources were quiet for long enough by this step."""
        for episode in self._episodes.end(step):
            sources = ", ".join(episode.sources)
            since, last = episode.since, episode.last
            words = "step %d: the alarm since step %d is over: nothing of %s after step %d"
            logger.info(words, step, since, sources, last)
            entry = {"since": since, "last_step": last, "sources": list(episode.sources)}
            self._monitor.log_event("ALERT_ENDED", step=step, **entry)
            for action in tuple(self.actions):
                if any(action.handles(alert) for alert in episode.alerts):
                    self._run(action, action.ended, episode, self._monitor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "non_finite_step": self.non_finite_step,
            "open": self._episodes.state_dict(),
            "joint": self._joint_episodes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.non_finite_step = state["non_finite_step"]
        self._episodes.load_state_dict(state["open"])
        self._joint_episodes.load_state_dict(state["joint"])

    def action_states(self) -> dict[str, dict[str, Any]]:
        """State of each action, by its class."""
        states: dict[str, dict[str, Any]] = {}
        self.each(lambda action: states.update({type(action).__name__: {**action.state_dict()}}))
        return states

    def load_action_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what `action_states` gave; an action without a state goes on as it is."""

        def load(action: Action) -> None:
            if state := states.get(type(action).__name__):
                action.load_state_dict(state)

        self.each(load)

    def already_reported(self, step: int) -> bool:
        """True if the rule ``non_finite`` was broken at this step or the one before."""
        return 0 <= step - self.non_finite_step <= 1

    def run_joint_actions(self, check: int) -> None:
        for alert in self.rank_sync.due_alerts(check) if self.rank_sync is not None else ():
            # The check is the same on all ranks; the step of the alert may not be.
            due, earlier, _ = self._joint_episodes.take(replace(alert, step=check, rank=0))
            for action in tuple(self.actions):
                delayed = action.on_all_ranks and not action.needs_verdict_now
                if delayed and _calls_for(action, due, earlier):
                    self._run(action, action, alert, self._monitor)

    def pass_decision(self, by: Action, entry: Mapping[str, Any]) -> None:
        """Call `Action.decided` of every action but the one that decided."""
        for action in tuple(self.actions):
            if action is not by and action.handles_decisions:
                self._run(action, action.decided, entry, self._monitor)

    @property
    def _monitor(self) -> Monitor:
        monitor = self._monitor_ref()
        assert monitor is not None
        return monitor

    def _may_act(self, action: Action, shared: bool) -> bool:
        """With several ranks, an action that changes the training runs on all of them or none."""
        if self.rank_sync is None or not action.on_all_ranks:
            return True
        step, weights_step = self._monitor.step, self._monitor.weights_step
        may = shared and action.needs_verdict_now and weights_step < step
        return may and self.rank_sync.agreed(step)

    def each(self, call: Callable[[Action], None]) -> None:
        """Call a function with each action; one that raises is switched off."""
        for action in tuple(self.actions):
            self._run(action, call, action)

    def _run(self, action: Action, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            self.actions.remove(action)
            logger.error("rmetric: %s failed and is switched off: %s", action, error)
            if action.on_all_ranks:
                # What the ranks do together ends: this action is missing on this one.
                if self.whole_norm is not None:
                    self.whole_norm.leave()
                if self.rank_sync is not None:
                    self.rank_sync.leave(DISABLED)


def _calls_for(action: Action, alert: Alert, earlier: Iterable[Alert]) -> bool:
    """True if an action is called with an alert, given the earlier ones of its episode."""
    if not action.handles(alert):
        return False
    each_step = action.needs_verdict_now and not action.once_an_episode
    return each_step or needs_call(alert, filter(action.handles, earlier), action.severe)
