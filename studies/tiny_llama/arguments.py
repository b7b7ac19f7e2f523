"""The command line of the reference training. Needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rmetric._util.options import layout_of, renamed
from studies.common.command import command_parser
from studies.common.llama_shape import Shape
from studies.tiny_llama.injection import KINDS

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "float64")
#: What `--layout` names.
SIZES = ("tensor", "pipeline", "data", "replicas")


def parser() -> argparse.ArgumentParser:
    made = command_parser(
        "tiny_llama", "Train a small Llama with tensor, pipeline and data parallelism."
    )
    _add_model(made.add_argument_group("model"))
    _add_layout(
        made.add_argument_group(
            "layout", "without effect where a supervisor has written a layout.json"
        )
    )
    _add_training(made.add_argument_group("training"))
    _add_saving(made.add_argument_group("saving"))
    return made


def _add_model(group: argparse._ArgumentGroup) -> None:
    _add(group, "layers", Shape.layers, "layers")
    _add(group, "heads", Shape.heads, "heads of queries")
    _add(group, "kv-heads", Shape.kv_heads, "heads of keys and values")
    _add(group, "hidden", Shape.hidden, "width of the residual stream")
    _add(group, "ffn", None, "width of the feed-forward blocks (default: 8/3 of hidden)")
    _add(group, "vocabulary", Shape.vocabulary, "tokens that there are")
    _add(group, "sequence", Shape.sequence, "tokens that a sample predicts")
    group.add_argument("--tied", action="store_true", help="the head is the embedding")
    group.add_argument(
        "--model-json", action="store_true", help="print the shape for `rmetric plan` and end"
    )


def _add_layout(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--layout", type=layout_of(SIZES), default={}, metavar="NAME=N,...",
        help="tensor: ranks that share each layer; pipeline: stages that the layers are cut "
        "into; data: copies that see other samples (default: as many as ranks are left); "
        "replicas: whole sets of shards that the copies are made of (default: 1 each)",
    )  # fmt: skip
    _add(group, "batch", 8, "samples of a step")
    _add(group, "micro-batch", 1, "samples of a forward pass")
    group.add_argument(
        "--uneven-batch", action="store_true",
        help="the copies need not divide the batch: their shares differ by one sample",
    )  # fmt: skip
    renamed(group, **{name: f"layout {name}=N" for name in SIZES})


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--folder", type=Path, metavar="RUN", help="for all that the run leaves")
    _add(group, "steps", 100, "steps in all")
    _add(group, "rate", 3e-3, "learning rate")
    _add(group, "warmup", 10, "steps until the learning rate is reached")
    _add(group, "clip", 1.0, "greatest norm of the gradient")
    _add(group, "seed", 0, "of the weights, the chain and what is drawn")
    group.add_argument(
        "--tokens", type=Path, metavar="PATH",
        help="train on a local file: .npy (whole numbers), .bin (16 bits), else bytes; "
        "without, on a seeded Markov chain",
    )  # fmt: skip
    group.add_argument("--device", choices=DEVICES, default="auto", help="(default: auto)")
    group.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="(default: float32)"
    )
    _add(group, "threads", 1, "of a process on a CPU")
    _add(group, "print-every", 10, "steps between two lines on the terminal")
    _add(group, "sleep", 0.0, "seconds to sleep after each step")
    group.add_argument("--monitor", action="store_true", help="attach the live monitor")
    group.add_argument(
        "--inject", action="append", default=[], metavar="KIND@STEP[:RANK]",
        help=f"fail on purpose, once in a run folder: {', '.join(KINDS)}; may be given again",
    )  # fmt: skip


def _add_saving(group: argparse._ArgumentGroup) -> None:
    _add(group, "save-every", 20, "steps between regular saves")
    _add(group, "keep", 3, "good checkpoints that are kept")
    _add(group, "least-gap", 0.25, "share of --save-every before an emergency may save")
    _add(group, "most-per-hour", 6, "emergency saves")
    _add(group, "retry", 10.0, "seconds from a save that failed to the next try")
    _add(group, "grace", 30.0, "seconds from SIGTERM to the end, saved or not")
    group.add_argument("--synchronous", action="store_true", help="wait for each save")


def _add(group: argparse._ArgumentGroup, name: str, default: Any, words: str) -> None:
    kind = float if isinstance(default, float) else int
    text = words if default is None else f"{words} (default: {default})"
    group.add_argument(f"--{name}", type=kind, default=default, metavar=kind.__name__, help=text)
