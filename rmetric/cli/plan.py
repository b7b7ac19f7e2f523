"""Find the fastest parallel layout for the remaining GPUs, and show why it was chosen."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rmetric._util.errors import fail
from rmetric._util.options import DEFAULT_GPU, layout_of, number, path_in, share, whole
from rmetric._util.strict_json import encode
from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec, PlanOptions
from rmetric.guard.planner.cluster import GIB, GPUS, Cluster, ClusterNode
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import ENGINES, LARGEST_CHANGE, SIZES, Problem
from rmetric.guard.planner.search import answer

#: Far above any cluster; a plan for so many takes some seconds.
LARGEST_CLUSTER = 65_536
#: The sizes that `--current` accepts.
CURRENT = ("tensor", "pipeline", "data", "context", "expert")
RECOMPUTE = {"auto": (False, True), "always": (True,), "never": (False,)}
EXAMPLES = """examples:
  rmetric plan --model config.json --gpus 7 --gpu h100 --batch 1024
  rmetric plan --model config.json --nodes 8,8,8 --without node1:3 --batch 1024 \\
      --current tensor=2,data=12
  rmetric plan --model config.json --nodes a:8,b:7 --gpu-memory 40 --batch 512 --engine torchtitan

The model is a Hugging Face config.json, a JSON object of Megatron-LM's arguments, or our own
(docs/planner.md). Times and memory are estimates for comparing layouts.

exit codes:
  0  a layout was found
  1  nothing fits; the binding constraint is printed
  2  an argument is wrong, or the model file cannot be read
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True).add_argument
    gpu = parser.add_argument_group("the GPU").add_argument
    add("--model", required=True, type=path_in, metavar="FILE", help="JSON of the model's shape")
    where("--nodes", type=node_sizes, metavar="N,N,...",
          help="GPUs of each node, counted from 0: 8,8,8 or with names a:8,b:8")  # fmt: skip
    add("--without", type=dropped, action="append", default=[], metavar="NODE[:N,N,...]",
        help="node, or some of its GPUs, that cannot be used; repeatable")  # fmt: skip
    where("--gpus", type=whole(0), metavar="N", help="GPUs of a single node")
    add("--batch", type=whole(0), required=True, help="samples per step")
    add("--engine", choices=tuple(ENGINES), default="megatron", help="(default: %(default)s)")
    add("--sequence", type=whole(1), help="tokens per sample (default: model)")
    add("--current", type=current, metavar="NAME=N,...",
        help="the layout until now: of layouts almost as fast the one with the smallest change "
        f"is taken; NAME is one of {', '.join(CURRENT)}, 1 where it is left out")  # fmt: skip
    add("--allow-batch-change", type=share, nargs="?", const=LARGEST_CHANGE, default=0.0,
        metavar="SHARE",
        help="the batch may change by this share (default, if given: %(const)s)")  # fmt: skip
    add("--uneven-batch", action=argparse.BooleanOptionalAction,
        help="the training splits a batch that the copies do not divide, by "
        "rmetric.guard.batch_share (default: only with the engine fsdp)")  # fmt: skip
    add("--micro-batches", type=sizes, default=(1, 2, 4, 8), metavar="N,N,...",
        help="sizes to try (default: 1,2,4,8)")  # fmt: skip
    for name, words in SIZES.items():
        add(f"--{name}", type=sizes, metavar="N,N,...", help=f"{words} to allow")
    add("--uneven-stages", action="store_true", help="stages may differ by one layer")
    add("--recompute", choices=tuple(RECOMPUTE), default="auto",
        help="recompute activations (default: %(default)s)")  # fmt: skip
    add("--no-distributed-optimizer", action="store_true", help="Megatron without ZeRO-1")
    add("--no-flash-attention", action="store_true", help="attention scores are stored")
    add("--alternatives", type=whole(0), default=4, metavar="N",
        help="number of alternatives to show (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    gpu("--gpu", choices=tuple(GPUS), default=DEFAULT_GPU,
        help="(default: %(default)s, as for rmetric supervise: what most large trainings run "
        "on)")  # fmt: skip
    gpu("--gpu-memory", type=number, metavar="GIB", help="if it differs")
    gpu("--reserve", type=number, default=4.0, metavar="GIB",
        help="for CUDA, NCCL and fragmentation (default: %(default)g)")  # fmt: skip
    gpu("--peak", type=number, metavar="TFLOPS", help="dense bfloat16, if it differs")
    gpu("--intra", type=number, metavar="GB/S", help="one way, within a node")
    gpu("--inter", type=number, metavar="GB/S", help="one way, between nodes")


def run(options: argparse.Namespace) -> int:
    try:
        problem = _problem(options)
    except ValueError as error:
        return fail(error)
    found = answer(problem, options.current)
    print(json.dumps(encode(found.report()), indent=1) if options.json else found.as_text())
    return 0 if found.best else 1


def _problem(options: argparse.Namespace) -> Problem:
    return Problem(
        model=ModelShape.from_json(Path(options.model), sequence=options.sequence),
        cluster=_cluster(options),
        engine=ENGINES[options.engine],
        batch=BatchSpec(
            samples=options.batch,
            largest_change=options.allow_batch_change,
            micro_batches=options.micro_batches,
        ),
        options=PlanOptions(
            **{name: getattr(options, name) for name in SIZES},
            recompute=RECOMPUTE[options.recompute],
            shard_optimiser=not options.no_distributed_optimizer,
            flash_attention=not options.no_flash_attention,
            uneven_stages=options.uneven_stages,
            uneven_batch=options.uneven_batch,
            alternatives=options.alternatives,
        ),
    )


def _cluster(options: argparse.Namespace) -> Cluster:
    given = {
        "memory": (options.gpu_memory, GIB),
        "peak_flops": (options.peak, 1e12),
        "intra_bandwidth": (options.intra, 1e9),
        "inter_bandwidth": (options.inter, 1e9),
    }
    changed = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    gpu = replace(GPUS[options.gpu], **changed)
    nodes = [("node0", options.gpus)] if options.nodes is None else options.nodes
    if sum(size for _, size in nodes) > LARGEST_CLUSTER:
        raise ValueError(f"more than {LARGEST_CLUSTER:,} GPUs: this is not made for so many")
    found = tuple(ClusterNode(name=name, gpus=tuple(range(size))) for name, size in nodes)
    cluster = Cluster(nodes=found, gpu=gpu, reserve=options.reserve * GIB)
    for node, gpus in options.without:
        try:
            cluster = cluster.without(node, gpus)
        except KeyError as error:
            raise ValueError(f"--without: {error.args[0]}") from None
    return cluster


def node_sizes(text: str) -> list[tuple[str, int]]:
    """8,7,8 or a:8,b:7 as names and sizes."""
    found = []
    for index, part in enumerate(text.split(",")):
        name, colon, size = part.strip().rpartition(":")
        if not size.isdecimal() or (colon and not name):
            raise argparse.ArgumentTypeError(
                f"{text!r}: GPUs of each node are accepted, 8,7,8 or a:8,b:7"
            )
        found.append((name or f"node{index}", int(size)))
    return found


def dropped(text: str) -> tuple[str, tuple[int, ...] | None]:
    """b:3,5 as a node and its GPUs; a node alone is all of it."""
    name, colon, numbers = text.partition(":")
    parts = [part.strip() for part in numbers.split(",")] if colon else []
    if not name or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: a node, or GPUs of one as in node1:3,5")
    return name, tuple(map(int, parts)) if colon else None


def sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(whole(1)(part.strip()) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers from 1, as in 1,2,4") from None


def current(text: str) -> Layout:
    """`tensor=2,data=12` as a layout."""
    return Layout(**layout_of(CURRENT)(text))
