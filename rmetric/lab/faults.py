"""What is done to a real run: faults, and benign changes that look like them.

Each is one function that touches one thing at one place of the step: the planned
`settings`, the `weights` (and moments) before the forward pass, the `batch`, or
the workers' `gradients` before they are averaged. Whether the run fails is then
up to the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rmetric.lab.models import NUM_EXPERTS, VOCABULARY, FlatModel
from rmetric.lab.training import EVALUATED, WORKERS, Batch, Settings, Training

PLACES = ("settings", "weights", "batch", "gradients")
SICK = 0  # the worker that a fault of one worker strikes


@dataclass
class Turn:
    """One step of a run under its fault.

    Attributes:
        training: the run.
        settings: of this step.
        age: steps since the onset, 0 at the onset.
        severity: in the fault's unit.
        duration: steps that the fault acts.
        rng: the run's own generator for its fault.
        memory: what the fault wants to keep from step to step.
        batch: what the workers read; from the place `batch` on.
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


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault or a benign change.

    Attributes:
        name: as in the logs; those of the simulator where it has the same.
        unit: of the severity.
        severities: from mild to severe.
        duration_steps: how long it acts; 0 for the rest of the run.
        place: of the step where it acts; see `PLACES`.
        act: does it, once a step from the onset on.
        summary: what it does, in one sentence.
        lowest, highest: severities that mean anything.
        whole: the severity is a count.
        benign: a change that a healthy run goes through.
        planned: the name under which the user announces it; None where nobody does.
        only: the architecture that has what it acts on; None for all.
    """

    name: str
    unit: str
    severities: tuple[float, ...]
    duration_steps: int
    place: str
    act: Callable[[Turn], None]
    summary: str
    lowest: float = 0.0
    highest: float = inf
    whole: bool = False
    benign: bool = False
    planned: str | None = None
    only: str | None = None


FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Fault:
    """The fault or benign change called `name`; ValueError names the known ones."""
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}: known are {', '.join(FAULTS)}")
    return FAULTS[name]


def register(new: Fault) -> None:
    """Make a fault known by its name."""
    if new.name in FAULTS:
        raise ValueError(f"fault {new.name!r} is registered already")
    if new.place not in PLACES:
        raise ValueError(f"place is {new.place!r}: known are {', '.join(PLACES)}")
    FAULTS[new.name] = new


# -- settings


def spike_rate(turn: Turn) -> None:
    turn.settings.rate_factor = turn.severity


def run_away(turn: Turn) -> None:
    turn.settings.rate_factor = turn.severity ** (turn.age + 1)


def break_beta(turn: Turn) -> None:
    turn.settings.beta2 = turn.severity


def overflow_half(turn: Turn) -> None:
    turn.settings.half_scale = turn.severity


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


def resize_batch(turn: Turn) -> None:
    turn.settings.batch_size = max(1, round(turn.settings.batch_size * turn.severity))


def change_length(turn: Turn) -> None:
    turn.settings.length = max(1, round(turn.settings.length * turn.severity))


def shift_domain(turn: Turn) -> None:
    turn.settings.other_share = turn.severity


def evaluate_less(turn: Turn) -> None:
    turn.settings.evaluated = round(turn.severity)


# -- weights and moments


def lose_experts(turn: Turn) -> None:
    """The same experts in every layer get fresh random weights."""
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


# -- batch


def corrupt_data(turn: Turn) -> None:
    """A share of the bytes is random; what follows a random byte is still to be guessed."""
    tokens, labels = turn.batch.tokens_WBT, turn.batch.labels_WBT
    text = np.concatenate([tokens, labels[..., -1:]], axis=-1)
    hit = turn.rng.random(text.shape) < turn.severity
    text[hit] = turn.rng.integers(VOCABULARY, size=int(hit.sum()))
    turn.batch = Batch(text[..., :-1], text[..., 1:].copy())


def shuffle_labels(turn: Turn) -> None:
    """A share of the labels changes places; the inputs stay what they are."""
    labels = turn.batch.labels_WBT.reshape(-1)
    hit = np.flatnonzero(turn.rng.random(labels.shape) < turn.severity)
    labels[hit] = labels[turn.rng.permutation(hit)]


def repeat_batch(turn: Turn) -> None:
    """The loader hands out the batch of the onset again and again."""
    if turn.age < turn.severity:
        turn.batch = turn.memory.setdefault("batch", turn.batch)


# -- gradients


def explode_gradient(turn: Turn) -> None:
    """One worker's gradient turns around and grows, step by step, up to the severity."""
    turn.gradients_WN[SICK] *= 1.0 - (1.0 + turn.severity) * (turn.age + 1) / turn.duration


def scale_one(turn: Turn) -> None:
    turn.gradients_WN[SICK] *= turn.severity


def scale_all(turn: Turn) -> None:
    turn.gradients_WN *= turn.severity


def flip_one(turn: Turn) -> None:
    turn.gradients_WN[SICK] *= -turn.severity


def flip_all(turn: Turn) -> None:
    turn.gradients_WN *= -turn.severity


def noise_one(turn: Turn) -> None:
    _add_noise(turn, turn.gradients_WN[SICK])


def noise_all(turn: Turn) -> None:
    for gradient_N in turn.gradients_WN:
        _add_noise(turn, gradient_N)


def _add_noise(turn: Turn, gradient_N: Tensor) -> None:
    """White noise whose norm is `severity` times the gradient's."""
    size = turn.severity * torch.linalg.vector_norm(gradient_N) / len(gradient_N) ** 0.5
    gradient_N += size * normal(turn.rng, gradient_N.shape)


def make_infinite(turn: Turn) -> None:
    where = turn.rng.choice(turn.gradients_WN.shape[1], round(turn.severity), replace=False)
    turn.gradients_WN[SICK, torch.from_numpy(where)] = inf


def stale_one(turn: Turn) -> None:
    _grow_stale(turn, slice(SICK, SICK + 1))


def stale_all(turn: Turn) -> None:
    _grow_stale(turn, slice(None))


def _grow_stale(turn: Turn, workers: slice) -> None:
    """The gradient is made anew every `severity` steps only, and sent again in between."""
    if turn.age % round(turn.severity) == 0:
        turn.memory["old"] = turn.gradients_WN[workers].clone()
    turn.gradients_WN[workers] = turn.memory["old"]


def kill_workers(turn: Turn) -> None:
    turn.gradients_WN[: round(turn.severity)] = 0.0


def normal(rng: np.random.Generator, shape: torch.Size) -> Tensor:
    """Standard normal numbers of the fault's own generator."""
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


for entry in (
    Fault(
        name="LR_SPIKE",
        unit="multiple of the scheduled learning rate",
        severities=(5, 15, 25),
        duration_steps=40,
        place="settings",
        act=spike_rate,
        summary="The optimiser uses a multiple of the scheduled learning rate.",
    ),
    Fault(
        name="LR_RUNAWAY",
        unit="growth of the learning rate a step",
        severities=(1.01, 1.02, 1.05),
        duration_steps=0,
        place="settings",
        act=run_away,
        lowest=1.0,
        highest=2.0,
        summary="The learning rate grows at every step.",
    ),
    Fault(
        name="GRADIENT_EXPLOSION",
        unit="multiple of one worker's gradient, its sign turned, at the end",
        severities=(10, 30, 100),
        duration_steps=100,
        place="gradients",
        act=explode_gradient,
        summary="One worker's gradient turns around and grows at every step.",
    ),
    Fault(
        name="GRADIENT_SCALE",
        unit="multiple of one worker's gradient",
        severities=(3, 10, 100),
        duration_steps=100,
        place="gradients",
        act=scale_one,
        summary="One worker's gradient is too large.",
    ),
    Fault(
        name="GRADIENT_SCALE_ALL",
        unit="multiple of every worker's gradient",
        severities=(10, 1000),
        duration_steps=100,
        place="gradients",
        act=scale_all,
        summary="Every worker's gradient is too large.",
    ),
    Fault(
        name="SIGN_FLIP",
        unit="multiple of one worker's gradient, its sign turned",
        severities=(1, 3, 10),
        duration_steps=100,
        place="gradients",
        act=flip_one,
        summary="One worker's gradient has the wrong sign.",
    ),
    Fault(
        name="SIGN_FLIP_ALL",
        unit="multiple of every worker's gradient, its sign turned",
        severities=(1,),
        duration_steps=40,
        place="gradients",
        act=flip_all,
        summary="Every worker's gradient has the wrong sign.",
    ),
    Fault(
        name="GRADIENT_NOISE",
        unit="norm of the noise, in units of the worker's gradient",
        severities=(1, 3, 10),
        duration_steps=100,
        place="gradients",
        act=noise_one,
        summary="One worker's gradient is noisy.",
    ),
    Fault(
        name="GRADIENT_NOISE_ALL",
        unit="norm of the noise, in units of the worker's gradient",
        severities=(1, 3, 10),
        duration_steps=100,
        place="gradients",
        act=noise_all,
        summary="Every worker's gradient is noisy.",
    ),
    Fault(
        name="INFINITE_GRADIENT",
        unit="infinite entries in one worker's gradient",
        severities=(1,),
        duration_steps=1,
        place="gradients",
        act=make_infinite,
        lowest=1,
        whole=True,
        summary="One worker's gradient has an infinite entry, once.",
    ),
    Fault(
        name="STALE_WORKER",
        unit="steps for which a gradient is sent again",
        severities=(10, 40, 100),
        duration_steps=100,
        place="gradients",
        act=stale_one,
        lowest=1,
        whole=True,
        summary="One worker sends an old gradient again and again.",
    ),
    Fault(
        name="STALE_ALL",
        unit="steps for which a gradient is sent again",
        severities=(10, 40, 100),
        duration_steps=100,
        place="gradients",
        act=stale_all,
        lowest=1,
        whole=True,
        summary="Every worker sends an old gradient again and again.",
    ),
    Fault(
        name="DATA_CORRUPTION",
        unit="share of the bytes that are random",
        severities=(0.1, 0.3, 0.6, 1.0),
        duration_steps=100,
        place="batch",
        act=corrupt_data,
        highest=1,
        summary="Part of every batch is random bytes.",
    ),
    Fault(
        name="LABEL_SHUFFLE",
        unit="share of the labels that change places",
        severities=(0.3, 0.6, 1.0),
        duration_steps=100,
        place="batch",
        act=shuffle_labels,
        highest=1,
        summary="Labels of a batch are mixed up.",
    ),
    Fault(
        name="EXPERT_FAILURE",
        unit="experts reset to fresh weights",
        severities=(1, 2, 4),
        duration_steps=1,
        place="weights",
        act=lose_experts,
        lowest=1,
        highest=NUM_EXPERTS,
        whole=True,
        only="mixtral",
        summary="Experts lose what they have learnt; the router does not know.",
    ),
    Fault(
        name="ROUTER_IMBALANCE",
        unit="bias on one expert's router logit",
        severities=(2, 4, 8),
        duration_steps=100,
        place="settings",
        act=bias_router,
        only="mixtral",
        summary="The router sends most tokens to one expert.",
    ),
    Fault(
        name="ATTENTION_SCALE",
        unit="multiple of the query weights",
        severities=(2, 4, 8),
        duration_steps=1,
        place="weights",
        act=scale_queries,
        lowest=0.01,
        summary="Query weights, and with them the attention logits, are too large at once.",
    ),
    Fault(
        name="ATTENTION_GROWTH",
        unit="growth of the query weights a step",
        severities=(1.05, 1.1, 1.2),
        duration_steps=40,
        place="weights",
        act=scale_queries,
        lowest=1.0,
        highest=2.0,
        summary="Query weights, and with them the attention logits, grow at every step.",
    ),
    Fault(
        name="HALF_OVERFLOW",
        unit="scale at which activations pass through half precision",
        severities=(2048, 4096, 8192),
        duration_steps=0,
        place="settings",
        act=overflow_half,
        lowest=1,
        summary="Activations pass through half precision and may leave its range.",
    ),
    Fault(
        name="WEIGHT_BIT_FLIP",
        unit="weights of which one exponent bit flips",
        severities=(1, 4, 16),
        duration_steps=1,
        place="weights",
        act=flip_bits,
        lowest=1,
        highest=1000,
        whole=True,
        summary="Exponent bits of some weights flip, once.",
    ),
    Fault(
        name="SECOND_MOMENT_ZEROED",
        unit="share of AdamW's second moments that are zeroed",
        severities=(0.1, 0.5, 1.0),
        duration_steps=1,
        place="weights",
        act=zero_second_moment,
        highest=1,
        summary="AdamW forgets how large gradients were, and not where they pointed.",
    ),
    Fault(
        name="FIRST_MOMENT_CORRUPTED",
        unit="size of the noise, in units of the moments' own",
        severities=(3, 10, 30),
        duration_steps=1,
        place="weights",
        act=corrupt_first_moment,
        summary="AdamW's first moments are overlaid with noise, once.",
    ),
    Fault(
        name="BETA_FAULT",
        unit="beta2 of AdamW",
        severities=(0.3, 0.1, 0.0),
        duration_steps=0,
        place="settings",
        act=break_beta,
        highest=1,
        summary="AdamW averages squared gradients over too few steps.",
    ),
    Fault(
        name="DEAD_WORKER",
        unit="workers whose gradient is zero",
        severities=(1, 3),
        duration_steps=0,
        place="gradients",
        act=kill_workers,
        lowest=1,
        highest=WORKERS,
        whole=True,
        summary="Workers send zeros, which are averaged with the others' gradients.",
    ),
    Fault(
        name="DOMAIN_SHIFT",
        unit="share of the sequences from another domain",
        severities=(0.1, 0.2, 0.3),
        duration_steps=0,
        place="settings",
        act=shift_domain,
        highest=1,
        benign=True,
        planned="data_mixture",
        summary="The data mixture moves towards another domain.",
    ),
    Fault(
        name="NOISY_EVALUATION",
        unit="sequences that are evaluated",
        severities=(4, 2, 1),
        duration_steps=100,
        place="settings",
        act=evaluate_less,
        lowest=1,
        highest=EVALUATED,
        whole=True,
        benign=True,
        summary="Evaluation on a smaller sample, drawn anew each time.",
    ),
    Fault(
        name="RATE_REWARMUP",
        unit="multiple of the scheduled learning rate after the ramp",
        severities=(1.0, 1.5, 2.0),
        duration_steps=60,
        place="settings",
        act=rewarm,
        benign=True,
        planned="learning_rate",
        summary="The learning rate is warmed up anew.",
    ),
    Fault(
        name="RATE_CUT",
        unit="multiple of the scheduled learning rate",
        severities=(0.7, 0.5),
        duration_steps=0,
        place="settings",
        act=cut_rate,
        benign=True,
        planned="learning_rate",
        summary="The learning rate is cut as planned.",
    ),
    Fault(
        name="BATCH_SIZE_UP",
        unit="multiple of the batch size",
        severities=(2, 4),
        duration_steps=0,
        place="settings",
        act=resize_batch,
        benign=True,
        planned="batch_size",
        summary="More sequences a step.",
    ),
    Fault(
        name="BATCH_SIZE_DOWN",
        unit="multiple of the batch size",
        severities=(0.5,),
        duration_steps=0,
        place="settings",
        act=resize_batch,
        benign=True,
        planned="batch_size",
        summary="Fewer sequences a step.",
    ),
    Fault(
        name="BAD_BATCH",
        unit="share of the bytes that are random",
        severities=(0.3, 0.6, 1.0),
        duration_steps=1,
        place="batch",
        act=corrupt_data,
        highest=1,
        benign=True,
        summary="One batch of rubbish.",
    ),
    Fault(
        name="GRADIENT_SPIKE",
        unit="multiple of every worker's gradient",
        severities=(10, 100, 1000),
        duration_steps=1,
        place="gradients",
        act=scale_all,
        benign=True,
        summary="One large gradient, which is clipped.",
    ),
    Fault(
        name="SEQUENCE_LENGTH",
        unit="multiple of the sequence length",
        severities=(0.5, 2),
        duration_steps=0,
        place="settings",
        act=change_length,
        benign=True,
        planned="sequence_length",
        summary="Shorter or longer sequences.",
    ),
    Fault(
        name="REPEATED_BATCH",
        unit="steps on the same batch",
        severities=(3, 10),
        duration_steps=10,
        place="batch",
        act=repeat_batch,
        lowest=1,
        whole=True,
        benign=True,
        summary="The loader hands out one batch several times.",
    ),
):
    register(entry)
