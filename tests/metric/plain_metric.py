"""The R-Metric in its plainest form: everything is recomputed from the whole past.

Exact rational arithmetic, no state but lists; far too slow to use, easy to check.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf, isfinite, nan

from rmetric.metric import RMetricConfig
from rmetric.records import Record


class PlainMetric:
    def __init__(self, config: RMetricConfig) -> None:
        self.config = config
        self.event_times: list[float] = []
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.has_variance = False  # another source than one norm over time stated it
        self.past: list[list[float]] = [[], [], []]  # all values of each signal
        self.raw = [nan, nan, nan]
        self.normalised = [0.0, 0.0, 0.0]

    def update(self, record: Record) -> PlainMetric:
        signals = (self.rate(record), self.variance(record), self.drift(record))
        for i, value in enumerate(signals):
            if value is not None:
                self.past[i].append(value)
                self.raw[i] = value
                self.normalised[i] = min_max(self.past[i], self.config.component_window)
        return self

    @property
    def score(self) -> float:
        return sum(w * n for w, n in zip(self.config.weights, self.normalised, strict=True))

    def rate(self, record: Record) -> float | None:
        if record.events is None or record.time is None:
            return record.failure_rate
        self.event_times += [
            event.time for event in record.events if not event.kind.startswith("application_")
        ]
        times = [0.0, *self.event_times][-self.config.event_window - 1 :]
        hours = (Fraction(record.time) - Fraction(times[0])) / 3600
        return float((len(times) - 1) / hours) if hours > 0 else nan

    def variance(self, record: Record) -> float | None:
        if record.worker_gradient_norms is not None:
            self.has_variance = True
            return population_variance(record.worker_gradient_norms)
        if record.gradient_variance is not None:
            self.has_variance = True
            return record.gradient_variance
        if record.gradient_norm is None or self.has_variance:
            return None
        if not isfinite(record.gradient_norm):
            return inf
        self.norms.append(record.gradient_norm)
        return population_variance(self.norms[-self.config.norm_window :])

    def drift(self, record: Record) -> float | None:
        loss = getattr(record, self.config.loss)
        if loss is None:
            return record.loss_drift
        if not isfinite(loss):
            return inf
        first = self.config.variant == "authors_simulator"
        past = self.losses[:1] if first else self.losses[-self.config.loss_window :]
        before = [Fraction(loss) for loss in past]
        self.losses.append(loss)
        if self.config.variant == "authors_monitor" and len(before) < 2:
            return 0.0
        drift = float(loss - sum(before) / len(before)) if before else nan
        return abs(drift) if self.config.absolute_loss_drift else drift


def population_variance(norms) -> float:
    if not all(isfinite(norm) for norm in norms):
        return inf
    if len(norms) < 2:
        return nan
    exact = [Fraction(norm) for norm in norms]
    mean = sum(exact) / len(exact)
    return float(sum((norm - mean) ** 2 for norm in exact) / len(exact))


def min_max(past: list[float], window: int) -> float:
    """The last of `past` between the extremes of its last `window` finite values."""
    if not isfinite(past[-1]):
        return 1.0 if past[-1] == inf else 0.0
    recent = [Fraction(value) for value in past if isfinite(value)][-window:]
    low, high = min(recent), max(recent)
    return 0.0 if low == high else float((recent[-1] - low) / (high - low))
