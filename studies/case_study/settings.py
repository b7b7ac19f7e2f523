"""The settings of a case study and its command line, checked before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from studies.case_study import CaseStudyError
from studies.case_study.faults import FAULTS

MODEL = "Qwen/Qwen2.5-3B-Instruct"
TINY = "tiny"  # an architecture of `models`, as the next one
QWEN_3B = "Qwen2.5-3B architecture"
DATASET = "OpenCoder-LLM/opc-sft-stage2"
BUNDLED = "bundled"  # the text of `bundled`
#: The paper's fault, which the runs measured so far absorb, and one that breaks them.
FAULT = "LR_SPIKE,LR_RUNAWAY"
CONTROL = "control"  # the run without a fault
METHODS = {
    "full": "train all weights",
    "lora": "train adapters only",
    "qlora": "train adapters on weights of 4 bits, with bitsandbytes on an NVIDIA GPU",
}


def _number(default: Any, help: str = "", least: int | None = None, option: str = "") -> Any:
    """A field with the help and the name of its option, and its smallest value."""
    return field(default=default, metadata={"help": help, "least": least, "option": option})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the runs depend on, beside the device; the defaults are the paper's.

    Attributes, beside those that their options explain:
        model: a name on the hub, a local folder, TINY or QWEN_3B.
        dataset: a name on the hub, a local file or folder, or BUNDLED.
        random_weights: weights drawn from the seed instead of the model's own.
        fault: names in `faults.FAULTS` with commas between, each for a run of its own; one may
            have a severity of its own, as in ``LR_SPIKE:25``.
        warm_up: steps over which the learning rate rises.
        micro_batches: of a step; each stands for a data-parallel worker.
    """

    model: str = MODEL
    dataset: str = DATASET
    random_weights: bool = False
    max_steps: int = _number(800, "optimiser steps (default: 800; tiny 400)", 1, "steps")
    eval_every: int = _number(20, "steps between two evaluations (default: 20; tiny 10)", 1)
    fault: str = FAULT
    fault_step: int | None = _number(
        None, "first step under the fault (default: the middle)", option="onset"
    )
    fault_steps: int | None = _number(
        None, "how many steps it acts (default: the fault's own, 20 for LR_SPIKE)", 1, "duration"
    )
    learning_rate: float | None = _number(
        None, "after the warm-up (default: 1e-5 full, 1e-4 LoRA, 2e-3 tiny)"
    )
    warm_up: int = 20
    sequence_length: int = _number(512, "tokens (default: 512; tiny 64)", 8)
    micro_batch_size: int = _number(
        1, "sequences; a step has four micro-batches (default: 1; tiny 4)", 1
    )
    micro_batches: int = 4
    eval_sequences: int = _number(32, "held-out sequences (default: 32)", 1)
    seed: int = _number(0, "of weights, data and fault (default: 0)", 0)

    def __post_init__(self) -> None:
        for name, about in NUMBERS.items():
            value, least = getattr(self, name), about["least"]
            if None not in (value, least) and value < least:
                raise CaseStudyError(f"{_option(name)} is {value}: at least {least} is needed")
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


NUMBERS = {one.name: one.metadata for one in fields(Settings) if one.metadata}


def _option(name: str) -> str:
    """The option of the command line that sets an attribute."""
    return f"--{(NUMBERS[name]['option'] or name).replace('_', '-')}"


def tiny_settings(**changes: Any) -> Settings:
    """A model of a tenth of a million weights on bundled text, for any processor."""
    small: dict[str, Any] = dict(
        model=TINY, dataset=BUNDLED, max_steps=400, eval_every=10, learning_rate=2e-3,
        sequence_length=64, micro_batch_size=4, eval_sequences=32,
    )  # fmt: skip
    return Settings(**(small | changes))


def parse_arguments(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """The options of the command line; `description` begins its help."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="NAME|PATH", help="on the hub, or a local folder")
    source.add_argument("--tiny", action="store_true", help="a tiny Qwen2 on bundled text")
    add("--dataset", metavar="NAME|PATH", help="on the hub, or jsonl, json, csv, parquet here")
    add(
        "--random-weights", action="store_true",
        help="draw the weights; without --model those of Qwen2.5-3B's architecture, on bundled "
        "text: the real size and cost with nothing to download",
    )  # fmt: skip
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="default: a GPU if any")
    add(
        "--float16", action="store_true",
        help="compute in float16 with loss scaling, as on a T4, where the GPU has bfloat16",
    )  # fmt: skip
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
    for name, about in NUMBERS.items():
        kind, metavar = (float, "X") if name == "learning_rate" else (int, "N")
        add(_option(name), dest=name, type=kind, metavar=metavar, help=about["help"])
    add("--out", type=Path, metavar="DIR", help="default: case_study_<device>")
    return parser.parse_args(argv)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that were asked for; raises CaseStudyError for what cannot be."""
    names = {one.name for one in fields(Settings)} & vars(arguments).keys()
    asked: dict[str, Any] = {n: v for n in names if (v := getattr(arguments, n)) is not None}
    if arguments.tiny:
        return tiny_settings(**asked)
    if arguments.random_weights and arguments.model is None:
        asked = {"model": QWEN_3B, "dataset": BUNDLED} | asked
    return Settings(**asked)
