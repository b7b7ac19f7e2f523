"""Rules on one step: its loss and gradient norm, and the learning rates against their plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from statistics import median
from typing import Any, ClassVar, NamedTuple


class StepRules:
    """Two rules on the loss and the gradient norm of the step at hand. No torch here.

    - ``non_finite``: the loss or the norm is nan or ±inf.
    - ``gradient_explosion``: the norm is above `factor` times the median of the
      last `window` finite norms, of which half must be past.

    Under a gradient scaler, which overflows on purpose to find its scale and
    then leaves the step out by itself, a non-finite norm alone is an alert only
    after `overflows` in a row.

    Their weakness: they see one step. What drifts is for the detectors.

    >>> rules = StepRules(window=4)
    >>> [rules.update(loss=2.0, norm=g) for g in (1.0, 1.2, 0.9)]
    [[], [], []]
    >>> rules.update(loss=2.0, norm=80.0)
    [('gradient_explosion', 'gradient norm 80, usual 1 (80 times the median of the last 3)')]
    """

    SETTINGS: ClassVar[frozenset[str]] = frozenset({"factor", "overflows", "scaled", "_least"})

    def __init__(
        self, *, factor: float = 20.0, window: int = 100, overflows: int = 10, scaled: bool = False
    ) -> None:
        self.factor, self.overflows, self.scaled = factor, overflows, scaled
        self._past: deque[float] = deque(maxlen=window)
        self._least = max(1, window // 2)
        self._overflows = 0

    @property
    def overflows_before(self) -> int:
        """Non-finite norms in a row before the last one; 0 where that was finite."""
        return max(self._overflows - 1, 0)

    def update(self, loss: float | None, norm: float | None) -> list[tuple[str, str]]:
        """Take one step; return (rule, reason) for each that is broken."""
        problems = [f"loss is {loss:g}"] if loss is not None and not isfinite(loss) else []
        if norm is not None and not isfinite(norm):
            self._overflows += 1
            if problems or not self.scaled or self._overflows >= self.overflows:
                often = f" for {self._overflows} steps in a row" if self._overflows > 1 else ""
                problems.append(f"gradient norm is {norm:g}{often}")
        if problems:
            return [("non_finite", "; ".join(problems))]
        if norm is None or not isfinite(norm):
            return []
        self._overflows = 0
        past = len(self._past)
        usual = median(self._past) if past >= self._least else 0.0
        self._past.append(norm)
        if not 0.0 < usual * self.factor < norm:
            return []
        times = f"{norm / usual:.3g} times the median of the last {past}"
        return [("gradient_explosion", f"gradient norm {norm:.4g}, usual {usual:.4g} ({times})")]


#: Times the scheduler's rate, and times the highest rate so far where there is no scheduler.
_OFF, _OFF_PEAK = 1.5, 4.0
#: First steps whose ratio to the scheduler's rate is the usual one; and steps without a new highest
#: rate that end a warm-up.
_USUAL_RATIO_STEPS, _SETTLED = 5, 5


class OffPlan(NamedTuple):
    """A group's learning rate off its plan: the scheduler's rate (`known`), or the last one."""

    group: int
    rate: float
    planned: float
    known: bool

    def __str__(self) -> str:
        times = f"{self.rate / self.planned:.3g} times" if self.planned else "beside"
        whose = "the scheduler's" if self.known else "the last one before"
        found = f"the learning rate of group {self.group} is {self.rate:.4g}"
        return f"{found}, {times} {whose} {self.planned:.4g}"


class LearningRates:
    """The learning rates of an optimiser's groups against their plan; `off` has those that left it.

    With a scheduler (`get_last_lr`, a rate for each group) a rate is off above 1.5 times the
    scheduler's, times the largest such ratio of the first five steps if that is above 1, and where
    it is 0 and the scheduler's is not. Without one it is off above 4 times the highest rate of the
    warm-up, which five steps without a higher one end.

    Its weakness: a scheduler that a fault has reached states the wrong rate itself.
    """

    def __init__(self) -> None:
        self.off: list[OffPlan] = []
        self._groups: list[_Group] = []

    def update(
        self, groups: Sequence[dict[str, Any]], schedulers: Iterable[Any], *, learn: bool = True
    ) -> None:
        """Judge the rates of a step before it is taken; once a step `learn` what is usual."""
        rates = [_host_value(group.get("lr")) for group in groups]
        plans = _plans(schedulers, len(rates))
        if len(self._groups) != len(rates):
            self._groups = [_Group() for _ in rates]
        self.off = []
        for place, (known, rate) in enumerate(zip(self._groups, rates, strict=True)):
            planned = plans[place] if plans else None
            if rate is None:
                continue
            if (off := known.planned_where_off(rate, planned)) is not None:
                self.off.append(OffPlan(place, rate, off, planned is not None))
            elif learn:
                known.learn(rate, planned)

    def restart(self) -> None:
        """An announced change resets the baseline."""
        self._groups = []


class _Group:
    """The usual rate of one parameter group."""

    def __init__(self) -> None:
        self._usual_ratio = 1.0
        self._last = self._peak = 0.0
        self._count = self._peak_age = 0

    def planned_where_off(self, rate: float, planned: float | None) -> float | None:
        if planned is not None:
            off = rate > _OFF * self._usual_ratio * planned or (rate == 0 < planned)
            return planned if off and self._last > 0 else None
        is_settled = self._peak_age >= _SETTLED
        return self._last if is_settled and rate > _OFF_PEAK * self._peak else None

    def learn(self, rate: float, planned: float | None) -> None:
        self._count += 1
        if planned and self._count <= _USUAL_RATIO_STEPS:
            self._usual_ratio = max(self._usual_ratio, rate / planned)
        if self._peak_age < _SETTLED:  # or a rate that runs away would take its limit along
            self._peak_age = 0 if rate > self._peak else self._peak_age + 1
            self._peak = max(self._peak, rate)
        self._last = rate


def _host_value(rate: Any) -> float | None:
    """The rate as a number; None for one on a device, which is not waited for."""
    if getattr(getattr(rate, "device", None), "type", "cpu") != "cpu":
        return None
    try:
        value = float(rate)
    except (TypeError, ValueError):
        return None
    return value if isfinite(value) else inf


def _plans(schedulers: Iterable[Any], number: int) -> list[float] | None:
    """The rates that schedulers state, for each group the largest; None without any."""
    found = []
    for scheduler in schedulers:
        try:
            rates = [_host_value(rate) for rate in scheduler.get_last_lr()]
        except Exception:  # of a class that is not torch's, or before its first step
            continue
        if len(rates) == number and None not in rates:
            found.append(rates)
    return [max(of_group) for of_group in zip(*found, strict=True)] if found else None
