"""The paper's case study, live: a fine-tuning, and its twins under faults.

    python run_case_study.py              Qwen2.5-3B on code questions, 800 steps (needs a GPU)
    python run_case_study.py --tiny       a tiny model, 400 steps, on two cores in two minutes
    python run_case_study.py --plan t4    print the plan for a GPU, and stop

Three twins: undisturbed, under a fault that the runs measured so far absorb, and under one
that breaks them. R-Metric as published and the calibrated detector judge them side by side.
The results are in case_study_<device>/; see docs/case_study.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from time import perf_counter
from typing import Any

from rmetric._util.interrupt import ends_at_once

with ends_at_once():
    from rmetric._util.options import renamed
    from studies.case_study.faults import FAULTS
    from studies.case_study.settings import (
        BUNDLED,
        FAULT,
        QWEN_3B,
        CannotWrite,
        CaseStudyError,
        Settings,
        option,
        tiny_settings,
    )

CHECKPOINT_EVERY = 100
METHODS = {
    "full": "train all weights",
    "lora": "train adapters only",
    "qlora": "train adapters on weights of 4 bits, with bitsandbytes on an NVIDIA GPU",
}
NUMBERS: dict[str, tuple[type, str]] = {
    "max_steps": (int, "optimiser steps (default: 800; tiny 400)"),
    "eval_every": (int, "steps between two evaluations (default: 20; tiny 10)"),
    "severity": (float, "of a single fault, in its unit (default: the fault's own)"),
    "fault_step": (int, "first step under the fault (default: the middle)"),
    "fault_steps": (int, "how many steps it acts (default: the fault's own, 20 for LR_SPIKE)"),
    "learning_rate": (float, "after the warm-up (default: 1e-5 full, 1e-4 LoRA, 2e-3 tiny)"),
    "sequence_length": (int, "tokens (default: 512; tiny 64)"),
    "micro_batch_size": (int, "sequences; a step has four micro-batches (default: 1; tiny 4)"),
    "eval_sequences": (int, "held-out sequences (default: 32)"),
    "seed": (int, "of weights, data and fault (default: 0)"),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
        "--plan", nargs="?", const="", metavar="GPU", type=str.lower,
        help="print memory, time and download and stop: for this machine, or for t4, l4, a100, "
        "h100 or h200",
    )  # fmt: skip
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
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--control", action="store_true", help="only the twin without the fault")
    runs.add_argument("--no-control", action="store_true", help="only the runs with a fault")
    for name, (kind, what) in NUMBERS.items():
        add(option(name), dest=name, type=kind, metavar="X" if kind is float else "N", help=what)
    renamed(parser, max_steps="steps", fault_step="onset", fault_steps="duration")
    add("--out", type=Path, metavar="DIR", help="default: case_study_<device>")
    add("--resume", action="store_true", help="go on with the case study in that folder")
    add(
        "--checkpoint-every", type=int, default=CHECKPOINT_EVERY, metavar="N",
        help="steps between two states that --resume can go on from; 0 for none, then nothing "
        "goes to disk (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(argv)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that were asked for; raises CaseStudyError for what cannot be."""
    names = {field.name for field in fields(Settings)} & vars(arguments).keys()
    asked: dict[str, Any] = {n: getattr(arguments, n) for n in names}
    asked = {name: value for name, value in asked.items() if value is not None}
    if arguments.tiny:
        return tiny_settings(**asked)
    if arguments.random_weights and arguments.model is None:
        asked = {"model": QWEN_3B, "dataset": BUNDLED} | asked
    return Settings(**asked)


def main(argv: list[str] | None = None) -> int:
    began = perf_counter()
    arguments = parse_arguments(argv)
    try:
        settings = settings_of(arguments)
        try:
            from studies.case_study.study import run_case_study, show_plan
        except ModuleNotFoundError as error:
            if str(error.name).startswith(("rmetric", "studies")):
                raise  # that is no package that the user could install
            raise CaseStudyError(
                f"{error.name} is not installed: pip install -e '.[live]'"
            ) from None
        if arguments.plan is not None:
            show_plan(
                settings,
                arguments.plan,
                device_kind=arguments.device,
                method=arguments.method,
                control=not arguments.no_control,
                faulty=not arguments.control,
                checkpoint_every=arguments.checkpoint_every,
                float16=arguments.float16,
            )
            return 0
        folder = run_case_study(
            settings,
            control=not arguments.no_control,
            faulty=not arguments.control,
            device_kind=arguments.device,
            method=arguments.method,
            out=arguments.out,
            resume=arguments.resume,
            checkpoint_every=arguments.checkpoint_every,
            began=began,
            float16=arguments.float16,
        )
    except CaseStudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CannotWrite) else 2
    except KeyboardInterrupt:
        print("\nstopped; the same command with --resume goes on", file=sys.stderr)
        return 130
    report(folder.path, folder.summary)
    return 0


def report(path: Path, summary: dict[str, Any]) -> None:
    """Print the time, the judgements side by side, and the sentence."""
    from studies.case_study.sentence import results_of, table

    seconds = summary["seconds"]
    print(
        f"\ntime  set-up {seconds['set_up']:.0f} s, training {seconds['training']:.0f} s, "
        f"report {seconds['report']:.0f} s; {seconds['of_processor']:.0f} s of processor time"
    )
    for name, run in summary["runs"].items():
        cost = run["cost"]
        print(
            f"cost  {name}: {cost['seconds_per_step']:.3f} s a step with the monitor, "
            f"{cost['seconds_per_step_without_monitor']:.3f} s without"
        )
    print(f"\n{table(results_of(summary))}")
    print(f"\n{path}: case_study.html, case_study.png and .pdf, results.csv, summary.json,")
    print("claims.md, and for each run its log (.jsonl) and its interactive page (.html)")
    print(f"\n{summary['sentence']}")


if __name__ == "__main__":
    sys.exit(main())
