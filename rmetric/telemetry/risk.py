"""Risk score of one GPU: weighted sum of six normalised factors. Pure: no clock, no NVML."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass
from math import isfinite, sqrt
from operator import mul

from rmetric.telemetry.changes import Counters
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk_config import ERRORS, FACTORS, RiskConfig, RiskWeights

__all__ = ["ERRORS", "FACTORS", "Risk", "RiskConfig", "RiskScore", "RiskWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Score after one reading.

    Attributes:
        value: 0 to 1; None while no factor is known.
        reachable: the most that the known factors could give, 0 to 1.
        factors: by name, 0 to 1; None for one unknown.
        measured: what each factor was made of: °C, share of memory, errors as shares of
            a full rise, standard deviation of power over its mean, share of utilisation
            lost, °C per minute; None where unknown.
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

    A factor that is unknown adds nothing, and its weight is left out of `reachable`: a
    GPU that tells no errors can reach 0.75, and whoever sets a threshold above that is
    told so instead of being left with a score that looks calm.

    Args:
        config: see `RiskConfig`.

    >>> score = RiskScore(RiskConfig())
    >>> risk = score.update(Reading(gpu=0, time=0.0, temperature_celsius=85.0))
    >>> risk.value, risk.reachable, risk.factors["errors"]
    (0.1875, 0.25, None)

    Source: the proactive fault-tolerance system for Megatron-LM, for weights, interval,
    window and threshold. Weaknesses: it is a sum, so one fatal sign alone gives 0.25 at
    most (see `rmetric.telemetry.rules`); a cold start is a rise, the end of a job a drop;
    0.95 needs nearly all six at their worst at the same time.
    """

    def __init__(self, config: RiskConfig | None = None) -> None:
        self.config = config or RiskConfig()
        self._weights = dict(zip(FACTORS, astuple(self.config.weights), strict=True))
        self._sum = self.config.weights.sum
        self._temperature, self._power = _Window(), _Window()
        self._utilisation, self._errors = _Window(), _Window()
        self._counters = Counters()

    def update(self, reading: Reading) -> Risk:
        """Take the next reading, in the order of their times."""
        config = self.config
        self._keep(self._temperature, reading.time, _known(reading.temperature_celsius))
        self._keep(self._power, reading.time, _known(reading.power_watts))
        self._keep(self._utilisation, reading.time, _known(reading.utilisation_percent))
        self._keep(self._errors, reading.time, self._new_errors(reading))
        measured = {
            "temperature": _known(reading.temperature_celsius),
            "memory": reading.memory_occupancy,
            "errors": self._measured_errors(reading),
            "power": self._fluctuation(reading),
            "utilisation_drop": self._drop(reading),
            "temperature_rise": self._rise(reading),
        }
        low = self.limit(reading) - config.temperature_span
        factors = {
            "temperature": _scaled(measured["temperature"], low, config.temperature_span),
            "memory": _scaled(measured["memory"], config.memory_low, 1 - config.memory_low),
            "errors": _scaled(measured["errors"], 0.0, 1.0),
            "power": _scaled(measured["power"], 0.0, config.power_full),
            "utilisation_drop": _scaled(measured["utilisation_drop"], 0.0, 1.0),
            "temperature_rise": _scaled(
                measured["temperature_rise"], 0.0, config.temperature_rise_full
            ),
        }
        return self._weighed(factors, measured)

    def limit(self, reading: Reading) -> float:
        """°C at which the temperature factor is 1."""
        limit = _known(reading.slowdown_temperature_celsius)
        return self.config.temperature_high if limit is None else limit

    def _weighed(self, factors: dict[str, float | None], measured: dict[str, float | None]) -> Risk:
        known = {name: value for name, value in factors.items() if value is not None}
        total = sum(self._weights[name] * value for name, value in known.items())
        most = sum(self._weights[name] for name in known)
        # A sum of weights in another order may differ in its last digit.
        value = min(1.0, total / self._sum) if known else None
        reachable = min(1.0, most / self._sum)
        return Risk(value=value, reachable=reachable, factors=factors, measured=measured)

    def _keep(self, past: _Window, time: float, value: float | None) -> None:
        """Add one value to a window and let go of what is out of it."""
        if value is not None:
            past.add(time, value)
        past.cut(time - self.config.window * self.config.interval, self.config.window)

    def _new_errors(self, reading: Reading) -> float:
        """Rises since the reading before, each as a share of a full one."""
        return sum(
            self._counters.rise(reading, counter) / getattr(self.config, full)
            for counter, full in ERRORS.items()
        )

    def _measured_errors(self, reading: Reading) -> float | None:
        if all(getattr(reading, counter) is None for counter in ERRORS):
            return None
        return sum(self._errors.values)

    def _fluctuation(self, reading: Reading) -> float | None:
        if not self._enough(self._power, reading.power_watts):
            return None
        mean, off = _centred(self._power.values)
        return sqrt(_product(off, off) / len(off)) / mean if mean > 0 else 0.0

    def _drop(self, reading: Reading) -> float | None:
        recent, values = self.config.recent, list(self._utilisation.values)
        if not self._enough(self._utilisation, reading.utilisation_percent):
            return None
        if len(values) <= recent:
            return None
        before = sum(values[:-recent]) / (len(values) - recent)
        if before < self.config.least_utilisation:
            return 0.0
        return max(0.0, 1 - sum(values[-recent:]) / recent / before)

    def _rise(self, reading: Reading) -> float | None:
        if not self._enough(self._temperature, reading.temperature_celsius):
            return None
        # Both are centred: a constant temperature has a slope of 0 and not of rounding errors.
        _, times = _centred(self._temperature.times)
        _, celsius = _centred(self._temperature.values)
        spread = _product(times, times)
        return 60 * _product(times, celsius) / spread if spread > 0 else None

    def _enough(self, past: _Window, now: float | None) -> bool:
        return _known(now) is not None and len(past.values) >= self.config.least_readings


class _Window:
    """Latest values and their times, as two rows for fast sums."""

    def __init__(self) -> None:
        self.times: deque[float] = deque()
        self.values: deque[float] = deque()

    def add(self, time: float, value: float) -> None:
        self.times.append(time)
        self.values.append(value)

    def cut(self, oldest: float, most: int) -> None:
        """Let go of what is as old as `oldest` or older, and of more than `most` values."""
        while self.times and (self.times[0] <= oldest or len(self.times) > most):
            self.times.popleft()
            self.values.popleft()


def _centred(values: deque[float]) -> tuple[float, list[float]]:
    """Mean, and the deviation of each value from it."""
    mean = sum(values) / len(values)
    return mean, [value - mean for value in values]


def _product(one: list[float], other: list[float]) -> float:
    return sum(map(mul, one, other))


def _known(value: float | None) -> float | None:
    """The value if it is finite, else None."""
    return None if value is None or not isfinite(value) else value


def _scaled(value: float | None, low: float, span: float) -> float | None:
    return None if value is None else min(1.0, max(0.0, (value - low) / span))
