"""Faults of the weights or the optimiser's moments, before the forward pass."""

from __future__ import annotations

import torch

from studies.fault_lab.faults.contract import Fault, Turn, normal
from studies.fault_lab.models import NUM_EXPERTS


def lose_experts(turn: Turn) -> None:
    """The same experts in every layer get new random weights."""
    lost = turn.rng.permutation(NUM_EXPERTS)[: round(turn.severity)]
    for weights in turn.model.parts(
        turn.model.weights_N, "experts.gate_up_proj", "experts.down_proj"
    ):
        for expert in lost:
            weights[expert] = 0.02 * normal(turn.rng, weights[expert].shape)


def scale_queries(turn: Turn) -> None:
    for weights in turn.model.parts(turn.model.weights_N, "q_proj.weight", "q_proj.bias"):
        weights.mul_(turn.severity)


def flip_bits(turn: Turn) -> None:
    """One random bit of the exponent, in each of some random weights."""
    weights_N = turn.model.weights_N
    where = torch.from_numpy(turn.rng.choice(len(weights_N), round(turn.severity), replace=False))
    bits = torch.from_numpy(turn.rng.integers(23, 31, size=len(where))).int()
    as_integers = weights_N.view(torch.int32)
    as_integers[where] ^= 1 << bits


def zero_second_moment(turn: Turn) -> None:
    second_N = turn.training.second_N
    second_N[torch.from_numpy(turn.rng.random(len(second_N)) < turn.severity)] = 0.0


def corrupt_first_moment(turn: Turn) -> None:
    first_N = turn.training.first_N
    first_N.add_(turn.severity * first_N.square().mean().sqrt() * normal(turn.rng, first_N.shape))


FAULTS = (
    Fault("EXPERT_FAILURE", lose_experts, (1, 2, 4), 1, "experts reset to fresh weights",
          "Experts lose what they have learnt; the router does not know.", lowest=1,
          highest=NUM_EXPERTS, whole=True, only="mixtral"),
    Fault("ATTENTION_SCALE", scale_queries, (2, 4, 8), 1, "multiple of the query weights",
          "Query weights, and with them the attention logits, are too large at once.", lowest=0.01),
    Fault("ATTENTION_GROWTH", scale_queries, (1.05, 1.1, 1.2), 40,
          "growth of the query weights a step",
          "Query weights, and with them the attention logits, grow at every step.", lowest=1.0,
          highest=2.0),
    Fault("WEIGHT_BIT_FLIP", flip_bits, (1, 4, 16), 1, "weights of which one exponent bit flips",
          "Exponent bits of some weights flip, once.", lowest=1, highest=1000, whole=True),
    Fault("SECOND_MOMENT_ZEROED", zero_second_moment, (0.1, 0.5, 1.0), 1,
          "share of AdamW's second moments that are zeroed",
          "AdamW forgets how large gradients were, and not where they pointed.", highest=1,
          optimizer="adamw"),
    Fault("FIRST_MOMENT_CORRUPTED", corrupt_first_moment, (3, 10, 30), 1,
          "size of the noise, in units of the moments' own",
          "AdamW's first moments are overlaid with noise, once."),
)  # fmt: skip
