"""Response of each signal to a fault before the run fails, compared with the exact twin.

A signal is compared with its own values before the onset. The largest value (or deviation, if
both directions are abnormal) between onset and failure is compared with the twin's over the same
steps. The area under the ROC curve is the probability that a failing run has a larger response
than a healthy one: 0.5 does not separate them, 1 does perfectly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from rmetric.metric import RMetric
from rmetric.records import Record, Run

Floats = NDArray[np.float64]

BEFORE = 60  # steps before the onset that a signal is set against
WATCHED = 60  # steps after the onset, of runs that do not fail
SMOOTHING = 0.2  # weight of the newest loss; single batches are noisy


@dataclass(frozen=True)
class Signal:
    """A number at each step, nan where not logged; `either_way`: low is as abnormal as high."""

    label: str
    series: Callable[[Sequence[Record]], Floats]
    either_way: bool = True


def column(name: str, records: Sequence[Record]) -> Floats:
    """A field of the records, nan where not logged."""
    values = [getattr(record, name) for record in records]
    return np.array([nan if value is None else value for value in values], float)


def _workers(name: str, records: Sequence[Record]) -> Floats:
    return np.array([getattr(record, name) for record in records], float)


def _log(values: Floats) -> Floats:
    return np.log(np.maximum(values, 1e-12))


def _smoothed(name: str) -> Callable[[Sequence[Record]], Floats]:
    def series(records: Sequence[Record]) -> Floats:
        smooth, level = [], nan
        for value in column(name, records):
            level = value if level != level else level + SMOOTHING * (value - level)
            smooth.append(level if value == value else value)
        return np.array(smooth)

    return series


def validation_rise(records: Sequence[Record]) -> Floats:
    """Above the best evaluation so far, nats."""
    losses = column("validation_loss", records)
    return losses - np.fmin.accumulate(losses)


def worst_worker(records: Sequence[Record]) -> Floats:
    """Largest norm over the median one, in logarithms."""
    norms_TW = _log(_workers("worker_gradient_norms", records))
    return norms_TW.max(axis=1) - np.median(norms_TW, axis=1)


def worker_variance(records: Sequence[Record]) -> Floats:
    """The σ² of the R-Metric."""
    return _log(_workers("worker_gradient_norms", records).var(axis=1))


def lowest_cosine(records: Sequence[Record]) -> Floats:
    return _workers("worker_gradient_cosines", records).min(axis=1)


def update_ratio(records: Sequence[Record]) -> Floats:
    """Update norm over the scheduled learning rate, in logarithms."""
    rates = column("learning_rate", records)
    return _log(column("update_norm", records)) - _log(rates)


def weight_growth(records: Sequence[Record]) -> Floats:
    """Change of the logarithm of the weight norm in a step."""
    norms = _log(column("parameter_norm", records))
    return np.diff(norms, prepend=norms[0])


def r_metric(records: Sequence[Record]) -> Floats:
    metric = RMetric()
    return np.array([metric.update(record).score for record in records])


def _logged(name: str) -> Callable[[Sequence[Record]], Floats]:
    return lambda records: column(name, records)


SIGNALS: dict[str, Signal] = {
    "validation_rise": Signal("validation loss above its best", validation_rise, False),
    "training_loss": Signal("training loss, smoothed", _smoothed("training_loss"), False),
    "probe_loss": Signal("loss on a probe batch", _logged("probe_loss"), False),
    "update_ratio": Signal("update norm / scheduled rate", update_ratio),
    "weight_growth": Signal("growth of the weight norm", weight_growth),
    "gradient_norm": Signal("gradient norm", lambda r: _log(column("gradient_norm", r))),
    "worst_worker": Signal("worst worker's norm / median", worst_worker),
    "worker_variance": Signal("variance of workers' norms (σ²)", worker_variance),
    "lowest_cosine": Signal("lowest cosine of a worker", lowest_cosine),
    "activation_headroom": Signal("activation headroom", _logged("activation_headroom")),
    "attention_logit_max": Signal("largest attention logit", _logged("attention_logit_max")),
    "router_load": Signal("router load", _logged("router_load")),
    "r_metric": Signal("R-Metric as published", r_metric, False),
}


class SignalResponse(NamedTuple):
    """Largest value of one signal in one run and in its twin, over the same steps."""

    shown: float
    twin: float


def response(signal: Signal, run: Run, control: Run) -> SignalResponse:
    """The largest value from the onset up to, not including, the failure.

    In units of the spread before the onset; -inf if the signal has no value.
    """
    truth = run.truth
    assert truth is not None
    assert truth.onset_step is not None
    begin = truth.onset_step
    end = truth.failure_step if truth.failed else begin + WATCHED
    assert end is not None
    steps = column("step", control.records)
    with np.errstate(all="ignore"):  # what is not finite is the finding
        twin = signal.series(control.records)
        shown = signal.series(run.records)
    before = twin[(steps >= begin - BEFORE) & (steps < begin)]
    window = slice(begin - 1, end - 1)
    largest = (_largest(signal, values[window], before) for values in (shown, twin))
    return SignalResponse(*largest)


def _largest(signal: Signal, values: Floats, before: Floats) -> float:
    logged = values[~np.isnan(values)]
    before = before[np.isfinite(before)]
    if len(logged) == 0 or len(before) == 0:
        return -inf
    middle = np.median(before)
    spread = 1.4826 * np.median(np.abs(before - middle)) + 1e-9
    deviation = (logged - middle) / spread
    return float((np.abs(deviation) if signal.either_way else deviation).max())


def area(found: pd.DataFrame) -> float:
    """Area under the ROC curve of runs (`shown`) against twins (`twin`); nan without any."""
    number = len(found)
    if not number:
        return nan
    ranks = rankdata([*found.shown, *found.twin])
    return float((ranks[:number].sum() - number * (number + 1) / 2) / number**2)
