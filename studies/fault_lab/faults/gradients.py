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
    Fault(
        name="GRADIENT_EXPLOSION", act=explode_gradient, severities=(10, 30, 100),
        duration_steps=100,
        unit="multiple of one worker's gradient, its sign turned, at the end",
        summary="One worker's gradient turns around and grows at every step.",
    ),
    Fault(
        name="GRADIENT_SCALE", act=scale_one, severities=(3, 10, 100), duration_steps=100,
        unit="multiple of one worker's gradient", summary="One worker's gradient is too large.",
    ),
    Fault(
        name="GRADIENT_SCALE_ALL", act=scale_all, severities=(10, 1000), duration_steps=100,
        unit="multiple of every worker's gradient", summary="Every worker's gradient is too large.",
    ),
    Fault(
        name="SIGN_FLIP", act=flip_one, severities=(1, 3, 10), duration_steps=100,
        unit="multiple of one worker's gradient, its sign turned",
        summary="One worker's gradient has the wrong sign.",
    ),
    Fault(
        name="SIGN_FLIP_ALL", act=flip_all, severities=(1,), duration_steps=40,
        unit="multiple of every worker's gradient, its sign turned",
        summary="Every worker's gradient has the wrong sign.",
    ),
    Fault(
        name="GRADIENT_NOISE", act=noise_one, severities=(1, 3, 10), duration_steps=100,
        unit="norm of the noise, in units of the worker's gradient",
        summary="One worker's gradient is noisy.",
    ),
    Fault(
        name="GRADIENT_NOISE_ALL", act=noise_all, severities=(1, 3, 10), duration_steps=100,
        unit="norm of the noise, in units of the worker's gradient",
        summary="Every worker's gradient is noisy.",
    ),
    Fault(
        name="INFINITE_GRADIENT", act=make_infinite, severities=(1,), duration_steps=1, lowest=1,
        whole=True,
        unit="infinite entries in one worker's gradient",
        summary="One worker's gradient has an infinite entry, once.",
    ),
    Fault(
        name="STALE_WORKER", act=stale_one, severities=(10, 40, 100), duration_steps=100, lowest=1,
        whole=True,
        unit="steps for which a gradient is sent again",
        summary="One worker sends an old gradient again and again.",
    ),
    Fault(
        name="STALE_ALL", act=stale_all, severities=(10, 40, 100), duration_steps=100, lowest=1,
        whole=True,
        unit="steps for which a gradient is sent again",
        summary="Every worker sends an old gradient again and again.",
    ),
    Fault(
        name="DEAD_WORKER", act=kill_workers, severities=(1, 3), duration_steps=0, lowest=1,
        highest=WORKERS, whole=True,
        unit="workers whose gradient is zero",
        summary="Workers send zeros, which are averaged with the others' gradients.",
    ),
    Fault(
        name="GRADIENT_SPIKE", act=scale_all, severities=(10, 100, 1000), duration_steps=1,
        benign=True,
        unit="multiple of every worker's gradient", summary="One large gradient, which is clipped.",
    ),
)  # fmt: skip
