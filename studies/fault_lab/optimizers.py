"""The updates of the optimisers, in place on the weights and the moments of a run.

The moments are vectors of the run itself, so that a snapshot holds them and a fault can
change them. Every optimiser uses the first ones; only AdamW uses the second ones of all weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPTIMIZERS = ("adamw", "muon", "sgd")
BETA1, BETA2 = 0.9, 0.95
WEIGHT_DECAY = 0.1  # of AdamW and Muon, times the rate
EPSILON = 1e-8
MUON_MOMENTUM = 0.95
#: Of the Newton-Schulz iteration, as in torch.optim.Muon.
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
SMALLEST_NORM = 1e-7
SGD_MOMENTUM = 0.9
SGD_DECAY = 1e-4  # part of the gradient, so that it suits rates near 1


class Weights(NamedTuple):
    """All weights, or one tensor of them, with what belongs to them; all of one shape.

    Weights and moments are updated in place; `decayed` is 1 where weight decay acts, 0 elsewhere.
    """

    weights: Tensor
    first: Tensor
    second: Tensor
    gradient: Tensor
    decayed: Tensor


def adamw(part: Weights, rate: float, beta1: float, beta2: float, step: int) -> None:
    """One step of AdamW; `step` counts from 1."""
    part.first.lerp_(part.gradient, 1.0 - beta1)
    part.second.mul_(beta2).addcmul_(part.gradient, part.gradient, value=1.0 - beta2)
    # The planned betas: an optimiser whose beta is wrong does not know it.
    correction1, correction2 = 1.0 - BETA1**step, 1.0 - BETA2**step
    part.weights.mul_(1.0 - rate * WEIGHT_DECAY * part.decayed)
    root = (part.second / correction2).sqrt_().add_(EPSILON)
    part.weights.addcdiv_(part.first, root, value=-rate / correction1)


def muon(part: Weights, rate: float) -> None:
    """One step of Muon on a matrix, or a stack of them.

    The update has the size that AdamW's usually has (`match_rms_adamw` in torch), so that both
    take the same rates.
    """
    part.first.lerp_(part.gradient, 1.0 - MUON_MOMENTUM)
    direction = orthogonal(part.gradient.lerp(part.first, MUON_MOMENTUM))
    part.weights.mul_(1.0 - rate * WEIGHT_DECAY)
    part.weights.add_(direction, alpha=-rate * 0.2 * max(direction.shape[-2:]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the nearest matrix with singular values of 1, in the precision of `matrix`.

    torch.optim.Muon does the same in bfloat16, and for a single matrix only.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    found = matrix.mT if tall else matrix
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.mT if tall else found


def sgd(part: Weights, rate: float) -> None:
    """One step of stochastic gradient descent with momentum, as in torch.optim.SGD."""
    part.first.mul_(SGD_MOMENTUM).add_(part.gradient)
    part.first.addcmul_(part.decayed, part.weights, value=SGD_DECAY)
    part.weights.add_(part.first, alpha=-rate)
