"""Vectorised `RiskScore` over a whole history: the same numbers, about a hundred times faster.

Sums over the window are differences of running sums in integers (degrees, percent,
milliwatts, readings), which are exact for any length of the history.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import ERRORS, RiskConfig
from studies.fleet.gpu_usage import STEP_SECONDS, Floats, Ints
from studies.fleet.telemetry_simulation import MEMORY_BYTES, SLOWDOWN_CELSIUS, Column, GpuHistory

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
    """Readings of each window: from `first` to before `end`, shape (M,)."""

    first: Ints
    end: Ints

    @property
    def num(self) -> Ints:
        return self.end - self.first

    def sums(self, values: NDArray) -> NDArray:
        total = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
        return np.asarray(total[self.end] - total[self.first])


def risk_values(history: GpuHistory, config: RiskConfig, coded: bool = False) -> Floats:
    """`RiskScore.update(...).value` after each reading, shape (T,); nan where there is none.

    With `coded` the readings are those that the original code sees, see `as_coded`.
    """
    available = np.flatnonzero(history.available)
    columns = {name: column[available] for name, column in history.columns.items()}
    step = np.rint(history.times[available] / STEP_SECONDS).astype(np.int64)
    reach = config.window * config.interval / STEP_SECONDS
    end = np.arange(1, available.size + 1)
    first = np.maximum(np.searchsorted(step, step - reach, side="right"), end - config.window)
    if not coded:  # the guard begins anew with a new driver, the original knows of none
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
