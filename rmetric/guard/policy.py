"""Checkpoint policy: when to save, how often, and which to keep. Pure: no clock, no files.

How often, with C and w the time that one save costs, M the mean time between failures, r = 1 / M,
u the time from a failure until the training goes on, D the interval:

    first order   sqrt(2 C M)                                                      (Young)
    expected      E[ETTR] = (1 - r (u + D / 2)) / (1 + w / D)

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval,
CACM 17(9), 1974; Revisiting Reliability in Large-Scale Machine Learning Research Clusters,
arXiv 2410.21680, for E[ETTR].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf, sqrt
from pathlib import Path
from typing import Protocol, TypeVar

from rmetric._util.errors import require

#: Sources of checkpoint requests.
SOURCES = ("risk", "rule", "alarm", "signal", "user")
#: Sources that report a lasting condition; signals and user requests are single events.
CONDITIONS = ("risk", "rule", "alarm")
HOUR, LONGEST_RETRY_SECONDS = 3600.0, 600.0


def check_source(source: str) -> None:
    require("source", source, source in SOURCES, f"of {', '.join(SOURCES)}")


class Vote(IntEnum):
    """Vote of one rank at the end of a step; all ranks act on the greatest."""

    NOTHING = 0
    REGULAR = 1
    EMERGENCY = 2
    FATAL = 3
    FINAL = 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for a checkpoint.

    Attributes:
        number: running number from 1; cleared only by a durable checkpoint.
        source: one of `SOURCES`.
        fatal: skips the filter on the gap.
        final: training ends when it is durable; also skips the bound on the rate.
        key: identifies the cause; a second request with a pending key is the same request.
    """

    number: int
    source: str
    reason: str
    fatal: bool
    final: bool
    key: str

    @property
    def vote(self) -> Vote:
        return Vote.FINAL if self.final else Vote.FATAL if self.fatal else Vote.EMERGENCY


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Settings of `CheckpointPolicy`; exactly one of the two intervals is given.

    Attributes:
        interval_steps: steps between regular saves, at least 1.
        interval_seconds: seconds between regular saves, above 0.
        least_gap: least time since the last durable save before an emergency save, as a share
            of the interval, from 0 to 1.
        most_per_hour: emergency saves begun in any hour, at least 1; fatal ones are counted
            separately.
        retry_seconds: wait after a failed save, above 0, doubled with each further failure up to
            `LONGEST_RETRY_SECONDS`.
    """

    interval_steps: int | None = None
    interval_seconds: float | None = None
    least_gap: float = 0.25
    most_per_hour: int = 6
    retry_seconds: float = 10.0

    def __post_init__(self) -> None:
        steps, seconds = self.interval_steps, self.interval_seconds
        if (steps is None) == (seconds is None):
            raise ValueError(
                f"interval_steps is {steps} and interval_seconds {seconds}: "
                "one of the two must be given"
            )
        for name, number in (("interval_steps", steps), ("most_per_hour", self.most_per_hour)):
            whole = number is None or (type(number) is int and number >= 1)
            require(name, number, whole, "an int of at least 1")
        require("interval_seconds", seconds, seconds is None or 0 < seconds < inf, "above 0")
        require("least_gap", self.least_gap, 0 <= self.least_gap <= 1, "from 0 to 1")
        in_range = 0 < self.retry_seconds <= LONGEST_RETRY_SECONDS
        require("retry_seconds", self.retry_seconds, in_range, "above 0, at most 600")


@dataclass(frozen=True, kw_only=True)
class _Save:
    step: int
    began: float
    vote: Vote
    answers: tuple[int, ...]


class CheckpointPolicy:
    """Decides at the end of each step whether to save; one per rank.

    Each rank calls `vote(now, step)`. If the greatest vote of all ranks is above NOTHING,
    all call `begin` and save, then `committed` when the checkpoint is durable, else
    `failed`. A request is pending until a save that began after it is durable.

    An emergency save requires that `least_gap` of the interval has passed since the last
    durable state. A fatal request skips only this filter: there is still one save at a time,
    one per step, and a bounded number per hour. A final request, after which training ends,
    also skips the bound, and once the wait after a failure. A lasting condition is answered
    once between two durable saves, unless it becomes fatal.

    The state of `step`, at which the run starts or resumes, counts as durable at `now`.

    Source: the proactive fault-tolerance system for Megatron-LM states the filter (25 %
    of the save interval); numbering, retries and the bound are additions.
    """

    def __init__(self, config: PolicyConfig, *, now: float, step: int) -> None:
        self.config = config
        self.pending: dict[int, Request] = {}
        self.durable_step, self.durable_time = step, now
        self.in_flight: _Save | None = None
        self.why_not = ""
        self._last_number = 0
        self._failures, self._retry_at = 0, -inf
        self._begun: dict[Vote, deque[float]] = {Vote.EMERGENCY: deque(), Vote.FATAL: deque()}
        # Key -> fatal, of the conditions that the last durable save answered, and of
        # those among them that were repeated since.
        self._standing: dict[str, bool] = {}
        self._repeated: dict[str, bool] = {}

    def request(
        self,
        source: str,
        reason: str,
        *,
        fatal: bool = False,
        final: bool = False,
        key: str | None = None,
    ) -> int | None:
        """Request a checkpoint; arguments as in `Request`.

        A pending request with the same `key`, None for source and reason, is the same request
        and becomes fatal or final if this one is. Returns its number; None for a lasting
        condition that was answered. Raises ValueError for an unknown source.
        """
        check_source(source)
        key, fatal = f"{source}: {reason}" if key is None else key, fatal or final
        if key in self._standing and self._standing[key] >= fatal and source in CONDITIONS:
            self._repeated[key] = self._standing[key]
            return None
        same = self._same(source, key, fatal)
        if same is None:
            number = self._last_number = self._last_number + 1
        else:
            number, fatal, final = same.number, fatal or same.fatal, final or same.final
            if (fatal, final) == (same.fatal, same.final):
                return number
        if final:
            self._retry_at = -inf
        self.pending[number] = Request(
            number=number, source=source, reason=reason, fatal=fatal, final=final, key=key
        )
        return number

    @property
    def ending(self) -> bool:
        """A final request is pending."""
        return any(request.final for request in self.pending.values())

    def vote(self, now: float, step: int) -> Vote:
        """Vote of this rank after `step`; `why_not` is the reason for not saving."""
        self.why_not = ""
        wanted = self._wanted(now, step)
        if wanted is Vote.NOTHING:
            return wanted
        if step == self.durable_step:
            return self._wait(f"step {step} is durable already")
        if self.in_flight is not None:
            return self._wait(f"the save of step {self.in_flight.step} is not durable yet")
        if now < self._retry_at:
            return self._wait(f"the last save failed; next try in {self._retry_at - now:.0f} s")
        return wanted

    def begin(self, now: float, step: int, vote: Vote) -> None:
        """Record that all ranks begin to save `step`, with the greatest vote of all."""
        if self.in_flight is not None:
            raise RuntimeError(f"the save of step {self.in_flight.step} is still in flight")
        self.in_flight = _Save(step=step, began=now, vote=vote, answers=tuple(self.pending))
        if vote in self._begun:
            self._begun[vote].append(now)

    def committed(self) -> tuple[Request, ...]:
        """Record that the save in flight is durable; returns the answered requests."""
        save = self._ended()
        self.durable_step, self.durable_time = save.step, save.began
        self._failures, self._retry_at = 0, -inf
        answered = tuple(self.pending.pop(number) for number in save.answers)
        conditions = {
            request.key: request.fatal for request in answered if request.source in CONDITIONS
        }
        self._standing, self._repeated = self._repeated | conditions, {}
        return answered

    def failed(self, now: float) -> float:
        """Record that the save in flight failed; returns the seconds until the next attempt."""
        self._ended()
        wait = self.config.retry_seconds * 2.0 ** min(self._failures, 30)
        self._failures += 1
        wait = min(wait, LONGEST_RETRY_SECONDS)
        self._retry_at = now + wait
        return wait

    def _wanted(self, now: float, step: int) -> Vote:
        most = max((request.vote for request in self.pending.values()), default=Vote.NOTHING)
        if most is Vote.FINAL:
            return most
        least, steps = self.config.least_gap, self.config.interval_steps
        if steps is not None:
            gap = (step - self.durable_step) / steps
            gone = f"{step - self.durable_step} of {least * steps:g} steps"
        else:
            seconds = self.config.interval_seconds or inf
            gap = (now - self.durable_time) / seconds
            gone = f"{now - self.durable_time:.0f} of {least * seconds:.0f} s"
        if gap >= 1.0:
            return Vote.REGULAR  # it also answers pending requests
        if most is Vote.NOTHING:
            return most
        if most is Vote.EMERGENCY and gap < least:
            return self._wait(f"{gone} since step {self.durable_step}")
        begun = self._begun[most]
        while begun and begun[0] <= now - HOUR:
            begun.popleft()
        if len(begun) < self.config.most_per_hour:
            return most
        return self._wait(f"{len(begun)} {most.name.lower()} saves in an hour are the most allowed")

    def _wait(self, why: str) -> Vote:
        numbers = ", ".join(map(str, self.pending))
        many = "requests" if len(self.pending) > 1 else "request"
        self.why_not = f"{many} {numbers} waits: {why}" if self.pending else why
        return Vote.NOTHING

    def _same(self, source: str, key: str, fatal: bool) -> Request | None:
        """Pending request with this key; that of a condition stays pending during its save."""
        answered = self.in_flight.answers if self.in_flight else ()
        for request in self.pending.values():
            lasts = source in CONDITIONS and request.fatal >= fatal
            if request.key == key and (lasts or request.number not in answered):
                return request
        return None

    def _ended(self) -> _Save:
        if self.in_flight is None:
            raise RuntimeError("no save is in flight")
        save, self.in_flight = self.in_flight, None
        return save


# -- how often


def young(save_seconds: float, failure_seconds: float) -> float:
    """Young's interval from the cost of one save and the mean time between failures, seconds.

    >>> round(young(120.0, 1.8 * 3600)), round(young(20.0, 1.8 * 3600))
    (1247, 509)
    """
    require("save_seconds", save_seconds, 0 < save_seconds < inf, "above 0")
    require("failure_seconds", failure_seconds, failure_seconds > 0, "above 0")
    return sqrt(2.0 * save_seconds * failure_seconds)


def expected_ettr(
    interval_seconds: float,
    *,
    save_seconds: float,
    restart_seconds: float,
    failures_per_hour: float,
) -> float:
    """Expected effective training time ratio, E[ETTR], by arXiv 2410.21680.

    Never below 0, where its assumption (failures are rare beside the interval) no longer holds.
    `failures_per_hour` is of the whole job: its nodes times their rate.

    >>> f"{expected_ettr(3600, save_seconds=20, restart_seconds=300, failures_per_hour=0.1):.3f}"
    '0.936'
    """
    require("interval_seconds", interval_seconds, 0 < interval_seconds < inf, "above 0")
    require("save_seconds", save_seconds, 0 <= save_seconds < inf, "at least 0")
    require("restart_seconds", restart_seconds, 0 <= restart_seconds < inf, "at least 0")
    require("failures_per_hour", failures_per_hour, 0 <= failures_per_hour < inf, "at least 0")
    lost = failures_per_hour / HOUR * (restart_seconds + interval_seconds / 2.0)
    return max(0.0, 1.0 - lost) / (1.0 + save_seconds / interval_seconds)


# -- which to keep
#
# An alarm makes suspect what was saved from its onset on. A suspect checkpoint never takes the
# place of a clean one: each kind has a quota of its own. The last clean one before a suspect stays
# as long as the suspect does, so that an alarm which ends too early costs nothing.


@dataclass(frozen=True, kw_only=True)
class SuspectMark:
    """Mark of a checkpoint that was saved during an alarm; `since` is its first suspect step."""

    since: int
    reason: str

    def __str__(self) -> str:
        return f"suspect since step {self.since} ({self.reason})"


def suspect_note(suspect: SuspectMark, clean: Path | None) -> str:
    which = f"the newest clean one is {clean}" if clean else "there is no clean one"
    return f"is {suspect}; {which}"


class Kept(Protocol):
    """A checkpoint, as far as retention depends on it."""

    @property
    def step(self) -> int: ...
    @property
    def suspect(self) -> SuspectMark | None: ...


AnyKept = TypeVar("AnyKept", bound=Kept)


def surplus(
    newest_first: Sequence[AnyKept],
    *,
    keep: int,
    keep_suspect: int,
    damaged: Collection[AnyKept] = (),
) -> list[AnyKept]:
    """Checkpoints to delete, of the good ones of one model.

    The first is always kept. Of the clean ones the newest `keep` are kept, of the suspect
    ones the newest `keep_suspect`, and the newest clean one that is older than these. A damaged
    one is kept only where its quota has room.
    """
    kept = {0}
    places = [n for n, checkpoint in enumerate(newest_first) if checkpoint not in damaged]
    places += [n for n, checkpoint in enumerate(newest_first) if checkpoint in damaged]
    for quota, wanted in ((keep, False), (keep_suspect, True)):
        kept.update([n for n in places if (newest_first[n].suspect is not None) is wanted][:quota])
    oldest = max((n for n in kept if newest_first[n].suspect), default=len(newest_first))
    kept.update([n for n in places if newest_first[n].suspect is None and n > oldest][:1])
    return [checkpoint for n, checkpoint in enumerate(newest_first) if n not in kept]


def suspects_of(newest_first: Sequence[AnyKept], *, since: int, step: int) -> list[AnyKept]:
    """Clean checkpoints that an alarm makes suspect: ancestors of the state from `since` on.

    A checkpoint is not an ancestor if training later went back to before it: its successor in
    the order of writing has the same or an earlier step. `step` is the current one.
    """
    found, earliest = [], step + 1
    for checkpoint in newest_first:
        if checkpoint.step < earliest:
            earliest = checkpoint.step
            if checkpoint.step >= since and checkpoint.suspect is None:
                found.append(checkpoint)
    return found
