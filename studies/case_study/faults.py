"""Faults of a case study; each acts on the real training.

A fault acts at one place of the step: the learning rate, a worker's batch, a
worker's gradient, or the state that training leaves behind. A worker is a
micro-batch; faults of one worker strike the first.
"""

from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from rmetric.records import Truth
from studies.case_study.settings import IGNORED, CaseStudyError, Settings

if TYPE_CHECKING:  # the command line lists the faults before it pays for torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from studies.case_study.data import Batch

STRUCK_WORKER = 0
EXPONENT = 23, 31  # bits of a float32


class Fault:
    """One fault, acting from `onset` for `duration` steps; by itself it changes nothing.

    Attributes:
        name: in logs and on the command line.
        unit: of the severity, in words.
        severity, duration: defaults, and what they are if something else is asked for.
        limits: of the severity.
        strikes_gradients: True if `gradient` does anything.
    """

    name, unit = "NONE", ""
    severity, duration, limits = 1.0, 20, (0.0, inf)
    strikes_gradients = False

    def __init__(
        self, onset: int, severity: float | None = None, duration: int | None = None
    ) -> None:
        low, high = self.limits
        if severity is not None and not (low <= severity <= high and severity < inf):
            raise CaseStudyError(
                f"--severity is {severity:g}: that of {self.name} ({self.unit}) must be "
                f"from {low:g} to {high:g}"
            )
        self.onset = onset
        self.severity = self.severity if severity is None else severity
        self.duration = duration or self.duration

    @property
    def label(self) -> str:
        """Name, with the severity if it is not the default; part of file names.

        >>> fault_of(Settings(fault="LR_SPIKE:25")).label
        'LR_SPIKE-25'
        """
        usual = self.severity == type(self).severity
        return self.name if usual else f"{self.name}-{self.severity:g}"

    @property
    def params(self) -> dict[str, Any]:
        """For the configuration in the log."""
        return {
            "severity": self.severity,
            "severity_unit": self.unit,
            "duration_steps": self.duration,
        }

    @property
    def truth(self) -> Truth:
        """What was injected, for the log."""
        return Truth(
            fault=self.name,
            severity=self.severity,
            onset_step=self.onset,
            duration_steps=self.duration,
        )

    def acts(self, step: int) -> bool:
        return self.onset <= step < self.onset + self.duration

    def learning_rate(self, step: int, scheduled: float) -> float:
        return scheduled

    def batch(self, batch: Batch, vocabulary: int, generator: np.random.Generator) -> Batch:
        """The batch that a worker reads in place of `batch`."""
        return batch

    def gradient(self, gradient: Tensor, worker: int, generator: np.random.Generator) -> Tensor:
        """The result of a worker's backward pass for one weight tensor."""
        struck = self.strikes_gradients and worker == STRUCK_WORKER
        return self.strike(gradient, generator) if struck else gradient

    def strike(self, gradient: Tensor, generator: np.random.Generator) -> Tensor:
        """The gradient of the struck worker."""
        return gradient

    def state(self, model: nn.Module, optimizer: Optimizer, generator: np.random.Generator) -> None:
        """Change what training has left behind, once, before the step of the onset."""


class LearningRateSpike(Fault):
    """The learning rate is multiplied; the paper's case study."""

    name, unit = "LR_SPIKE", "multiple of the scheduled learning rate"
    severity = 15.0

    def learning_rate(self, step: int, scheduled: float) -> float:
        return scheduled * self.severity


class LearningRateRunaway(Fault):
    """The learning rate grows by a factor every step, as from a schedule with a wrong sign."""

    name, unit = "LR_RUNAWAY", "growth of the learning rate a step"
    severity, duration = 1.1, 100

    def learning_rate(self, step: int, scheduled: float) -> float:
        return scheduled * self.severity ** (step - self.onset + 1)


class GradientScale(Fault):
    """One worker's gradient is multiplied before it is averaged."""

    name, unit = "GRADIENT_SCALE", "multiple of one worker's gradient"
    severity, strikes_gradients = 100.0, True

    def strike(self, gradient: Tensor, generator: np.random.Generator) -> Tensor:
        return gradient * self.severity


class SignFlip(Fault):
    """Every worker's gradient points the wrong way."""

    name, unit = "SIGN_FLIP_ALL", "multiple of every worker's gradient, its sign turned"
    strikes_gradients = True

    def gradient(self, gradient: Tensor, worker: int, generator: np.random.Generator) -> Tensor:
        return -self.severity * gradient


class GradientNoise(Fault):
    """Noise is added to one worker's gradient."""

    name = "GRADIENT_NOISE"
    unit = "noise over gradient, as root mean squares of each weight tensor"
    severity, strikes_gradients = 10.0, True

    def strike(self, gradient: Tensor, generator: np.random.Generator) -> Tensor:
        import torch

        on_device = torch.Generator(gradient.device).manual_seed(int(generator.integers(2**62)))
        noise = torch.empty_like(gradient).normal_(generator=on_device)
        size = gradient.float().square().mean().sqrt().to(gradient.dtype)
        return gradient + self.severity * size * noise


class NanGradient(Fault):
    """The first entry of every weight tensor's gradient is no number, on one worker."""

    name, unit = "NAN_GRADIENT", "none: any of it is enough"
    duration, strikes_gradients = 1, True

    def strike(self, gradient: Tensor, generator: np.random.Generator) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = nan
        return spoilt


class DataCorruption(Fault):
    """A share of the tokens is replaced by tokens drawn evenly from the vocabulary."""

    name, unit = "DATA_CORRUPTION", "share of the tokens"
    severity, duration, limits = 0.5, 100, (0.0, 1.0)

    def batch(self, batch: Batch, vocabulary: int, generator: np.random.Generator) -> Batch:
        struck = generator.random(batch.tokens_BL.shape) < self.severity
        drawn = generator.integers(vocabulary, size=batch.tokens_BL.shape)
        learnt = batch.labels_BL != IGNORED
        return batch._replace(
            tokens_BL=np.where(struck, drawn, batch.tokens_BL),
            labels_BL=np.where(struck & learnt, drawn, batch.labels_BL),
        )


class LabelShuffle(Fault):
    """In a share of the sequences the labels come in a random order."""

    name, unit = "LABEL_SHUFFLE", "share of the sequences"
    duration, limits = 100, (0.0, 1.0)

    def batch(self, batch: Batch, vocabulary: int, generator: np.random.Generator) -> Batch:
        labels = batch.labels_BL.copy()
        for row in np.flatnonzero(generator.random(len(labels)) < self.severity):
            learnt = labels[row] != IGNORED
            labels[row, learnt] = generator.permutation(labels[row, learnt])
        return batch._replace(labels_BL=labels)


class WeightBitFlip(Fault):
    """One bit of the exponent is turned over, in each of some trained weights."""

    name, unit = "WEIGHT_BIT_FLIP", "weights of which one exponent bit flips"
    duration, limits = 1, (1.0, 1000.0)

    def state(self, model: nn.Module, optimizer: Optimizer, generator: np.random.Generator) -> None:
        import torch

        trained = [p.detach().view(-1) for p in model.parameters() if p.requires_grad]
        sizes = np.array([len(weights) for weights in trained], dtype=float)
        for _ in range(round(self.severity)):
            weights = trained[generator.choice(len(trained), p=sizes / sizes.sum())]
            bit = int(generator.integers(*EXPONENT))
            # Whatever a recipe computes in, what it trains is float32.
            weights.view(torch.int32)[generator.integers(len(weights))].bitwise_xor_(1 << bit)


class SecondMomentZeroed(Fault):
    """The optimiser's second moments are multiplied: 0 forgets how large gradients are."""

    name, unit = "SECOND_MOMENT_ZEROED", "multiple of the second moments"
    severity, duration = 0.0, 1

    def state(self, model: nn.Module, optimizer: Optimizer, generator: np.random.Generator) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(self.severity)


FAULTS: dict[str, type[Fault]] = {fault.name: fault for fault in Fault.__subclasses__()}


def faults_of(settings: Settings) -> list[Fault]:
    """The faults of `settings`, in their order; raises CaseStudyError for one that cannot be."""
    asked = settings.fault.split(",")
    if settings.severity is not None and (len(asked) > 1 or ":" in settings.fault):
        raise CaseStudyError(
            f"--severity is {settings.severity:g} and --fault {settings.fault}: it goes with one "
            "fault; several have their own, as in LR_SPIKE:15,LR_RUNAWAY:1.1"
        )
    faults = [_fault_of(one.strip(), settings) for one in asked]
    labels = [fault.label for fault in faults]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise CaseStudyError(f"--fault {settings.fault}: {twice} is in it twice")
    return faults


def fault_of(settings: Settings) -> Fault:
    """The only or the first fault of `settings`; raises CaseStudyError for an unknown name."""
    return faults_of(settings)[0]


def _fault_of(asked: str, settings: Settings) -> Fault:
    name, _, own = asked.partition(":")
    if name not in FAULTS:
        raise CaseStudyError(f"--fault {name}: known are {', '.join(FAULTS)}, in any case")
    severity = settings.severity
    if own:
        try:
            severity = float(own)
        except ValueError:
            raise CaseStudyError(
                f"--fault {asked}: its severity must be a number, as in LR_SPIKE:15"
            ) from None
    return FAULTS[name](settings.onset, severity, settings.fault_steps)
