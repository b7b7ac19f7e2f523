"""Base class of the actions that a monitor calls on an alert."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rmetric.detectors.registry import DETECTORS
from rmetric.monitor.alerts import SEVERE, Alert, Episode
from rmetric.monitor.config import ALERTS, MEMORY
from rmetric.monitor.stalls import SOURCES
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor


#: In `on`: the decisions of a rescue.
RESCUE = "rescue"


class Action:
    """Something to do on an alarm; called on the training's thread, so it must be quick.

    A condition that lasts many steps is one episode (`rmetric.monitor.alerts`). An action is called
    at its first alert, and once more if a source of `severe` joins other ones. An action that needs
    the verdict of every step is called at each bad step instead. Slow work goes to
    `monitor.background.submit(function)`. An action that raises is reported and switched off.

    Attributes:
        needs_verdict_now: the alert must be known before the optimiser's step (one read a step).
        on_all_ranks: it changes what all ranks must do alike. With several ranks it
            acts when every one of them has received the alert, or, if it needs
            the verdict now, on nothing but what all of them see at that step.
        once_an_episode: it is not called at each bad step although it needs the verdict now.
        notifies: it reports and changes nothing. Only such an action reacts to the times of
            steps (``stall``, ``slow_rank``, ``slow_drift``) and to ``memory`` without being given
            them as `on`: neither is a reason to skip, stop, or distrust the weights.
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
            accepted = f"{', '.join(known[: -len(DETECTORS)])} and the detectors"
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
        on: sources of alerts that it reacts to, ``rescue`` for `decided`; None for every one.
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


def as_actions(actions: Iterable[Action | Callable[[Alert], None]]) -> list[Action]:
    """A list of actions; a plain function becomes a Callback. Raises TypeError for all else."""
    if isinstance(actions, (Action, str)) or not isinstance(actions, Iterable):
        raise TypeError(f"actions is {actions!r}: a list is accepted, as in actions=[SkipStep()]")
    return [as_action(action) for action in actions]


def as_action(action: Action | Callable[[Alert], None]) -> Action:
    """A plain function becomes a Callback. Raises TypeError for what is neither."""
    if isinstance(action, type):
        name = action.__name__
        raise TypeError(f"{name} is a class and no action: an object is needed, {name}()")
    if isinstance(action, Action):
        return action
    if callable(action):
        return Callback(action)
    raise TypeError(f"{action!r} is no action: an Action or a function of one alert is needed")


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
