"""Predictors of GPU failures: thresholds on telemetry signals, any of which raises an alarm.

A signal is a number after each reading, higher for worse, nan if unknown. All signals are
causal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.telemetry.judge import EXPLAINED_BY, rule_of
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import ERRORS, RiskConfig
from rmetric.telemetry.xid import xid_kind
from studies.fleet.gpu_usage import HOUR, STEP_SECONDS, Bools, Floats, Ints
from studies.fleet.telemetry_simulation import MEMORY_BYTES, SLOWDOWN_CELSIUS, Column, GpuHistory

#: Corrected errors within an hour that make the simple threshold fire; by hand.
CORRECTED_AN_HOUR = 10.0


@dataclass(frozen=True, kw_only=True)
class ThresholdPredictor:
    """Alarms while one of its signals (`any_of`, see `signals`) is at its threshold or above."""

    name: str
    title: str
    any_of: tuple[tuple[str, float], ...]

    def alarms(self, found: dict[str, Floats]) -> Bools:
        """Alarm after each reading, shape (T,)."""
        alarms = np.zeros(found["anything"].size, dtype=np.bool_)
        for signal, threshold in self.any_of:
            alarms |= found[signal] >= threshold
        return alarms


def _one(name: str, title: str, *any_of: tuple[str, float]) -> ThresholdPredictor:
    return ThresholdPredictor(name=name, title=title, any_of=any_of)


PREDICTORS = (
    _one("score_095", "Score as described, 0.95", ("risk", 0.95)),
    _one("score_010", "Score as described, 0.10", ("risk", 0.10)),
    _one("coded_095", "Score as the code behaves, 0.95", ("coded", 0.95)),
    _one("coded_010", "Score as the code behaves, 0.10", ("coded", 0.10)),
    _one("guard", "Score at 0.95 with rules", ("risk", 0.95), ("rules", 0.5)),
    _one("rules", "Rules alone", ("rules", 0.5)),
    _one("temperature", "Temperature above the slowdown limit", ("temperature", 1.0)),
    _one("uncorrected", "Any uncorrectable ECC error", ("uncorrected", 1.0)),
    _one("corrected", "10 corrected ECC errors in an hour", ("corrected", CORRECTED_AN_HOUR)),
    _one(
        "both", "Rules, or 10 corrected in an hour",
        ("rules", 0.5), ("corrected", CORRECTED_AN_HOUR),
    ),
    _one("xid", "Any Xid", ("xid", 1.0)),
    _one("always", "Always on", ("anything", 0.0)),
    _one("hourly", "Once an hour", ("hour", 1.0)),
    _one("never", "Never"),
)  # fmt: skip

#: Thresholds along which a signal's curve is drawn.
CURVES = {
    "risk": tuple(np.round(np.linspace(0.04, 0.6, 29), 3).tolist()),
    "coded": tuple(np.round(np.linspace(0.04, 0.6, 29), 3).tolist()),
    "temperature": tuple(float(above) for above in range(-20, 5)),
    "corrected": (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0),
}
ON_CURVES = tuple(
    _one(f"{signal}@{threshold:g}", "", (signal, threshold))
    for signal, thresholds in CURVES.items()
    for threshold in thresholds
)


def signals(history: GpuHistory) -> dict[str, Floats]:
    """Every signal after each reading, shape (T,).

    ``risk`` and ``coded`` are the score, as described and as the original code behaves;
    ``rules`` is 1 while a rule says that a GPU is at risk or worse; ``temperature`` is degrees
    above the limit; ``uncorrected`` and ``xid`` are new ones, ``corrected`` those of the last
    hour.
    """
    num = history.times.size
    kinds = _kinds(history)
    alarmed = [seen for kind, seen in kinds.items() if _condemns(kind)]
    xids = [seen for kind, seen in kinds.items() if "xid" in kind]
    temperature = history.columns["temperature_celsius"] - SLOWDOWN_CELSIUS
    return {
        "anything": np.zeros(num),
        "hour": np.asarray(history.times % HOUR == 0, dtype=np.float64),
        "risk": risk_values(history, RiskConfig()),
        "coded": risk_values(history, AS_CODED, coded=True),
        "rules": _any(alarmed, num),
        "temperature": np.where(history.available, temperature, np.nan),
        "uncorrected": _rises(history, "ecc_uncorrected_errors"),
        "corrected": _in_an_hour(_rises(history, "ecc_corrected_errors"), history.times),
        "xid": _any(xids, num),
    }


def _condemns(kind: str) -> bool:
    rule = rule_of(kind)
    return rule is not None and rule.level != "healthy"


def _any(seen: list[Bools], num: int) -> Floats:
    return np.asarray(np.any([np.zeros(num, dtype=bool), *seen], axis=0), dtype=np.float64)


def _kinds(history: GpuHistory) -> dict[str, Bools]:
    """Kind of sign, as the rules name it -> readings at which it is new or holds."""
    remaps = ("row_remap_pending", "row_remap_failed")
    kinds = {name: history.columns[name] & history.available for name in remaps}
    kinds["gpu_lost"] = history.lost
    for time, number in history.xids:
        at = int(np.searchsorted(history.times, time))
        kinds.setdefault(xid_kind(number), np.zeros(history.times.size, dtype=bool))[at] = True
    kinds["ecc_uncorrected"] = _rises(history, "ecc_uncorrected_errors") > 0
    for kind, other in EXPLAINED_BY.items():
        kinds[kind] &= ~kinds.get(other, np.zeros(history.times.size, dtype=bool))
    return kinds


def _rises(history: GpuHistory, counter: str) -> Floats:
    """Increase of a counter at each reading; a decrease is a reset."""
    available = np.flatnonzero(history.available)
    counts = history.columns[counter][available]
    rises = np.zeros(history.times.size)
    rises[available] = np.maximum(0, np.diff(counts, prepend=counts[:1]))
    return rises


def _in_an_hour(rises: Floats, times: Floats) -> NDArray[np.float64]:
    total = np.concatenate([[0.0], np.cumsum(rises)])
    return total[1:] - total[np.searchsorted(times, times - HOUR, side="right")]


# -- the score over a whole history: the numbers of `RiskScore`, a hundred times faster. Sums over
# the window are differences of running sums in integers, which are exact.

#: What the original code reads: no errors at all, and traffic where memory in use is meant.
#: The least share that counts is by hand, since traffic is never near 95 %.
AS_CODED = RiskConfig(memory_low=0.0)


def as_coded(reading: Reading) -> Reading:
    """The reading as the original code sees it, see `AS_CODED`."""
    busy = reading.memory_busy_percent
    used = None if busy is None else round(busy)
    seen: dict[str, Any] = dict.fromkeys(ERRORS, 0)
    seen |= {"memory_used_bytes": used, "memory_total_bytes": 100}
    return replace(reading, **seen)


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """From `first` to before `end`, shape (M,)."""

    first: Ints
    end: Ints

    @property
    def num(self) -> Ints:
        return self.end - self.first

    def sums(self, values: NDArray) -> NDArray:
        total = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
        return np.asarray(total[self.end] - total[self.first])


def risk_values(history: GpuHistory, config: RiskConfig, coded: bool = False) -> Floats:
    """`RiskScore.update(...).value` after each reading, nan without; `coded`: see `as_coded`."""
    available = np.flatnonzero(history.available)
    columns = {name: column[available] for name, column in history.columns.items()}
    step = np.rint(history.times[available] / STEP_SECONDS).astype(np.int64)
    reach = config.window * config.interval / STEP_SECONDS
    end = np.arange(1, available.size + 1)
    first = np.maximum(np.searchsorted(step, step - reach, side="right"), end - config.window)
    if not coded:  # the guard begins anew with a new driver, the original does not
        reloads = np.where(history.reloaded[available], end - 1, 0)
        first = np.maximum(first, np.maximum.accumulate(reloads))
    windows = _Windows(first=first, end=end)
    celsius = np.rint(columns["temperature_celsius"]).astype(np.int64)
    factors = {
        "temperature": 1 + (celsius - SLOWDOWN_CELSIUS) / config.temperature_span,
        "memory": (_occupancy(columns, coded) - config.memory_low) / (1 - config.memory_low),
        "errors": np.zeros(available.size) if coded else windows.sums(_new_errors(columns, config)),
        "power": _fluctuation(columns["power_watts"], windows, config) / config.power_full,
        "utilisation_drop": _drop(columns["utilisation_percent"], windows, config),
        "temperature_rise": _rise(celsius, step, windows, config) / config.temperature_rise_full,
    }
    weighted = sum(
        getattr(config.weights, name) * np.clip(factor, 0.0, 1.0)
        for name, factor in factors.items()
    )
    values = np.full(history.times.size, np.nan)
    values[available] = np.minimum(1.0, weighted / config.weights.sum)
    return values


def _occupancy(columns: dict[str, Column], coded: bool) -> Floats:
    if coded:
        return np.asarray(columns["memory_busy_percent"] / 100)
    return np.asarray(columns["memory_used_bytes"] / MEMORY_BYTES)


def _new_errors(columns: dict[str, Column], config: RiskConfig) -> Floats:
    new = np.zeros(columns["power_watts"].size)
    for counter, full in ERRORS.items():
        if counter in columns:
            counts = columns[counter]
            new += np.maximum(0, np.diff(counts, prepend=counts[:1])) / getattr(config, full)
    return new


def _fluctuation(watts: Column, windows: _Windows, config: RiskConfig) -> Floats:
    milliwatts = np.rint(1000 * watts).astype(np.int64)
    num, total = windows.num, windows.sums(milliwatts)
    spread = num * windows.sums(milliwatts**2) - total**2
    return np.where(num >= config.least_readings, np.sqrt(spread) / np.maximum(total, 1), 0.0)


def _drop(percent: Column, windows: _Windows, config: RiskConfig) -> Floats:
    percent = np.rint(percent).astype(np.int64)
    split = np.maximum(windows.first, windows.end - config.recent)
    recent = _Windows(first=split, end=windows.end).sums(percent) / config.recent
    num_before = np.maximum(split - windows.first, 1)
    before = _Windows(first=windows.first, end=split).sums(percent) / num_before
    known = (windows.num >= config.least_readings) & (windows.num > config.recent)
    defined = known & (before >= config.least_utilisation)
    return np.where(defined, 1 - recent / np.maximum(before, 1e-9), 0.0)


def _rise(celsius: Ints, step: Ints, windows: _Windows, config: RiskConfig) -> Floats:
    """Degrees a minute of the least-squares line."""
    num, sum_step = windows.num, windows.sums(step)
    above = num * windows.sums(step * celsius) - sum_step * windows.sums(celsius)
    below = num * windows.sums(step**2) - sum_step**2
    slope = above / np.maximum(below, 1)
    return np.where(num >= config.least_readings, slope * 60 / STEP_SECONDS, 0.0)
