"""Many simulated training runs, stepped together. The equations of docs/simulator.md.

A noisy quadratic model of data-parallel training: 64 directions of a power-law
curvature spectrum, a cross-entropy that saturates, workers that each draw their
own gradient noise, AdamW with clipping, weights whose norm grows and sharpens
the attention blocks, experts behind a router that learns. A fault turns one of
the knobs; what follows, follows.

Shape suffixes: R runs, W workers, B blocks, M modes of a block, E experts.
Every operation treats the runs apart and is exact IEEE arithmetic in a fixed
order, so a run's bytes depend on neither its batch nor the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rmetric.simulation.architectures import Architecture
from rmetric.simulation.exact import exp, half_cosine, log

Floats = NDArray[np.float64]

NUM_BLOCKS, MODES_PER_BLOCK = 8, 8
ATTENTION = slice(0, 2)  # blocks whose curvature follows the weight norm
EXPERTS = slice(4, 8)  # blocks behind the router, in a mixture of experts
NUM_EXPERTS = 4
FLOAT32_MAX = 3.4028234663852886e38

add, maximum = np.add.reduce, np.maximum.reduce


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the model types share; sources and fits in docs/simulator.md."""

    top_curvature: float = 24.0  # H0 of h_k = H0 / k^3
    start_quadratic: float = 28.0  # q at the start
    start_spread: float = 0.08  # relative, of the start distances
    rate_spread: float = 0.5  # runs differ in their peak rate by up to this share
    saturation: float = 2.0  # A of A ln(1 + q / A), nats
    gain_stiffness: float = 20.0  # B of the norm-gain term
    balance: float = 0.08  # weight of the router's balance term
    stride: float = 0.15  # distance moved a step by a unit update at the peak rate
    start_norm: float = 3.5  # weight norm at the start, in units of the stride
    noise_norm_squared: float = 0.5  # of one worker's gradient, in the curved directions
    ambient_norm_squared: float = 4.7  # and in the flat ones
    ambient_spread: float = 0.15  # relative, from batch to batch
    batch_spread: float = 0.08  # log-scale spread of the noise from batch to batch
    router_rate: float = 0.01  # router and gain move this much by a unit update
    gain_rate: float = 0.003
    router_noise: float = 0.05
    training_loss_noise: float = 0.012  # nats, of the mean over the workers' batches of 8
    validation_loss_noise: float = 0.003  # nats
    beta_1: float = 0.9
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    final_learning_rate: float = 0.1  # of the peak, at the end of the cosine


CONSTANTS = Constants()


@dataclass
class Knobs:
    """What a fault can turn, one row a run; `Knobs.neutral` is an undisturbed step."""

    learning_rate_R: Floats  # multiplies the scheduled rate
    attention_gain_R: Floats  # multiplies the attention logits
    log_norm_gain_R: Floats  # added to the log-gain of the normalisation layers
    router_bias_RE: Floats  # added to the router's logits
    sick_gain_R: Floats  # multiplies the first worker's gradient
    corruption_R: Floats  # share of the batch that pulls elsewhere
    batch_size_R: Floats  # multiplies the tokens a step
    training_offset_R: Floats  # nats added by harder data
    validation_noise_R: Floats  # multiplies the evaluation noise

    @classmethod
    def neutral(cls, num_runs: int) -> Knobs:
        one = np.ones(num_runs)
        return cls(
            learning_rate_R=one.copy(),
            attention_gain_R=one.copy(),
            log_norm_gain_R=np.zeros(num_runs),
            router_bias_RE=np.zeros((num_runs, NUM_EXPERTS)),
            sick_gain_R=one.copy(),
            corruption_R=np.zeros(num_runs),
            batch_size_R=one.copy(),
            training_offset_R=np.zeros(num_runs),
            validation_noise_R=one.copy(),
        )


@dataclass
class State:
    """Where the runs stand, one row a run."""

    distance_RBM: Floats  # from the optimum
    momentum_RBM: Floats
    second_moment_RB: Floats
    norm_squared_R: Floats  # of the weights, relative to the start
    log_gain_R: Floats  # learned, of the normalisation layers
    router_RE: Floats
    small_momentum_RS: Floats  # of the gain and the router together
    small_second_moment_RS: Floats
    lure_RBM: Floats  # where corrupt data pull to

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> State:
        """A copy that holds these rows, in this order."""
        return State(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


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
    """What the workers' gradients of one step are made of; K = B M directions."""

    signal_RK: Floats  # what every worker sees
    scale_RK: Floats  # of a worker's own noise
    ambient_R: Floats  # squared norm of a worker's noise in the flat directions
    sick_gain_R: Floats
    noise: Noise


@dataclass
class Step:
    """What one step showed; one row a run."""

    training_loss_R: Floats
    gradient_norm_R: Floats
    update_norm_R: Floats
    gradient: Gradient


def mode_numbers() -> Floats:
    """k = 1 ... B M, dealt to the blocks in turn, shape (B, M)."""
    k = np.arange(1.0, NUM_BLOCKS * MODES_PER_BLOCK + 1)
    return k.reshape(MODES_PER_BLOCK, NUM_BLOCKS).T.copy()


def curvatures() -> Floats:
    """h_k = H0 / k^3, dealt to the blocks in turn, shape (B, M)."""
    k = mode_numbers()
    return CONSTANTS.top_curvature / (k * k * k)


def start_distance() -> Floats:
    """Typical distance from the optimum before training, shape (B, M).

    Its square grows as k^1.5, which with h_k makes the loss a power of the step.
    """
    k = mode_numbers()
    profile = np.sqrt(k * np.sqrt(k))
    energy = float(np.sum(0.5 * curvatures() * profile * profile))
    return profile * np.sqrt(CONSTANTS.start_quadratic / energy)


class Schedule:
    """Learning rate relative to its peak: linear warm-up, cosine to a tenth."""

    def __init__(self, warmup_steps: int, total_steps: int) -> None:
        step = np.arange(1.0, total_steps + 1)
        after = np.maximum(step - warmup_steps, 0.0) / max(total_steps - warmup_steps, 1)
        least = CONSTANTS.final_learning_rate
        cosine = least + (1.0 - least) * half_cosine(np.minimum(after, 1.0))
        self.relative = np.where(step <= warmup_steps, step / max(warmup_steps, 1), cosine)


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
        self.bias_1, self.bias_2_R = 1.0, np.ones(len(architectures))

    def start(self, draws_RBM: Floats) -> State:
        """Fresh weights from standard normal draws, shape (R, B, M)."""
        num_runs = len(draws_RBM)
        distance = start_distance() * (1.0 + CONSTANTS.start_spread * draws_RBM)
        return State(
            distance_RBM=distance,
            momentum_RBM=np.zeros_like(distance),
            second_moment_RB=np.zeros((num_runs, NUM_BLOCKS)),
            norm_squared_R=np.ones(num_runs),
            log_gain_R=np.zeros(num_runs),
            router_RE=np.zeros((num_runs, NUM_EXPERTS)),
            small_momentum_RS=np.zeros((num_runs, 1 + NUM_EXPERTS)),
            small_second_moment_RS=np.zeros((num_runs, 1 + NUM_EXPERTS)),
            lure_RBM=np.zeros_like(distance),
        )

    def take(self, rows: NDArray[np.intp]) -> None:
        """Keep these rows, in this order."""
        for name, value in vars(self).items():
            if name.endswith(("_R", "_RT")):
                setattr(self, name, value[rows])

    def forward(self, state: State, knobs: Knobs) -> Forward:
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
        attention = state.norm_squared_R * knobs.attention_gain_R * knobs.attention_gain_R
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
        return Forward(loss, slope, curvature, log_gain, quadratic_RB, share, log_load)

    def step(self, state: State, knobs: Knobs, ahead: Forward, noise: Noise, index: int) -> Step:
        """One optimiser step, in place; `index` counts from 0."""
        c = CONSTANTS
        gradient, gradient_norm, parts = self._gradient(state, knobs, ahead, noise)
        clip = np.minimum(1.0, c.clip_norm / gradient_norm)
        gradient *= clip[:, None, None]

        self.bias_1 = self.bias_1 * c.beta_1
        self.bias_2_R = self.bias_2_R * self.beta_2_R
        debias_1, debias_2_R = 1.0 - self.bias_1, 1.0 - self.bias_2_R
        rate_R = self.relative_RT[:, index] * knobs.learning_rate_R

        state.momentum_RBM *= c.beta_1
        state.momentum_RBM += (1.0 - c.beta_1) * gradient
        power = add(gradient * gradient, axis=2) / MODES_PER_BLOCK
        ambient = c.ambient_norm_squared / self.num_workers / (NUM_BLOCKS * MODES_PER_BLOCK)
        power += (ambient * clip * clip)[:, None]
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
        training_loss = ahead.loss_R + knobs.training_offset_R + batch_noise * noise.training_R
        return Step(training_loss, gradient_norm, update_norm, parts)

    def _gradient(
        self, state: State, knobs: Knobs, ahead: Forward, noise: Noise
    ) -> tuple[Floats, Floats, Gradient]:
        """Mean gradient (R, B, M), its norm (R,), and what the workers' are made of."""
        c = CONSTANTS
        others = self.num_workers - 1
        # Corrupt data ask for another optimum.
        target = state.distance_RBM - knobs.corruption_R[:, None, None] * state.lure_RBM
        signal = (ahead.slope_R[:, None, None] * ahead.curvature_RBM * target).reshape(
            len(target), -1
        )
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
        return mean.reshape(target.shape), norm, parts

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
        norms = np.sqrt(add(all_RWK * all_RWK, axis=2) + ambient)
        norms[:, 0] *= gradient.sick_gain_R[:runs]
        norms[norms > FLOAT32_MAX] = np.inf
        return norms

    def _step_gain_and_router(
        self,
        state: State,
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


def saturate(q_R: Floats, excess_R: Floats, worst_R: Floats) -> tuple[Floats, Floats]:
    """Excess loss (nats) of a quadratic distance q, and its derivative by q.

    x = A ln(1 + q/A), bent so that it never passes `worst`: x (1 + (x/worst)^4)^(-1/4).
    """
    square = excess_R / worst_R
    square = square * square
    bend = 1.0 + square * square
    root = np.sqrt(np.sqrt(bend))
    return excess_R / root, 1.0 / ((1.0 + q_R / CONSTANTS.saturation) * bend * root)


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
    WIDTH = 2 * NUM_BLOCKS * MODES_PER_BLOCK + NUM_EXPERTS + 5

    @staticmethod
    def spread_batches(draws: Floats) -> None:
        """Turn the last column of many steps' draws into the scale of each batch's noise."""
        draws[..., -1] = exp(CONSTANTS.batch_spread * draws[..., -1])

    @classmethod
    def split(cls, draws: Floats) -> Noise:
        """Name the parts of standard normal draws, shape (R, WIDTH).

        The last column is no normal any more but what `spread_batches` made of it.
        """
        modes = NUM_BLOCKS * MODES_PER_BLOCK
        return cls(
            draws[:, :modes],
            draws[:, modes : 2 * modes],
            draws[:, 2 * modes : 2 * modes + NUM_EXPERTS],
            *draws[:, -5:].T,
        )
