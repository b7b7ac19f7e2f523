"""Faults of the settings of a step: rates, betas, sizes, the arithmetic."""

from __future__ import annotations

from studies.fault_lab.faults.contract import Fault, Turn
from studies.fault_lab.models import NUM_EXPERTS
from studies.fault_lab.training import EVALUATED


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


FAULTS = (
    Fault(
        name="LR_SPIKE", act=spike_rate, severities=(5, 15, 25), duration_steps=40,
        unit="multiple of the scheduled learning rate",
        summary="The optimiser uses a multiple of the scheduled learning rate.",
    ),
    Fault(
        name="LR_RUNAWAY", act=run_away, severities=(1.01, 1.02, 1.05), duration_steps=0,
        lowest=1.0, highest=2.0,
        unit="growth of the learning rate a step", summary="The learning rate grows at every step.",
    ),
    Fault(
        name="ROUTER_IMBALANCE", act=bias_router, severities=(2, 4, 8), duration_steps=100,
        only="mixtral",
        unit="bias on one expert's router logit",
        summary="The router sends most tokens to one expert.",
    ),
    Fault(
        name="HALF_OVERFLOW", act=overflow_half, severities=(2048, 4096, 8192), duration_steps=0,
        lowest=1,
        unit="scale at which activations pass through half precision",
        summary="Activations pass through half precision and may leave its range.",
    ),
    Fault(
        name="BETA_FAULT", act=break_beta, severities=(0.3, 0.1, 0.0), duration_steps=0, highest=1,
        optimizer="adamw",
        unit="beta2 of AdamW", summary="AdamW averages squared gradients over too few steps.",
    ),
    Fault(
        name="DOMAIN_SHIFT", act=shift_domain, severities=(0.1, 0.2, 0.3), duration_steps=0,
        highest=1, benign=True, planned="data_mixture",
        unit="share of the sequences from another domain",
        summary="The data mixture moves towards another domain.",
    ),
    Fault(
        name="NOISY_EVALUATION", act=evaluate_less, severities=(4, 2, 1), duration_steps=100,
        lowest=1, highest=EVALUATED, whole=True, benign=True,
        unit="sequences that are evaluated",
        summary="Evaluation on a smaller sample, drawn anew each time.",
    ),
    Fault(
        name="RATE_REWARMUP", act=rewarm, severities=(1.0, 1.5, 2.0), duration_steps=60,
        benign=True, planned="learning_rate",
        unit="multiple of the scheduled learning rate after the ramp",
        summary="The learning rate is warmed up anew.",
    ),
    Fault(
        name="RATE_CUT", act=cut_rate, severities=(0.7, 0.5), duration_steps=0, benign=True,
        planned="learning_rate",
        unit="multiple of the scheduled learning rate",
        summary="The learning rate is cut as planned.",
    ),
    Fault(
        name="BATCH_SIZE_UP", act=resize_batch, severities=(2, 4), duration_steps=0, benign=True,
        planned="batch_size",
        unit="multiple of the batch size", summary="More sequences a step.",
    ),
    Fault(
        name="BATCH_SIZE_DOWN", act=resize_batch, severities=(0.5,), duration_steps=0, benign=True,
        planned="batch_size",
        unit="multiple of the batch size", summary="Fewer sequences a step.",
    ),
    Fault(
        name="SEQUENCE_LENGTH", act=change_length, severities=(0.5, 2), duration_steps=0,
        benign=True, planned="sequence_length",
        unit="multiple of the sequence length", summary="Shorter or longer sequences.",
    ),
)  # fmt: skip
