"""Faults of the workers' own gradients, applied before they are averaged."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from studies.fault_lab.faults.contract import Fault, Turn, normal
from studies.fault_lab.training import WORKERS

SICK = 0  # the worker that a fault of one worker strikes


def explode_gradient(turn: Turn) -> None:
    """One worker's gradient reverses and grows, step by step, up to the severity."""
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
    """The gradient is computed only every `severity` steps, and sent again in between."""
    if turn.age % round(turn.severity) == 0:
        turn.memory["old"] = turn.gradients_WN[workers].clone()
    turn.gradients_WN[workers] = turn.memory["old"]


def kill_workers(turn: Turn) -> None:
    turn.gradients_WN[: round(turn.severity)] = 0.0


FAULTS = (
    Fault("GRADIENT_EXPLOSION", explode_gradient, (10, 30, 100), 100,
          "multiple of one worker's gradient, its sign turned, at the end",
          "One worker's gradient turns around and grows at every step."),
    Fault("GRADIENT_SCALE", scale_one, (3, 10, 100), 100, "multiple of one worker's gradient",
          "One worker's gradient is too large."),
    Fault("GRADIENT_SCALE_ALL", scale_all, (10, 1000), 100, "multiple of every worker's gradient",
          "Every worker's gradient is too large."),
    Fault("SIGN_FLIP", flip_one, (1, 3, 10), 100,
          "multiple of one worker's gradient, its sign turned",
          "One worker's gradient has the wrong sign."),
    Fault("SIGN_FLIP_ALL", flip_all, (1,), 40,
          "multiple of every worker's gradient, its sign turned",
          "Every worker's gradient has the wrong sign."),
    Fault("GRADIENT_NOISE", noise_one, (1, 3, 10), 100,
          "norm of the noise, in units of the worker's gradient",
          "One worker's gradient is noisy."),
    Fault("GRADIENT_NOISE_ALL", noise_all, (1, 3, 10), 100,
          "norm of the noise, in units of the worker's gradient",
          "Every worker's gradient is noisy."),
    Fault("INFINITE_GRADIENT", make_infinite, (1,), 1, "infinite entries in one worker's gradient",
          "One worker's gradient has an infinite entry, once.", lowest=1, whole=True),
    Fault("STALE_WORKER", stale_one, (10, 40, 100), 100, "steps for which a gradient is sent again",
          "One worker sends an old gradient again and again.", lowest=1, whole=True),
    Fault("STALE_ALL", stale_all, (10, 40, 100), 100, "steps for which a gradient is sent again",
          "Every worker sends an old gradient again and again.", lowest=1, whole=True),
    Fault("DEAD_WORKER", kill_workers, (1, 3), 0, "workers whose gradient is zero",
          "Workers send zeros, which are averaged with the others' gradients.", lowest=1,
          highest=WORKERS, whole=True),
    Fault("GRADIENT_SPIKE", scale_all, (10, 100, 1000), 1, "multiple of every worker's gradient",
          "One large gradient, which is clipped.", benign=True),
)  # fmt: skip
