"""Sampled GPU failures and their precursors, added to the usage of a healthy GPU.

The rate of each cause is published (see `published`). The mixtures within a cause, the lead
time of a sign and its strength are not published as far as we know and are set by hand
here. The caller requests a failure with or without a sign, so that this share is a
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from studies.fleet.gpu_usage import HOUR, STEP_SECONDS, Bools, Floats, GpuUsage, Ints

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
        cause: cause of the failure.
        end: final Xid, or ``silent``.
        reading: reading at which the GPU failed.
        sign: kind of precursor; empty for none.
        sign_reading: reading at which the sign began; below 0 if before the history.
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
    """An uncorrectable error that the hardware contains, without a failure after it.

    The application is restarted; the row is remapped at a reset, which comes at `until`.
    """
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
