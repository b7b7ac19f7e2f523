"""The interface of a fault, and its input at each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.fault_lab.models import FlatModel
from studies.fault_lab.training import WORKERS, Batch, Settings, Training


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
        memory: state of the fault between steps.
        batch: of the workers; from the place `batch` on.
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


@dataclass(frozen=True)
class Fault:
    """A fault or a benign change.

    Attributes:
        name: as in the logs; the simulator's name if it has the same fault.
        act: applies it, once per step from the onset on.
        severities: from mild to severe.
        duration_steps: duration; 0 for the rest of the run.
        unit: of the severity.
        summary: its effect, in one sentence.
        place: of the step where it acts, the name of its file.
        lowest, highest: valid severities.
        whole: the severity is a count.
        benign: a change that a healthy run goes through.
        planned: the name of its announcement; None if it is not announced.
        only: the architecture on which it can act; None for all.
        optimizer: the optimiser on which it can act; None for all.
    """

    name: str
    act: Callable[[Turn], None]
    severities: tuple[float, ...]
    duration_steps: int
    unit: str
    summary: str
    place: str = ""
    lowest: float = 0.0
    highest: float = inf
    whole: bool = False
    benign: bool = False
    planned: str | None = None
    only: str | None = None
    optimizer: str | None = None


def normal(rng: np.random.Generator, shape: torch.Size) -> Tensor:
    """Standard normal numbers of the fault's own generator."""
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))
