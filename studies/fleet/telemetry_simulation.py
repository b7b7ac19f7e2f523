"""Simulated GPU telemetry: readings every 10 seconds from usage and injected failure signs.

Power follows work and clock, temperature follows power with a lag of a minute, and a GPU
that is too hot slows down. Constants are those of an H100 SXM
where its data sheet states them (700 W, 80 GB, 1980 MHz), else by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.telemetry.reading import GpuSign, Reading
from rmetric.telemetry.xid import xid_kind
from studies.fleet.gpu_usage import (
    DAY,
    HOUR,
    STEP_SECONDS,
    Bools,
    Floats,
    GpuFailure,
    GpuUsage,
    JobConditions,
    Signs,
    contain,
    fail,
    sample_usage,
)

SLOWDOWN_CELSIUS, ROOM_CELSIUS = 89.0, 27.0
IDLE_WATTS, LIMIT_WATTS = 75.0, 700.0
MOST_MHZ, MEMORY_MHZ = 1980.0, 2619.0
MEMORY_BYTES = 80 * 1024**3
LAG_SECONDS = 60.0

#: History of a failure: evaluated time before it, warm-up before that, and time after it.
BEFORE_SECONDS, WARM_UP_SECONDS, AFTER_SECONDS = DAY, HOUR, 300.0

Column = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class GpuHistory:
    """Telemetry of one GPU, as arrays of one value per reading, shape (T,).

    Attributes:
        columns: varying fields of `Reading`, by name.
        throttles: active throttle reasons, by name.
        available: a reading exists; False while the driver is unavailable.
        lost: the GPU no longer responds.
        xids: time and number of each Xid, in order.
        failure: None for a healthy GPU.
    """

    gpu: int
    times: Floats
    columns: dict[str, Column]
    throttles: dict[str, Bools]
    available: Bools
    lost: Bools
    reloaded: Bools
    xids: tuple[tuple[float, int], ...]
    failure: GpuFailure | None = None

    def reading(self, index: int) -> Reading | None:
        """The reading at `index`; None if there is none."""
        if not self.available[index]:
            return None
        values = {name: column[index].item() for name, column in self.columns.items()}
        reasons = frozenset(word for word, held in self.throttles.items() if held[index])
        return Reading(
            gpu=self.gpu, time=float(self.times[index]), throttle_reasons=reasons,
            slowdown_temperature_celsius=SLOWDOWN_CELSIUS, power_limit_watts=LIMIT_WATTS,
            memory_total_bytes=MEMORY_BYTES, sm_clock_max_mhz=MOST_MHZ,
            memory_clock_mhz=MEMORY_MHZ, memory_clock_max_mhz=MEMORY_MHZ, **values,
        )  # fmt: skip

    def events(self) -> Iterator[Reading | GpuSign]:
        """Readings and signs in order of time, as a telemetry source yields them."""
        xids = deque(self.xids)
        for index, time in enumerate(self.times.tolist()):
            if self.reloaded[index]:
                yield GpuSign(gpu=self.gpu, time=time, kind="driver_loaded")
            reading = self.reading(index)
            if reading is not None:
                yield reading
            while xids and xids[0][0] <= time:
                yield GpuSign(gpu=self.gpu, time=time, kind=xid_kind(xids.popleft()[1]))
            if self.lost[index] and not self.lost[index - 1]:
                yield GpuSign(gpu=self.gpu, time=time, kind="gpu_lost")


def healthy(rng: np.random.Generator, *, gpu: int, days: float, job: JobConditions) -> GpuHistory:
    """History of a GPU that does not fail."""
    life = sample_usage(rng, _readings(days * DAY), job)
    return _history(rng, gpu, life, Signs.none(life.work.size))


def contained(rng: np.random.Generator, *, gpu: int, job: JobConditions) -> GpuHistory:
    """Two days around an uncorrectable error that is contained, without a failure."""
    life = sample_usage(rng, _readings(2 * DAY), job)
    at = _readings(DAY)
    until = at + int(rng.integers(_readings(HOUR), _readings(DAY)))
    return _history(rng, gpu, life, contain(rng, life, at, until))


def failing(
    rng: np.random.Generator, *, gpu: int, cause: str, with_sign: bool, job: JobConditions,
    before: float = WARM_UP_SECONDS + BEFORE_SECONDS,
) -> GpuHistory:  # fmt: skip
    """History around a failure: `before` seconds before it and minutes after it."""
    at = _readings(before)
    life = sample_usage(rng, at + _readings(AFTER_SECONDS), job)
    signs, failure = fail(rng, life, cause, at, with_sign)
    return _history(rng, gpu, life, signs, failure)


def _readings(seconds: float) -> int:
    return round(seconds / STEP_SECONDS)


def _history(
    rng: np.random.Generator, gpu: int, life: GpuUsage, signs: Signs,
    failure: GpuFailure | None = None,
) -> GpuHistory:  # fmt: skip
    num = life.work.size
    clock = _slowed_by_heat(life, signs)
    power = _power(rng, life, signs, clock)
    celsius = _temperature(life, signs, power) + rng.normal(0.0, 0.4, num)
    busy = np.clip(45 * life.work + rng.normal(0.0, 3.0, num), 0, 100) * (life.work > 0)
    jitter = rng.normal(0.0, 1.0, num)
    utilisation = np.where(life.utilisation > 0, np.clip(life.utilisation + jitter, 0, 100), 0.0)
    utilisation[signs.spinning] = 100.0
    columns: dict[str, Column] = {
        "temperature_celsius": np.round(celsius),
        "power_watts": np.round(power, 3),
        "utilisation_percent": np.round(utilisation),
        "memory_busy_percent": np.round(busy),
        "memory_used_bytes": (life.memory * MEMORY_BYTES).astype(np.int64),
        "sm_clock_mhz": np.round(MOST_MHZ * clock * np.where(life.work > 0, 0.93, 1.0)),
        **_counters(life, signs),
        "row_remap_pending": signs.remap_pending,
        "row_remap_failed": signs.remap_failed,
    }
    hot = celsius > SLOWDOWN_CELSIUS
    return GpuHistory(
        gpu=gpu,
        times=np.arange(num, dtype=np.float64) * STEP_SECONDS,
        columns=columns,
        throttles={
            "software_power_cap": power > 0.97 * LIMIT_WATTS,
            "hardware_slowdown": signs.slowed | hot,
            "hardware_thermal": hot,
        },
        available=~(life.unread | signs.lost),
        lost=signs.lost,
        reloaded=life.reloaded,
        xids=tuple(
            (reading * STEP_SECONDS, number) for reading, number in sorted(life.xids + signs.xids)
        ),
        failure=failure,
    )


def _slowed_by_heat(life: GpuUsage, signs: Signs) -> Floats:
    """Clock as a share of its maximum, after thermal throttling."""
    steady = ROOM_CELSIUS + life.ambient + signs.heat + _KELVIN_PER_WATT * LIMIT_WATTS * life.work
    too_hot = np.maximum(0.0, steady - (SLOWDOWN_CELSIUS + 2.0))
    return signs.clock * np.maximum(0.4, 1.0 - too_hot / (_KELVIN_PER_WATT * LIMIT_WATTS))


_KELVIN_PER_WATT = 0.06


def _power(rng: np.random.Generator, life: GpuUsage, signs: Signs, clock: Floats) -> Floats:
    watts = IDLE_WATTS + (0.97 * LIMIT_WATTS - IDLE_WATTS) * life.work * clock
    watts[signs.spinning] = 130.0
    noise = rng.normal(0.0, 1.0, watts.size) * np.where(life.work > 0, 14.0, 1.0)
    return np.clip(watts + noise, 50.0, 1.02 * LIMIT_WATTS)


def _temperature(life: GpuUsage, signs: Signs, power: Floats) -> Floats:
    """Chip temperature, which follows power with a lag of a minute."""
    from scipy.signal import lfilter  # takes a second to import

    load = power / LIMIT_WATTS
    steady = ROOM_CELSIUS + life.ambient + signs.heat * load + _KELVIN_PER_WATT * power
    keep = np.exp(-STEP_SECONDS / LAG_SECONDS)
    lagged, _ = lfilter([1 - keep], [1, -keep], steady, zi=[keep * steady[0]])
    return np.asarray(lagged, dtype=np.float64)


def _counters(life: GpuUsage, signs: Signs) -> dict[str, Column]:
    """Error counters; volatile ones restart when the driver is reloaded."""
    corrected = np.cumsum(life.corrected + signs.corrected)
    uncorrected = np.cumsum(signs.uncorrected)
    links = np.cumsum(life.link_retries + signs.link_errors)
    return {
        "ecc_corrected_errors": _since(corrected, life.reloaded),
        "ecc_uncorrected_errors": _since(uncorrected, life.reloaded),
        "ecc_corrected_errors_lifetime": corrected,
        "ecc_uncorrected_errors_lifetime": uncorrected,
        "remapped_rows_correctable": np.zeros(corrected.size, dtype=np.int64),
        "remapped_rows_uncorrectable": np.cumsum(signs.remapped),
        "pcie_replays": _since(np.cumsum(life.pcie_replays), life.reloaded),
        "nvlink_replays": _since(links, life.reloaded),
        "nvlink_recoveries": np.zeros(corrected.size, dtype=np.int64),
        "nvlink_crc_errors": _since(np.cumsum(signs.link_errors), life.reloaded),
    }


def _since(total: Column, reloaded: Bools) -> Column:
    """Running total since the driver was last loaded."""
    levels = np.where(reloaded, total, 0)
    return total - np.maximum.accumulate(levels)
