"""The command line of a case study."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from studies.case_study.faults import FAULTS
from studies.case_study.settings import (
    BUNDLED,
    FAULT,
    NUMBERS,
    QWEN_3B,
    Settings,
    option,
    tiny_settings,
)

METHODS = {
    "full": "train all weights",
    "lora": "train adapters only",
    "qlora": "train adapters on weights of 4 bits, with bitsandbytes on an NVIDIA GPU",
}


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
        add(option(name), dest=name, type=kind, metavar=metavar, help=about["help"])
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
