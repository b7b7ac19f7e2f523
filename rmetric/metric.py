"""The R-Metric, online. Read this first.

    R = 0.10 n(λ) + 0.45 n(σ²) + 0.70 n(ΔL),    alert where R > 0.57

λ is the hardware failure rate (events per hour), σ² the variance of the
workers' gradient norms, ΔL the rise of the validation loss above its recent
mean (nats), and n a sliding min-max over each signal's own past.

Source: Fatima, "A Proactive Reliability Metric for Detecting Failures in
Language Model Training", EMNLP 2025 industry track, pages 2897-2913.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any, NamedTuple

from rmetric.normalisers import SlidingMinMax
from rmetric.records import Record
from rmetric.signals import FailureRate, LossDrift, TrailingGradientVariance
from rmetric.signals.gradient_variance import population_variance


class Components(NamedTuple):
    """One number for each of the three ideas of the metric."""

    failure_rate: float
    gradient_variance: float
    loss_drift: float


PAPER_WEIGHTS = Components(failure_rate=0.10, gradient_variance=0.45, loss_drift=0.70)

#: The ablations of the paper: one signal alone counts, with weight 1.
MODES: dict[str, Components] = {
    "FULL_METRIC": PAPER_WEIGHTS,
    "LAMBDA_ONLY": Components(1.0, 0.0, 0.0),
    "SIGMA_ONLY": Components(0.0, 1.0, 0.0),
    "DELTA_L_ONLY": Components(0.0, 0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class RMetricConfig:
    """Everything that can be set; the defaults are the paper's simulation.

    Attributes:
        weights: of λ, σ² and ΔL; finite, at least 0, not all 0.
        threshold: R above it is an alert.
        component_window: values over which each signal is normalised.
        event_window: hardware events over which λ is counted.
        loss_window: earlier evaluations whose mean ΔL is taken against.
        norm_window: steps of the stand-in for σ² where one norm is logged.
        absolute_loss_drift: use |ΔL|.
        loss: the record's field that ΔL follows, ``validation_loss`` or, for
            runs that never evaluate, ``training_loss``.
    """

    weights: Components = PAPER_WEIGHTS
    threshold: float = 0.57
    component_window: int = 1000
    event_window: int = 50
    loss_window: int = 100
    norm_window: int = 20
    absolute_loss_drift: bool = False
    loss: str = "validation_loss"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", Components(*self.weights))
        for name, weight in self.weights._asdict().items():
            if not (isfinite(weight) and weight >= 0):
                raise ValueError(f"weight of {name} is {weight}: it must be finite and at least 0")
        if not any(self.weights):
            raise ValueError("all three weights are 0: at least one must be above 0")
        if not isfinite(self.threshold):
            raise ValueError(f"threshold is {self.threshold}: it must be finite")
        for name, least in (
            ("component_window", 2),
            ("event_window", 1),
            ("loss_window", 1),
            ("norm_window", 2),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least {least}")
        if self.loss not in ("validation_loss", "training_loss"):
            raise ValueError(
                f"loss is {self.loss!r}: it must be 'validation_loss' or 'training_loss'"
            )

    @classmethod
    def simulation(cls, **changes: Any) -> RMetricConfig:
        """The paper's simulation study: windows of 1000, signed ΔL."""
        return cls(**changes)

    @classmethod
    def case_study(cls, **changes: Any) -> RMetricConfig:
        """The paper's case study: windows of 100, |ΔL| over 10 evaluations."""
        settings: dict[str, Any] = dict(
            component_window=100, loss_window=10, absolute_loss_drift=True
        )
        return cls(**(settings | changes))

    def with_mode(self, mode: str) -> RMetricConfig:
        """The same settings with the weights of one of `MODES`."""
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}: known are {', '.join(MODES)}")
        return replace(self, weights=MODES[mode])


PRESETS = {"simulation": RMetricConfig.simulation, "case_study": RMetricConfig.case_study}


class RMetric:
    """The R-Metric as a stream: `update(record)`, then read the attributes.

    Each signal is taken from what it is defined on (event times, the workers'
    norms, the loss) and, where a log lacks that, from the log's own statement
    of the signal. A signal that a record says nothing about keeps its value.

    Attributes:
        score: R, from 0 to the sum of the weights.
        alarm: whether R is above the threshold.
        raw: λ (events per hour), σ² (squared norm units), ΔL (nats); nan where
            not yet defined, inf where what was seen is beyond all bounds.
        normalised: the same, each from 0 to 1.
        variance_source: what σ² was computed from, ``workers``, ``trailing``
            (one norm, over time), ``logged`` or None.

    >>> metric = RMetric()
    >>> for step, loss in enumerate([3.0, 2.5, 2.4, 2.9], start=1):
    ...     _ = metric.update(Record(step=step, validation_loss=loss))
    >>> metric.score, metric.alarm
    (0.7, True)

    Source: Fatima 2025, equation 1. See docs/differences_from_paper.md for every
    choice that the paper leaves open.
    """

    def __init__(self, config: RMetricConfig | None = None) -> None:
        self.config = config = config or RMetricConfig()
        self.score = 0.0
        self.alarm = False
        self.variance_source: str | None = None
        self._raw = [nan, nan, nan]
        self._normalised = [0.0, 0.0, 0.0]
        self._failure_rate = FailureRate(config.event_window)
        self._trailing_variance = TrailingGradientVariance(config.norm_window)
        self._loss_drift = LossDrift(config.loss_window, absolute=config.absolute_loss_drift)
        self._scales = tuple(SlidingMinMax(config.component_window) for _ in range(3))
        self._weights = tuple(config.weights)
        self._threshold = config.threshold
        self._on_training_loss = config.loss == "training_loss"

    @property
    def raw(self) -> Components:
        return Components(*self._raw)

    @property
    def normalised(self) -> Components:
        return Components(*self._normalised)

    def update(self, record: Record) -> RMetric:
        """Take the next record; records must come in the order of their steps."""
        raw, normalised = self._raw, self._normalised
        scale_rate, scale_variance, scale_drift = self._scales

        events = record.events
        if events is not None and record.time is not None:
            times = [event.time for event in events] if events else ()
            rate = self._failure_rate.update(record.time, times)
            raw[0] = rate
            normalised[0] = scale_rate.update(rate)
        elif record.failure_rate is not None:
            raw[0] = record.failure_rate
            normalised[0] = scale_rate.update(record.failure_rate)

        variance = None
        if record.worker_gradient_norms is not None:
            variance = population_variance(record.worker_gradient_norms)
            self.variance_source = "workers"
        elif record.gradient_variance is not None:
            variance = record.gradient_variance
            self.variance_source = "logged"
        elif record.gradient_norm is not None:
            variance = self._trailing_variance.update(record.gradient_norm)
            self.variance_source = "trailing"
        if variance is not None:
            raw[1] = variance
            normalised[1] = scale_variance.update(variance)

        loss = record.training_loss if self._on_training_loss else record.validation_loss
        if loss is not None:
            drift = self._loss_drift.update(loss)
            raw[2] = drift
            normalised[2] = scale_drift.update(drift)
        elif record.loss_drift is not None:
            raw[2] = record.loss_drift
            normalised[2] = scale_drift.update(record.loss_drift)

        of_rate, of_variance, of_drift = self._weights
        self.score = score = (
            of_rate * normalised[0] + of_variance * normalised[1] + of_drift * normalised[2]
        )
        self.alarm = score > self._threshold
        return self

    def update_all(self, records: Iterable[Record]) -> RMetric:
        """Take many records; the attributes then speak of the last."""
        for record in records:
            self.update(record)
        return self
