"""Does the learning rate follow the schedule that its author wrote?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import isfinite
from typing import Any

from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.training import Seen, Training, rate_of

#: Steps of the optimiser in a row with the same, too large, number of the scheduler's.
MIN_STEPS_TOO_OFTEN = 5
#: Steps without one of the scheduler's, where its rate began at 0; and without a new highest rate,
#: after which the peak is the measure of the rates of as many steps to come.
NEVER, SETTLED = 20, 20
#: A rate so many times that peak; a fall to less than this share of the rate before.
ABOVE_PEAK, FALL = 3.0, 0.1


class Schedule(Audit):
    """Steps of the schedulers against those of the optimiser, and each rate against its past.

    Its weakness: a scheduler that is stepped once an epoch looks like one that is forgotten.
    """

    name = "schedule"

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, int] = {}  # of each scheduler
        self._in_a_row: Counter[tuple[int, int]] = Counter()  # scheduler and its steps at once
        self._made = self._age = self._left = 0
        self._peak = self._settled = self._last = self._before = 0.0

    def restart(self) -> None:
        self._counts.clear()
        self._in_a_row.clear()
        self._last = self._before = 0.0

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        made = sum(training.made.values())
        steps, self._made = made - self._made, made
        for scheduler in training.schedulers:
            yield from self._steps(training, scheduler, seen.step, steps)
        groups = training.optimizers[0].param_groups if training.optimizers else []
        if groups and isfinite(rate := rate_of(groups[0])):
            yield from self._course(training, rate, seen.step)

    def _steps(self, training: Training, scheduler: Any, step: int, made: int) -> Iterable[Finding]:
        key, count = id(scheduler), getattr(scheduler, "last_epoch", None)
        if not isinstance(count, int):
            return
        before, self._counts[key] = self._counts.get(key), count
        if before is None or made != 1:
            return
        done = count - before
        often = self._in_a_row[key, done] + 1
        for other in [known for known in self._in_a_row if known[0] == key]:
            del self._in_a_row[other]
        self._in_a_row[key, done] = often
        # accelerate steps a scheduler once for each rank.
        if done > 1 and done != training.ranks and often >= MIN_STEPS_TOO_OFTEN:
            yield from self.find("scheduler_too_often", step, times=done)
        if done == 0 == count and often >= NEVER and not any(scheduler.get_last_lr()):
            yield from self.find("scheduler_never", step, times=NEVER)

    def _course(self, training: Training, rate: float, step: int) -> Iterable[Finding]:
        if self._age >= SETTLED:
            self._settled, self._left = self._peak, SETTLED
        if self._left and rate > ABOVE_PEAK * self._settled > 0:
            values = {"rate": f"{rate:.3g}", "times": f"{rate / self._settled:.3g}"}
            severity: Severity = "hint" if _is_planned(training, rate) else "error"
            # The rate is already that of the step that is about to be made.
            yield from self.find("rate_above_peak", step + 1, severity, **values)
        self._left = max(0, self._left - 1)
        if self._before and self._last < rate < self._before:
            yield from self.find("warm_up_again", step, "hint", before=f"{self._before:.3g}")
        fell = 0 <= rate < FALL * self._last
        self._before = self._last if fell else self._before if rate < self._before else 0.0
        self._age = 0 if rate > self._peak else self._age + 1
        self._peak, self._last = max(self._peak, rate), rate


def _is_planned(training: Training, rate: float) -> bool:
    """True if a scheduler has set that rate: a warm-up of one rate an epoch may go up at once."""
    known = (s for s in training.schedulers if hasattr(s, "get_last_lr"))
    return any(rate in scheduler.get_last_lr() for scheduler in known)
