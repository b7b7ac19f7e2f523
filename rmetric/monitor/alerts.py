"""Alert and verdict of the monitor. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert of the monitor.

    Attributes:
        step: that it is about.
        source: one of `MonitorConfig.alert_on`.
        reason: what was measured, what is usual, and one suggested action.
        rank: the process that saw it, from 0; of a ``slow_rank``, and of a ``stall`` where
            one rank is at fault, that rank.
        since: step at which the condition began, at most `step`; `step` where it is not given.
    """

    step: int
    source: str
    reason: str
    rank: int = 0
    since: int = 0

    def __post_init__(self) -> None:
        if not self.since:
            object.__setattr__(self, "since", self.step)

    def as_entry(self) -> dict[str, Any]:
        """Its form in a log."""
        return asdict(self)

    def __str__(self) -> str:
        since = f" (since step {self.since})" if self.since < self.step else ""
        return f"step {self.step}{since}, rank {self.rank}: {self.source}: {self.reason}"


class Verdict:
    """Verdict on a step between backward and optimizer.step(): true where it may be taken.

    The answer is found at its first use: on an accelerator that reads one number from the
    device, and a loop that never uses it never waits.

    >>> bool(Verdict(tuple))
    True
    """

    def __init__(self, find: Callable[[], tuple[Alert, ...]]) -> None:
        self._find = find

    @cached_property
    def alerts(self) -> tuple[Alert, ...]:
        """Why not; empty where the step may be taken."""
        return self._find()

    @property
    def ok(self) -> bool:
        return not self.alerts

    def __bool__(self) -> bool:
        return self.ok


#: Steps without the condition that end an episode.
GAP = 20
#: Alerts kept of one episode, beside the first of each source: in large jobs each rank raises one.
MOST_ALERTS = 32
#: Sources that judge whether the training diverges: they share an episode. Every other source
#: has its own, so that one which alarms often does not hide these.
DIVERGENCE = frozenset({"non_finite", "gradient_explosion", "calibrated"})
#: A source that is worse than the other ones of its episode.
SEVERE = frozenset({"non_finite"})


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A condition from its onset to its last step.

    `alerts` are the first of each source and rank, in the order in which they were raised.
    """

    since: int
    last: int
    alerts: tuple[Alert, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(alert.source for alert in self.alerts))


class Episodes:
    """Assigns alerts to episodes; `open` has the open one of each group of sources.

    An episode ends when its sources have been quiet for more than `gap` steps, at least 1.

    >>> episodes = Episodes(gap=5)
    >>> for step in (713, 714, 718):
    ...     alert = Alert(step=step, source="non_finite", reason="loss is nan")
    ...     alert, earlier, is_new = episodes.take(alert)
    ...     print(alert.since, is_new, needs_call(alert, earlier))
    713 True True
    713 False False
    713 False False
    >>> [(episode.since, episode.last) for episode in episodes.end(723)]
    [(713, 718)]
    """

    def __init__(self, gap: int = GAP) -> None:
        self.gap = gap
        self.open: dict[str, Episode] = {}

    def take(self, alert: Alert) -> tuple[Alert, tuple[Alert, ...], bool]:
        """The alert with the onset of its episode, the earlier alerts, is it new there.

        A resumed training repeats the step of its checkpoint, whose alert is then new again.
        """
        group = _group(alert.source)
        episode = self.open.get(group)
        if episode is None or alert.step - episode.last > self.gap:
            episode = Episode(since=alert.since, last=alert.step)
        alert = replace(alert, since=episode.since)
        earlier = episode.alerts
        key = alert.source, alert.rank
        is_new = all(b.step == alert.step for b in earlier if (b.source, b.rank) == key)
        if is_new and alert not in earlier:
            # A source that joins is kept: its actions are called when the episode ends.
            is_new = len(earlier) < MOST_ALERTS or alert.source not in episode.sources
            if is_new:
                episode = replace(episode, alerts=(*earlier, alert))
        self.open[group] = replace(episode, last=max(episode.last, alert.step))
        return alert, earlier, is_new

    def onset(self, source: str, step: int) -> int | None:
        """Onset of the open episode that an alert of this source and step belongs to."""
        episode = self.open.get(_group(source))
        return episode.since if episode and step - episode.last <= self.gap else None

    def lasts(self, source: str, step: int) -> None:
        """Record that a source is still alarmed at this step; it continues an open episode."""
        group = _group(source)
        episode = self.open.get(group)
        if episode and source in episode.sources:
            self.open[group] = replace(episode, last=max(episode.last, step))

    def end(self, step: int) -> list[Episode]:
        """Close and return the episodes whose sources were quiet for `gap` steps by this one."""
        over = [group for group, episode in self.open.items() if step - episode.last >= self.gap]
        return [self.open.pop(group) for group in over]

    def state_dict(self) -> list[dict[str, Any]]:
        return [asdict(episode) for episode in self.open.values()]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        self.open = {}
        for saved in state:
            alerts = tuple(Alert(**entry) for entry in saved["alerts"])
            self.open[_group(alerts[0].source)] = Episode(**{**saved, "alerts": alerts})


def needs_call(alert: Alert, earlier: Iterable[Alert], severe: Collection[str] = SEVERE) -> bool:
    """True if an alert needs a call of its own beside the earlier ones of its episode.

    The first one does, and the first one of a severe source.
    """
    return all(alert.source in severe and before.source not in severe for before in earlier)


def _group(source: str) -> str:
    return "divergence" if source in DIVERGENCE else source
