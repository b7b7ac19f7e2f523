"""Risk score of one GPU: weighted sum of six normalised factors. Pure: no clock, no NVML."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass, field, fields
from math import inf, isfinite, sqrt
from operator import mul

from rmetric._util.errors import require
from rmetric.telemetry.reading import Counters, Reading


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
            require(f"the weight of {name}", weight, 0 <= weight < inf, "at least 0")
        require("the sum of the weights", self.sum, self.sum > 0, "above 0")

    @property
    def sum(self) -> float:
        return float(sum(astuple(self)))


FACTORS = tuple(weight.name for weight in fields(RiskWeights))

#: Counters whose rise is an error, and the setting of how large a rise is a full one.
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

    Weights, interval, window and threshold are the original's, every setting below them is ours.

    Attributes:
        interval: seconds between readings, above 0.
        window: readings that are looked back on, at least 2; none of them is older than
            window x interval.
        threshold: score from which on a GPU is at risk, above 0, at most 1.
        release: share of the threshold below which it no longer is, 0 to 1.
        temperature_high: °C at which the factor is 1, for a GPU that does not report the
            temperature at which it slows down.
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
        scales = ("interval", "temperature_span", "power_full", "temperature_rise_full")
        for name in (*scales, *sorted(set(ERRORS.values()))):
            value = getattr(self, name)
            require(name, value, 0 < value < inf, "above 0")
        for name, least in (("window", 2), ("recent", 1), ("least_readings", 2)):
            number = getattr(self, name)
            require(name, number, type(number) is int and number >= least, f"an int from {least}")
        require("threshold", self.threshold, 0 < self.threshold <= 1, "above 0 and at most 1")
        require("release", self.release, 0 <= self.release <= 1, "from 0 to 1")
        require("memory_low", self.memory_low, 0 <= self.memory_low < 1, "from 0 to below 1")
        percent = self.least_utilisation
        require("least_utilisation", percent, 0 <= percent <= 100, "from 0 to 100 percent")
        celsius = self.temperature_high
        require("temperature_high", celsius, isfinite(celsius), "a finite number of °C")
        if max(self.least_readings, self.recent + 1) > self.window:
            raise ValueError(
                f"least_readings is {self.least_readings} and recent {self.recent}: the "
                f"window of {self.window} readings must hold the first, and more than the second"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Score after one reading.

    Attributes:
        value: 0 to 1; None while no factor is known.
        reachable: the most that the known factors could give, 0 to 1.
        factors: by name, 0 to 1; None for one unknown.
        measured: what each factor was made of: °C, share of memory, errors as shares of a full
            rise, standard deviation of power over its mean, share of utilisation lost, °C per
            minute; None where unknown.
    """

    value: float | None
    reachable: float
    factors: dict[str, float | None]
    measured: dict[str, float | None]


class RiskScore:
    """Online risk score of one GPU: `update(reading)` returns its `Risk`.

    risk = Σ weight · factor / Σ weight, over all six factors, each clipped to 0 to 1:

        temperature       (T - (limit - span)) / span
        memory            (used / total - low) / (1 - low)
        errors            Σ rise of a counter in the window / its full rise
        power             (standard deviation / mean) over the window / full
        utilisation_drop  1 - mean of the recent readings / mean of those before
        temperature_rise  slope of a line through the window's temperatures / full

    An unknown factor adds nothing, and its weight is left out of `reachable`: a GPU that
    reports no errors can reach 0.75, below the default threshold.

    >>> score = RiskScore(RiskConfig())
    >>> risk = score.update(Reading(gpu=0, time=0.0, temperature_celsius=85.0))
    >>> risk.value, risk.reachable, risk.factors["errors"]
    (0.1875, 0.25, None)

    Source: the proactive fault-tolerance system for Megatron-LM, for weights, interval,
    window and threshold. Weaknesses: one fatal sign alone gives 0.25 at most; a cold start is a
    rise, the end of a job a drop; 0.95 needs nearly all six at their worst at the same time.
    """

    def __init__(self, config: RiskConfig | None = None) -> None:
        self.config = config or RiskConfig()
        self._weights = dict(zip(FACTORS, astuple(self.config.weights), strict=True))
        self._sum = self.config.weights.sum
        self._temperature, self._power = _Window(self.config), _Window(self.config)
        self._utilisation, self._errors = _Window(self.config), _Window(self.config)
        self._counters = Counters()

    def update(self, reading: Reading) -> Risk:
        """Take the next reading, in the order of their times."""
        config = self.config
        temperature = _known(reading.temperature_celsius)
        self._temperature.add(reading.time, temperature)
        self._power.add(reading.time, _known(reading.power_watts))
        self._utilisation.add(reading.time, _known(reading.utilisation_percent))
        rises = (  # each as a share of a full one
            self._counters.rise(reading, name) / getattr(config, full)
            for name, full in ERRORS.items()
        )
        self._errors.add(reading.time, sum(rises))
        counts = any(getattr(reading, counter) is not None for counter in ERRORS)
        low = self.limit(reading) - config.temperature_span
        scaled = {  # what is measured, where its factor is 0, and how far above that it is 1
            "temperature": (temperature, low, config.temperature_span),
            "memory": (reading.memory_occupancy, config.memory_low, 1 - config.memory_low),
            "errors": (sum(self._errors.values) if counts else None, 0.0, 1.0),
            "power": (self._fluctuation(), 0.0, config.power_full),
            "utilisation_drop": (self._drop(), 0.0, 1.0),
            "temperature_rise": (self._rise(), 0.0, config.temperature_rise_full),
        }
        measured = {name: value for name, (value, *_) in scaled.items()}
        factors = {name: _scaled(*each) for name, each in scaled.items()}
        known = {name: value for name, value in factors.items() if value is not None}
        total = sum(self._weights[name] * value for name, value in known.items())
        most = sum(self._weights[name] for name in known)
        # A sum of weights in another order may differ in its last digit.
        value = min(1.0, total / self._sum) if known else None
        reachable = min(1.0, most / self._sum)
        return Risk(value=value, reachable=reachable, factors=factors, measured=measured)

    def limit(self, reading: Reading) -> float:
        """°C at which the temperature factor is 1."""
        limit = _known(reading.slowdown_temperature_celsius)
        return self.config.temperature_high if limit is None else limit

    def _fluctuation(self) -> float | None:
        if not self._power.enough:
            return None
        mean, off = _centred(self._power.values)
        return sqrt(_product(off, off) / len(off)) / mean if mean > 0 else 0.0

    def _drop(self) -> float | None:
        recent, values = self.config.recent, list(self._utilisation.values)
        if not self._utilisation.enough or len(values) <= recent:
            return None
        before = sum(values[:-recent]) / (len(values) - recent)
        if before < self.config.least_utilisation:
            return 0.0
        return max(0.0, 1 - sum(values[-recent:]) / recent / before)

    def _rise(self) -> float | None:
        if not self._temperature.enough:
            return None
        # Both are centred: a constant temperature has a slope of 0 and not of rounding errors.
        _, times = _centred(self._temperature.times)
        _, celsius = _centred(self._temperature.values)
        spread = _product(times, times)
        return 60 * _product(times, celsius) / spread if spread > 0 else None


class _Window:
    """Known values of the last `config.window` readings and their times."""

    def __init__(self, config: RiskConfig) -> None:
        self._seconds = config.window * config.interval
        self._least = config.least_readings
        self.times: deque[float] = deque(maxlen=config.window)
        self.values: deque[float] = deque(maxlen=config.window)
        self.enough = False  # the last value is known, and there are `config.least_readings`

    def add(self, time: float, value: float | None) -> None:
        if value is not None:
            self.times.append(time)
            self.values.append(value)
        while self.times and self.times[0] <= time - self._seconds:
            self.times.popleft()
            self.values.popleft()
        self.enough = value is not None and len(self.values) >= self._least


def _centred(values: deque[float]) -> tuple[float, list[float]]:
    mean = sum(values) / len(values)
    return mean, [value - mean for value in values]


def _product(first: list[float], other: list[float]) -> float:
    return float(sum(map(mul, first, other)))


def _known(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else value


def _scaled(value: float | None, low: float, span: float) -> float | None:
    return None if value is None else min(1.0, max(0.0, (value - low) / span))
