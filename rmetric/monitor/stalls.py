"""Detect stalls, slow ranks and a slow drift from the times of steps. No torch, no clock here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import ClassVar, NamedTuple

import numpy as np

STALL, SLOW_RANK, SLOW_DRIFT = SOURCES = ("stall", "slow_rank", "slow_drift")

#: Parts of a step in words, and what to look at; in the order in which they are suspected: the
#: time that a rank waits for data is its own, while waiting for another rank may show in any part
#: below the first.
PARTS = {
    "data_wait": (
        "waiting for data",
        "look at its data loader or storage (announce a pause of the loop's own with "
        "monitor.paused())",
    ),
    "forward_backward": (
        "in forward and backward",
        "look at that machine: other load, swapping, the clocks of its CPU and GPU",
    ),
    "optimizer": (
        "in the optimiser's step",
        "look at that machine: offloaded optimiser states, swapping, other load",
    ),
    "exchange": (
        "waiting for the other ranks in the gradient exchange",
        "look at the network and at the slowest rank's machine",
    ),
    "check": (
        "waiting for the device",
        "look at the device and at the collective operations on it",
    ),
}
#: Values in the message of a rank -> part of a step; the seconds are fields of `Record` too.
SECONDS = {
    "data_wait_seconds": "data_wait",
    "forward_backward_seconds": "forward_backward",
    "exchange_seconds": "exchange",
    "optimizer_seconds": "optimizer",
}
TIMES = ("step_seconds", *SECONDS, "step_size")

WINDOW = 100  # steps that a usual time is taken over
LEAST = 24  # steps before a stall is judged
SETTLING = 3  # first steps of a process, which compile and warm up: not judged
REFRESH = 8  # steps between two comparisons of the ranks
FACTORS = 2.0, 10.0  # smallest and largest multiple of the usual time that is a stall
SPREADS = 10.0  # standard deviations of the log time, robustly estimated, up to a stall

RANK_WINDOW = 32  # steps that the times of ranks are compared over
LARGEST_LEFT_OUT = 2  # of each rank's times in that window: single stalls
RANK_SECONDS = 0.02  # excess of a slow rank, at least
RANK_SHARE = 0.15  # of the step that the excess must be, at least

BLOCK = 50  # steps whose median is one point of the drift
RESIZED = 1.25  # ratio of step sizes from which the best level is taken anew


@dataclass(slots=True)
class StepTimes:
    """Host time of one step on one rank, in seconds; None for what was not measured."""

    data_wait: float | None = None  # from the optimiser's step before to the forward pass
    forward_backward: float | None = None  # without `exchange` it includes waiting for others
    exchange: float | None = None  # waiting in backward for the gradients of the other ranks
    optimizer: float | None = None  # from the check's end to the end of the optimiser's step
    check: float | None = None  # in the monitor's check, where the host waits for an accelerator
    size: float | None = None  # elements of the model's input (tokens)
    compiled: bool = False  # torch.compile has compiled during the step

    @property
    def total(self) -> float:
        """Sum of the measured parts, without known pauses."""
        seconds: float = sum(getattr(self, part) or 0.0 for part in PARTS)
        return seconds


class StepTimeAlarm(NamedTuple):
    """An alarm that begins; `rank` is None where no single rank is at fault."""

    source: str
    reason: str
    rank: int | None = None


class StepTimeRules:
    """The three detectors on the times of each step; each alarm is returned once, at its onset.

    The settings are those of `MonitorConfig`.

    >>> rules = StepTimeRules()
    >>> steps = [StepTimes(data_wait=0.01, forward_backward=0.4) for _ in range(40)]
    >>> [alarm for step, times in enumerate(steps) for alarm in rules.update(step, [times])]
    []
    >>> [alarm] = rules.update(41, [StepTimes(data_wait=20.9, forward_backward=0.4)])
    >>> alarm.reason[:57]
    'the step took 21.3 s (usual 0.41 s): 20.9 s waiting for d'
    """

    def __init__(
        self, *, stall_seconds: float = 5.0, slow_rank_factor: float = 1.5, slow_drift: float = 0.2
    ) -> None:
        self._stall = StallDetector(stall_seconds)
        self._slow_rank = SlowRankDetector(slow_rank_factor)
        self._drift = DriftDetector(slow_drift)

    def update(
        self,
        step: int,
        times: Sequence[StepTimes],
        *,
        ranks: Sequence[int] = (0,),
        planned: bool = False,
    ) -> list[StepTimeAlarm]:
        """The alarms that begin with a step; `planned`: a change was announced for it."""
        if any(row.compiled for row in times):
            return []
        alarms = self._slow_rank.update(times, ranks) if len(times) > 1 else []
        stall = self._stall.update(step, times, ranks)
        drift = self._drift.update(step, times, planned=planned)
        return [alarm for alarm in (stall, *alarms, drift) if alarm is not None]

    @property
    def alarmed(self) -> list[str]:
        lasting = ((SLOW_RANK, self._slow_rank.slow), (SLOW_DRIFT, self._drift.alarmed))
        return [source for source, alarmed in lasting if alarmed]

    def settle(self) -> None:
        """The process has begun anew: its first steps are not judged."""
        self._stall.settling = SETTLING


class StallDetector:
    """A step that takes far longer than the usual one.

        limit = max(usual + `seconds`, f · usual),  f = exp(10 σ) within 2 ... 10

    `usual` is the median over the last `WINDOW` steps and σ the robust standard deviation of the
    log time (1.4826 times the median absolute deviation). Steps after one that is too long belong
    to the same stall, as long as they are too long. From the third on, a pause at the same distance
    as the two before is a habit of the loop (a checkpoint) and no stall; the first two alarm.
    """

    SETTINGS: ClassVar[frozenset[str]] = frozenset({"_seconds"})

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._totals: deque[float] = deque(maxlen=WINDOW)
        self._sizes: deque[float] = deque(maxlen=WINDOW)
        self._parts: list[deque[float]] = [deque(maxlen=WINDOW) for _ in PARTS]
        self._pauses: deque[int] = deque(maxlen=2)  # steps of the last long ones
        self._last_long = -(10**9)  # step
        self.settling = SETTLING

    def update(
        self, step: int, times: Sequence[StepTimes], ranks: Sequence[int] = (0,)
    ) -> StepTimeAlarm | None:
        if self.settling:
            self.settling -= 1
            return None
        total = max(row.total for row in times)
        size = _total_size(times)
        begins = self._begins(step, total, size)
        alarm = self._alarm(times, ranks, total) if begins and not self._habitual(step) else None
        if begins:
            self._pauses.append(step)
        self._totals.append(total)
        if size is not None:
            self._sizes.append(size)
        for past, part in zip(self._parts, PARTS, strict=True):
            values = [value for row in times if (value := getattr(row, part)) is not None]
            if values:
                past.append(median(values))
        return alarm

    def _begins(self, step: int, total: float, size: float | None) -> bool:
        """True if this step is too long, and those before are not of the same stall."""
        if len(self._totals) < LEAST:
            return False
        usual = max(median(self._totals), 1e-9)
        if total <= usual + self._seconds:
            return False
        deviations = [abs(log(max(total, 1e-9) / usual)) for total in self._totals]
        least, most = FACTORS
        factor = min(most, max(least, exp(min(SPREADS * 1.4826 * median(deviations), 10.0))))
        limit = max(usual + self._seconds, factor * usual)
        usual_size = median(self._sizes) if self._sizes else 0.0
        if size is not None and usual_size > 0.0:  # a longer batch may take longer
            limit *= max(1.0, size / usual_size)
        if total <= limit:
            return False
        begins = not 0 <= step - self._last_long <= 2
        self._last_long = step
        return begins

    def _habitual(self, step: int) -> bool:
        if len(self._pauses) < 2:
            return False
        before, last = self._pauses
        return abs((step - last) - (last - before)) <= 1

    def _alarm(
        self, times: Sequence[StepTimes], ranks: Sequence[int], total: float
    ) -> StepTimeAlarm:
        usual = median(self._totals)
        part, guilty, seconds = self._cause(times, total - usual)
        rank = ranks[guilty[0]] if len(guilty) == 1 else None
        where = ""
        if len(guilty) == len(times) > 1:
            where = " on all ranks"
        elif len(ranks) > 1 or ranks[0] > 0:
            where = f" on rank {', '.join(str(ranks[place]) for place in guilty[:8])}"
        words, advice = PARTS[part]
        reason = (
            f"the step took {_shown(total)} s (usual {_shown(usual)} s): "
            f"{_shown(seconds)} s {words}{where}; {advice}"
        )
        return StepTimeAlarm(STALL, reason, rank)

    def _cause(self, times: Sequence[StepTimes], excess: float) -> tuple[str, list[int], float]:
        """The part, the places of the ranks, and the most seconds that one spent in it."""
        seconds_PR = np.array([[getattr(row, part) or 0.0 for row in times] for part in PARTS])
        usual_P1 = np.array([[median(past) if past else 0.0] for past in self._parts])
        excess_PR = seconds_PR - usual_P1
        for number, row_R in enumerate(excess_PR):
            worst = np.argsort(-row_R, kind="stable").tolist()
            guilty = [place for place in worst if row_R[place] > excess / 2]
            if guilty:
                return [*PARTS][number], guilty, float(seconds_PR[number].max())
        number, place = divmod(int(excess_PR.argmax()), len(times))
        return [*PARTS][number], [place], float(seconds_PR[number, place])


class SlowRankDetector:
    """A rank whose own time is persistently longer than that of the others.

    The own time of a rank is what it waits for data, and its forward and backward pass without the
    wait for the others' gradients, where that is measured on all ranks. It is averaged over
    `RANK_WINDOW` steps without each rank's largest, so single stalls do not count. A rank is slow
    where two averages in a row exceed `factor` times the median of the others, by at least
    `RANK_SHARE` of a step. Its weakness: the host's time is not the device's: no slow GPU is named.
    """

    SETTINGS: ClassVar[frozenset[str]] = frozenset({"_factor"})

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._rows: deque[list[list[float]]] = deque(maxlen=RANK_WINDOW)
        self._own = False  # whether the rows hold forward and backward too
        self._age = 0
        self._suspects: list[int] = []  # ranks, at the last comparison
        self.slow: list[int] = []  # ranks that are alarmed

    def update(self, times: Sequence[StepTimes], ranks: Sequence[int]) -> list[StepTimeAlarm]:
        waited = all(row.data_wait is not None for row in times)
        own = all(row.exchange is not None and row.forward_backward is not None for row in times)
        if self._rows and len(self._rows[0][0]) != len(times):
            self._rows.clear()
        measured = own if self._own and self._rows else waited or own
        if not measured:
            return []  # at this step alone
        if own != self._own:
            self._rows.clear()
            self._own = own
        nothing = [0.0] * len(times)
        data = [row.data_wait or 0.0 for row in times] if waited else nothing
        passes = [row.forward_backward or 0.0 for row in times] if own else nothing
        self._rows.append([data, passes, [max(row.total for row in times)] * len(times)])
        self._age -= 1
        if len(self._rows) < RANK_WINDOW or self._age > 0:
            return []
        self._age = REFRESH
        return self._compare(ranks)

    def _compare(self, ranks: Sequence[int]) -> list[StepTimeAlarm]:
        rows_TPR = np.array(self._rows)  # steps, parts (data, passes, total), ranks
        own_TR = rows_TPR[:, 0] + rows_TPR[:, 1]
        kept = np.sort(own_TR, axis=0)[:-LARGEST_LEFT_OUT].mean(axis=0)
        step_seconds = float(np.median(rows_TPR[:, 2, 0]))
        suspects, alarms, still = [], [], []
        for place in np.argsort(-kept)[: max(1, len(ranks) // 2)].tolist():
            rank, seconds = ranks[place], float(kept[place])
            others = float(np.median(np.delete(kept, place)))
            excess = seconds - others
            enough = excess > max(RANK_SECONDS, RANK_SHARE * step_seconds)
            if enough and seconds > self._factor * others:
                suspects.append(rank)
                if rank in self.slow:
                    still.append(rank)
                elif rank in self._suspects:
                    still.append(rank)
                    part = self._part(rows_TPR, place)
                    alarms.append(self._alarm(rank, seconds, others, part))
            elif rank in self.slow and seconds > (1.0 + self._factor) / 2.0 * others:
                still.append(rank)
        self._suspects, self.slow = suspects, still
        return alarms

    def _part(self, rows_TPR: np.ndarray, place: int) -> str:
        excess_TP = rows_TPR[:, :2, place] - np.median(rows_TPR[:, :2], axis=2)
        data, passes = excess_TP.mean(axis=0)
        return "data_wait" if data >= passes else "forward_backward"

    def _alarm(self, rank: int, seconds: float, others: float, part: str) -> StepTimeAlarm:
        what = "own work and data" if self._own else "data"
        words, advice = PARTS[part]
        reason = (
            f"rank {rank} takes {_shown(seconds)} s a step for its {what}, the other ranks "
            f"{_shown(others)} s (median), over the last {RANK_WINDOW} steps: mostly "
            f"{words}; {advice}"
        )
        return StepTimeAlarm(SLOW_RANK, reason, rank)


class DriftDetector:
    """Steps that become slower little by little.

    The median time of each `BLOCK` steps (a token, where the size is known) is compared with the
    best level that two blocks in a row have held. Two blocks in a row that lost more than `drop` of
    that throughput are an alarm. An announced change, or steps of another size, begin a new level.
    """

    SETTINGS: ClassVar[frozenset[str]] = frozenset({"_drop"})

    def __init__(self, drop: float) -> None:
        self._drop = drop
        self._block: list[list[float]] = []  # total, size, parts of each step
        self._last: list[float] = []  # of the block before: value, total, size, parts
        self._best: list[float] = []  # likewise; empty before the second block
        self._best_step = 0
        self.alarmed = False

    def update(
        self, step: int, times: Sequence[StepTimes], *, planned: bool
    ) -> StepTimeAlarm | None:
        if planned:
            self._block, self._last, self._best, self.alarmed = [], [], [], False
        parts = [max(getattr(row, part) or 0.0 for row in times) for part in PARTS]
        total = max(row.total for row in times)
        self._block.append([total, _total_size(times) or 0.0, *parts])
        if len(self._block) < BLOCK:
            return None
        last, level = self._last, self._level()
        self._block, self._last = [], level
        if not last:
            return None
        small, large = sorted((last[2], level[2]))
        if large and (not small or large / small >= RESIZED):
            self._best, self.alarmed = [], False
            return None
        held = max(last, level, key=lambda row: row[0])
        if not self._best or held[0] < self._best[0]:
            self._best, self._best_step = held, step
        limit = self._best[0] / (1.0 - self._drop)
        slow = min(last[0], level[0]) > limit
        begins = slow and not self.alarmed
        self.alarmed = slow or (self.alarmed and level[0] > (limit + self._best[0]) / 2.0)
        return self._alarm(level) if begins else None

    def _level(self) -> list[float]:
        """The median of each column of the block, which is full, behind that of the time."""
        columns = list(zip(*self._block, strict=True))
        totals, sizes = columns[:2]
        values = [t / s for t, s in zip(totals, sizes, strict=True)] if all(sizes) else totals
        return [median(values), *map(median, columns)]

    def _alarm(self, level: list[float]) -> StepTimeAlarm:
        grown = [now - then for now, then in zip(level[3:], self._best[3:], strict=True)]
        words, advice = [*PARTS.values()][grown.index(max(grown))]
        lost = 1.0 - self._best[0] / level[0]
        reason = (
            f"the throughput is {lost:.0%} below the best sustained one, of step "
            f"{self._best_step}: a step takes {_shown(level[1])} s (median of {BLOCK}), it took "
            f"{_shown(self._best[1])} s; most was added {words}; {advice}"
        )
        return StepTimeAlarm(SLOW_DRIFT, reason)


def _total_size(times: Sequence[StepTimes]) -> float | None:
    sizes = [row.size for row in times if row.size is not None]
    return sum(sizes) if sizes and len(sizes) == len(times) else None


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10.0 else f"{seconds:.2g}"
