"""Base class of what a monitor calls on an alert, and the actions that change the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from rmetric._util.errors import as_number, require
from rmetric.detectors.registry import DETECTORS
from rmetric.monitor.alerts import SEVERE, Alert, Episode
from rmetric.monitor.config import ALERTS, MEMORY
from rmetric.monitor.stalls import SOURCES
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

#: In `on`: the decisions of a rescue.
RESCUE = "rescue"
#: Rates of a parameter group; schedulers keep the last three there.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
#: Rates of a scheduler, each a list with one value for each parameter group.
BASE_RATES = ("base_lrs", "max_lrs")


class Action:
    """Something to do on an alarm; called on the training's thread, so it must be quick.

    A condition that lasts many steps is one episode (`rmetric.monitor.alerts`). An action is called
    at its first alert, and once more if a source of `severe` joins other ones. An action that needs
    the verdict of every step is called at each bad step instead. Slow work goes to
    `monitor.background.submit(function)`. An action that raises is reported and switched off.

    Attributes:
        needs_verdict_now: the alert must be known before the optimiser's step (one read a step).
        on_all_ranks: it changes what all ranks must do alike. With several ranks it acts when every
            one of them has received the alert, or, if it needs the verdict now, on what all see.
        once_an_episode: it is not called at each bad step although it needs the verdict now.
        notifies: it reports and changes nothing. Only such an action reacts to the times of steps
            and to ``memory`` without being given them as `on`: neither is a reason to skip, stop,
            or distrust the weights.
        severe: sources that are worse than the other ones of their episode.

    Args:
        on: sources of alerts that it reacts to, ``rescue`` for `decided`; None for all of them.
    """

    needs_verdict_now = False
    on_all_ranks = False
    once_an_episode = False
    notifies = False
    severe: Collection[str] = SEVERE

    def __init__(self, *, on: Collection[str] | None = None) -> None:
        if isinstance(on, str) or not isinstance(on, Collection | None):
            raise ValueError(f"on is {on!r}: it must be a collection of alert sources")
        known = (*ALERTS, RESCUE, *DETECTORS)
        if unknown := [source for source in on or () if source not in known]:
            accepted = f"{', '.join((*ALERTS, RESCUE))} and the detectors"
            raise ValueError(f"on has {unknown[0]!r}: known are {accepted}")
        self.on = None if on is None else frozenset(on)

    def handles(self, alert: Alert) -> bool:
        if self.on is None:
            return self.notifies or alert.source not in (*SOURCES, MEMORY)
        return alert.source in self.on

    @property
    def handles_decisions(self) -> bool:
        return self.on is None or RESCUE in self.on

    def start(self, monitor: Monitor) -> None:
        """The monitor is complete and the training has not begun."""

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        """React to one alert."""

    def before_update(self, broken: Sequence[tuple[str, str]], monitor: Monitor) -> None:
        """Take each step before the optimiser does, where an action needs the verdict now.

        `broken` has (rule, reason) of each step rule that the step at hand, `monitor.step`, breaks.
        """

    def ended(self, episode: Episode, monitor: Monitor) -> None:
        """The condition has been absent for some steps; each rank calls it for itself."""

    def record(self, record: Record, monitor: Monitor) -> None:
        """Take each finished record."""

    def decided(self, entry: Mapping[str, Any], monitor: Monitor) -> None:
        """Another action has changed the training, or is about to hold it; called on all ranks.

        The entry is that of the log: ``step``, ``action``, ``reason``, ``to``, ``repeated``, ...
        After a return `monitor.step` is that of the snapshot.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, as plain values; empty for none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, in another process after `start`."""

    def close(self) -> None:
        """The monitor ends."""


class Callback(Action):
    """Calls a function with the alert.

    Args:
        function: of one alert.
        decided: of the log entry of a decision, see `Action.decided`; None for none.
        on: as of `Action`.
    """

    notifies = True

    def __init__(
        self,
        function: Callable[[Alert], None],
        *,
        decided: Callable[[Mapping[str, Any]], None] | None = None,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        self.function, self._decided = function, decided

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self.function(alert)

    def decided(self, entry: Mapping[str, Any], monitor: Monitor) -> None:
        if self._decided is not None:
            self._decided(entry)


class Stop(Action):
    """Sets `monitor.should_stop`, which the training loop looks at after each step."""

    on_all_ranks = True

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if not monitor.should_stop:
            logger.warning("rmetric: the training is asked to stop (%s)", alert)
        monitor.should_stop = True


class SkipStep(Action):
    """Leaves the step at hand out: its gradients are dropped, so the optimiser changes nothing.

    The batch is used up and the schedule of the learning rate continues. After `limit` steps in a
    row it reports that and stops skipping until a step has passed without an alert: a run that only
    skips is not training.

    An alert of a detector is about the step before, which is taken already: it leaves nothing out,
    unless `on` names the detector. Then the next step is left out for it, though that one may be
    good. A GradScaler goes on, and adjusts its scale, as if the optimiser had been called. With
    several ranks it acts on what is equal on all of them at that step, the reduced gradient.

    Args:
        limit: steps left out in a row, at least 1.
        on: sources of alerts that it reacts to; None for every alert on the step at hand.
    """

    needs_verdict_now = True
    on_all_ranks = True

    def __init__(self, limit: int = 10, *, on: Collection[str] | None = None) -> None:
        super().__init__(on=on)
        require("limit", limit, as_number(limit) >= 1, "at least 1 step")
        self.limit = limit
        self._in_a_row = 0
        self._last_alert: int | None = None  # step of it

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if self.on is None and alert.step <= monitor.weights_step:
            return
        if alert.step != self._last_alert:
            follows = self._last_alert is not None and alert.step == self._last_alert + 1
            self._in_a_row = self._in_a_row + 1 if follows else 1
            self._last_alert = alert.step
        if self._in_a_row <= self.limit:
            monitor.leave_step_out()
        elif self._in_a_row == self.limit + 1:
            logger.error("rmetric: %d steps in a row were skipped; now none are", self.limit)


class CutLearningRate(Action):
    """Multiplies the learning rate by `factor`, and the schedule ahead with it.

        lr ← max(factor · lr, floor)

    What changes: ``lr`` of every parameter group, and by the same ratio what a scheduler computes
    the next rates from: ``initial_lr``, ``max_lr`` and ``min_lr`` of the group, ``base_lrs`` and
    ``max_lrs`` of `scheduler` and of those inside it. In a loop of your own, a scheduler that is
    not passed in and computes its rates anew at each step (LambdaLR, and so most of transformers')
    takes the cut back: one warning reports that.

    The cut stands in `Record.actions`. It is not a planned event: an alarm under way goes on.

    Args:
        factor: above 0, below 1.
        floor: no rate is cut below it.
        wait: steps before it may cut again, at least 1.
        scheduler: the learning-rate scheduler, where there is one; None for the trainer's own.
        on: sources of alerts that it reacts to; None for every alert.
    """

    on_all_ranks = True

    def __init__(
        self,
        factor: float = 0.5,
        floor: float = 0.0,
        *,
        wait: int = 100,
        scheduler: Any = None,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        require("factor", factor, 0.0 < as_number(factor) < 1.0, "above 0 and below 1")
        require("floor", floor, as_number(floor) >= 0.0, "at least 0")
        require("wait", wait, as_number(wait) >= 1, "at least 1 step")
        self.factor, self.floor, self.wait, self.scheduler = factor, floor, wait, scheduler
        self._last_cut: int | None = None
        self._ratio_of_cut = 1.0
        self._rate: tuple[int, float] | None = None  # step of the last record and its rate

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if self._last_cut is not None and 0 <= monitor.step - self._last_cut < self.wait:
            return
        self._last_cut = monitor.step
        groups = monitor.optimizer.param_groups
        before = float(groups[0]["lr"])
        ratios = [self._ratio(float(group["lr"])) for group in groups]
        for group, ratio in zip(groups, ratios, strict=True):
            for name in RATES:
                if name in group:
                    group[name] = _scaled(group[name], ratio)
        known = monitor.schedulers if self.scheduler is None else [self.scheduler]
        for scheduler in (found for each in known for found in _with_inner(each)):
            for name in BASE_RATES:
                if hasattr(scheduler, name):
                    scaled = map(_scaled, getattr(scheduler, name), ratios)
                    setattr(scheduler, name, list(scaled))
        change = f"cut from {before:g} to {float(groups[0]['lr']):g}"
        logger.warning("rmetric: learning rate %s (%s)", change, alert)
        self._ratio_of_cut = ratios[0]
        self._rate = monitor.weights_step + 1, float(groups[0]["lr"])
        monitor.record_change(f"learning rate {change}")

    def record(self, record: Record, monitor: Monitor) -> None:
        """Report it once if a scheduler has taken the last cut back."""
        if self._rate is None or record.learning_rate is None or record.step <= self._rate[0]:
            return
        before, rate = self._rate[1], record.learning_rate
        self._rate = record.step, rate
        cut = -log(self._ratio_of_cut)
        if not (cut and before > 0.0 < rate):
            return
        # All of the cut, but for a step of the schedule.
        if abs(log(rate / before) - cut) < min(0.1, cut / 2):
            self._rate = None
            logger.warning(
                "rmetric: the learning rate is back at %g at step %d: a scheduler has undone the "
                "cut. Pass it in as CutLearningRate(scheduler=...)", rate, record.step,
            )  # fmt: skip

    def _ratio(self, rate: float) -> float:
        if rate <= self.floor:
            return 1.0 if rate > 0.0 else self.factor  # 0 is where a warm-up begins
        return max(self.factor, self.floor / rate)


def _scaled(rate: Any, ratio: float) -> Any:
    if isinstance(rate, Tensor):  # of a capturable optimiser, which holds on to it
        return rate.mul_(ratio)
    return rate * ratio


def _with_inner(scheduler: Any) -> list[Any]:
    """The scheduler, those that it chains, and the one that a trainer's wrapper holds."""
    if scheduler is None:
        return []
    inner = [*getattr(scheduler, "_schedulers", ()), getattr(scheduler, "scheduler", None)]
    return [scheduler, *(found for each in inner for found in _with_inner(each))]


def as_actions(actions: Iterable[Action | Callable[[Alert], None]]) -> list[Action]:
    """A list of actions; a plain function becomes a Callback. Raises TypeError for all else."""
    if isinstance(actions, (Action, str)) or not isinstance(actions, Iterable):
        raise TypeError(f"actions is {actions!r}: a list is accepted, as in actions=[SkipStep()]")
    return [as_action(action) for action in actions]


def as_action(action: Action | Callable[[Alert], None]) -> Action:
    """A plain function becomes a Callback. Raises TypeError for what is neither."""
    if isinstance(action, type):
        name = action.__name__
        raise TypeError(f"{name} is a class, not an action: pass an object, {name}()")
    if isinstance(action, Action):
        return action
    if callable(action):
        return Callback(action)
    raise TypeError(f"{action!r} is not an action: an Action or a function of one alert is needed")


def decision_words(entry: Mapping[str, Any]) -> str:
    """A decision in one line, from its entry in the log.

    >>> decision_words({"step": 713, "action": "hold", "reason": "held at step 690"})
    'step 713: rescue: held at step 690'
    """
    return f"step {entry['step']}: {RESCUE}: {entry['reason']}"


def is_distributed() -> bool:
    """True if torch.distributed runs with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Rank of this process, from 0; 0 for a single process."""
    return dist.get_rank() if is_distributed() else 0
