"""State, knobs and noise of a batch of simulated runs, and the values that a step shows.

Shape suffixes: R runs, W workers, B blocks, M modes of a block, K = B M modes, E
experts, S = 1 + E small parameters (the norm gain and the router's logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rmetric.simulation.architectures import CONSTANTS, NUM_EXPERTS, NUM_MODES, Floats
from rmetric.simulation.exact import exp


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
    """Where the runs stand, one row a run."""

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

        The last column is no normal any more but what `spread_batches` made of it.
        """
        modes = NUM_MODES
        return cls(
            draws[:, :modes],
            draws[:, modes : 2 * modes],
            draws[:, 2 * modes : 2 * modes + NUM_EXPERTS],
            *draws[:, -5:].T,
        )
