"""Many simulated training runs, stepped together. The equations of docs/simulator.md.

A noisy quadratic model of data-parallel training: 64 directions of a power-law
curvature spectrum, a cross-entropy that saturates, workers that each draw their
own gradient noise, AdamW with clipping, weights whose norm grows and sharpens
the attention blocks, experts behind a router that learns. A fault turns one of
the knobs; what follows, follows.

Shape suffixes: R runs, W workers, B blocks, M modes of a block, K = B M modes, E experts,
S = 1 + E small parameters (the norm gain and the router's logits).
Every operation treats the runs apart and is exact IEEE arithmetic in a fixed
order, so a run's bytes depend on neither its batch nor the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rmetric.simulation.architectures import (
    ATTENTION,
    CONSTANTS,
    EXPERTS,
    MODES_PER_BLOCK,
    NUM_BLOCKS,
    NUM_EXPERTS,
    NUM_MODES,
    Architecture,
    Floats,
    curvatures,
    start_distance,
)
from rmetric.simulation.exact import exp, log

FLOAT32_MAX = 3.4028234663852886e38

add, maximum = np.add.reduce, np.maximum.reduce


@dataclass
class Knobs:
    """Quantities that a fault can turn, one row a run; `Knobs.neutral` is an undisturbed step."""

    learning_rate_R: Floats  # multiplies the scheduled rate
    attention_gain_R: Floats  # multiplies the attention logits
    log_norm_gain_R: Floats  # added to the log-gain of the normalisation layers
    router_bias_RE: Floats  # added to the router's logits
    sick_gain_R: Floats  # multiplies the first worker's gradient
    corruption_R: Floats  # share of the batch that pulls elsewhere
    rubbish_R: Floats  # share of the batch that is noise and teaches nothing
    batch_size_R: Floats  # multiplies the tokens a step
    training_offset_R: Floats  # nats added by harder data
    validation_noise_R: Floats  # multiplies the evaluation noise

    @classmethod
    def neutral(cls, num_runs: int) -> Knobs:
        factors = ("learning_rate_R", "attention_gain_R", "sick_gain_R", "batch_size_R",
                   "validation_noise_R")  # fmt: skip
        others = ("log_norm_gain_R", "corruption_R", "rubbish_R", "training_offset_R")
        return cls(
            router_bias_RE=np.zeros((num_runs, NUM_EXPERTS)),
            **{name: np.ones(num_runs) for name in factors},
            **{name: np.zeros(num_runs) for name in others},
        )


@dataclass
class TrainingState:
    """State of the runs, one row each."""

    distance_RBM: Floats  # from the optimum
    momentum_RBM: Floats
    second_moment_RB: Floats
    norm_squared_R: Floats  # of the weights, relative to the start
    log_gain_R: Floats  # learned, of the normalisation layers
    router_RE: Floats
    small_momentum_RS: Floats  # of the gain and the router together
    small_second_moment_RS: Floats
    lure_RBM: Floats  # where other data pull to
    hedge_R: Floats  # probability that the model sets aside for rubbish

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> TrainingState:
        """A copy that holds these rows, in this order."""
        return TrainingState(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass
class Forward:
    """The loss of the current weights, and what the gradient needs of it."""

    loss_R: Floats  # expected, nats per token
    slope_R: Floats  # d loss / d q
    curvature_RBM: Floats
    log_gain_R: Floats
    quadratic_RB: Floats
    share_RE: Floats  # of the tokens that each expert gets
    log_load_RE: Floats  # log of that share over an even one


@dataclass
class Gradient:
    """Parts of the workers' gradients of one step; K = B M directions."""

    signal_RK: Floats  # what every worker sees
    scale_RK: Floats  # of a worker's own noise
    ambient_R: Floats  # squared norm of a worker's noise in the flat directions
    sick_gain_R: Floats
    noise: Noise


@dataclass
class Step:
    """Values that one step shows; one row a run."""

    training_loss_R: Floats
    gradient_norm_R: Floats
    update_norm_R: Floats
    gradient: Gradient


@dataclass
class Noise:
    """The random numbers of one step, one row a run; K = B M directions."""

    sick_RK: Floats  # of the worker that a fault can strike
    others_RK: Floats  # of all others together, scaled to unit variance
    router_RE: Floats
    ambient_sick_R: Floats
    ambient_others_R: Floats
    training_R: Floats
    validation_R: Floats
    batch_spread_R: Floats

    #: Standard normals that one run draws a step.
    WIDTH = 2 * NUM_MODES + NUM_EXPERTS + 5

    @staticmethod
    def spread_batches(draws: Floats) -> None:
        """Turn the last column of many steps' draws into the scale of each batch's noise."""
        draws[..., -1] = exp(CONSTANTS.batch_spread * draws[..., -1])

    @classmethod
    def split(cls, draws: Floats) -> Noise:
        """Name the parts of standard normal draws, shape (R, WIDTH).

        `spread_batches` has changed the last column, which is no longer normal.
        """
        modes = NUM_MODES
        return cls(
            draws[:, :modes],
            draws[:, modes : 2 * modes],
            draws[:, 2 * modes : 2 * modes + NUM_EXPERTS],
            *draws[:, -5:].T,
        )


class Dynamics:
    """The runs of one batch: `forward`, then `step`, then again.

    Args:
        architectures: of each run.
        num_workers: data-parallel workers, the same for all.
        relative_learning_rate: to the architecture's peak, shape (R, T).
    """

    def __init__(
        self,
        architectures: Sequence[Architecture],
        num_workers: int,
        relative_learning_rate: Floats,
    ) -> None:
        self.num_workers = num_workers
        self.relative_RT = relative_learning_rate
        self.peak_R = np.array([a.peak_learning_rate for a in architectures])
        self.decay_R = np.array([a.weight_decay for a in architectures])
        self.beta_2_R = np.array([a.beta_2 for a in architectures])
        self.floor_R = np.array([a.irreducible_loss for a in architectures])
        self.worst_R = np.array([a.worst_excess for a in architectures])
        self.mixture_R = np.array([float(a.num_experts > 0) for a in architectures])
        self.curvature_BM = curvatures()
        # Noise variance per unit of curvature, so that the norms come out as measured.
        self.noise_variance = CONSTANTS.noise_norm_squared / float(np.sum(self.curvature_BM))
        self.training_noise = CONSTANTS.training_loss_noise * float(np.sqrt(8.0 / num_workers))
        self.log_experts = float(log(np.array(float(NUM_EXPERTS))))
        self.unhedged = float(exp(np.array(-CONSTANTS.surprise)))
        self.bias_1, self.bias_2_R = 1.0, np.ones(len(architectures))

    def start(self, draws_RBM: Floats) -> TrainingState:
        """Fresh weights from standard normal draws, shape (R, B, M)."""
        num_runs = len(draws_RBM)
        distance = start_distance() * (1.0 + CONSTANTS.start_spread * draws_RBM)
        return TrainingState(
            distance_RBM=distance,
            momentum_RBM=np.zeros_like(distance),
            second_moment_RB=np.zeros((num_runs, NUM_BLOCKS)),
            norm_squared_R=np.ones(num_runs),
            log_gain_R=np.zeros(num_runs),
            router_RE=np.zeros((num_runs, NUM_EXPERTS)),
            small_momentum_RS=np.zeros((num_runs, 1 + NUM_EXPERTS)),
            small_second_moment_RS=np.zeros((num_runs, 1 + NUM_EXPERTS)),
            lure_RBM=np.zeros_like(distance),
            hedge_R=np.zeros(num_runs),
        )

    def take(self, rows: NDArray[np.intp]) -> None:
        """Keep these rows, in this order."""
        for name, value in vars(self).items():
            if name.endswith(("_R", "_RT")):
                setattr(self, name, value[rows])

    def forward(self, state: TrainingState, knobs: Knobs) -> Forward:
        """The loss and its slope at the current weights."""
        c = CONSTANTS
        num_runs = len(state.norm_squared_R)
        logits = state.router_RE + knobs.router_bias_RE
        logits -= maximum(logits, axis=1)[:, None]
        log_gain = knobs.log_norm_gain_R + state.log_gain_R
        powers = exp(np.concatenate([logits, 2.0 * log_gain[:, None]], axis=1))
        total = add(powers[:, :NUM_EXPERTS], axis=1)
        share = powers[:, :NUM_EXPERTS] / total[:, None]

        weight_RB = np.ones((num_runs, NUM_BLOCKS))
        attention = state.norm_squared_R * sharpened(knobs.attention_gain_R)
        weight_RB[:, ATTENTION] = attention[:, None]
        weight_RB[:, EXPERTS] += self.mixture_R[:, None] * (NUM_EXPERTS * share - 1.0)
        weight_RB *= powers[:, NUM_EXPERTS:]  # the gain, squared
        curvature = weight_RB[:, :, None] * self.curvature_BM
        quadratic_RB = 0.5 * add(curvature * state.distance_RBM * state.distance_RBM, axis=2)
        q = add(quadratic_RB, axis=1) + 0.5 * c.gain_stiffness * log_gain * log_gain

        logs = log(np.concatenate([total, 1.0 + q / c.saturation]))
        log_load = logits + (self.log_experts - logs[:num_runs])[:, None]
        excess, slope = saturate(q, c.saturation * logs[num_runs:], self.worst_R)
        imbalance = add(share * log_load, axis=1)
        loss = self.floor_R + excess + self.mixture_R * c.balance * imbalance
        loss = self._hedged(loss, state.hedge_R)
        return Forward(loss, slope, curvature, log_gain, quadratic_RB, share, log_load)

    def _hedged(self, loss_R: Floats, hedge_R: Floats) -> Floats:
        """Loss on true tokens of a model that sets a share of its probability aside, evenly."""
        if not hedge_R.any():
            return loss_R
        gain = exp(loss_R - (self.floor_R + self.worst_R))
        return loss_R - log(1.0 - hedge_R + hedge_R * gain)

    def _with_rubbish(self, loss_R: Floats, hedge_R: Floats, share_R: Floats) -> Floats:
        """The loss of a batch of which a share is noise: uniform guessing, and the surprise."""
        if not share_R.any():
            return loss_R
        expected = hedge_R + (1.0 - hedge_R) * self.unhedged
        rubbish = self.floor_R + self.worst_R - log(expected)
        return np.asarray((1.0 - share_R) * loss_R + share_R * rubbish)

    def step(
        self, state: TrainingState, knobs: Knobs, ahead: Forward, noise: Noise, index: int
    ) -> Step:
        """One optimiser step, in place; `index` counts from 0."""
        c = CONSTANTS
        gradient, gradient_norm, flat_R, parts = self._gradient(state, knobs, ahead, noise)
        clip = np.minimum(1.0, c.clip_norm / gradient_norm)
        gradient *= clip[:, None, None]

        self.bias_1 = self.bias_1 * c.beta_1
        self.bias_2_R = self.bias_2_R * self.beta_2_R
        debias_1, debias_2_R = 1.0 - self.bias_1, 1.0 - self.bias_2_R
        rate_R = self.relative_RT[:, index] * knobs.learning_rate_R

        state.momentum_RBM *= c.beta_1
        state.momentum_RBM += (1.0 - c.beta_1) * gradient
        power = add(gradient * gradient, axis=2) / MODES_PER_BLOCK
        power += (flat_R * clip * clip / NUM_MODES)[:, None]
        b2 = self.beta_2_R[:, None]
        state.second_moment_RB = b2 * state.second_moment_RB + (1.0 - b2) * power
        scale = np.sqrt(state.second_moment_RB / debias_2_R[:, None]) + c.epsilon
        update = state.momentum_RBM / (debias_1 * scale)[:, :, None]

        stride_R = c.stride * rate_R
        flat = update.reshape(len(update), -1)
        update_norm = stride_R * np.sqrt(add(flat * flat, axis=1))
        state.distance_RBM -= (stride_R / np.sqrt(state.norm_squared_R))[:, None, None] * update
        self._step_gain_and_router(state, ahead, noise, rate_R, debias_1, debias_2_R)
        shrink = np.maximum(1.0 - 2.0 * self.peak_R * rate_R * self.decay_R, 0.0)
        growth = update_norm / c.start_norm
        state.norm_squared_R = state.norm_squared_R * shrink + growth * growth

        batch_noise = self.training_noise / np.sqrt(knobs.batch_size_R)
        batch_loss = self._with_rubbish(ahead.loss_R, state.hedge_R, knobs.rubbish_R)
        training_loss = batch_loss + knobs.training_offset_R + batch_noise * noise.training_R
        hedging = np.minimum(c.hedging_rate * rate_R, 1.0)
        state.hedge_R = state.hedge_R + hedging * (knobs.rubbish_R - state.hedge_R)
        return Step(training_loss, gradient_norm, update_norm, parts)

    def _gradient(
        self, state: TrainingState, knobs: Knobs, ahead: Forward, noise: Noise
    ) -> tuple[Floats, Floats, Floats, Gradient]:
        """Mean gradient and its norm, of the norm squared the flat part, and the gradients' parts.

        Shapes (R, B, M), (R,) and (R,).
        """
        c = CONSTANTS
        others = self.num_workers - 1
        # Other data ask for another optimum; rubbish asks for nothing.
        target = state.distance_RBM - knobs.corruption_R[:, None, None] * state.lure_RBM
        slope = ahead.slope_R * (1.0 - knobs.rubbish_R)
        signal = (slope[:, None, None] * ahead.curvature_RBM * target).reshape(len(target), -1)
        spread = noise.batch_spread_R / np.sqrt(knobs.batch_size_R)
        curvature = ahead.curvature_RBM.reshape(signal.shape)
        scale = np.sqrt(self.noise_variance * curvature) * spread[:, None]
        ambient = c.ambient_norm_squared / knobs.batch_size_R
        sick = knobs.sick_gain_R

        # Only the sum over the healthy workers moves the weights, so only that is drawn.
        mean = scale * (sick[:, None] * noise.sick_RK + np.sqrt(others) * noise.others_RK)
        mean += (sick + others)[:, None] * signal
        mean /= self.num_workers
        flat = (sick * sick) * (1.0 + c.ambient_spread * noise.ambient_sick_R)
        flat += others + c.ambient_spread * np.sqrt(others) * noise.ambient_others_R
        flat *= ambient / (self.num_workers * self.num_workers)
        norm = np.sqrt(add(mean * mean, axis=1) + flat)
        # An infinite worker makes the average infinite, and clipping turns that into nan.
        overflow = ~(norm * self.num_workers <= FLOAT32_MAX)
        if overflow.any():
            norm[overflow] = np.inf
            mean[overflow] = np.nan
        parts = Gradient(signal, scale, ambient, sick, noise)
        return mean.reshape(target.shape), norm, flat, parts

    def worker_norms(self, gradient: Gradient, draws_RWK: Floats, ambient_RW: Floats) -> Floats:
        """The norm of each worker's own gradient, shape (R, W), of the first R runs.

        The healthy workers' noise is drawn given its sum, which has moved the
        weights already: standard normal `draws_RWK` (W - 1 of them) less their mean,
        plus each worker's part of the sum. `ambient_RW` likewise.
        """
        c = CONSTANTS
        runs, others = draws_RWK.shape[:2]
        noise = gradient.noise
        shared = noise.others_RK[:runs] / np.sqrt(others)
        draws_RWK += (shared - add(draws_RWK, axis=1) / others)[:, None]
        all_RWK = np.concatenate([noise.sick_RK[:runs, None], draws_RWK], axis=1)
        all_RWK *= gradient.scale_RK[:runs, None]
        all_RWK += gradient.signal_RK[:runs, None]
        shared = noise.ambient_others_R[:runs] / np.sqrt(others)
        ambient_RW += (shared - add(ambient_RW, axis=1) / others)[:, None]
        ambient = np.concatenate([noise.ambient_sick_R[:runs, None], ambient_RW], axis=1)
        ambient = gradient.ambient_R[:runs, None] * (1.0 + c.ambient_spread * ambient)
        norms: Floats = np.sqrt(add(all_RWK * all_RWK, axis=2) + ambient)
        norms[:, 0] *= np.abs(gradient.sick_gain_R[:runs])
        norms[norms > FLOAT32_MAX] = np.inf
        return norms

    def _step_gain_and_router(
        self,
        state: TrainingState,
        ahead: Forward,
        noise: Noise,
        rate_R: Floats,
        debias_1: float,
        debias_2_R: Floats,
    ) -> None:
        """Adam on the log-gain and on the router's logits, side by side."""
        c = CONSTANTS
        gradient = np.empty((len(rate_R), 1 + NUM_EXPERTS))
        gradient[:, 0] = ahead.slope_R * (
            2.0 * add(ahead.quadratic_RB, axis=1) + c.gain_stiffness * ahead.log_gain_R
        )
        # A token moved to an expert costs what its block adds to the loss, and balance.
        share = ahead.share_RE
        cost = ahead.slope_R[:, None] * ahead.quadratic_RB[:, EXPERTS] + share * (
            c.balance * ahead.log_load_RE
        )
        pull = cost - share * add(cost, axis=1)[:, None]
        gradient[:, 1:] = self.mixture_R[:, None] * (pull + c.router_noise * noise.router_RE)

        b2 = self.beta_2_R[:, None]
        state.small_momentum_RS = c.beta_1 * state.small_momentum_RS + (1 - c.beta_1) * gradient
        state.small_second_moment_RS = (
            b2 * state.small_second_moment_RS + (1 - b2) * gradient * gradient
        )
        root = np.sqrt(state.small_second_moment_RS / debias_2_R[:, None]) + c.epsilon
        update = rate_R[:, None] * state.small_momentum_RS / (debias_1 * root)
        state.log_gain_R = state.log_gain_R - c.gain_rate * update[:, 0]
        state.router_RE = state.router_RE - c.router_rate * update[:, 1:]


def sharpened(gain_R: Floats) -> Floats:
    """Factor of the curvature under a scale of the attention logits; 1 for a scale of 1.

    g² while it is small. A softmax saturates, and its gradient with it, so it never
    passes 1 + b.
    """
    square, b = gain_R * gain_R, CONSTANTS.softmax_bound
    return square * (1.0 + b) / (square + b)


def saturate(q_R: Floats, excess_R: Floats, worst_R: Floats) -> tuple[Floats, Floats]:
    """Excess loss (nats) of a quadratic distance q, and its derivative by q.

    x = A ln(1 + q/A), bent so that it never passes `worst`: x (1 + (x/worst)^4)^(-1/4).
    """
    square = excess_R / worst_R
    square = square * square
    bend = 1.0 + square * square
    root = np.sqrt(np.sqrt(bend))
    return excess_R / root, 1.0 / ((1.0 + q_R / CONSTANTS.saturation) * bend * root)
