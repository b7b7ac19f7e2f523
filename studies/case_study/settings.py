"""The settings of a case study, its faults and its command line, checked before anything is loaded.

A worker is a micro-batch; a fault of one worker acts on the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rmetric.records import Truth

if TYPE_CHECKING:  # the command line lists the faults before it pays for torch
    from torch import Tensor

    from studies.case_study.data import Batch

IGNORED = -100  # the label of a token that is read and not learnt, as torch has it
MODEL = "Qwen/Qwen2.5-3B-Instruct"
TINY = "tiny"  # an architecture of `models`, as the next one
QWEN_3B = "Qwen2.5-3B architecture"
DATASET = "OpenCoder-LLM/opc-sft-stage2"
BUNDLED = "bundled"  # the text of `data.examples`
#: The paper's fault, from which the models measured so far recover, and one that breaks most.
FAULT = "LR_SPIKE,LR_RUNAWAY"
CONTROL = "control"  # the run without a fault
SWITCHES = {
    "--random-weights": "draw the weights; without --model those of Qwen2.5-3B's architecture, on "
    "bundled text: the real size and cost with nothing to download",
    "--float16": "compute in float16 with loss scaling, as on a T4, where the GPU has bfloat16",
}
METHODS = {
    "full": "train all weights",
    "lora": "train adapters only",
    "qlora": "train adapters on weights of 4 bits, with bitsandbytes on an NVIDIA GPU",
}
#: Attribute of the settings -> its option, its smallest value if it has one, and its help.
NUMBERS: dict[str, tuple[str, int | None, str]] = {
    "max_steps": ("--steps", 1, "optimiser steps (default: 800; tiny 400)"),
    "eval_every": ("--eval-every", 1, "steps between two evaluations (default: 20; tiny 10)"),
    "fault_step": ("--onset", None, "first step under the fault (default: the middle)"),
    "fault_steps": ("--duration", 1, "how many steps it acts (default: the fault's own)"),
    "learning_rate": ("--learning-rate", None,
                      "after the warm-up (default: 1e-5 full, 1e-4 LoRA, 2e-3 tiny)"),
    "sequence_length": ("--sequence-length", 8, "tokens (default: 512; tiny 64)"),
    "micro_batch_size": ("--micro-batch-size", 1,
                         "sequences; a step has four micro-batches (default: 1; tiny 4)"),
    "eval_sequences": ("--eval-sequences", 1, "held-out sequences (default: 32)"),
    "seed": ("--seed", 0, "of weights, data and fault (default: 0)"),
}  # fmt: skip
#: With --tiny: a tenth of a million weights on bundled text, for any processor.
SMALL: dict[str, Any] = dict(
    model=TINY, dataset=BUNDLED, max_steps=400, eval_every=10, learning_rate=2e-3,
    sequence_length=64, micro_batch_size=4, eval_sequences=32,
)  # fmt: skip


class CaseStudyError(ValueError):
    """Something that the user has to change; one message, no traceback."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the runs depend on, beside the device; the defaults are the paper's.

    Attributes, beside those that their options explain:
        model: a name on the hub, a local folder, TINY or QWEN_3B.
        dataset: a name on the hub, a local file or folder, or BUNDLED.
        micro_batches: of a step; each stands for a data-parallel worker.
    """

    model: str = MODEL
    dataset: str = DATASET
    random_weights: bool = False
    max_steps: int = 800
    eval_every: int = 20
    fault: str = FAULT
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
        for name, (option, least, _) in NUMBERS.items():
            value = getattr(self, name)
            if value is not None and least is not None and value < least:
                raise CaseStudyError(f"{option} is {value}: at least {least} is needed")
        last, rate = self.max_steps, self.learning_rate
        for name, value, good, accepted in (
            ("onset", self.onset, 1 <= self.onset <= last, f"from 1 to the last step, {last}"),
            ("eval-every", self.eval_every, self.eval_every <= last, f"at most --steps, {last}"),
            ("learning-rate", rate, rate is None or 0 < rate < inf, "above 0"),
        ):
            if not good:
                raise CaseStudyError(f"--{name} is {value}: it must be {accepted}")

    @property
    def onset(self) -> int:
        return max(1, self.max_steps // 2) if self.fault_step is None else self.fault_step

    def share_of_rate(self, steps: int, first: int = 1) -> float:
        """Share of the learning rate at step `first` + `steps`: a linear warm-up, then 1."""
        return min(1.0, (first + steps) / self.warm_up) if self.warm_up else 1.0

    def generator(self, *numbers: int) -> np.random.Generator:
        """The randomness of a step, and of what is drawn in it."""
        return np.random.default_rng([self.seed, *numbers])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that acts from `onset` for `duration` steps on the rate, the batch or the gradient.

    Attributes:
        unit, limits: of the severity.
        all_workers: its `gradient` acts on every worker, not on the first alone.
        rate: (severity, number of the step under the fault, from 1) -> factor of the learning rate.
        batch: (batch, severity, tokens of the vocabulary, generator) -> the corrupted batch.
        gradient: (gradient of one weight tensor, severity) -> the corrupted gradient.
    """

    name: str
    unit: str
    severity: float = 1.0
    onset: int = 1
    duration: int = 20
    limits: tuple[float, float] = (0.0, inf)
    all_workers: bool = False
    rate: Callable[[float, int], float] | None = None
    batch: Callable[[Batch, float, int, np.random.Generator], Batch] | None = None
    gradient: Callable[[Tensor, float], Tensor] | None = None

    @property
    def label(self) -> str:
        """Name, with the severity if it is not the default; part of file names."""
        usual = self.severity == FAULTS[self.name].severity
        return self.name if usual else f"{self.name}-{self.severity:g}"

    @property
    def truth(self) -> Truth:
        """The injected fault, for the log."""
        known = Truth(fault=self.name, severity=self.severity)
        return replace(known, onset_step=self.onset, duration_steps=self.duration)

    def acts(self, step: int) -> bool:
        return self.onset <= step < self.onset + self.duration


def _corrupt(batch: Batch, share: float, vocabulary: int, generator: np.random.Generator) -> Batch:
    replaced = generator.random(batch.tokens_BL.shape) < share
    drawn = generator.integers(vocabulary, size=batch.tokens_BL.shape)
    return batch._replace(
        tokens_BL=np.where(replaced, drawn, batch.tokens_BL),
        labels_BL=np.where(replaced & (batch.labels_BL != IGNORED), drawn, batch.labels_BL),
    )


def _shuffle_labels(batch: Batch, share: float, _: int, generator: np.random.Generator) -> Batch:
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


def faults_of(text: str, onset: int, duration: int | None = None) -> list[Fault]:
    """The faults NAME[:SEVERITY],... in their order; without `duration` each has its own."""
    found: dict[str, Fault] = {}
    for item in map(str.strip, text.split(",")):
        name, _, own = item.partition(":")
        if name not in FAULTS:
            raise CaseStudyError(f"--fault {name}: known are {', '.join(FAULTS)}, in any case")
        kind, (low, high) = FAULTS[name], FAULTS[name].limits
        try:
            severity = float(own) if own else kind.severity
        except ValueError:
            severity = nan
        if not (low <= severity <= high and severity < inf):
            raise CaseStudyError(
                f"--fault {item}: the severity of {name} ({kind.unit}) must be a number "
                f"from {low:g} to {high:g}, as in {name}:{kind.severity:g}"
            )
        fault = replace(kind, severity=severity, onset=onset, duration=duration or kind.duration)
        if fault.label in found:
            raise CaseStudyError(f"--fault {text}: {fault.label} is in it twice")
        found[fault.label] = fault
    return list(found.values())


def parse_arguments(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="NAME|PATH", help="on the hub, or a local folder")
    source.add_argument("--tiny", action="store_true", help="a tiny Qwen2 on bundled text")
    add("--dataset", metavar="NAME|PATH", help="on the hub, or jsonl, json, csv, parquet here")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="default: a GPU if any")
    for name, what in SWITCHES.items():
        add(name, action="store_true", help=what)
    method = parser.add_mutually_exclusive_group()
    for name, what in METHODS.items():
        method.add_argument(
            f"--{name}", dest="method", action="store_const", const=name, default="auto",
            help=f"{what} (default: the first of all weights, adapters, adapters on 4-bit weights "
            "that fits)",
        )  # fmt: skip
    add(
        "--fault", type=str.upper, metavar="NAME[:SEVERITY],...", default=FAULT,
        help=f"one or more of {', '.join(FAULTS)}; each has a run of its own (default: {FAULT})",
    )  # fmt: skip
    for name, (option, _, what) in NUMBERS.items():
        kind, metavar = (float, "X") if name == "learning_rate" else (int, "N")
        add(option, dest=name, type=kind, metavar=metavar, help=what)
    add("--out", type=Path, metavar="DIR", help="default: case_study_<device>")
    return parser.parse_args(argv)


def settings_of(arguments: argparse.Namespace) -> Settings:
    names = {field.name for field in fields(Settings)} & vars(arguments).keys()
    given: dict[str, Any] = {n: v for n in names if (v := getattr(arguments, n)) is not None}
    if arguments.tiny:
        given = SMALL | given
    elif arguments.random_weights and arguments.model is None:
        given = {"model": QWEN_3B, "dataset": BUNDLED} | given
    return Settings(**given)
