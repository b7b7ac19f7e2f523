"""Settings of the risk score: which are the original's, and which are ours."""

from __future__ import annotations

import warnings
from dataclasses import astuple, dataclass, field, fields
from math import inf, isfinite


@dataclass(frozen=True, kw_only=True)
class RiskWeights:
    """Weights of the factors, at least 0 each; the score divides them by their sum."""

    temperature: float = 0.25
    memory: float = 0.15
    errors: float = 0.25
    power: float = 0.10
    utilisation_drop: float = 0.15
    temperature_rise: float = 0.10

    def __post_init__(self) -> None:
        for name, weight in zip(FACTORS, astuple(self), strict=True):
            if not 0 <= weight < inf:
                raise ValueError(f"the weight of {name} is {weight}: it must be at least 0")
        if not self.sum > 0:
            raise ValueError("all weights are 0: at least one must be above 0")
        if abs(self.sum - 1) > 1e-6:
            message = f"the weights sum to {self.sum:g}, not 1: each is divided by that"
            warnings.warn(message, stacklevel=3)

    @property
    def sum(self) -> float:
        return float(sum(astuple(self)))


FACTORS = tuple(weight.name for weight in fields(RiskWeights))

#: Counters whose rise is an error, and the setting that says how large a rise is a full one.
ERRORS = {
    "ecc_corrected_errors": "corrected_errors_full",
    "ecc_uncorrected_errors": "uncorrected_errors_full",
    "remapped_rows_correctable": "remapped_rows_full",
    "remapped_rows_uncorrectable": "remapped_rows_full",
    "retired_pages": "remapped_rows_full",
    "pcie_replays": "link_errors_full",
    "nvlink_replays": "link_errors_full",
    "nvlink_recoveries": "link_errors_full",
    "nvlink_crc_errors": "link_errors_full",
}


@dataclass(frozen=True, kw_only=True)
class RiskConfig:
    """Settings of `RiskScore`.

    Weights, interval, window and threshold are the original's. How the factors are
    normalised it does not say: every setting below them is ours.

    Attributes:
        weights: of the factors, see `RiskWeights`.
        interval: seconds between readings, above 0.
        window: readings that are looked back on, at least 2; none of them is older than
            window x interval.
        threshold: score from which on a GPU is at risk, above 0, at most 1.
        release: share of the threshold below which it no longer is, 0 to 1.
        temperature_high: °C at which the factor is 1, where the GPU does not tell at
            what temperature it slows down.
        temperature_span: °C below that at which the factor is 0.
        memory_low: share of the memory in use at which the factor is 0; it is 1 at 1.
        corrected_errors_full, uncorrected_errors_full, remapped_rows_full,
        link_errors_full: rise within the window that alone makes the factor 1, above 0.
        power_full: standard deviation of power over its mean that makes the factor 1.
        recent: readings, at least 1, whose mean utilisation is set against the mean of
            those before them in the window.
        least_utilisation: percent below which there is nothing to drop.
        temperature_rise_full: °C per minute that make the factor 1.
        least_readings: in the window before power, drop and rise are known.
    """

    weights: RiskWeights = field(default_factory=RiskWeights)
    interval: float = 10.0
    window: int = 60
    threshold: float = 0.95
    release: float = 0.9
    temperature_high: float = 90.0
    temperature_span: float = 20.0
    memory_low: float = 0.95
    corrected_errors_full: float = 100.0
    uncorrected_errors_full: float = 1.0
    remapped_rows_full: float = 1.0
    link_errors_full: float = 1000.0
    power_full: float = 0.5
    recent: int = 6
    least_utilisation: float = 10.0
    temperature_rise_full: float = 2.0
    least_readings: int = 12

    def __post_init__(self) -> None:
        _above_zero(self, "interval", "temperature_span", "power_full", "temperature_rise_full")
        _above_zero(self, *sorted(set(ERRORS.values())))
        _counts(self, window=2, recent=1, least_readings=2)
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}: it must be above 0 and at most 1")
        if not 0 <= self.release <= 1:
            raise ValueError(f"release is {self.release}: it must be from 0 to 1")
        if not 0 <= self.memory_low < 1:
            raise ValueError(f"memory_low is {self.memory_low}: it must be from 0 to below 1")
        if not 0 <= self.least_utilisation <= 100:
            raise ValueError(f"least_utilisation is {self.least_utilisation}: 0 to 100 percent")
        if not isfinite(self.temperature_high):
            raise ValueError(f"temperature_high is {self.temperature_high}: a finite number of °C")
        if max(self.least_readings, self.recent + 1) > self.window:
            raise ValueError(
                f"least_readings is {self.least_readings} and recent {self.recent}: the "
                f"window of {self.window} readings must hold the first, and more than the second"
            )


def _above_zero(config: RiskConfig, *names: str) -> None:
    for name in names:
        if not 0 < getattr(config, name) < inf:
            raise ValueError(f"{name} is {getattr(config, name)!r}: it must be above 0")


def _counts(config: RiskConfig, **least: int) -> None:
    for name, smallest in least.items():
        value = getattr(config, name)
        if type(value) is not int or value < smallest:
            raise ValueError(f"{name} is {value!r}: an int of at least {smallest} is needed")
