"""Faults of a real run, and benign changes that resemble them.

Each is one function that changes one thing at one place of the step: the planned
`settings`, the `weights` (and moments) before the forward pass, the `batch`, or the
workers' `gradients` before they are averaged. To add a fault, write its function and a row under
its place. The outcome of the run is not scripted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.fault_lab.models import NUM_EXPERTS, VOCABULARY, FlatModel
from studies.fault_lab.training import EVALUATED, WORKERS, Batch, Settings, Training


@dataclass
class Turn:
    """One step of a run under its fault.

    Attributes:
        age: steps since the onset, 0 at the onset.
        duration: steps that the fault acts.
        memory: state of the fault between steps.
        batch: of the workers; from the place `batch` on.
        gradients_WN: the workers' own; at the place `gradients`.
    """

    training: Training
    settings: Settings
    age: int
    severity: float
    duration: int
    rng: np.random.Generator
    memory: dict[str, Any] = field(default_factory=dict)
    batch: Batch = field(default_factory=lambda: Batch(*np.zeros((2, 1, 1, 1), np.int64)))
    gradients_WN: Tensor = field(default_factory=lambda: torch.zeros(WORKERS, 0))

    @property
    def model(self) -> FlatModel:
        return self.training.model


@dataclass(frozen=True)
class Fault:
    """A fault or a benign change.

    Attributes:
        name: as in the logs; the simulator's name if it has the same fault.
        act: applies it, once per step from the onset on.
        severities: from mild to severe, within `lowest` and `highest`; counts where `whole`.
        duration_steps: 0 for the rest of the run.
        place: of the step where it acts, a key of `PLACES`.
        planned: the name of its announcement; None if it is not announced.
        only, optimizer: the architecture and the optimiser on which it can act; None for all.
    """

    name: str
    act: Callable[[Turn], None]
    severities: tuple[float, ...]
    duration_steps: int
    unit: str
    summary: str
    place: str = ""
    lowest: float = 0.0
    highest: float = inf
    whole: bool = False
    benign: bool = False
    planned: str | None = None
    only: str | None = None
    optimizer: str | None = None


def normal(rng: np.random.Generator, shape: torch.Size) -> Tensor:
    """Standard normal numbers of the fault's own generator."""
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


# The settings of a step: rates, betas, sizes, the arithmetic.


def set_to(turn: Turn, name: str) -> None:
    """The setting is the severity."""
    setattr(turn.settings, name, turn.severity)


def resize(turn: Turn, name: str) -> None:
    """The setting, a whole number, is multiplied."""
    setattr(turn.settings, name, max(1, round(getattr(turn.settings, name) * turn.severity)))


def run_away(turn: Turn) -> None:
    turn.settings.rate_factor = turn.severity ** (turn.age + 1)


def bias_router(turn: Turn) -> None:
    """One expert's logit is raised in every layer."""
    favourite = turn.memory.setdefault("favourite", int(turn.rng.integers(NUM_EXPERTS)))
    turn.settings.router_bias = (favourite, turn.severity)


def rewarm(turn: Turn) -> None:
    """Up from 0 to `severity` times the planned rate over a third of the time, then as planned."""
    ramp = max(turn.duration // 3, 1)
    turn.settings.scheduled_rate *= turn.severity * min((turn.age + 1) / ramp, 1.0)


def cut_rate(turn: Turn) -> None:
    turn.settings.scheduled_rate *= turn.severity


def evaluate_less(turn: Turn) -> None:
    turn.settings.evaluated = round(turn.severity)


SETTINGS = (
    Fault("LR_SPIKE", partial(set_to, name="rate_factor"), (5, 15, 25), 40,
          "multiple of the scheduled learning rate",
          "The optimiser uses a multiple of the scheduled learning rate."),
    Fault("LR_RUNAWAY", run_away, (1.01, 1.02, 1.05), 0, "growth of the learning rate a step",
          "The learning rate grows at every step.", lowest=1.0, highest=2.0),
    Fault("ROUTER_IMBALANCE", bias_router, (2, 4, 8), 100, "bias on one expert's router logit",
          "The router sends most tokens to one expert.", only="mixtral"),
    Fault("HALF_OVERFLOW", partial(set_to, name="half_scale"), (2048, 4096, 8192), 0,
          "scale at which activations pass through half precision",
          "Activations pass through half precision and may leave its range.", lowest=1),
    Fault("BETA_FAULT", partial(set_to, name="beta2"), (0.3, 0.1, 0.0), 0, "beta2 of AdamW",
          "AdamW averages squared gradients over too few steps.", highest=1, optimizer="adamw"),
    Fault("DOMAIN_SHIFT", partial(set_to, name="other_share"), (0.1, 0.2, 0.3), 0,
          "share of the sequences from another domain",
          "The data mixture moves towards another domain.", highest=1, benign=True,
          planned="data_mixture"),
    Fault("NOISY_EVALUATION", evaluate_less, (4, 2, 1), 100, "sequences that are evaluated",
          "Evaluation on a smaller sample, drawn anew each time.", lowest=1, highest=EVALUATED,
          whole=True, benign=True),
    Fault("RATE_REWARMUP", rewarm, (1.0, 1.5, 2.0), 60,
          "multiple of the scheduled learning rate after the ramp",
          "The learning rate is warmed up anew.", benign=True, planned="learning_rate"),
    Fault("RATE_CUT", cut_rate, (0.7, 0.5), 0, "multiple of the scheduled learning rate",
          "The learning rate is cut as planned.", benign=True, planned="learning_rate"),
    Fault("BATCH_SIZE_UP", partial(resize, name="batch_size"), (2, 4), 0,
          "multiple of the batch size",
          "More sequences a step.", benign=True, planned="batch_size"),
    Fault("BATCH_SIZE_DOWN", partial(resize, name="batch_size"), (0.5,), 0,
          "multiple of the batch size",
          "Fewer sequences a step.", benign=True, planned="batch_size"),
    Fault("SEQUENCE_LENGTH", partial(resize, name="length"), (0.5, 2), 0,
          "multiple of the sequence length",
          "Shorter or longer sequences.", benign=True, planned="sequence_length"),
)  # fmt: skip


# The weights or the optimiser's moments, before the forward pass.


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


WEIGHTS = (
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


# The batch, before the workers read it.


def corrupt_data(turn: Turn) -> None:
    """A share of the bytes is random; the byte after a random one remains a target."""
    tokens, labels = turn.batch.tokens_WBT, turn.batch.labels_WBT
    text = np.concatenate([tokens, labels[..., -1:]], axis=-1)
    hit = turn.rng.random(text.shape) < turn.severity
    text[hit] = turn.rng.integers(VOCABULARY, size=int(hit.sum()))
    turn.batch = Batch(text[..., :-1], text[..., 1:].copy())


def shuffle_labels(turn: Turn) -> None:
    """A share of the labels is permuted; the inputs are unchanged."""
    labels = turn.batch.labels_WBT.reshape(-1)
    hit = np.flatnonzero(turn.rng.random(labels.shape) < turn.severity)
    labels[hit] = labels[turn.rng.permutation(hit)]


def repeat_batch(turn: Turn) -> None:
    """The loader repeats the batch of the onset."""
    if turn.age < turn.severity:
        turn.batch = turn.memory.setdefault("batch", turn.batch)


BATCH = (
    Fault("DATA_CORRUPTION", corrupt_data, (0.1, 0.3, 0.6, 1.0), 100,
          "share of the bytes that are random", "Part of every batch is random bytes.", highest=1),
    Fault("LABEL_SHUFFLE", shuffle_labels, (0.3, 0.6, 1.0), 100,
          "share of the labels that change places", "Labels of a batch are mixed up.", highest=1),
    Fault("BAD_BATCH", corrupt_data, (0.3, 0.6, 1.0), 1, "share of the bytes that are random",
          "One batch of rubbish.", highest=1, benign=True),
    Fault("REPEATED_BATCH", repeat_batch, (3, 10), 10, "steps on the same batch",
          "The loader hands out one batch several times.", lowest=1, whole=True, benign=True),
)  # fmt: skip


# The workers' own gradients, before they are averaged.


SICK = 0  # the worker that a fault of one worker strikes
ONE, ALL = slice(SICK, SICK + 1), slice(None)


def explode_gradient(turn: Turn) -> None:
    """One worker's gradient reverses and grows, step by step, up to the severity."""
    turn.gradients_WN[SICK] *= 1.0 - (1.0 + turn.severity) * (turn.age + 1) / turn.duration


def scale(turn: Turn, workers: slice) -> None:
    turn.gradients_WN[workers] *= turn.severity


def flip(turn: Turn, workers: slice) -> None:
    turn.gradients_WN[workers] *= -turn.severity


def add_noise(turn: Turn, workers: slice) -> None:
    """White noise whose norm is `severity` times the gradient's."""
    for gradient_N in turn.gradients_WN[workers]:
        size = turn.severity * torch.linalg.vector_norm(gradient_N) / len(gradient_N) ** 0.5
        gradient_N += size * normal(turn.rng, gradient_N.shape)


def make_infinite(turn: Turn) -> None:
    where = turn.rng.choice(turn.gradients_WN.shape[1], round(turn.severity), replace=False)
    turn.gradients_WN[SICK, torch.from_numpy(where)] = inf


def grow_stale(turn: Turn, workers: slice) -> None:
    """The gradient is computed only every `severity` steps, and sent again in between."""
    if turn.age % round(turn.severity) == 0:
        turn.memory["old"] = turn.gradients_WN[workers].clone()
    turn.gradients_WN[workers] = turn.memory["old"]


def kill_workers(turn: Turn) -> None:
    turn.gradients_WN[: round(turn.severity)] = 0.0


GRADIENTS = (
    Fault("GRADIENT_EXPLOSION", explode_gradient, (10, 30, 100), 100,
          "multiple of one worker's gradient, its sign turned, at the end",
          "One worker's gradient turns around and grows at every step."),
    Fault("GRADIENT_SCALE", partial(scale, workers=ONE), (3, 10, 100), 100,
          "multiple of one worker's gradient",
          "One worker's gradient is too large."),
    Fault("GRADIENT_SCALE_ALL", partial(scale, workers=ALL), (10, 1000), 100,
          "multiple of every worker's gradient",
          "Every worker's gradient is too large."),
    Fault("SIGN_FLIP", partial(flip, workers=ONE), (1, 3, 10), 100,
          "multiple of one worker's gradient, its sign turned",
          "One worker's gradient has the wrong sign."),
    Fault("SIGN_FLIP_ALL", partial(flip, workers=ALL), (1,), 40,
          "multiple of every worker's gradient, its sign turned",
          "Every worker's gradient has the wrong sign."),
    Fault("GRADIENT_NOISE", partial(add_noise, workers=ONE), (1, 3, 10), 100,
          "norm of the noise, in units of the worker's gradient",
          "One worker's gradient is noisy."),
    Fault("GRADIENT_NOISE_ALL", partial(add_noise, workers=ALL), (1, 3, 10), 100,
          "norm of the noise, in units of the worker's gradient",
          "Every worker's gradient is noisy."),
    Fault("INFINITE_GRADIENT", make_infinite, (1,), 1, "infinite entries in one worker's gradient",
          "One worker's gradient has an infinite entry, once.", lowest=1, whole=True),
    Fault("STALE_WORKER", partial(grow_stale, workers=ONE), (10, 40, 100), 100,
          "steps for which a gradient is sent again",
          "One worker sends an old gradient again and again.", lowest=1, whole=True),
    Fault("STALE_ALL", partial(grow_stale, workers=ALL), (10, 40, 100), 100,
          "steps for which a gradient is sent again",
          "Every worker sends an old gradient again and again.", lowest=1, whole=True),
    Fault("DEAD_WORKER", kill_workers, (1, 3), 0, "workers whose gradient is zero",
          "Workers send zeros, which are averaged with the others' gradients.", lowest=1,
          highest=WORKERS, whole=True),
    Fault("GRADIENT_SPIKE", partial(scale, workers=ALL), (10, 100, 1000), 1,
          "multiple of every worker's gradient",
          "One large gradient, which is clipped.", benign=True),
)  # fmt: skip

PLACES = {"settings": SETTINGS, "weights": WEIGHTS, "batch": BATCH, "gradients": GRADIENTS}
FAULTS = {
    entry.name: replace(entry, place=place) for place, faults in PLACES.items() for entry in faults
}


def fault(name: str) -> Fault:
    """The fault or benign change called `name`; ValueError names the known ones."""
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}: known are {', '.join(FAULTS)}")
    return FAULTS[name]
