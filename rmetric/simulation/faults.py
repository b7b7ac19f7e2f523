"""Faults of a simulated run, and benign changes that look like them.

A fault turns a mechanism and nothing else; whether, when and how the run fails
follows from the dynamics. To add one, write a function that turns the knobs for
one run and one step, and an entry of `FAULTS`: see CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from rmetric.simulation.architectures import (
    CONSTANTS,
    EXPERTS,
    NUM_EXPERTS,
    Architecture,
    start_distance,
)
from rmetric.simulation.dynamics import Knobs, TrainingState
from rmetric.simulation.exact import log


@dataclass
class Turn:
    """One run at one step under its fault.

    Attributes:
        knobs, state: of the whole batch; only `row` is this run's.
        age: steps since the onset, 0 at the onset.
        duration: steps that the fault acts.
        rng: the run's own generator for its fault, untouched by anything else.
        memory: what the fault wants to keep from step to step.
    """

    knobs: Knobs
    state: TrainingState
    row: int
    age: int
    severity: float
    duration: int
    rng: np.random.Generator
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """A fault or a benign change.

    Attributes:
        unit: of the severity.
        severities: mild, middling, severe; the published ones where there are any.
        duration_steps: how long it acts by default; 0 for the rest of the run.
        summary: what it does, in one sentence.
        stress_severities: those of the stress study, where they differ.
        act: turns the knobs at each step that it acts; None where it only
            strikes the hardware.
        lowest, highest: severities that mean anything.
        whole: the severity is a count.
        benign: a change that a healthy run goes through.
        applies_to: whether an architecture has what the fault acts on.
        hardware: the process of `simulation.hardware` that it starts, or None.
    """

    name: str
    unit: str
    severities: tuple[float, ...]
    duration_steps: int
    summary: str
    stress_severities: tuple[float, ...] = ()
    act: Callable[[Turn], None] | None = None
    lowest: float = 0.0
    highest: float = inf
    whole: bool = False
    benign: bool = False
    applies_to: Callable[[Architecture], bool] = lambda architecture: True
    hardware: str | None = None


def fault(name: str) -> Fault:
    """The fault or benign change called `name`; ValueError names the known ones."""
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}: known are {', '.join(FAULTS)}")
    return FAULTS[name]


def has_experts(architecture: Architecture) -> bool:
    return architecture.num_experts > 0


def multiply(knob: str) -> Callable[[Turn], None]:
    """A fault that multiplies the knob of this name by the severity."""

    def act(turn: Turn) -> None:
        getattr(turn.knobs, knob)[turn.row] *= turn.severity

    return act


def lose_experts(turn: Turn) -> None:
    """Reset experts to fresh weights, once; the router still sends them tokens."""
    if turn.age == 0:
        blocks = EXPERTS.start + turn.rng.permutation(NUM_EXPERTS)[: round(turn.severity)]
        fresh = start_distance()[blocks]
        turn.state.distance_RBM[turn.row, blocks] = fresh * (
            1.0 + CONSTANTS.start_spread * turn.rng.standard_normal(fresh.shape)
        )


def bias_router(turn: Turn) -> None:
    """Push one expert's router logit up."""
    if turn.age == 0:
        turn.memory["expert"] = turn.rng.integers(NUM_EXPERTS)
    turn.knobs.router_bias_RE[turn.row, turn.memory["expert"]] += turn.severity


def explode_gradient(turn: Turn) -> None:
    """One worker's gradient turns around and grows, step by step, up to the severity."""
    grown = (turn.age + 1) / turn.duration
    turn.knobs.sick_gain_R[turn.row] *= 1.0 - (1.0 + turn.severity) * grown


def corrupt_data(turn: Turn) -> None:
    """A share of every batch is noise: less to learn from, and a model that learns to hedge."""
    turn.knobs.rubbish_R[turn.row] = turn.severity


def scale_norm(turn: Turn) -> None:
    """RMSNorm divides by too little: its output is `severity` times too large."""
    turn.knobs.log_norm_gain_R[turn.row] += float(log(np.array(turn.severity)))


def shift_domain(turn: Turn) -> None:
    """Harder text from elsewhere: another loss at once, a slightly other optimum."""
    if turn.age == 0:
        fresh = start_distance()
        turn.state.lure_RBM[turn.row] = fresh * turn.rng.standard_normal(fresh.shape)
    turn.knobs.training_offset_R[turn.row] += turn.severity
    turn.knobs.corruption_R[turn.row] = 0.1 * turn.severity


def rewarm(turn: Turn) -> None:
    """The schedule restarts: up from 0 to `severity` times the rate over a fifth of it."""
    ramp = max(turn.duration // 5, 1)
    turn.knobs.learning_rate_R[turn.row] *= turn.severity * min((turn.age + 1) / ramp, 1.0)


def bad_batch(turn: Turn) -> None:
    """One batch of rubbish: a high loss, and a gradient towards nowhere."""
    fresh = start_distance()
    turn.state.lure_RBM[turn.row] = fresh * turn.rng.standard_normal(fresh.shape)
    turn.knobs.corruption_R[turn.row] = 1.0
    turn.knobs.training_offset_R[turn.row] += turn.severity


FAULTS: dict[str, Fault] = {
    entry.name: entry
    for entry in (
        Fault("NONE", "none", (0.0,), 0, "Nothing is injected."),
        Fault("EXPERT_FAILURE", "experts reset to fresh weights", (1, 2, 4), 1,
            "Experts lose what they have learnt; the router does not know.",
            act=lose_experts, lowest=1, highest=NUM_EXPERTS, whole=True, applies_to=has_experts),
        Fault("ROUTER_IMBALANCE", "bias on one expert's router logit", (2, 4, 8), 500,
            "The router sends most tokens to one expert.",
            act=bias_router, applies_to=has_experts),
        Fault("GRADIENT_EXPLOSION",
            "multiple of one worker's gradient, its sign turned, at the end", (10, 30, 100), 500,
            "One worker's gradient turns around and grows at every step.", act=explode_gradient),
        Fault("LR_SPIKE", "multiple of the scheduled learning rate", (5, 15, 25), 200,
            "The learning rate is multiplied.", act=multiply("learning_rate_R")),
        Fault("NODE_FAILURE", "failures per hour of the sick node", (0.2, 1, 5), 1000,
            "A node turns unreliable; when it is lost, the synchronous job stops.",
            hardware="sick_node"),
        Fault("NETWORK_DEGRADATION", "delay of one link, milliseconds", (50, 150, 250), 1000,
            "A link stalls; a stall longer than the collective's time-out ends the job.",
            hardware="slow_link"),
        Fault("DATA_CORRUPTION", "share of every batch that is corrupt", (0.02, 0.05, 0.10), 0,
            "Part of the data is noise.",
            act=corrupt_data, stress_severities=(0.1, 0.3, 0.6), highest=1),
        Fault("GQA_MISMATCH", "multiple of the attention logits", (2, 4, 8), 500,
            "Query heads use the wrong group's keys and values.",
            act=multiply("attention_gain_R"), lowest=0.01,
            applies_to=lambda architecture: architecture.grouped_query_attention),
        Fault("RMS_NORM_ERROR", "multiple of the normalised output", (1.5, 3.0, 6.0), 0,
            "RMSNorm's scale is wrong.", act=scale_norm, lowest=0.01),
        Fault("DOMAIN_SHIFT", "nats that the new data are harder", (0.1, 0.2, 0.4), 500,
            "The data mixture moves to another domain.", act=shift_domain, benign=True),
        Fault("RATE_REWARMUP", "multiple of the scheduled learning rate after the ramp",
            (1.0, 1.5, 2.0), 300, "The learning rate is warmed up anew.", act=rewarm, benign=True),
        Fault("BAD_BATCH", "nats that the batch is worse", (1.0, 2.0, 4.0), 1,
            "One batch of rubbish.", act=bad_batch, benign=True),
        Fault("NOISY_EVALUATION", "multiple of the evaluation noise", (3, 6, 12), 500,
            "Evaluation on a smaller sample.", act=multiply("validation_noise_R"), benign=True),
        Fault("BATCH_SIZE_CHANGE", "multiple of the batch size", (0.5, 2, 4), 0,
            "More or fewer tokens a step.",
            act=multiply("batch_size_R"), lowest=0.01, benign=True),
    )
}  # fmt: skip
