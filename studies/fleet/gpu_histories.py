"""Histories of GPUs' telemetry: from a life and what is wrong to readings every 10 seconds.

The physics is small: power follows the work and the clock, temperature follows power with a
lag of a minute, and a GPU that gets too hot slows down. Constants are those of an H100 SXM
where its data sheet states them (700 W, 80 GB, 1980 MHz), else by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.telemetry.reading import Reading, Sign
from rmetric.telemetry.xid import xid_kind
from studies.fleet.gpu_failures import Failure, Signs, contain, fail
from studies.fleet.job_life import DAY, HOUR, STEP_SECONDS, Bools, Floats, JobLife, Life, live

SLOWDOWN_CELSIUS, ROOM_CELSIUS = 89.0, 27.0
IDLE_WATTS, LIMIT_WATTS = 75.0, 700.0
MOST_MHZ, MEMORY_MHZ = 1980.0, 2619.0
MEMORY_BYTES = 80 * 1024**3
LAG_SECONDS = 60.0

#: A failure's history: what is looked at before it, an hour to warm up, and a while after.
BEFORE_SECONDS, WARM_UP_SECONDS, AFTER_SECONDS = DAY, HOUR, 300.0

Column = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class History:
    """What one GPU told, as arrays of one value a reading, shape (T,).

    Attributes:
        times: seconds.
        columns: the fields of `Reading` that change, by their names.
        throttles: whether each reason held, by its word.
        told: whether there is a reading at all; False while the driver is away.
        lost: whether the GPU no longer answers.
        reloaded: whether the driver is new at this reading.
        xids: time and number of each, in order.
        failure: what happened in truth; None for a GPU that stays healthy.
    """

    gpu: int
    times: Floats
    columns: dict[str, Column]
    throttles: dict[str, Bools]
    told: Bools
    lost: Bools
    reloaded: Bools
    xids: tuple[tuple[float, int], ...]
    failure: Failure | None = None

    @property
    def days(self) -> float:
        return self.times.size * STEP_SECONDS / DAY

    def reading(self, index: int) -> Reading | None:
        """The reading at `index`; None where there is none."""
        if not self.told[index]:
            return None
        values = {name: column[index].item() for name, column in self.columns.items()}
        reasons = frozenset(word for word, held in self.throttles.items() if held[index])
        return Reading(
            gpu=self.gpu, time=float(self.times[index]), throttle_reasons=reasons,
            slowdown_temperature_celsius=SLOWDOWN_CELSIUS, power_limit_watts=LIMIT_WATTS,
            memory_total_bytes=MEMORY_BYTES, sm_clock_max_mhz=MOST_MHZ,
            memory_clock_mhz=MEMORY_MHZ, memory_clock_max_mhz=MEMORY_MHZ, **values,
        )  # fmt: skip

    def heard(self) -> Iterator[Reading | Sign]:
        """What a watcher would have heard, in order: readings, and signs between them."""
        xids = deque(self.xids)
        for index, time in enumerate(self.times.tolist()):
            if self.reloaded[index]:
                yield Sign(gpu=self.gpu, time=time, kind="driver_loaded")
            reading = self.reading(index)
            if reading is not None:
                yield reading
            while xids and xids[0][0] <= time:
                yield Sign(gpu=self.gpu, time=time, kind=xid_kind(xids.popleft()[1]))
            if self.lost[index] and not self.lost[index - 1]:
                yield Sign(gpu=self.gpu, time=time, kind="gpu_lost")


def healthy(rng: np.random.Generator, *, gpu: int, days: float, job: JobLife) -> History:
    """A GPU that does not fail."""
    life = live(rng, _readings(days * DAY), job)
    return _history(rng, gpu, life, Signs.none(life.work.size))


def contained(rng: np.random.Generator, *, gpu: int, job: JobLife) -> History:
    """Two days with an uncorrectable error that is contained and comes to nothing."""
    life = live(rng, _readings(2 * DAY), job)
    at = _readings(DAY)
    until = at + int(rng.integers(_readings(HOUR), _readings(DAY)))
    return _history(rng, gpu, life, contain(rng, life, at, until))


def failing(
    rng: np.random.Generator,
    *,
    gpu: int,
    cause: str,
    with_sign: bool,
    job: JobLife,
    before: float = WARM_UP_SECONDS + BEFORE_SECONDS,
) -> History:
    """The time before a failure, in seconds, and the minutes after it."""
    at = _readings(before)
    life = live(rng, at + _readings(AFTER_SECONDS), job)
    signs, failure = fail(rng, life, cause, at, with_sign)
    return _history(rng, gpu, life, signs, failure)


def _readings(seconds: float) -> int:
    return round(seconds / STEP_SECONDS)


def _history(
    rng: np.random.Generator, gpu: int, life: Life, signs: Signs, failure: Failure | None = None
) -> History:
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
    return History(
        gpu=gpu,
        times=np.arange(num, dtype=np.float64) * STEP_SECONDS,
        columns=columns,
        throttles={
            "software_power_cap": power > 0.97 * LIMIT_WATTS,
            "hardware_slowdown": signs.slowed | hot,
            "hardware_thermal": hot,
        },
        told=~(life.unread | signs.lost),
        lost=signs.lost,
        reloaded=life.reloaded,
        xids=tuple(
            (reading * STEP_SECONDS, number) for reading, number in sorted(life.xids + signs.xids)
        ),
        failure=failure,
    )


def _slowed_by_heat(life: Life, signs: Signs) -> Floats:
    """The clock that is left; a GPU in too hot a place throttles by as much as it must."""
    steady = ROOM_CELSIUS + life.ambient + signs.heat + _KELVIN_PER_WATT * LIMIT_WATTS * life.work
    too_hot = np.maximum(0.0, steady - (SLOWDOWN_CELSIUS + 2.0))
    return signs.clock * np.maximum(0.4, 1.0 - too_hot / (_KELVIN_PER_WATT * LIMIT_WATTS))


_KELVIN_PER_WATT = 0.06


def _power(rng: np.random.Generator, life: Life, signs: Signs, clock: Floats) -> Floats:
    watts = IDLE_WATTS + (0.97 * LIMIT_WATTS - IDLE_WATTS) * life.work * clock
    watts[signs.spinning] = 130.0
    noise = rng.normal(0.0, 1.0, watts.size) * np.where(life.work > 0, 14.0, 1.0)
    return np.clip(watts + noise, 50.0, 1.02 * LIMIT_WATTS)


def _temperature(life: Life, signs: Signs, power: Floats) -> Floats:
    """What the chip comes to, a minute behind."""
    from scipy.signal import lfilter  # takes a second to import

    load = power / LIMIT_WATTS
    steady = ROOM_CELSIUS + life.ambient + signs.heat * load + _KELVIN_PER_WATT * power
    keep = np.exp(-STEP_SECONDS / LAG_SECONDS)
    lagged, _ = lfilter([1 - keep], [1, -keep], steady, zi=[keep * steady[0]])
    return np.asarray(lagged, dtype=np.float64)


def _counters(life: Life, signs: Signs) -> dict[str, Column]:
    """Counters since the driver was loaded begin again with it; those over a life do not."""
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
    """A running total less what it was when the driver was last loaded."""
    levels = np.where(reloaded, total, 0)
    return total - np.maximum.accumulate(levels)
