"""Sampled usage of a healthy GPU in a large training job.

Rates of stops are published (see `published`). All other parameters are set by hand, from
how such jobs are run, and are defined in `JobConditions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies.fleet import published

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

STEP_SECONDS = 10.0
DAY = 86_400.0
HOUR = 3_600.0


@dataclass(frozen=True, kw_only=True)
class JobConditions:
    """Operating conditions of a job; rates per GPU-day, durations in seconds, set by hand.

    Attributes:
        stops_per_day: the whole job stops, because something in it failed. Published.
        software_share: of the stops, those in which this GPU reports an Xid of the
            application with `xid_share`. The share is published.
        idles_per_day: between jobs; half of them with a new driver, whose counters begin at 0.
        weak_share: of GPUs with a memory cell that is corrected now and then.
        corrected_per_day, weak_corrected_per_day: corrected ECC errors.
        hot_share: of GPUs in a hot rack, by `hot_celsius`.
        airflow_per_day: a fan wall, a door, a neighbour: some degrees for an hour or three.
    """

    stops_per_day: float = published.STOPS_PER_DAY
    software_share: float = published.SOFTWARE_SHARE
    xid_share: float = 0.3
    stop_median: float = 420.0
    idles_per_day: float = 0.2
    checkpoint_intervals: tuple[float, ...] = (900.0, 1800.0, 3600.0)
    evaluations_per_day: float = 4.0
    slow_loading_per_day: float = 0.5
    weak_share: float = 0.04
    corrected_per_day: float = 0.005
    weak_corrected_per_day: float = 2.0
    link_retries_per_day: float = 0.5
    pcie_replays_per_day: float = 1.0
    hot_share: float = 0.1
    hot_celsius: float = 7.0
    airflow_per_day: float = 0.2


@dataclass(kw_only=True)
class GpuUsage:
    """Usage of one GPU before the physical model; arrays of one value per reading, shape (T,).

    Attributes:
        work: share of full load, 0 while the GPU is idle.
        utilisation: percent, before noise.
        memory: share of the memory held.
        ambient: degrees above the room's set point.
        corrected: new corrected ECC errors at each reading.
        link_retries: new link retries at each reading.
        pcie_replays: new PCIe replays at each reading.
        reloaded: readings at which the driver was reloaded.
        unread: readings that failed, because the driver was away.
        xids: reading and number of each Xid of the application.
    """

    work: Floats
    utilisation: Floats
    memory: Floats
    ambient: Floats
    corrected: Ints
    link_retries: Ints
    pcie_replays: Ints
    reloaded: Bools
    unread: Bools
    xids: list[tuple[int, int]] = field(default_factory=list)

    def stand_still(self, first: int, last: int, memory: float = 0.01) -> None:
        """Make the GPU idle from reading `first` to before `last`."""
        self.work[first:last] = self.utilisation[first:last] = 0.0
        self.memory[first:last] = memory


def sample_usage(rng: np.random.Generator, num_readings: int, job: JobConditions) -> GpuUsage:
    """The usage of one GPU in so many readings, one every `STEP_SECONDS`."""
    days = num_readings * STEP_SECONDS / DAY
    life = _loaded(rng, num_readings)
    life.ambient += _surroundings(rng, num_readings, days, job)
    weak = rng.random() < job.weak_share
    corrected = job.weak_corrected_per_day if weak else job.corrected_per_day
    life.corrected += _counts(rng, num_readings, corrected)
    life.link_retries += _counts(rng, num_readings, job.link_retries_per_day)
    life.pcie_replays += _counts(rng, num_readings, job.pcie_replays_per_day)
    _pauses(rng, life, days, job)
    _stops(rng, life, days, job)
    return life


def _loaded(rng: np.random.Generator, num_readings: int) -> GpuUsage:
    """Periods of training, a few hours each, with different loads."""
    ends = np.cumsum(rng.exponential(3 * HOUR, size=2 + num_readings // 60) / STEP_SECONDS)
    stretch = np.searchsorted(ends, np.arange(num_readings))
    work = rng.uniform(0.84, 1.0, size=ends.size)[stretch]
    utilisation = rng.uniform(94.0, 100.0, size=ends.size)[stretch]
    still = {"memory": rng.uniform(0.8, 0.95), "ambient": 0.0}
    still |= dict.fromkeys(("corrected", "link_retries", "pcie_replays"), 0)
    still |= dict.fromkeys(("reloaded", "unread"), False)
    arrays: dict[str, Any] = {name: np.full(num_readings, x) for name, x in still.items()}
    return GpuUsage(work=work, utilisation=utilisation, **arrays)


def _surroundings(rng: np.random.Generator, num: int, days: float, job: JobConditions) -> Floats:
    """Ambient temperature: rack, time of day, weather and disturbed airflow."""
    hours = np.arange(num) * STEP_SECONDS / HOUR
    rack = rng.normal(0.0, 2.0) + job.hot_celsius * (rng.random() < job.hot_share)
    degrees = rack + 1.5 * np.sin(2 * np.pi * (hours / 24 + rng.random()))
    degrees += rng.normal(0.0, 1.5) * np.sin(2 * np.pi * (hours / 120 + rng.random()))
    for first, last in _spells(rng, num, job.airflow_per_day * days, HOUR, 3 * HOUR):
        ramp = np.minimum(1.0, np.minimum(np.arange(last - first), np.arange(last - first)[::-1])
                          / (600 / STEP_SECONDS))  # fmt: skip
        degrees[first:last] += rng.uniform(3.0, 7.0) * ramp
    return degrees


def _pauses(rng: np.random.Generator, life: GpuUsage, days: float, job: JobConditions) -> None:
    """Add checkpoints, evaluations and slow data loading."""
    num = life.work.size
    for first, last in _spells(rng, num, job.slow_loading_per_day * days, 300.0, HOUR):
        life.utilisation[first:last] = rng.uniform(50.0, 90.0, size=last - first)
        life.work[first:last] *= life.utilisation[first:last] / 100
    for first, last in _spells(rng, num, job.evaluations_per_day * days, 60.0, 300.0):
        life.utilisation[first:last] = rng.uniform(60.0, 95.0)
        life.work[first:last] *= 0.7
    every = int(rng.choice(job.checkpoint_intervals) / STEP_SECONDS)
    for first in range(int(rng.integers(every)), num, every):
        last = first + int(rng.integers(1, 10))
        life.utilisation[first:last] = rng.uniform(0.0, 30.0)
        life.work[first:last] *= 0.15


def _stops(rng: np.random.Generator, life: GpuUsage, days: float, job: JobConditions) -> None:
    num = life.work.size
    for first in rng.integers(num, size=rng.poisson(job.stops_per_day * days)):
        seconds = job.stop_median * np.exp(0.6 * rng.standard_normal())
        life.stand_still(int(first), int(first + seconds / STEP_SECONDS) + 1)
        if rng.random() < job.software_share * job.xid_share:
            number = int(rng.choice([13, 31, 43]))
            life.xids += [(int(first), number)] * int(rng.integers(1, 4))
    for first, last in _spells(rng, num, job.idles_per_day * days, HOUR / 2, 6 * HOUR):
        life.stand_still(first, last, memory=0.005)
        if rng.random() < 0.5:
            life.reloaded[(first + last) // 2] = True
            life.unread[(first + last) // 2 - 3 : (first + last) // 2] = True


def _spells(
    rng: np.random.Generator, num: int, expected: float, shortest: float, longest: float
) -> list[tuple[int, int]]:
    """Random periods: first reading, and the one after the last."""
    firsts = rng.integers(num, size=rng.poisson(expected))
    lengths = rng.uniform(shortest, longest, size=firsts.size) / STEP_SECONDS
    return [
        (int(first), min(num, int(first + length) + 1))
        for first, length in zip(firsts, lengths, strict=True)
    ]


def _counts(rng: np.random.Generator, num: int, per_day: float) -> Ints:
    return rng.poisson(per_day * STEP_SECONDS / DAY, size=num)
