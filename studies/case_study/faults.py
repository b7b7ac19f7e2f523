"""Faults of a case study; each acts on the real training.

A fault acts at one place of the step: the learning rate, a worker's batch, or a worker's
gradient. A worker is a micro-batch; faults of one worker strike the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, nan
from typing import TYPE_CHECKING

import numpy as np

from rmetric.records import Truth
from studies.case_study import IGNORED, CaseStudyError

if TYPE_CHECKING:  # the command line lists the faults before it pays for torch
    from torch import Tensor

    from studies.case_study.data import Batch

Generator = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one kind, acting from `onset` for `duration` steps.

    Attributes:
        unit: of the severity, in words.
        limits: of the severity.
        all_workers: its `gradient` strikes every worker, not the first alone.
        rate: (severity, steps under the fault, this one included) -> factor of the learning rate.
        batch: (batch, severity, tokens of the vocabulary, generator) -> the batch that is read.
        gradient: (gradient of one weight tensor, severity) -> what comes of it.
    """

    name: str
    unit: str
    severity: float = 1.0
    onset: int = 1
    duration: int = 20
    limits: tuple[float, float] = (0.0, inf)
    all_workers: bool = False
    rate: Callable[[float, int], float] | None = None
    batch: Callable[[Batch, float, int, Generator], Batch] | None = None
    gradient: Callable[[Tensor, float], Tensor] | None = None

    @property
    def label(self) -> str:
        """Name, with the severity if it is not the default; part of file names.

        >>> faults_of("LR_SPIKE:25", onset=400)[0].label
        'LR_SPIKE-25'
        """
        usual = self.severity == FAULTS[self.name].severity
        return self.name if usual else f"{self.name}-{self.severity:g}"

    @property
    def truth(self) -> Truth:
        """What was injected, for the log."""
        return Truth(
            fault=self.name, severity=self.severity, onset_step=self.onset,
            duration_steps=self.duration,
        )  # fmt: skip

    def acts(self, step: int) -> bool:
        return self.onset <= step < self.onset + self.duration


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


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="LR_SPIKE", unit="multiple of the scheduled learning rate", severity=15.0,
              rate=lambda severity, step: severity),
        Fault(name="LR_RUNAWAY", unit="growth of the learning rate a step", severity=1.1,
              duration=100, rate=lambda severity, step: severity**step),
        Fault(name="GRADIENT_SCALE", unit="multiple of one worker's gradient", severity=100.0,
              gradient=lambda gradient, severity: gradient * severity),
        Fault(name="SIGN_FLIP_ALL", unit="multiple of every worker's gradient, its sign turned",
              all_workers=True, gradient=lambda gradient, severity: -severity * gradient),
        Fault(name="NAN_GRADIENT", unit="none: any of it is enough", duration=1,
              gradient=lambda gradient, _: gradient * nan),
        Fault(name="DATA_CORRUPTION", unit="share of the tokens", severity=0.5, duration=100,
              limits=(0.0, 1.0), batch=_corrupt),
        Fault(name="LABEL_SHUFFLE", unit="share of the sequences", duration=100,
              limits=(0.0, 1.0), batch=_shuffle_labels),
    )
}  # fmt: skip


def faults_of(asked: str, onset: int, duration: int | None = None) -> list[Fault]:
    """The faults NAME[:SEVERITY],... in their order, from `onset` on; None: the fault's duration.

    Raises CaseStudyError for one that cannot be.
    """
    faults = [_fault_of(one.strip(), onset, duration) for one in asked.split(",")]
    labels = [fault.label for fault in faults]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise CaseStudyError(f"--fault {asked}: {twice} is in it twice")
    return faults


def _fault_of(asked: str, onset: int, duration: int | None) -> Fault:
    name, _, own = asked.partition(":")
    if name not in FAULTS:
        raise CaseStudyError(f"--fault {name}: known are {', '.join(FAULTS)}, in any case")
    kind = FAULTS[name]
    low, high = kind.limits
    try:
        severity = float(own) if own else kind.severity
    except ValueError:
        severity = nan
    if not (low <= severity <= high and severity < inf):
        raise CaseStudyError(
            f"--fault {asked}: the severity of {name} ({kind.unit}) must be a number "
            f"from {low:g} to {high:g}, as in {name}:{kind.severity:g}"
        )
    return replace(kind, severity=severity, onset=onset, duration=duration or kind.duration)
