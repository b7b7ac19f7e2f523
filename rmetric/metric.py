"""The R-Metric, online. Read this first.

    R = 0.10 n(λ) + 0.45 n(σ²) + 0.70 n(ΔL),    alert where R > 0.57

λ is the hardware failure rate (events per hour), σ² the variance of the
workers' gradient norms, ΔL the rise of the validation loss above its recent
mean (nats), and n a sliding min-max over each signal's own past.

Source: Fatima, "A Proactive Reliability Metric for Detecting Failures in
Language Model Training", EMNLP 2025 industry track, pages 2897-2913.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite, nan
from numbers import Real
from typing import Any, ClassVar, NamedTuple

from rmetric.normalisers import SlidingMinMax
from rmetric.records import Record
from rmetric.signals import FailureRate, LossDrift, TrailingGradientVariance
from rmetric.signals.authors import FirstLossDrift, NumpyLossDrift, UnclippedMinMax, numpy_variance
from rmetric.signals.gradient_variance import population_variance


class Components(NamedTuple):
    """One number for each of the three ideas of the metric."""

    failure_rate: float
    gradient_variance: float
    loss_drift: float


class Sources(NamedTuple):
    """Source of each signal at one record; None where the record lacks it.

    ``events``; ``workers`` (the workers' norms) or ``trailing`` (one norm, over
    time); ``validation_loss`` or ``training_loss``; ``logged`` for a signal that
    another program's log states; ``logged_normalised`` where it states n of the signal only.
    """

    failure_rate: str | None = None
    gradient_variance: str | None = None
    loss_drift: str | None = None


PAPER_WEIGHTS = Components(failure_rate=0.10, gradient_variance=0.45, loss_drift=0.70)
#: Percent of the healthy public runs in which it alarms as published: of the benchmark's results,
#: with which tests/evaluation/test_run_verdict.py compares it.
HEALTHY_ALARMED = 62

SYMBOLS_AND_UNITS = (("λ", "events an hour"), ("σ²", "squared norm units"), ("ΔL", ""))
#: Suggested action where that signal is the largest part of R.
R_ADVICE = {
    "λ": "find the GPU with `rmetric telemetry`",
    "σ²": "compare the workers' gradient norms",
    "ΔL": "roll back to a checkpoint before the rise if the next evaluation is as high",
}

WINDOWS_AT_LEAST = {"component_window": 2, "event_window": 1, "loss_window": 1, "norm_window": 2}

#: The ablations of the paper: one signal alone counts, with weight 1.
MODES: dict[str, Components] = {
    "FULL_METRIC": PAPER_WEIGHTS,
    "LAMBDA_ONLY": Components(1.0, 0.0, 0.0),
    "SIGMA_ONLY": Components(0.0, 1.0, 0.0),
    "DELTA_L_ONLY": Components(0.0, 0.0, 1.0),
}


class Variant(NamedTuple):
    """One form of the metric: its choices where the paper leaves them open.

    Attributes:
        loss_drift: ΔL for some settings.
        loss_scale: n(ΔL) over a number of values.
        by_numpy: whether NumPy adds up σ².
    """

    loss_drift: Callable[[RMetricConfig], Any]
    loss_scale: Callable[[int], SlidingMinMax]
    by_numpy: bool


#: ``paper`` has the paper's equations. The others are the authors' code, bit for bit:
#: ``authors_simulator`` (commit a3f0b99) takes ΔL from the first loss; ``authors_average`` (the
#: shipped logs) has NumPy's moving average; ``authors_monitor`` (the case study) has it from the
#: third loss on, and 0 before. The simulators count a non-finite loss as 100 nats, not clipped.
VARIANTS: dict[str, Variant] = {
    "paper": Variant(
        lambda config: LossDrift(config.loss_window, absolute=config.absolute_loss_drift),
        SlidingMinMax,
        by_numpy=False,
    ),
    "authors_simulator": Variant(lambda config: FirstLossDrift(), UnclippedMinMax, by_numpy=True),
    "authors_average": Variant(
        lambda config: NumpyLossDrift(config.loss_window, absolute=config.absolute_loss_drift),
        UnclippedMinMax,
        by_numpy=True,
    ),
    "authors_monitor": Variant(
        lambda config: NumpyLossDrift(
            config.loss_window, absolute=config.absolute_loss_drift, least=2, before=0.0
        ),
        SlidingMinMax,
        by_numpy=True,
    ),
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
        variant: whose arithmetic, a name of `VARIANTS`.
    """

    weights: Components = PAPER_WEIGHTS
    threshold: float = 0.57
    component_window: int = 1000
    event_window: int = 50
    loss_window: int = 100
    norm_window: int = 20
    absolute_loss_drift: bool = False
    loss: str = "validation_loss"
    variant: str = "paper"

    def __post_init__(self) -> None:
        self._check_weights()
        if not _is_finite(self.threshold):
            raise ValueError(f"threshold is {self.threshold!r}: it must be a finite number")
        for name, least in WINDOWS_AT_LEAST.items():
            window = getattr(self, name)
            if not isinstance(window, int) or window < least:
                raise ValueError(f"{name} is {window!r}: it must be an int of at least {least}")
        if self.loss not in ("validation_loss", "training_loss"):
            raise ValueError(
                f"loss is {self.loss!r}: it must be 'validation_loss' or 'training_loss'"
            )
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}: known are {', '.join(VARIANTS)}")

    def _check_weights(self) -> None:
        try:
            object.__setattr__(self, "weights", Components(*self.weights))
        except TypeError:
            raise ValueError(
                f"weights are {self.weights!r}: three are needed, of λ, σ² and ΔL"
            ) from None
        for name, weight in self.weights._asdict().items():
            if not _is_finite(weight) or weight < 0:
                raise ValueError(f"weight of {name} is {weight!r}: it must be finite, at least 0")
        if not any(self.weights):
            raise ValueError("all three weights are 0: at least one must be above 0")

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

    @classmethod
    def authors_simulator(cls, **changes: Any) -> RMetricConfig:
        """The simulator behind the published F1 (commit a3f0b99): ΔL from the first loss, no λ."""
        settings: dict[str, Any] = dict(
            weights=Components(0.0, 0.5, 0.78), variant="authors_simulator"
        )
        return cls(**(settings | changes))

    @classmethod
    def authors_case_study(cls, **changes: Any) -> RMetricConfig:
        """The monitor of their shipped case study: |ΔL| of the training loss, at first 0 twice."""
        settings: dict[str, Any] = dict(
            weights=Components(0.0, 0.52, 0.78),
            threshold=0.60,
            component_window=100,
            loss_window=10,
            absolute_loss_drift=True,
            loss="training_loss",
            variant="authors_monitor",
        )
        return cls(**(settings | changes))

    @classmethod
    def authors_readme(cls, **changes: Any) -> RMetricConfig:
        """The weights of their README, with the window and threshold of their replay script."""
        settings: dict[str, Any] = dict(
            weights=Components(0.40, 0.35, 0.25), component_window=50, variant="authors_average"
        )
        return cls(**(settings | changes))

    def with_mode(self, mode: str) -> RMetricConfig:
        """The same settings with one signal alone; FULL_METRIC keeps the weights as set."""
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}: known are {', '.join(MODES)}")
        return self if mode == "FULL_METRIC" else replace(self, weights=MODES[mode])


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and isfinite(value)


def _from_0_to_1(stated: float) -> float:
    """A stated n within the bounds of n; 0 for nan, as for a nan signal."""
    return min(max(stated, 0.0), 1.0) if stated == stated else 0.0


def reason_for(config: RMetricConfig, raw: Components, normalised: Components, score: float) -> str:
    """The parts of R while it is alarmed, the largest first."""
    parts = []
    for (symbol, unit), weight, n, value in zip(
        SYMBOLS_AND_UNITS, config.weights, normalised, raw, strict=True
    ):
        if weight and value == value:  # nan: nothing was seen of it
            measured = f"{value:.3g} {unit}".rstrip()
            parts.append((weight * n, f"{symbol} {weight * n:.2f} ({measured})"))
        elif weight and n:
            stated = f"(n = {n:.3g} as the log states it)"
            parts.append((weight * n, f"{symbol} {weight * n:.2f} {stated}"))
    texts = [text for _, text in sorted(parts, key=lambda part: -part[0])]
    advice = f": {R_ADVICE[texts[0].split()[0]]}" if texts else ""
    return f"R {score:.2f}, limit {config.threshold:g}, parts: {', '.join(texts) or 'none'}{advice}"


PRESETS = {
    "simulation": RMetricConfig.simulation,
    "case_study": RMetricConfig.case_study,
    "authors_simulator": RMetricConfig.authors_simulator,
    "authors_case_study": RMetricConfig.authors_case_study,
    "authors_readme": RMetricConfig.authors_readme,
}


class RMetric:
    """The R-Metric as a stream: `update(record)`, then read the attributes.

    Each signal is taken from what it is defined on (event times, the workers'
    norms, the loss) and, where a log lacks that, from the log's own statement
    of the signal. Where a signal has had no value in its own unit, the log's statement
    of its n is taken as it is: one n must not come from two scales. A signal that a
    record does not hold keeps its value.

    Attributes:
        score: R, from 0 to the sum of the weights.
        alarm: whether R is above the threshold.
        reason: what R is made of while it is alarmed, the largest part first; else empty.
        raw: λ (events per hour), σ² (squared norm units), ΔL (nats); nan where
            not yet defined or stated normalised only, inf where what was seen is beyond
            all bounds.
        normalised: the same, each from 0 to 1.
        sources: what each signal was taken from at this record; see `Sources`.
        variance_source: what the present σ² was taken from, also where this
            record does not hold it; None before the first.

    >>> metric = RMetric()
    >>> for step, loss in enumerate([3.0, 2.5, 2.4, 2.9], start=1):
    ...     _ = metric.update(Record(step=step, validation_loss=loss))
    >>> metric.score, metric.alarm
    (0.7, True)

    Source: Fatima 2025, equation 1. See docs/differences_from_paper.md for every
    choice that the paper leaves open.
    """

    SETTINGS: ClassVar[frozenset[str]] = frozenset(
        {"_weights", "_threshold", "_on_training_loss", "_by_numpy"}
    )

    def __init__(self, config: RMetricConfig | None = None) -> None:
        self.config = config = config or RMetricConfig()
        self.score = 0.0
        self.alarm = False
        self.variance_source: str | None = None
        self._sources: tuple[str | None, str | None, str | None] = None, None, None
        self._raw = [nan, nan, nan]
        self._normalised = [0.0, 0.0, 0.0]
        self._failure_rate = FailureRate(config.event_window)
        self._trailing_variance = TrailingGradientVariance(config.norm_window)
        variant, window = VARIANTS[config.variant], config.component_window
        self._by_numpy = variant.by_numpy
        self._loss_drift = variant.loss_drift(config)
        self._scales = SlidingMinMax(window), SlidingMinMax(window), variant.loss_scale(window)
        self._weights = tuple(config.weights)
        self._threshold = config.threshold
        self._on_training_loss = config.loss == "training_loss"

    @property
    def raw(self) -> Components:
        return Components(*self._raw)

    @property
    def normalised(self) -> Components:
        return Components(*self._normalised)

    @property
    def sources(self) -> Sources:
        return Sources(*self._sources)

    @property
    def reason(self) -> str:
        if not self.alarm:
            return ""
        return reason_for(self.config, self.raw, self.normalised, self.score)

    def update(self, record: Record) -> RMetric:
        """Take the next record; records must come in the order of their steps."""
        # Long on purpose: a call for each signal would cost a tenth more.
        raw, normalised = self._raw, self._normalised
        scale_rate, scale_variance, scale_drift = self._scales
        rate_from = drift_from = None

        events, rate = record.events, record.failure_rate
        if events is not None and record.time is not None:
            times = [event.time for event in events if event.is_hardware] if events else ()
            rate, rate_from = self._failure_rate.update(record.time, times), "events"
        elif rate is not None:
            rate_from = "logged"
        if rate is not None:
            raw[0] = rate
            normalised[0] = scale_rate.update(rate)
        elif record.failure_rate_normalised is not None and raw[0] != raw[0]:
            normalised[0] = _from_0_to_1(record.failure_rate_normalised)
            rate_from = "logged_normalised"

        variance, variance_from = self._variance_of(record)
        if variance is not None:
            raw[1] = variance
            normalised[1] = scale_variance.update(variance)
            self.variance_source = variance_from
        elif variance_from is not None and record.gradient_variance_normalised is not None:
            normalised[1] = _from_0_to_1(record.gradient_variance_normalised)
            self.variance_source = variance_from

        loss = record.training_loss if self._on_training_loss else record.validation_loss
        drift = record.loss_drift
        if loss is not None:
            drift, drift_from = self._loss_drift.update(loss), self.config.loss
        elif drift is not None:
            drift_from = "logged"
        if drift is not None:
            raw[2] = drift
            normalised[2] = scale_drift.update(drift)
        elif record.loss_drift_normalised is not None and raw[2] != raw[2]:
            normalised[2] = _from_0_to_1(record.loss_drift_normalised)
            drift_from = "logged_normalised"

        of_rate, of_variance, of_drift = self._weights
        self.score = score = (
            of_rate * normalised[0] + of_variance * normalised[1] + of_drift * normalised[2]
        )
        self.alarm = score > self._threshold
        self._sources = rate_from, variance_from, drift_from
        return self

    def _variance_of(self, record: Record) -> tuple[float | None, str | None]:
        """σ² of a record and its source; of a record that states its n only, the source."""
        norms = record.worker_gradient_norms
        if norms is not None:
            of_norms = numpy_variance if self._by_numpy else population_variance
            return of_norms(norms), "workers"
        if record.gradient_variance is not None:
            return record.gradient_variance, "logged"
        if record.gradient_variance_normalised is not None and self._raw[1] != self._raw[1]:
            return None, "logged_normalised"
        if record.gradient_norm is not None and self.variance_source in (None, "trailing"):
            # Only where nothing better was ever logged: one window must not hold both.
            return self._trailing_variance.update(record.gradient_norm), "trailing"
        return None, None

    def update_all(self, records: Iterable[Record]) -> RMetric:
        """Take many records; the attributes then speak of the last."""
        for record in records:
            self.update(record)
        return self
