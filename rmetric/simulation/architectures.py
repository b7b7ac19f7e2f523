"""The model types of the study, the constants that they share, and the directions they train in.

docs/simulator.md states where every constant comes from; the ones marked
*fitted* or *by hand* there have no source but the behaviour they give.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmetric.simulation.exact import exp, half_cosine, log

Floats = NDArray[np.float64]

#: Raised with every change that moves a number of any run: a study never goes on in the
#: folder of another version.
SIMULATOR_VERSION = 2

NUM_BLOCKS, MODES_PER_BLOCK = 8, 8
NUM_MODES = NUM_BLOCKS * MODES_PER_BLOCK
ATTENTION = slice(0, 2)  # blocks whose curvature follows the weight norm
EXPERTS = slice(4, 8)  # blocks behind the router, in a mixture of experts
NUM_EXPERTS = 4


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants that the model types share; sources and fits in docs/simulator.md."""

    top_curvature: float = 24.0  # H0 of h_k = H0 / k^3
    start_quadratic: float = 10.0  # q at the start
    start_spread: float = 0.08  # relative, of the start distances
    rate_spread: float = 0.5  # runs differ in their peak rate by up to this share
    saturation: float = 2.0  # A of A ln(1 + q / A), nats
    gain_stiffness: float = 20.0  # B of the norm-gain term
    balance: float = 0.08  # weight of the router's balance term
    softmax_bound: float = 4.0  # b of g² (1 + b) / (g² + b), g the scale of the attention logits
    stride: float = 0.15  # distance moved a step by a unit update at the peak rate
    start_norm: float = 3.5  # weight norm at the start, in units of the stride
    noise_norm_squared: float = 0.5  # of one worker's gradient, in the curved directions
    ambient_norm_squared: float = 4.7  # and in the flat ones
    ambient_spread: float = 0.15  # relative, from batch to batch
    batch_spread: float = 0.08  # log-scale spread of the noise from batch to batch
    router_rate: float = 0.01  # router and gain move this much by a unit update
    gain_rate: float = 0.003
    router_noise: float = 0.05
    hedging_rate: float = 0.5  # share of the way to the right hedge, a step at the peak rate
    surprise: float = 3.3  # nats that rubbish costs a model above uniform guessing
    training_loss_noise: float = 0.012  # nats, of the mean over the workers' batches of 8
    validation_loss_noise: float = 0.003  # nats
    beta_1: float = 0.9
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    final_learning_rate: float = 0.1  # of the peak, at the end of the cosine


CONSTANTS = Constants()


def mode_numbers() -> Floats:
    """Numbers k = 1 ... B M, dealt to the blocks in turn, shape (B, M)."""
    k = np.arange(1.0, NUM_BLOCKS * MODES_PER_BLOCK + 1)
    return np.asarray(k.reshape(MODES_PER_BLOCK, NUM_BLOCKS).T.copy())


def curvatures() -> Floats:
    """h_k = H0 / k^3, dealt to the blocks in turn, shape (B, M)."""
    k = mode_numbers()
    return np.asarray(CONSTANTS.top_curvature / (k * k * k))


def start_distance() -> Floats:
    """Typical distance from the optimum before training, shape (B, M).

    It grows as k, which with h_k makes the loss nearly a power of the step.
    """
    k = mode_numbers()
    energy = float(np.sum(0.5 * curvatures() * k * k))
    return np.asarray(k * np.sqrt(CONSTANTS.start_quadratic / energy))


def schedule(warmup_steps: int, total_steps: int) -> Floats:
    """Learning rate relative to its peak: linear warm-up, cosine to a tenth; shape (T,)."""
    step = np.arange(1.0, total_steps + 1)
    after = np.maximum(step - warmup_steps, 0.0) / max(total_steps - warmup_steps, 1)
    least = CONSTANTS.final_learning_rate
    cosine = least + (1.0 - least) * half_cosine(np.minimum(after, 1.0))
    return np.where(step <= warmup_steps, step / max(warmup_steps, 1), cosine)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model type and its training recipe.

    Attributes:
        name: as in the published matrix.
        parameters: weights active per token, for the scaling law.
        vocabulary: tokens; a model that knows nothing is at ln(vocabulary).
        batch_tokens: tokens per optimiser step.
        peak_learning_rate, beta_2, weight_decay: of AdamW.
        warmup_steps: of the linear warm-up; a cosine to a tenth follows.
        num_experts: of the mixture of experts, 0 for a dense model.
        grouped_query_attention: whether heads share keys and values.
    """

    name: str
    parameters: float
    vocabulary: int
    batch_tokens: float = 4e6
    peak_learning_rate: float
    beta_2: float = 0.95
    weight_decay: float = 0.1
    warmup_steps: int = 200
    num_experts: int = 0
    grouped_query_attention: bool = True

    @property
    def irreducible_loss(self) -> float:
        """Loss that no amount of data removes, nats per token.

        E + 406.4 / N^0.34 with E = 1.69 (Hoffmann et al. 2022, equation 10).
        """
        return 1.69 + 406.4 / float(exp(0.34 * log(np.array(self.parameters))))

    @property
    def worst_excess(self) -> float:
        """Nats between the irreducible loss and that of uniform guessing."""
        return float(log(np.array(float(self.vocabulary)))) - self.irreducible_loss


ARCHITECTURES = {
    known.name: known
    for known in (
        Architecture(
            name="Llama-3-8B", parameters=8.03e9, vocabulary=128_256, peak_learning_rate=3e-4
        ),
        Architecture(
            name="Mistral-7B", parameters=7.24e9, vocabulary=32_000, peak_learning_rate=3e-4
        ),
        Architecture(
            name="GPT-4-MoE",
            parameters=12.9e9,
            vocabulary=100_277,
            peak_learning_rate=2e-4,
            num_experts=4,
        ),
    )
}


def architecture(name: str) -> Architecture:
    """The architecture called `name`; ValueError names the known ones."""
    if name not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {name!r}: known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
