"""Sampled usage of a GPU in a large training job, and its failures with their signs.

Rates of stops and of the causes of failures are published (see `published`). All else, such as the
mixtures within a cause, the lead time of a sign and its strength, is set by hand. The caller
requests a failure with or without a sign, so that this share is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        corrected, link_retries, pcie_replays: new ones at each reading.
        reloaded, unread: the driver was reloaded; was away, so that the reading failed.
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


# -- failures and their precursors

#: Mixture of the signs by cause, by hand; cause as in `published.INTERRUPTIONS`.
SIGNS_OF: Mapping[str, Mapping[str, float]] = {
    "gpu": {"link": 0.35, "clocks": 0.25, "contained": 0.15, "heat": 0.15, "corrected": 0.1},
    "hbm": {"corrected": 0.5, "contained": 0.5},
    "sram": {"corrected": 0.5, "contained": 0.5},
    "gsp": {"clocks": 1.0},
    "thermal": {"heat": 1.0},
}
#: Mixture of the ends by cause, by hand: an Xid, or that the GPU only stands still.
ENDS_OF: Mapping[str, Mapping[str, float]] = {
    "gpu": {"79": 0.45, "74": 0.25, "48": 0.1, "silent": 0.2},
    "hbm": {"48": 0.4, "95": 0.3, "64": 0.3},
    "sram": {"48": 0.6, "95": 0.4},
    "gsp": {"119": 1.0},
    "thermal": {"79": 0.5, "silent": 0.5},
}
UNCORRECTABLE = ("48", "64", "95")
#: Hours from the first sign to the failure: median of a log-normal law, by hand.
MEDIAN_LEAD_HOURS = {"corrected": 8.0, "contained": 6.0, "link": 3.0, "heat": 2.0, "clocks": 1.0}
LEAD_SPREAD = 1.2  # standard deviation of the logarithm


@dataclass(frozen=True, kw_only=True)
class GpuFailure:
    """Ground truth of one simulated GPU failure.

    Attributes:
        end: final Xid, or ``silent``.
        reading: at which the GPU failed.
        sign: kind of precursor; empty for none.
        sign_reading: at which it began; below 0 if before the history.
    """

    cause: str
    end: str
    reading: int
    sign: str = ""
    sign_reading: int = 0


@dataclass(kw_only=True)
class Signs:
    """Effects of a failure on each reading, shape (T,); neutral for a healthy GPU.

    Attributes:
        heat: additional degrees at full load due to weaker cooling.
        clock: share of the clock left.
        slowed: the driver reports a hardware slowdown.
        corrected, uncorrected, link_errors, remapped: new ones at each reading.
        remap_pending, remap_failed, lost, spinning: states; lost no longer responds,
            spinning waits for ever for another GPU.
        xids: reading and number.
    """

    heat: Floats
    clock: Floats
    slowed: Bools
    corrected: Ints
    uncorrected: Ints
    link_errors: Ints
    remapped: Ints
    remap_pending: Bools
    remap_failed: Bools
    lost: Bools
    spinning: Bools
    xids: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def none(cls, num: int) -> Signs:
        counts = ("corrected", "uncorrected", "link_errors", "remapped")
        states = ("slowed", "remap_pending", "remap_failed", "lost", "spinning")
        neutral = {"heat": 0.0, "clock": 1.0}
        neutral |= dict.fromkeys(counts, 0) | dict.fromkeys(states, False)
        arrays: dict[str, Any] = {name: np.full(num, value) for name, value in neutral.items()}
        return cls(**arrays)


def fail(
    rng: np.random.Generator, life: GpuUsage, cause: str, reading: int, with_sign: bool
) -> tuple[Signs, GpuFailure]:
    """Let the GPU fail at `reading`, with or without a sign before it."""
    signs, sign, begun = Signs.none(life.work.size), "", 0
    if with_sign:
        sign = _drawn(rng, SIGNS_OF[cause])
        lead = MEDIAN_LEAD_HOURS[sign] * HOUR * np.exp(LEAD_SPREAD * rng.standard_normal())
        begun = reading - max(1, round(float(lead) / STEP_SECONDS))
        _SIGNS[sign](rng, life, signs, begun, reading)
    end = _drawn(rng, ENDS_OF[cause])
    _end(life, signs, end, reading)
    return signs, GpuFailure(cause=cause, end=end, reading=reading, sign=sign, sign_reading=begun)


def contain(rng: np.random.Generator, life: GpuUsage, reading: int, until: int) -> Signs:
    """An uncorrectable error that is contained; its row is remapped at `until`."""
    signs = Signs.none(life.work.size)
    _contained_once(rng, life, signs, reading)
    signs.remap_pending[reading:until] = True
    signs.remapped[until:] += np.arange(life.work.size - until) == 0
    return signs


def _drawn(rng: np.random.Generator, mixture: Mapping[str, float]) -> str:
    return str(rng.choice(list(mixture), p=list(mixture.values())))


def _age(begun: int, reading: int) -> tuple[slice, Floats]:
    """Readings from the start of a sign to the failure, and their progress, 0 to 1."""
    first = max(0, begun)
    return slice(first, reading), (np.arange(first, reading) - begun) / (reading - begun)


def _corrected(
    rng: np.random.Generator, life: GpuUsage, signs: Signs, begun: int, reading: int
) -> None:
    """Corrected errors come ever faster: from one in two hours to seventy in one."""
    span, age = _age(begun, reading)
    signs.corrected[span] += rng.poisson(0.5 * np.exp(5 * age) * STEP_SECONDS / HOUR)
    signs.corrected[span.start] += 1


def _contained(
    rng: np.random.Generator, life: GpuUsage, signs: Signs, begun: int, reading: int
) -> None:
    """Contained errors with a pending reset that is not carried out."""
    first = max(0, begun)
    again = rng.integers(first, reading, size=rng.poisson(1.0))
    for at in [first, *map(int, again)]:
        _contained_once(rng, life, signs, at)
    signs.remap_pending[first:reading] = True


def _contained_once(rng: np.random.Generator, life: GpuUsage, signs: Signs, reading: int) -> None:
    signs.uncorrected[reading] += 1
    signs.xids += [(reading, 94), (reading, 63)]
    life.stand_still(reading, reading + int(rng.integers(12, 60)))


def _heat(rng: np.random.Generator, life: GpuUsage, signs: Signs, begun: int, reading: int) -> None:
    """Cooling is lost bit by bit, by 6 to 30 degrees at full load."""
    span, age = _age(begun, reading)
    signs.heat[span] = rng.uniform(6.0, 30.0) * age


def _link(rng: np.random.Generator, life: GpuUsage, signs: Signs, begun: int, reading: int) -> None:
    """Errors on NVLink in bursts: from two in an hour to fifteen."""
    span, age = _age(begun, reading)
    bursts = rng.poisson(2.0 * np.exp(2 * age) * STEP_SECONDS / HOUR)
    signs.link_errors[span] += bursts * rng.integers(1, 50, size=bursts.size)
    signs.link_errors[span.start] += 1


def _clocks(
    rng: np.random.Generator, life: GpuUsage, signs: Signs, begun: int, reading: int
) -> None:
    """Slowdowns for minutes at a time, which the driver does not always report."""
    span, age = _age(begun, reading)
    turns = np.cumsum(rng.exponential(30, size=2 + age.size // 5))
    slow = np.searchsorted(turns, np.arange(age.size)) % 2 == 0
    signs.clock[span] = np.where(slow, rng.uniform(0.5, 0.85), 1.0)
    signs.slowed[span] = slow & (rng.random() < 0.6)


_SIGNS: dict[str, Callable[[np.random.Generator, GpuUsage, Signs, int, int], None]] = {
    "corrected": _corrected,
    "contained": _contained,
    "heat": _heat,
    "link": _link,
    "clocks": _clocks,
}


def _end(life: GpuUsage, signs: Signs, end: str, reading: int) -> None:
    life.stand_still(reading, life.work.size)
    if end == "silent":
        signs.spinning[reading:] = True
        return
    signs.xids.append((reading, int(end)))
    if end in UNCORRECTABLE:
        signs.uncorrected[reading] += 1
    if end == "64":
        signs.remap_failed[reading:] = True
    signs.lost[reading:] = end == "79"
