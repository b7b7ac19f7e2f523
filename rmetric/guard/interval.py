"""Optimal checkpoint interval from measured times. Pure.

Frequent saves cost time, rare saves lose work after a failure.

    first order   sqrt(2 C M)                                                      (Young)
    higher order  sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C,  M if C >= 2M (Daly)
    expected      E[ETTR] = (1 - r (u + D / 2)) / (1 + w / D)

with C and w the time that one save costs, M the mean time between failures, r = 1 / M,
u the time from a failure until the training goes on, D the interval.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval,
CACM 17(9), 1974; J. T. Daly, A higher order estimate of the optimum checkpoint interval
for restart dumps, FGCS 22(3), 2006; Revisiting Reliability in Large-Scale Machine Learning
Research Clusters, arXiv 2410.21680, for E[ETTR].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from rmetric._util.errors import require
from rmetric._util.lazy import needed

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class FailureRateEstimate:
    """Failures per hour, `low` to `high` at a confidence `level`; counted in `hours`, or given."""

    per_hour: float
    low: float
    high: float
    failures: int | None = None
    hours: float | None = None
    level: float = 0.95


def failure_rate(failures: int, hours: float, *, level: float = 0.95) -> FailureRateEstimate:
    """Rate of a Poisson process from a count, with its exact (Gamma) interval.

    >>> rate = failure_rate(4, 100.0)
    >>> f"{rate.per_hour:.2f} ({rate.low:.3f} to {rate.high:.3f}) an hour"
    '0.04 (0.011 to 0.102) an hour'
    """
    whole = type(failures) is int and failures >= 0
    require("failures", failures, whole, "an int of at least 0")
    require("hours", hours, 0 < hours < inf, "above 0")
    require("level", level, 0 < level < 1, "between 0 and 1")
    gamma = needed("scipy.stats").gamma

    tail = (1 - level) / 2
    low = float(gamma.ppf(tail, failures)) / hours if failures else 0.0
    high = float(gamma.isf(tail, failures + 1)) / hours
    return FailureRateEstimate(
        per_hour=failures / hours, low=low, high=high, failures=failures, hours=hours, level=level
    )


def young(save_seconds: float, failure_seconds: float) -> float:
    """Young's interval from the cost of one save and the mean time between failures, seconds.

    >>> round(young(120.0, 1.8 * 3600)), round(young(20.0, 1.8 * 3600))
    (1247, 509)
    """
    require("save_seconds", save_seconds, 0 < save_seconds < inf, "above 0")
    require("failure_seconds", failure_seconds, failure_seconds > 0, "above 0")
    return sqrt(2.0 * save_seconds * failure_seconds)


def daly(save_seconds: float, failure_seconds: float) -> float:
    """Daly's interval between the end of one save and the beginning of the next, in seconds.

    >>> round(daly(120.0, 1.8 * 3600))
    1168
    """
    first = young(save_seconds, failure_seconds)
    if first == inf or save_seconds >= 2.0 * failure_seconds:
        return failure_seconds
    share = save_seconds / (2.0 * failure_seconds)
    return first * (1.0 + sqrt(share) / 3.0 + share / 9.0) - save_seconds


def expected_ettr(
    interval_seconds: float,
    *,
    save_seconds: float,
    restart_seconds: float,
    failures_per_hour: float,
) -> float:
    """Expected effective training time ratio, E[ETTR], by arXiv 2410.21680.

    Never below 0, where its assumption (failures are rare beside the interval) no longer holds.

    Args:
        interval_seconds: time between two saves.
        save_seconds: cost of one save.
        restart_seconds: time from a failure until training continues.
        failures_per_hour: of the whole job: its nodes times their rate.

    >>> f"{expected_ettr(3600, save_seconds=20, restart_seconds=300, failures_per_hour=0.1):.3f}"
    '0.936'
    """
    require("interval_seconds", interval_seconds, 0 < interval_seconds < inf, "above 0")
    _check_from_0(
        save_seconds=save_seconds,
        restart_seconds=restart_seconds,
        failures_per_hour=failures_per_hour,
    )
    lost = failures_per_hour / HOUR * (restart_seconds + interval_seconds / 2.0)
    return max(0.0, 1.0 - lost) / (1.0 + save_seconds / interval_seconds)


def best_interval(
    *, save_seconds: float, restart_seconds: float, failures_per_hour: float
) -> float:
    """Interval that maximises `expected_ettr`, seconds; inf without failures.

    Where the derivative of (a - b D) D / (D + w), with a = 1 - r u and b = r / 2, is zero:
    D = sqrt(w² + a w / b) - w.
    """
    require("save_seconds", save_seconds, 0 < save_seconds < inf, "above 0")
    _check_from_0(restart_seconds=restart_seconds, failures_per_hour=failures_per_hour)
    if failures_per_hour == 0:
        return inf
    rate = failures_per_hour / HOUR
    left = 1.0 - rate * restart_seconds
    if left <= 0:
        raise ValueError(
            f"restart_seconds is {restart_seconds:g} at {failures_per_hour:g} failures an hour: "
            "restarts take all the time, no interval helps"
        )
    return sqrt(save_seconds**2 + 2.0 * save_seconds * left / rate) - save_seconds


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommended checkpoint interval, seconds.

    Attributes:
        young, daly: theirs at the counted rate.
        best: that of the greatest expected ETTR.
        shortest, longest: `best` at the ends of the rate's interval.
        ettr: expected ETTR at `best`; None without failures.
        words: the recommendation as a sentence.
    """

    young: float
    daly: float
    best: float
    shortest: float
    longest: float
    ettr: float | None
    words: str


def advise(
    *,
    save_seconds: float,
    failures_per_hour: float | FailureRateEstimate,
    durable_seconds: float = 0.0,
    restart_seconds: float = 0.0,
) -> Advice:
    """Recommended interval from measured times.

    Args:
        save_seconds: cost of one save: blocking time and slowdown.
        failures_per_hour: failure rate of the whole training.
        durable_seconds: time from the start of a save until it is durable; a failure in
            between loses that much more work.
        restart_seconds: time from a failure until training continues.
    """
    rate = failures_per_hour
    if not isinstance(rate, FailureRateEstimate):
        _check_from_0(failures_per_hour=rate)
        rate = FailureRateEstimate(per_hour=rate, low=rate, high=rate)
    _check_from_0(durable_seconds=durable_seconds)
    costs = {"save_seconds": save_seconds, "restart_seconds": restart_seconds + durable_seconds}
    best, shortest, longest = (
        best_interval(failures_per_hour=per_hour, **costs)
        for per_hour in (rate.per_hour, rate.high, rate.low)
    )
    counted = "" if rate.failures is None else f", counted {rate.failures} in {rate.hours:g} h"
    words = (
        f"a save costs {save_seconds:.3g} s and {rate.per_hour:.3g} failures an hour are met"
        f"{counted}: "
    )
    ettr = None
    if best < inf:
        ettr = expected_ettr(best, failures_per_hour=rate.per_hour, **costs)
        end = "no end" if longest == inf else f"{longest:.0f}"
        between = "" if shortest == longest else f" ({shortest:.0f} to {end})"
        words += f"save every {best:.0f} s{between}, expected ETTR {ettr:.4f}"
    else:
        words += f"at least every {shortest:.0f} s, " if shortest < inf else ""
        words += "no failure was seen, so no longest interval follows"
    mean = HOUR / rate.per_hour if rate.per_hour else inf
    return Advice(
        young=young(save_seconds, mean), daly=daly(save_seconds, mean), best=best,
        shortest=shortest, longest=longest, ettr=ettr, words=words,
    )  # fmt: skip


def _check_from_0(**values: float) -> None:
    for name, value in values.items():
        require(name, value, 0 <= value < inf, "at least 0")
