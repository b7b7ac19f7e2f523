"""Reports of a plan as text and as JSON, and the arguments of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any, NamedTuple

from rmetric._util.printed import counted, number_ranges, printable
from rmetric.guard.layout import Layout
from rmetric.guard.planner.cluster import Placement, in_words
from rmetric.guard.planner.costs import PARTS, layers_of_stage
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import AT_WORK, Problem
from rmetric.guard.planner.search import LayoutPlan, Option, faster_with, idle_hints

WIDTH = 98


def as_json(answer: LayoutPlan) -> dict[str, Any]:
    """JSON report: plan, model and settings of the best layout."""
    problem, best = answer.problem, answer.best
    settings = None
    if best is not None:
        launches = [launch._asdict() for launch in torchrun_launches(best.placement)]
        settings = {"torchrun": launches, problem.engine.name: _engine_settings(problem, best)}
    return {
        "model": problem.model.as_json(),
        "parameters": problem.model.parameters,
        "gpus": problem.cluster.num_gpus,
        "plan": answer.as_json(),
        "nearest_batch": _nearest(problem, best),
        "settings": settings,
    }


def _nearest(problem: Problem, best: Option | None) -> dict[str, Any] | None:
    """Layout if the batch may change, where the plan leaves more than a few GPUs idle."""
    if best is None or best.layout.num_gpus >= AT_WORK * problem.cluster.num_gpus:
        return None
    flag = "--allow-batch-change"
    near = faster_with(problem, best, flag).get(flag)
    if near is None:
        return None
    change = near.layout.global_batch / problem.batch.samples - 1
    return {"layout": near.layout.as_json(), "change": change, "speedup": near.gain(best)}


def _engine_settings(problem: Problem, best: Option) -> Any:
    model, layout, recompute = problem.model, best.layout, best.recompute
    if problem.engine.name == "megatron":
        sharded = problem.options.shard_optimiser
        return megatron_arguments(model, layout, recompute=recompute, shard_optimiser=sharded)
    if problem.engine.name == "torchtitan":
        return torchtitan_settings(model, layout, recompute=recompute)
    shape, names = fsdp_mesh(layout)
    return {
        "mesh_shape": shape,
        "mesh_dim_names": names,
        "batch": layout.global_batch,
        "micro_batch": layout.micro_batch,
        "accumulation": layout.accumulation,
        "recompute": recompute,
    }


def as_text(answer: LayoutPlan) -> str:
    """Text report: the same, with the reasons, the alternatives and the commands."""
    problem = answer.problem
    model, cluster = problem.model, problem.cluster
    active = f" ({model.active_parameters / 1e9:.2f} active)" if model.experts else ""
    lines = [
        f"{printable(model.name)}: {model.parameters / 1e9:.2f} billion parameters{active}, "
        f"sequence {model.sequence:,}, batch {problem.batch.samples:,}",
        f"{counted(cluster.num_gpus, 'GPU')} ({_sum_of(cluster.sizes)}), {cluster.gpu.name}, "
        f"{in_words(cluster.usable_memory)} of {in_words(cluster.gpu.memory)} usable; "
        f"{problem.engine.name}",
        *(f"assumed: {printable(assumption)}" for assumption in model.assumed),
        "",
    ]
    best = answer.best
    if best is None:
        lines += ["Nothing fits.", *_wrapped(f"Binding constraint: {answer.why}")]
        for hint in answer.would_help:
            lines += _wrapped(f"- {hint}")
        return "\n".join(lines)
    lines += _best(answer, best)
    if answer.alternatives:
        rows = [
            (str(option.layout), f"{option.gain(best):+.1%}", in_words(option.memory.total),
             "computed again" if option.recompute else "")
            for option in answer.alternatives
        ]  # fmt: skip
        lines += ["", "Next best", *_columns(rows, right=(1, 2))]
    if hints := idle_hints(problem, best):
        lines += ["", "Idle GPUs would be used with"]
        lines += [line for hint in hints for line in _wrapped(f"  {hint}")]
    return "\n".join([*lines, "", "Start it", *_start(problem, best)])


def _sum_of(sizes: Sequence[int]) -> str:
    """Sizes of nodes, as in `8 + 7 + 8` or `4 x 8 + 7`."""
    runs = [(size, len(list(alike))) for size, alike in groupby(sizes)]
    return " + ".join(f"{n} x {size}" if n > 3 else " + ".join([f"{size}"] * n) for size, n in runs)


def _best(answer: LayoutPlan, best: Option) -> list[str]:
    usable = answer.problem.cluster.usable_memory
    again = ", activations computed again" if best.recompute else ""
    step, needed = best.step._asdict(), best.memory._asdict()
    seconds = [
        (words, f"{step[name]:.3g} s", f"{step[name] / best.step.seconds:.1%}")
        for name, words in PARTS.items()
        if step[name]
    ]
    stage = needed.pop("stage")
    return [
        f"Plan: {best.layout}{again}",
        f"  {best.step.tokens_per_second:,.0f} tokens a second, {best.step.seconds:.3g} s a step; "
        f"{in_words(best.memory.total)} of {in_words(usable)} on the fullest GPU (estimates)",
        *_wrapped(f"  Why: {answer.why}."),
        *(line for remark in best.remarks for line in _wrapped(f"  Note: {remark}.")),
        "",
        "Time of a step",
        *_columns(seconds, right=(1, 2)),
        "",
        f"Memory of the fullest GPU (stage {stage})",
        *_columns([(name, in_words(size)) for name, size in needed.items() if size], right=(1,)),
        "",
        "GPUs",
        *_gpus(best),
    ]


def _gpus(best: Option) -> list[str]:
    rows, rank = [], 0
    for node, used in _by_node(best.placement.ranks).items():
        last = rank + len(used) - 1
        rows.append((printable(node), f"GPUs {number_ranges(used)}", f"ranks {rank}-{last}"))
        rank = last + 1
    for node, idle in _by_node(best.placement.idle).items():
        rows.append((printable(node), f"GPUs {number_ranges(idle)}", "idle"))
    return _columns(rows)


def _by_node(places: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """GPUs of each node, whose places are consecutive."""
    return {node: [gpu for _, gpu in of] for node, of in groupby(places, key=lambda at: at[0])}


def _start(problem: Problem, best: Option) -> list[str]:
    lines = [
        f"  on {printable(launch.node)}: {launch} TRAIN.py ..."
        for launch in torchrun_launches(best.placement)
    ]
    found, layout = _engine_settings(problem, best), best.layout
    if problem.engine.name == "megatron":
        lines += _arguments(found)
        if layout.tensor > 1 or layout.context > 1:
            lines.append("  before Blackwell: export CUDA_DEVICE_MAX_CONNECTIONS=1")
    elif problem.engine.name == "torchtitan":
        lines += ["  torchtitan 0.3:", *_arguments(torchtitan_arguments(found))]
    else:
        policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        checkpointed = ", checkpoint each block's activations" if best.recompute else ""
        lines += [
            f'  mesh = init_device_mesh("cuda", {found["mesh_shape"]}, '
            f"mesh_dim_names={found['mesh_dim_names']})",
            f"  policy = {policy}",
            "  fully_shard(each block and the model, mesh=mesh, mp_policy=policy)",
            f"  micro-batch {layout.micro_batch}, accumulation {layout.accumulation}{checkpointed}",
        ]
    if layout.samples is not None:
        lines += [
            "  the copies do not divide the batch; the training must split it (docs/planner.md):",
            f"    batch_share({layout.samples}, {layout.data}, copy)"
            f".micro_batches({layout.micro_batch})",
        ]
    return lines


def _arguments(arguments: Sequence[str]) -> list[str]:
    """An option and its value stay on one line."""
    pairs: list[str] = []
    for word in arguments:
        if pairs and not word.startswith("-") and ":" not in word:
            pairs[-1] += f" {word}"
        else:
            pairs.append(word)
    return [f"    {pair} \\" for pair in pairs[:-1]] + [f"    {pair}" for pair in pairs[-1:]]


def _columns(rows: Sequence[tuple[str, ...]], *, right: tuple[int, ...] = ()) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _wrapped(text: str) -> list[str]:
    margin = text[: len(text) - len(text.lstrip())]
    return wrap(text, WIDTH, subsequent_indent=margin + "  ")


class NodeLaunch(NamedTuple):
    """torchrun command of one node; `arguments` come before the training script."""

    node: str
    environment: dict[str, str]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        variables = " ".join(f"{name}={value}" for name, value in self.environment.items())
        return f"{variables} torchrun {' '.join(self.arguments)}"


def torchrun_launches(placement: Placement) -> list[NodeLaunch]:
    """One launch per node, in rank order; the first node is the rendezvous.

    torchrun numbers ranks node by node, so that nodes may have different numbers of them.
    """
    per_node = placement.per_node
    first = next(iter(per_node))
    launches = []
    for index, (node, count) in enumerate(per_node.items()):
        rendezvous = ["--standalone"]
        if len(per_node) > 1:
            rendezvous = [f"--node-rank={index}", f"--master-addr={first}", "--master-port=29500"]
        visible = ",".join(str(gpu) for name, gpu in placement.ranks if name == node)
        # CUDA counts the fastest first by default; the numbers here are NVML's.
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
        arguments = (f"--nnodes={len(per_node)}", f"--nproc-per-node={count}", *rendezvous)
        launches.append(NodeLaunch(node, environment, arguments))
    return launches


def megatron_arguments(
    model: ModelShape, layout: Layout, *, recompute: bool = False, shard_optimiser: bool = True
) -> list[str]:
    """Megatron-LM arguments that a layout sets; those of the model are unchanged.

    With TP or CP, GPUs before Blackwell need CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment.
    A checkpoint can only be taken up at another TP or PP if it was saved with
    --ckpt-format torch_dist and, for a sharded optimiser,
    --dist-ckpt-optim-fully-reshardable.
    """
    pairs = {
        "--tensor-model-parallel-size": layout.tensor,
        "--pipeline-model-parallel-size": layout.pipeline,
        "--context-parallel-size": layout.context,
        "--expert-model-parallel-size": layout.expert,
        "--micro-batch-size": layout.micro_batch,
        "--global-batch-size": layout.global_batch,
    }
    arguments = [word for name, value in pairs.items() for word in (name, str(value))]
    if layout.tensor > 1:
        arguments.append("--sequence-parallel")
    if shard_optimiser:
        arguments += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    arguments += ["--ckpt-format", "torch_dist"]
    if recompute:
        arguments += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        arguments += ["--recompute-num-layers", "1"]
    if model.layers % layout.pipeline:
        # E the embedding, t a layer, L the loss, a bar between stages.
        counts = [sum(layers_of_stage(model, layout.pipeline, i)) for i in range(layout.pipeline)]
        stages = "|".join("t" * count for count in counts)
        arguments += ["--pipeline-model-parallel-layout", f"E{stages}L"]
    return arguments


def torchtitan_settings(
    model: ModelShape, layout: Layout, *, recompute: bool = False
) -> dict[str, dict[str, int | str]]:
    """Section -> key -> value. Stages are cut as planned: by layers alone."""
    piped = layout.pipeline > 1
    parallelism: dict[str, int | str] = {
        "data_parallel_replicate_degree": layout.replicas,
        "data_parallel_shard_degree": layout.data // layout.replicas,
        "tensor_parallel_degree": layout.tensor,
        "pipeline_parallel_degree": layout.pipeline,
        "context_parallel_degree": layout.context,
        "expert_parallel_degree": layout.expert,
    }
    if piped:
        parallelism |= {
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    return {
        "training": {
            "local_batch_size": layout.micro_batch * (layout.accumulation if piped else 1),
            "global_batch_size": layout.global_batch,
            "seq_len": model.sequence,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": "full" if recompute else "none"},
    }


def torchtitan_arguments(settings: dict[str, dict[str, int | str]]) -> list[str]:
    """Arguments of torchtitan 0.3; recomputation is a subcommand and comes last."""
    arguments = [
        word
        for section, values in settings.items()
        if section != "activation_checkpoint"
        for key, value in values.items()
        for word in (f"--{section}.{key}", str(value))
    ]
    return [*arguments, f"activation-checkpoint:{settings['activation_checkpoint']['mode']}"]


def fsdp_mesh(layout: Layout) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and names of the device mesh for `fully_shard`: FSDP, or HSDP with replicas."""
    if layout.replicas == 1:
        return (layout.data,), ("dp_shard",)
    shape = (layout.replicas, layout.data // layout.replicas)
    return shape, ("dp_replicate", "dp_shard")
