"""Faults of a case study; each acts on the real training.

A fault acts at one place of the step: the learning rate, a worker's batch, a
worker's gradient, or the state that training leaves behind. A worker is a
micro-batch; faults of one worker strike the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from rmetric.records import Truth
from studies.case_study.settings import IGNORED, CaseStudyError, Settings

if TYPE_CHECKING:  # the command line lists the faults before it pays for torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from studies.case_study.data import Batch

EXPONENT = 23, 31  # bits of a float32
Generator = np.random.Generator


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        unit: of the severity, in words.
        severity, duration: what they are if nothing else is asked for.
        limits: of the severity.
        all_workers: its `gradient` strikes every worker, not the first alone.
        rate: (severity, steps under the fault, this one included) -> factor of the learning rate.
        batch: (batch, severity, tokens of the vocabulary, generator) -> the batch that is read.
        gradient: (gradient of one weight tensor, severity, generator) -> what comes of it.
        state: (model, optimiser, severity, generator), once, before the step of the onset.
    """

    name: str
    unit: str
    severity: float = 1.0
    duration: int = 20
    limits: tuple[float, float] = (0.0, inf)
    all_workers: bool = False
    rate: Callable[[float, int], float] | None = None
    batch: Callable[[Batch, float, int, Generator], Batch] | None = None
    gradient: Callable[[Tensor, float, Generator], Tensor] | None = None
    state: Callable[[nn.Module, Optimizer, float, Generator], None] | None = None


def _add_noise(gradient: Tensor, severity: float, generator: Generator) -> Tensor:
    import torch

    on_device = torch.Generator(gradient.device).manual_seed(int(generator.integers(2**62)))
    noise = torch.empty_like(gradient).normal_(generator=on_device)
    size = gradient.float().square().mean().sqrt().to(gradient.dtype)
    return gradient + severity * size * noise


def _spoil_first(gradient: Tensor, severity: float, generator: Generator) -> Tensor:
    spoilt = gradient.clone()
    spoilt.view(-1)[0] = nan
    return spoilt


def _corrupt(batch: Batch, share: float, vocabulary: int, generator: Generator) -> Batch:
    struck = generator.random(batch.tokens_BL.shape) < share
    drawn = generator.integers(vocabulary, size=batch.tokens_BL.shape)
    learnt = batch.labels_BL != IGNORED
    return batch._replace(
        tokens_BL=np.where(struck, drawn, batch.tokens_BL),
        labels_BL=np.where(struck & learnt, drawn, batch.labels_BL),
    )


def _shuffle_labels(batch: Batch, share: float, vocabulary: int, generator: Generator) -> Batch:
    labels = batch.labels_BL.copy()
    for row in np.flatnonzero(generator.random(len(labels)) < share):
        learnt = labels[row] != IGNORED
        labels[row, learnt] = generator.permutation(labels[row, learnt])
    return batch._replace(labels_BL=labels)


def _flip_bits(model: nn.Module, optimizer: Optimizer, number: float, generator: Generator) -> None:
    import torch

    trained = [p.detach().view(-1) for p in model.parameters() if p.requires_grad]
    sizes = np.array([len(weights) for weights in trained], dtype=float)
    for _ in range(round(number)):
        weights = trained[generator.choice(len(trained), p=sizes / sizes.sum())]
        bit = int(generator.integers(*EXPONENT))
        # Whatever a recipe computes in, what it trains is float32.
        weights.view(torch.int32)[generator.integers(len(weights))].bitwise_xor_(1 << bit)


def _scale_second_moments(
    model: nn.Module, optimizer: Optimizer, factor: float, generator: Generator
) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(factor)


FAULTS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("LR_SPIKE", "multiple of the scheduled learning rate", 15.0,
             rate=lambda severity, step: severity),
        Kind("LR_RUNAWAY", "growth of the learning rate a step", 1.1, 100,
             rate=lambda severity, step: severity**step),
        Kind("GRADIENT_SCALE", "multiple of one worker's gradient", 100.0,
             gradient=lambda gradient, severity, _: gradient * severity),
        Kind("SIGN_FLIP_ALL", "multiple of every worker's gradient, its sign turned",
             all_workers=True, gradient=lambda gradient, severity, _: -severity * gradient),
        Kind("GRADIENT_NOISE", "noise over gradient, as root mean squares of each weight tensor",
             10.0, gradient=_add_noise),
        Kind("NAN_GRADIENT", "none: any of it is enough", duration=1, gradient=_spoil_first),
        Kind("DATA_CORRUPTION", "share of the tokens", 0.5, 100, (0.0, 1.0), batch=_corrupt),
        Kind("LABEL_SHUFFLE", "share of the sequences", 1.0, 100, (0.0, 1.0),
             batch=_shuffle_labels),
        Kind("WEIGHT_BIT_FLIP", "weights of which one exponent bit flips", 1.0, 1, (1.0, 1000.0),
             state=_flip_bits),
        Kind("SECOND_MOMENT_ZEROED", "multiple of the second moments", 0.0, 1,
             state=_scale_second_moments),
    )
}  # fmt: skip


class Fault:
    """A fault of one kind, acting from `onset` for `duration` steps."""

    def __init__(
        self, kind: Kind, onset: int, severity: float | None = None, duration: int | None = None
    ) -> None:
        low, high = kind.limits
        if severity is not None and not (low <= severity <= high and severity < inf):
            raise CaseStudyError(
                f"--severity is {severity:g}: that of {kind.name} ({kind.unit}) must be "
                f"from {low:g} to {high:g}"
            )
        self.kind, self.name, self.onset = kind, kind.name, onset
        self.severity = kind.severity if severity is None else severity
        self.duration = duration or kind.duration

    @property
    def label(self) -> str:
        """Name, with the severity if it is not the default; part of file names.

        >>> faults_of(Settings(fault="LR_SPIKE:25"))[0].label
        'LR_SPIKE-25'
        """
        usual = self.severity == self.kind.severity
        return self.name if usual else f"{self.name}-{self.severity:g}"

    @property
    def params(self) -> dict[str, Any]:
        """For the configuration in the log."""
        return {
            "severity": self.severity,
            "severity_unit": self.kind.unit,
            "duration_steps": self.duration,
        }

    @property
    def truth(self) -> Truth:
        """What was injected, for the log."""
        return Truth(
            fault=self.name, severity=self.severity, onset_step=self.onset,
            duration_steps=self.duration,
        )  # fmt: skip

    def acts(self, step: int) -> bool:
        return self.onset <= step < self.onset + self.duration

    def learning_rate(self, step: int, scheduled: float) -> float:
        rate = self.kind.rate
        return scheduled * rate(self.severity, step - self.onset + 1) if rate else scheduled

    def batch(self, batch: Batch, vocabulary: int, generator: Generator) -> Batch:
        """The batch that a worker reads in place of `batch`."""
        change = self.kind.batch
        return change(batch, self.severity, vocabulary, generator) if change else batch

    def gradient(self, gradient: Tensor, worker: int, generator: Generator) -> Tensor:
        """The result of a worker's backward pass for one weight tensor."""
        change = self.kind.gradient
        struck = change is not None and (worker == 0 or self.kind.all_workers)
        return change(gradient, self.severity, generator) if change and struck else gradient

    def state(self, model: nn.Module, optimizer: Optimizer, generator: Generator) -> None:
        """Change what training has left behind, once, before the step of the onset."""
        if self.kind.state:
            self.kind.state(model, optimizer, self.severity, generator)


def faults_of(settings: Settings) -> list[Fault]:
    """The faults of `settings`, in their order; raises CaseStudyError for one that cannot be."""
    asked = settings.fault.split(",")
    if settings.severity is not None and (len(asked) > 1 or ":" in settings.fault):
        raise CaseStudyError(
            f"--severity is {settings.severity:g} and --fault {settings.fault}: it goes with one "
            "fault; several have their own, as in LR_SPIKE:15,LR_RUNAWAY:1.1"
        )
    faults = [_fault_of(name.strip(), settings) for name in asked]
    labels = [fault.label for fault in faults]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise CaseStudyError(f"--fault {settings.fault}: {twice} is in it twice")
    return faults


def _fault_of(asked: str, settings: Settings) -> Fault:
    name, _, own = asked.partition(":")
    if name not in FAULTS:
        raise CaseStudyError(f"--fault {name}: known are {', '.join(FAULTS)}, in any case")
    try:
        severity = float(own) if own else settings.severity
    except ValueError:
        raise CaseStudyError(
            f"--fault {asked}: its severity must be a number, as in LR_SPIKE:15"
        ) from None
    return Fault(FAULTS[name], settings.onset, severity, settings.fault_steps)
