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
    Fault("LR_SPIKE", spike_rate, (5, 15, 25), 40, "multiple of the scheduled learning rate",
          "The optimiser uses a multiple of the scheduled learning rate."),
    Fault("LR_RUNAWAY", run_away, (1.01, 1.02, 1.05), 0, "growth of the learning rate a step",
          "The learning rate grows at every step.", lowest=1.0, highest=2.0),
    Fault("ROUTER_IMBALANCE", bias_router, (2, 4, 8), 100, "bias on one expert's router logit",
          "The router sends most tokens to one expert.", only="mixtral"),
    Fault("HALF_OVERFLOW", overflow_half, (2048, 4096, 8192), 0,
          "scale at which activations pass through half precision",
          "Activations pass through half precision and may leave its range.", lowest=1),
    Fault("BETA_FAULT", break_beta, (0.3, 0.1, 0.0), 0, "beta2 of AdamW",
          "AdamW averages squared gradients over too few steps.", highest=1, optimizer="adamw"),
    Fault("DOMAIN_SHIFT", shift_domain, (0.1, 0.2, 0.3), 0,
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
    Fault("BATCH_SIZE_UP", resize_batch, (2, 4), 0, "multiple of the batch size",
          "More sequences a step.", benign=True, planned="batch_size"),
    Fault("BATCH_SIZE_DOWN", resize_batch, (0.5,), 0, "multiple of the batch size",
          "Fewer sequences a step.", benign=True, planned="batch_size"),
    Fault("SEQUENCE_LENGTH", change_length, (0.5, 2), 0, "multiple of the sequence length",
          "Shorter or longer sequences.", benign=True, planned="sequence_length"),
)  # fmt: skip
