"""The command line of the reference training and its settings, checked before torch is loaded."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from rmetric._util.errors import require
from rmetric._util.options import layout_of as sizes_of
from rmetric.guard.layout import Layout
from rmetric.guard.policy import PolicyConfig
from rmetric.guard.run_folder import FOLDER_VARIABLE, LAUNCH_VARIABLE, RunFolder
from studies.common.command import command_parser
from studies.common.llama_shape import Shape, check_layout, feed_forward_of
from studies.tiny_llama.data import Chain, TokenFile, TokenSource

KINDS = ("kill", "exception", "hang", "slow", "nan")
SLOW_SECONDS = 3.0
FOLDER = "injected"


class InjectedError(RuntimeError):
    """Raised for ``exception``."""


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One injected failure, in place of `step` or in it; see docs/reference_training.md."""

    kind: str
    step: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}"

    @classmethod
    def parsed(cls, text: str) -> Injection:
        """Parse KIND@STEP[:RANK]. Raises ValueError for other input."""
        found = re.fullmatch(rf"({'|'.join(KINDS)})@([1-9][0-9]*)(?::([0-9]+))?", text)
        if not found:
            raise ValueError(
                f"--inject is {text!r}: KIND@STEP[:RANK] is accepted, with a step from 1 and a "
                f"kind of {', '.join(KINDS)}"
            )
        kind, step, rank = found.groups()
        return cls(kind=kind, step=int(step), rank=int(rank or 0))


class Injector:
    """Injects the failures of this rank, of those of all ranks, into a run folder."""

    def __init__(self, folder: Path, injections: tuple[Injection, ...], rank: int) -> None:
        self._folder = folder / FOLDER
        self._own = [injection for injection in injections if injection.rank == rank]

    def before(self, step: int) -> None:
        """Inject the failures that replace a step or precede it."""
        if self._due("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._due("exception", step):
            raise InjectedError(f"injected at step {step}")
        if self._due("slow", step):
            time.sleep(SLOW_SECONDS)
        if self._due("hang", step):
            while True:
                time.sleep(3600.0)

    def corrupts_gradient(self, step: int) -> bool:
        """A nan is injected into the gradient of this step."""
        return self._due("nan", step)

    def _due(self, kind: str, step: int) -> bool:
        """An injection of this kind is due; it is recorded so that it happens once."""
        return any(self._noted(due) for due in self._own if (due.kind, due.step) == (kind, step))

    def _noted(self, injection: Injection) -> bool:
        entry: dict[str, Any] = {
            **asdict(injection),
            "pid": os.getpid(),
            "launch": os.environ.get(LAUNCH_VARIABLE, ""),
            "time": time.time(),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(self._folder / f"{injection}.json", "x") as file:
                file.write(json.dumps(entry))
        except FileExistsError:
            return False
        print(f"injected: {injection}", file=sys.stderr, flush=True)
        return True


#: What `--layout` names.
SIZES = ("tensor", "pipeline", "data", "replicas")


def parser() -> argparse.ArgumentParser:
    made = command_parser(
        "tiny_llama", "Train a small Llama with tensor, pipeline and data parallelism."
    )
    group = made.add_argument_group("model")
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
    group = made.add_argument_group(
        "layout", "without effect where a supervisor has written a layout.json"
    )
    group.add_argument(
        "--layout", type=sizes_of(SIZES), default={}, metavar="NAME=N,...",
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
    group = made.add_argument_group("training")
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
    for name, values in (
        ("device", ("auto", "cpu", "cuda")),
        ("precision", ("float32", "float64")),
    ):
        default = values[0]
        group.add_argument(
            f"--{name}", choices=values, default=default, help=f"(default: {default})"
        )
    _add(group, "threads", 1, "of a process on a CPU")
    _add(group, "print-every", 10, "steps between two lines on the terminal")
    _add(group, "sleep", 0.0, "seconds to sleep after each step")
    group.add_argument("--monitor", action="store_true", help="attach the live monitor")
    group.add_argument(
        "--inject", action="append", default=[], metavar="KIND@STEP[:RANK]",
        help=f"fail on purpose, once in a run folder: {', '.join(KINDS)}; may be given again",
    )  # fmt: skip
    group = made.add_argument_group("saving")
    _add(group, "save-every", 20, "steps between regular saves")
    _add(group, "keep", 3, "good checkpoints that are kept")
    _add(group, "least-gap", 0.25, "share of --save-every before an emergency may save")
    _add(group, "most-per-hour", 6, "emergency saves")
    _add(group, "retry", 10.0, "seconds from a save that failed to the next try")
    _add(group, "grace", 30.0, "seconds from SIGTERM to the end, saved or not")
    group.add_argument("--synchronous", action="store_true", help="wait for each save")
    return made


def _add(group: argparse._ArgumentGroup, name: str, default: Any, words: str) -> None:
    kind = float if isinstance(default, float) else int
    text = words if default is None else f"{words} (default: {default})"
    group.add_argument(f"--{name}", type=kind, default=default, metavar=kind.__name__, help=text)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of one training; `options` are the others, by their command-line names."""

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
    """Settings from command-line options for so many ranks; ValueError for what does not fit."""
    shape = shape_of(options)
    _at_least(options, 1, "steps", "print_every", "keep", "batch", "micro_batch", "threads")
    _at_least(options, 0, "warmup", "seed", "sleep")
    for name in ("rate", "clip", "grace"):
        value = getattr(options, name)
        require(f"--{name}", value, 0 < value < inf, "above 0")
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
    length, tokens = shape.sequence + 1, options.tokens
    return TrainingSettings(
        shape=shape,
        layout=layout,
        folder=folder,
        data=Chain(shape.vocabulary, length, options.seed)
        if tokens is None
        else TokenFile(tokens, shape.vocabulary, length, options.seed),
        policy=PolicyConfig(
            interval_steps=options.save_every,
            least_gap=options.least_gap,
            most_per_hour=options.most_per_hour,
            retry_seconds=options.retry,
        ),
        inject=tuple(map(Injection.parsed, options.inject)),
        options=options,
    )


def shape_of(options: argparse.Namespace) -> Shape:
    """Shape of the model. Raises ValueError."""
    _at_least(options, 1, "heads", "hidden")
    given = {name: getattr(options, name) for name in Shape.__dataclass_fields__}
    if options.ffn is None:
        given["ffn"] = feed_forward_of(options.hidden, options.heads)
    return Shape(**given)


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
    """Layout of the supervisor, if it wrote one, else of the command line; and its source."""
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
        value, option = getattr(options, name), name.replace("_", "-")
        require(f"--{option}", value, least <= value < inf, f"at least {least}")
