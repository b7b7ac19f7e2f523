"""The settings of a case study, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

MODEL = "Qwen/Qwen2.5-3B-Instruct"
TINY = "tiny"  # a model and a text that are made here: see `bundled`
QWEN_3B = "Qwen2.5-3B architecture"
BUNDLED = "bundled"
#: The paper's fault, which the runs measured so far absorb, and one that breaks them.
FAULT = "LR_SPIKE,LR_RUNAWAY"
DATASET = "OpenCoder-LLM/opc-sft-stage2"
DATASET_CONFIG = "educational_instruct"
CONTROL = "control"  # the run without a fault
IGNORED = -100  # the label of a token that is read and not learnt, as torch has it


class CaseStudyError(ValueError):
    """Something that the user has to change; one message, no traceback."""


class CannotWrite(CaseStudyError):
    """The output folder cannot be written."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the runs depend on, beside the device; the defaults are the paper's.

    Attributes:
        model: a name on the hub, a local folder, TINY or QWEN_3B.
        dataset: a name on the hub, a local file or folder, or BUNDLED.
        random_weights: weights drawn from the seed instead of the model's own.
        max_steps: optimiser steps.
        eval_every: steps between two evaluations.
        fault: names in `faults.FAULTS` with commas between, each for a run of its own; one may
            have a severity of its own, as in ``LR_SPIKE:25``.
        severity: of a single fault, in its unit; None for its default.
        fault_step: first step under the fault; None for the middle of the run.
        fault_steps: how many steps it acts; None for its default.
        learning_rate: after the warm-up; None for that of the recipe.
        warm_up: steps over which the learning rate rises to it.
        sequence_length: tokens.
        micro_batch_size: sequences.
        micro_batches: of a step; each stands for a data-parallel worker.
        eval_sequences: held-out sequences of an evaluation.
        seed: of weights, order of the data and the fault's chance.
    """

    model: str = MODEL
    dataset: str = DATASET
    random_weights: bool = False
    max_steps: int = 800
    eval_every: int = 20
    fault: str = FAULT
    severity: float | None = None
    fault_step: int | None = None
    fault_steps: int | None = None
    learning_rate: float | None = None
    warm_up: int = 20
    sequence_length: int = 512
    micro_batch_size: int = 1
    micro_batches: int = 4
    eval_sequences: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise CaseStudyError(f"{option(name)} is {value}: at least {least} is needed")
        if not 1 <= self.onset <= self.max_steps:
            raise CaseStudyError(
                f"--onset is {self.onset}: it must be from 1 to the last step, "
                f"{self.max_steps} (--steps)"
            )
        if self.eval_every > self.max_steps:
            raise CaseStudyError(
                f"--eval-every is {self.eval_every}: the run has {self.max_steps} steps only "
                "(--steps), so it would never be evaluated"
            )
        rate = self.learning_rate
        if rate is not None and not (isfinite(rate) and rate > 0):
            raise CaseStudyError(f"--learning-rate is {rate}: it must be above 0")

    @property
    def onset(self) -> int:
        """First step under the fault."""
        return max(1, self.max_steps // 2) if self.fault_step is None else self.fault_step

    def share_of_rate(self, steps: int, first: int = 1) -> float:
        """Share of the learning rate at step `first` + `steps`: a linear warm-up, then 1."""
        return min(1.0, (first + steps) / self.warm_up) if self.warm_up else 1.0

    def generator(self, *numbers: int) -> np.random.Generator:
        """The randomness of one purpose: of a step, and of what is drawn in it."""
        return np.random.default_rng([self.seed, *numbers])


def tiny_settings(**changes: Any) -> Settings:
    """A model of a tenth of a million weights on bundled text, for any processor."""
    small: dict[str, Any] = dict(
        model=TINY,
        dataset=BUNDLED,
        max_steps=400,
        eval_every=10,
        learning_rate=2e-3,
        sequence_length=64,
        micro_batch_size=4,
        eval_sequences=32,
    )
    return Settings(**(small | changes))


#: Smallest value of each whole number.
LEAST = {
    "max_steps": 1,
    "eval_every": 1,
    "fault_steps": 1,
    "warm_up": 0,
    "sequence_length": 8,
    "micro_batch_size": 1,
    "micro_batches": 2,
    "eval_sequences": 1,
    "seed": 0,
}

#: Options that are called otherwise than the attribute, as all commands call them.
OPTIONS = {"max_steps": "steps", "fault_step": "onset", "fault_steps": "duration"}


def option(name: str) -> str:
    """The option of the command line that sets an attribute."""
    return f"--{OPTIONS.get(name, name).replace('_', '-')}"
