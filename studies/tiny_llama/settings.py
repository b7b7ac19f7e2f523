"""Settings of a training from the command line, checked before torch is loaded."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from rmetric.guard.layout import Layout
from rmetric.guard.policy import PolicyConfig
from rmetric.guard.run_folder import FOLDER_VARIABLE, RunFolder
from studies.common.llama_shape import Shape, check_layout, feed_forward_of
from studies.tiny_llama.data import Chain, TokenFile, TokenSource
from studies.tiny_llama.injection import Injection


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of one training.

    Attributes:
        shape: shape of the model.
        layout: parallel layout.
        folder: run folder.
        data: training data.
        policy: checkpoint policy.
        inject: injected failures.
        options: other options, by their command-line names.
    """

    shape: Shape
    layout: Layout
    folder: RunFolder
    data: TokenSource
    policy: PolicyConfig
    inject: tuple[Injection, ...]
    options: argparse.Namespace

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Properties that a checkpoint must share for this run to resume from it."""
        options = self.options
        data = "a chain" if options.tokens is None else options.tokens.name
        own = {"seed": options.seed, "precision": options.precision, "data": data}
        return {**asdict(self.shape), **own}


def settings_of(options: argparse.Namespace, ranks: int) -> TrainingSettings:
    """Settings from command-line options.

    Args:
        options: parsed command line.
        ranks: number of ranks.

    Raises:
        ValueError: an option is invalid or does not fit the ranks.
    """
    shape = shape_of(options)
    check_numbers(options)
    folder = folder_of(options.folder)
    layout, source = layout_of(options, folder, ranks)
    if layout.num_gpus != ranks:
        raise ValueError(
            f"there are {ranks} ranks (torchrun's --nproc-per-node times its nodes), and the "
            f"layout {layout}, from {source}, takes {layout.num_gpus}"
        )
    check_layout(shape, layout)
    if options.monitor and (layout.tensor > 1 or layout.pipeline > 1):
        raise ValueError(
            "--monitor needs tensor = 1 and pipeline = 1: it sums norms over ranks, and would "
            "count several times what tensor-parallel ranks share, and miss other stages"
        )
    return TrainingSettings(
        shape=shape,
        layout=layout,
        folder=folder,
        data=data_of(options, shape),
        policy=PolicyConfig(
            interval_steps=options.save_every,
            least_gap=options.least_gap,
            most_per_hour=options.most_per_hour,
            retry_seconds=options.retry,
        ),
        inject=tuple(Injection.parsed(text) for text in options.inject),
        options=options,
    )


def shape_of(options: argparse.Namespace) -> Shape:
    """Shape of the model. Raises ValueError."""
    _at_least(options, 1, "heads", "hidden")
    wide = feed_forward_of(options.hidden, options.heads) if options.ffn is None else options.ffn
    return Shape(
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        hidden=options.hidden,
        ffn=wide,
        vocabulary=options.vocabulary,
        sequence=options.sequence,
        tied=options.tied,
    )


def data_of(options: argparse.Namespace, shape: Shape) -> TokenSource:
    """Training data. Raises ValueError for an unusable file."""
    length = shape.sequence + 1
    if options.tokens is None:
        return Chain(shape.vocabulary, length, options.seed)
    return TokenFile(options.tokens, shape.vocabulary, length, options.seed)


def check_numbers(options: argparse.Namespace) -> None:
    """Check the ranges of numeric options. Raises ValueError."""
    _at_least(options, 1, "steps", "print_every", "keep", "batch", "micro_batch", "threads")
    _at_least(options, 0, "warmup", "seed", "sleep")
    for name in ("rate", "clip", "grace"):
        if not 0 < getattr(options, name) < inf:
            raise ValueError(f"--{name} is {getattr(options, name)}: it must be above 0")


def folder_of(given: Path | None) -> RunFolder:
    """Run folder of the supervisor, or the given one. Raises ValueError for neither."""
    supervised = RunFolder.of_environment()
    if supervised is None:
        if given is None:
            raise ValueError("--folder is missing: it is for all that the run leaves")
        return RunFolder(given)
    if given is not None and given.resolve() != supervised.path.resolve():
        raise ValueError(
            f"--folder is {given}, and the supervisor's is {os.environ[FOLDER_VARIABLE]}: "
            "leave --folder out, or give the same"
        )
    return supervised


def layout_of(options: argparse.Namespace, folder: RunFolder, ranks: int) -> tuple[Layout, str]:
    """Layout of the supervisor, if it wrote one, else of the command line; and its source.

    Raises ValueError for a batch that the layout does not divide without `--uneven-batch`.
    """
    if RunFolder.of_environment() is not None and folder.layout_file.exists():
        written = folder.layout()
        if written is None:
            raise ValueError(f"{folder.layout_file} holds no layout")
        return written, str(folder.layout_file)
    sizes: dict[str, int] = options.layout
    one_copy = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    data = sizes.get("data", max(1, ranks // one_copy))
    if not options.uneven_batch and options.batch % (options.micro_batch * data):
        raise ValueError(
            f"--batch is {options.batch}: it must be a multiple of micro-batch x data = "
            f"{options.micro_batch} x {data}, or --uneven-batch must be given"
        )
    layout = Layout.split(options.batch, **{**sizes, "data": data}, micro_batch=options.micro_batch)
    return layout, "the command line"


def _at_least(options: argparse.Namespace, least: int, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not least <= value < inf:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {value}: it must be at least {least}")
