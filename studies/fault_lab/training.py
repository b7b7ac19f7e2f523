"""One real training run, a step at a time: four workers, their mean, a clip, an update.

`Training` holds the whole state of a run: weights, moments and the step. The batch of a step
depends on the seed and the step alone, so a run that resumes from a snapshot continues bit for
bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmetric.monitor.forward import ForwardProbes
from rmetric.monitor.gradients import layer_names, norms_by_layer, tensor_norms
from rmetric.monitor.workers import cosines_to_mean
from rmetric.records import Record
from studies.fault_lab.corpus import corpus, windows
from studies.fault_lab.models import MAX_LENGTH, FlatModel

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
    """All weights, or one tensor, and their moments; `decayed` is 1 where weight decay acts."""

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
    """One step of Muon on a matrix, or a stack of them, with the size of AdamW's usual updates."""
    part.first.lerp_(part.gradient, 1.0 - MUON_MOMENTUM)
    direction = orthogonal(part.gradient.lerp(part.first, MUON_MOMENTUM))
    part.weights.mul_(1.0 - rate * WEIGHT_DECAY)
    part.weights.add_(direction, alpha=-rate * 0.2 * max(direction.shape[-2:]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the nearest matrix with singular values of 1, in the precision of `matrix`."""
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


# -- optimisers

if TYPE_CHECKING:
    from studies.fault_lab.spec import LabSpec

WORKERS = 4
EVALUATE_EVERY = 10
EVALUATED = 16  # sequences of the held-out batch
PROBED = 2  # sequences of the probe batch, looked at after every step
CLIP = 1.0
WARM_UP = 40  # steps
FLOOR = 0.1  # of the peak rate, at the end
CONTEXT = 48  # bytes of a sequence


@dataclass
class Settings:
    """Settings of one step; faults and planned changes modify them.

    Attributes:
        scheduled_rate: learning rate of the schedule, as in the record.
        rate_factor: multiple of it that the optimiser uses.
        batch_size: sequences a worker, of `length` tokens.
        other_share: share of the sequences that come from the other domain.
        evaluated: sequences of the held-out batch.
        half_scale, router_bias: see `FlatModel.disturbed`.
        planned: changes that the user announced at this step.
    """

    scheduled_rate: float
    rate_factor: float = 1.0
    beta1: float = BETA1
    beta2: float = BETA2
    batch_size: int = 2
    length: int = CONTEXT
    other_share: float = 0.0
    evaluated: int = EVALUATED
    half_scale: float | None = None
    router_bias: tuple[int, float] | None = None
    planned: tuple[str, ...] = ()


@dataclass
class Batch:
    """Input of the workers at one step, shape (workers, sequences, tokens)."""

    tokens_WBT: NDArray[np.int64]
    labels_WBT: NDArray[np.int64]


class Average(NamedTuple):
    """Average of the workers' gradients, and norm and cosine to it of each worker's own.

    `non_finite` counts entries that are nan or inf, over all workers.
    """

    gradient_N: Tensor
    loss: float
    norms: tuple[float, ...]
    cosines: tuple[float, ...]
    non_finite: int


@dataclass(frozen=True)
class Snapshot:
    """Whole state of a run after a step."""

    step: int
    weights_N: Tensor
    first_N: Tensor
    second_N: Tensor


class Training:
    """A run that is trained step by step, before its first step.

    `first_N` has the optimiser's first moments, or its momentum; `second_N` AdamW's second moments,
    0 where the optimiser has none.
    """

    def __init__(self, spec: LabSpec) -> None:
        # Twice the context: a planned change may double the length of the sequences.
        max_length = max(MAX_LENGTH, 2 * spec.context)
        model = FlatModel(spec.architecture, spec.seed, spec.size, max_length)
        text = corpus(spec.text)
        self.spec, self.model, self.text = spec, model, text
        self.step = 0
        self.first_N = torch.zeros_like(model.weights_N)
        self.second_N = torch.zeros_like(model.weights_N)
        self._layers = layer_names(model.names)
        self._probes = ForwardProbes(model.module)
        rng = np.random.default_rng([spec.seed, 0])
        self.held_out = self._windows(text.held_out, rng, EVALUATED)
        self._probe = self._windows(text.held_out, rng, PROBED)

    def snapshot(self) -> Snapshot:
        moments = self.first_N.clone(), self.second_N.clone()
        return Snapshot(self.step, self.model.weights_N.clone(), *moments)

    def restore(self, snapshot: Snapshot) -> None:
        self.step = snapshot.step
        self.model.weights_N.copy_(snapshot.weights_N)
        self.first_N.copy_(snapshot.first_N)
        self.second_N.copy_(snapshot.second_N)

    def settings(self, step: int) -> Settings:
        """Planned settings for `step`, counted from 1."""
        spec = self.spec
        rate = spec.peak_rate * schedule(step, spec.total_steps, spec.restarts)
        return Settings(scheduled_rate=rate, length=spec.context)

    def batch(self, step: int, settings: Settings) -> Batch:
        """The batch of a step; depends on the seed, the step and the settings alone."""
        rng = np.random.default_rng([self.spec.seed, step])
        shape, length = (WORKERS, settings.batch_size), settings.length + 1
        draw = rng.random(shape)
        tokens = self._at(self.text.home, draw, length)
        elsewhere = rng.random(shape) < settings.other_share
        if elsewhere.any():
            tokens[elsewhere] = self._at(self.text.other, draw[elsewhere], length)
        return Batch(tokens[..., :-1], tokens[..., 1:].copy())

    def gradients(self, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
        """Each worker's own, shape (workers, parameters), and losses, shape (workers,)."""
        tokens, labels = torch.from_numpy(batch.tokens_WBT), torch.from_numpy(batch.labels_WBT)
        with self.model.disturbed(settings.half_scale, settings.router_bias):
            return self.model.gradients(tokens, labels)

    def average(self, losses_W: Tensor, gradients_WN: Tensor) -> Average:
        """The workers' mean, with each worker's norm and cosine to it."""
        norms = tuple(torch.linalg.vector_norm(gradients_WN, dim=1).tolist())
        return Average(
            gradient_N=gradients_WN.mean(dim=0),
            loss=float(losses_W.mean()),
            norms=norms,
            cosines=tuple(cosines_to_mean(gradients_WN).tolist()),
            # A finite norm has no entry that is not, which saves the count.
            non_finite=0 if all(map(isfinite, norms)) else int((~gradients_WN.isfinite()).sum()),
        )

    def finish_step(self, settings: Settings, average: Average, *, update: bool = True) -> Record:
        """Clip and update the weights, or leave them; the record of the step and its evaluation."""
        self.step += 1
        model = self.model
        norm = torch.linalg.vector_norm(average.gradient_N)
        record = self._record(settings, average, float(norm))
        if update:
            before_N = model.weights_N.clone()
            self._update(settings, average.gradient_N * torch.clamp(CLIP / (norm + 1e-6), max=1.0))
            record.update_norm = float(torch.linalg.vector_norm(model.weights_N - before_N))
        record.parameter_norm = float(torch.linalg.vector_norm(model.weights_N))
        with model.disturbed(settings.half_scale, settings.router_bias):
            if update:
                record.probe_loss = model.evaluate(*self._probe)
            if self.step % EVALUATE_EVERY == 0:
                self._evaluate(record, settings)
        return record

    def _update(self, settings: Settings, gradient_N: Tensor) -> None:
        rate = settings.scheduled_rate * settings.rate_factor
        model = self.model
        whole = Weights(model.weights_N, self.first_N, self.second_N, gradient_N, model.decayed_N)
        if self.spec.optimizer == "sgd":
            sgd(whole, rate)
        elif self.spec.optimizer == "adamw":
            adamw(whole, rate, settings.beta1, settings.beta2, self.step)
        else:
            # Muon is for the matrices between embedding and output; AdamW updates the others.
            parts = zip(*map(model.tensors, whole), strict=True)
            for tensors, between in zip(parts, model.between, strict=True):
                part = Weights(*tensors)
                if between:
                    muon(part, rate)
                else:
                    adamw(part, rate, settings.beta1, settings.beta2, self.step)

    def _record(self, settings: Settings, average: Average, norm: float) -> Record:
        record = Record(
            step=self.step,
            time=float(self.step),
            training_loss=average.loss,
            gradient_norm=norm,
            worker_gradient_norms=average.norms,
            worker_gradient_cosines=average.cosines,
            non_finite_gradients=average.non_finite,
            learning_rate=settings.scheduled_rate,
            planned_events=settings.planned or None,
        )
        if self.step % EVALUATE_EVERY == 0:
            norms = tensor_norms(self.model.tensors(average.gradient_N)).tolist()
            record.layer_gradient_norms = norms_by_layer(self._layers, norms)
        return record

    def _evaluate(self, record: Record, settings: Settings) -> None:
        tokens, labels = self.held_out
        if settings.evaluated < EVALUATED:
            rng = np.random.default_rng([self.spec.seed, self.step, 1])
            chosen = torch.from_numpy(rng.permutation(EVALUATED)[: settings.evaluated])
            tokens, labels = tokens[chosen], labels[chosen]
        with self._probes.measuring():
            record.validation_loss = self.model.evaluate(tokens, labels)
        for name, value in self._probes.read().items():
            setattr(record, name, value)

    def _at(self, text: NDArray[np.uint8], draw: NDArray[np.float64], length: int) -> NDArray:
        starts = (draw * (len(text) - self.model.max_length - 1)).astype(np.int64)
        return windows(text, starts, length).astype(np.int64)

    def _windows(
        self, text: NDArray[np.uint8], rng: np.random.Generator, number: int
    ) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(self._at(text, rng.random(number), self.spec.context + 1))
        return tokens[:, :-1], tokens[:, 1:]


def schedule(step: int, total_steps: int, restarts: int = 0) -> float:
    """Share of the peak rate: up in a line, then down a cosine.

    With `restarts`, the cosine begins anew at the peak so many times, after equal times.

    >>> schedule(20, 400), schedule(40, 400), round(schedule(400, 400), 3)
    (0.5, 1.0, 0.1)
    >>> [round(schedule(step, 400, restarts=1), 3) for step in (219, 220, 400)]
    [0.1, 1.0, 0.1]
    """
    if step <= WARM_UP:
        return step / WARM_UP
    length = total_steps - WARM_UP
    done = (step - WARM_UP) * (restarts + 1)
    progress = done % length / length if step < total_steps else 1.0
    return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + cos(pi * progress))
