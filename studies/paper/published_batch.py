"""Many published runs at once, in NumPy: for the spread over seeds and for single changes.

Only evaluations are computed, because the steps between them are not logged. With the same uniform
numbers it gives the losses, norms and crashes of `published`. Here the numbers come from a NumPy
generator, so a study does not correspond to a seed of the authors.

Shape suffixes: R runs, E evaluations, W workers, K steps of a fault.

Source: as `published`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from rmetric.metric import RMetricConfig
from rmetric.simulation.published import (
    LONGEST_FAULT,
    NORM_BLOW,
    NORM_SPREAD,
    RISE,
    RISE_NOISE,
    PublishedDynamics,
    crash_chance,
    usual_loss,
    usual_norm,
)

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Uniform numbers from [0, 1) that decide some runs.

    `rise_RE` and `blow_REW` are of what a fault does to loss and norms; `crash_RK` has one at each
    of its steps.
    """

    training_RE: Floats
    validation_RE: Floats
    norms_REW: Floats
    rise_RE: Floats
    blow_REW: Floats
    crash_RK: Floats

    @classmethod
    def random(
        cls, num_runs: int, dynamics: PublishedDynamics, generator: np.random.Generator
    ) -> Draws:
        of_run = num_runs, len(dynamics.evaluation_steps)
        of_workers = *of_run, dynamics.num_workers
        return cls(
            crash_RK=generator.random((num_runs, LONGEST_FAULT)),
            training_RE=generator.random(of_run),
            validation_RE=generator.random(of_run),
            rise_RE=generator.random(of_run),
            norms_REW=generator.random(of_workers),
            blow_REW=generator.random(of_workers),
        )


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of the runs, shape (R,): whether they act, end the run, and their first step."""

    acts: Bools
    crashes: Bools
    onset: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PublishedBatch:
    """The evaluations of some runs.

    Attributes:
        seen_RE: False for evaluations after the end of the run.
        onset_R: first step under the fault, -inf without one.
        failure_R: step of the crash, inf without one.
    """

    steps_E: NDArray[np.int64]
    validation_RE: Floats
    norms_REW: Floats
    seen_RE: Bools
    onset_R: Floats
    failure_R: Floats


def run_batch(dynamics: PublishedDynamics, faults: Faults, draws: Draws) -> PublishedBatch:
    """Simulate the runs; each depends on its own row of `draws` alone."""
    steps_E = np.array(dynamics.evaluation_steps, dtype=np.int64)
    ages_RE = steps_E - faults.onset[:, None] + 1
    acting_RE = faults.acts[:, None] & (ages_RE >= 1) & (ages_RE <= LONGEST_FAULT)

    # By math.exp, whose last bit is not always NumPy's.
    loss_RE = np.array([usual_loss(step) for step in steps_E.tolist()]) + _uniform(
        dynamics.training_noise, draws.training_RE
    )
    rise_RE = RISE * ages_RE + _uniform(RISE_NOISE, draws.rise_RE)
    loss_RE = np.where(acting_RE, loss_RE + rise_RE, loss_RE)

    usual_E = np.array([usual_norm(step) for step in steps_E.tolist()])
    low_E1, high_E1 = (edge * usual_E[:, None] for edge in NORM_SPREAD)
    norms_REW = low_E1 + (high_E1 - low_E1) * draws.norms_REW
    if acting_RE.any():
        blow = _uniform(NORM_BLOW, draws.blow_REW[acting_RE])
        norms_REW[acting_RE] *= blow

    chance_K = np.array([crash_chance(age) for age in range(1, LONGEST_FAULT + 1)])
    crash_R = (draws.crash_RK < chance_K).argmax(axis=1)  # certain at the last
    failure_R = np.where(faults.crashes, faults.onset + crash_R, inf)
    return PublishedBatch(
        steps_E=steps_E,
        validation_RE=loss_RE + _uniform(dynamics.evaluation_noise, draws.validation_RE),
        norms_REW=norms_REW,
        seen_RE=steps_E <= failure_R[:, None],
        onset_R=np.where(faults.acts, faults.onset, -inf),
        failure_R=failure_R,
    )


def _uniform(limits: tuple[float, float], draws: Floats) -> Floats:
    """Equal to `random.uniform` for the same draw, to the last bit."""
    low, high = limits
    return low + (high - low) * draws


def scores(batch: PublishedBatch, config: RMetricConfig) -> Floats:
    """R at every evaluation, shape (R, E), as `RMetric` computes it; no λ is logged here."""
    num_evaluations = len(batch.steps_E)
    if num_evaluations > config.component_window:
        raise ValueError(
            f"{num_evaluations} evaluations: at most the component window of "
            f"{config.component_window} can be scored at once"
        )
    if config.variant == "authors_simulator":
        drift_RE = batch.validation_RE - batch.validation_RE[:, :1]
    elif config.variant in ("paper", "authors_average"):
        drift_RE = _above_mean(batch.validation_RE, config.loss_window)
    else:
        raise ValueError(f"variant is {config.variant!r}: it follows no validation loss")
    score_RE = config.weights.gradient_variance * _min_max(batch.norms_REW.var(axis=-1))
    # The first evaluation has no past, and what it would be stays out of the window.
    score_RE[:, 1:] += config.weights.loss_drift * _min_max(drift_RE[:, 1:])
    return score_RE


def _above_mean(loss_RE: Floats, window: int) -> Floats:
    """Each loss minus the mean of up to `window` before it; the first has none."""
    before = np.arange(loss_RE.shape[1])
    since = np.maximum(before - window, 0)
    sums_RE = np.concatenate([np.zeros((len(loss_RE), 1)), loss_RE.cumsum(axis=1)], axis=1)
    return loss_RE - (sums_RE[:, before] - sums_RE[:, since]) / np.maximum(before - since, 1)


def _min_max(x_RE: Floats) -> Floats:
    """Each value scaled to the extremes so far; 0 while they are equal."""
    low = np.minimum.accumulate(x_RE, axis=1)
    span = np.maximum.accumulate(x_RE, axis=1) - low
    return np.divide(x_RE - low, span, out=np.zeros_like(x_RE), where=span > 0)


def with_noise(
    dynamics: PublishedDynamics, training: float, evaluation: float
) -> PublishedDynamics:
    """The same with each noise's range widened about its middle by a factor."""
    return replace(
        dynamics,
        training_noise=_widened(dynamics.training_noise, training),
        evaluation_noise=_widened(dynamics.evaluation_noise, evaluation),
    )


def _widened(limits: tuple[float, float], factor: float) -> tuple[float, float]:
    if factor == 1:
        return limits
    middle, half = sum(limits) / 2, (limits[1] - limits[0]) / 2
    return middle - factor * half, middle + factor * half
