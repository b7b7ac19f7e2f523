"""Reports of a plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import wrap
from typing import Any

from rmetric._util.printed import counted, printable
from rmetric.guard.layout import Layout
from rmetric.guard.planner.arguments import (
    fsdp_mesh,
    megatron_arguments,
    torchrun_launches,
    torchtitan_arguments,
    torchtitan_settings,
    torchtitan_toml,
)
from rmetric.guard.planner.choose import BatchSpec, LayoutPlan, Option, PlanOptions, plan
from rmetric.guard.planner.cluster import Cluster, in_words
from rmetric.guard.planner.engines import engine_named
from rmetric.guard.planner.memory import memory_in_words
from rmetric.guard.planner.model_shape import ModelShape

WIDTH = 98
#: Share by which a layout must be faster to be worth mentioning.
WORTH_SAYING = 0.02
#: What each part of a step is called.
PARTS = {
    "compute": "matrix products",
    "launches": "starting kernels",
    "tensor": "TP reductions",
    "context": "CP ring",
    "expert": "EP all-to-all",
    "bubble": "pipeline bubble",
    "pipeline": "PP sends",
    "data": "DP gradients",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """Arguments of `plan`."""

    model: ModelShape
    cluster: Cluster
    batch: BatchSpec
    current: Layout | None
    options: PlanOptions


def as_json(question: Question, answer: LayoutPlan) -> dict[str, Any]:
    """JSON report: plan, model and settings of the best layout."""
    return {
        "model": question.model.as_json(),
        "parameters": question.model.parameters,
        "gpus": question.cluster.num_gpus,
        "plan": answer.as_json(),
        "settings": settings(question, answer.best, answer.engine) if answer.best else None,
    }


def settings(question: Question, best: Option, engine: str) -> dict[str, Any]:
    """Launch commands: torchrun per node, and the arguments of the engine."""
    launches = torchrun_launches(best.placement)
    found: dict[str, Any] = {
        "torchrun": [
            {"node": each.node, "environment": each.environment, "arguments": [*each.arguments]}
            for each in launches
        ]
    }
    if engine == "megatron":
        found["megatron"] = _megatron(question, best)
    elif engine == "torchtitan":
        found["torchtitan"] = torchtitan_settings(
            question.model, best.layout, recompute=best.recompute
        )
    else:
        shape, names = fsdp_mesh(best.layout)
        found["fsdp"] = {
            "mesh_shape": shape,
            "mesh_dim_names": names,
            "micro_batch": best.layout.micro_batch,
            "accumulation": best.layout.accumulation,
            "recompute": best.recompute,
        }
    return found


def as_text(question: Question, answer: LayoutPlan) -> str:
    model, cluster = question.model, question.cluster
    sizes = _sum_of(cluster.sizes)
    lines = [
        f"{printable(model.name)}: {model.parameters / 1e9:.2f} billion parameters, sequence "
        f"{model.sequence:,}, batch {question.batch.samples:,}",
        f"{counted(cluster.num_gpus, 'GPU')} ({sizes}), {cluster.gpu.name}, "
        f"{in_words(cluster.usable_memory)} of {in_words(cluster.gpu.memory)} usable; "
        f"{answer.engine}",
        *(f"assumed: {printable(each)}" for each in model.assumed),
        "",
    ]
    if answer.best is None:
        lines += ["Nothing fits.", *_wrapped(f"Binding constraint: {answer.why}")]
        for each in answer.would_help:
            lines += _wrapped(f"- {each}")
        return "\n".join(lines)
    lines += _best(question, answer, answer.best)
    lines += _alternatives(answer)
    lines += _hints(question, answer.best, answer.engine)
    lines += ["", "Start it", *_start(question, answer.best, answer.engine)]
    return "\n".join(lines)


def _sum_of(sizes: Sequence[int]) -> str:
    """Many alike are counted.

    >>> _sum_of([8, 7, 8]), _sum_of([8, 8, 8, 8, 7])
    ('8 + 7 + 8', '4 x 8 + 7')
    """
    runs = [(size, len(list(alike))) for size, alike in groupby(sizes)]
    return " + ".join(f"{n} x {size}" if n > 3 else " + ".join([f"{size}"] * n) for size, n in runs)


def _best(question: Question, answer: LayoutPlan, best: Option) -> list[str]:
    usable = question.cluster.usable_memory
    again = ", activations computed again" if best.recompute else ""
    lines = [
        f"Plan: {best.layout}{again}",
        f"  {best.step.tokens_per_second:,.0f} tokens a second, {best.step.seconds:.3g} s a step; "
        f"{in_words(best.memory.total)} of {in_words(usable)} on the fullest GPU (estimates)",
        *_wrapped(f"  Why: {answer.why}."),
        *(line for each in best.remarks for line in _wrapped(f"  Note: {each}.")),
        "",
        "Time of a step",
    ]
    seconds = best.step.seconds
    rows = [
        (words, f"{getattr(best.step, name):.3g} s", f"{getattr(best.step, name) / seconds:.1%}")
        for name, words in PARTS.items()
        if getattr(best.step, name)
    ]
    lines += _columns(rows, right=(1, 2))
    lines += ["", f"Memory of the fullest GPU (stage {best.memory.stage})"]
    terms = memory_in_words(
        question.model, best.layout, engine_named(answer.engine), best.memory,
        recompute=best.recompute, shard_optimiser=question.options.shard_optimiser,
    )  # fmt: skip
    rows = [(name, in_words(size), how) for name, size, how in terms]
    lines += _columns(rows, right=(1,))
    return [*lines, "", "GPUs", *_gpus(best)]


def _gpus(best: Option) -> list[str]:
    rows = []
    rank = 0
    for node, count in best.placement.per_node.items():
        used = [gpu for name, gpu in best.placement.ranks if name == node]
        rows.append((printable(node), f"GPUs {_ranges(used)}", f"ranks {rank}-{rank + count - 1}"))
        rank += count
    idle: dict[str, list[int]] = {}
    for node, gpu in best.placement.idle:
        idle.setdefault(node, []).append(gpu)
    rows += [(printable(node), f"GPUs {_ranges(gpus)}", "idle") for node, gpus in idle.items()]
    return _columns(rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-3,5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)


def _alternatives(answer: LayoutPlan) -> list[str]:
    if not answer.alternatives or answer.best is None:
        return []
    rows = []
    for each in answer.alternatives:
        ratio = each.step.tokens_per_second / answer.best.step.tokens_per_second - 1
        remark = "computed again" if each.recompute else ""
        fullest = in_words(each.memory.total)
        rows.append((str(each.layout), f"{ratio:+.1%}", fullest, remark))
    return ["", "Next best", *_columns(rows, right=(1, 2))]


def _hints(question: Question, best: Option, engine: str) -> list[str]:
    """Changes that would make idle GPUs usable."""
    if not best.placement.idle:
        return []
    freer: dict[str, tuple[BatchSpec, PlanOptions]] = {}
    if question.batch.keep:
        freer["--allow-batch-change"] = replace(question.batch, keep=False), question.options
    if not question.options.uneven_stages:
        uneven = replace(question.options, uneven_stages=True)
        freer["--uneven-stages"] = question.batch, uneven
    lines = []
    for flag, (batch, options) in freer.items():
        other = plan(question.model, question.cluster, batch, engine=engine, options=options).best
        assert other is not None  # it may do all that the first plan might
        gain = other.step.tokens_per_second / best.step.tokens_per_second - 1
        if gain >= WORTH_SAYING:
            lines += _wrapped(f"  {flag}: {other.layout}, {gain:+.1%}")
    return ["", "Idle GPUs would be used with", *lines] if lines else []


def _start(question: Question, best: Option, engine: str) -> list[str]:
    lines = []
    for launch in torchrun_launches(best.placement):
        lines.append(f"  on {printable(launch.node)}: {launch} TRAIN.py ...")
    if engine == "megatron":
        lines += _arguments(_megatron(question, best))
        if best.layout.tensor > 1 or best.layout.context > 1:
            lines.append("  before Blackwell: export CUDA_DEVICE_MAX_CONNECTIONS=1")
    elif engine == "torchtitan":
        found = torchtitan_settings(question.model, best.layout, recompute=best.recompute)
        lines += ["  torchtitan 0.3:", *_arguments(torchtitan_arguments(found))]
        lines += ["  torchtitan up to 0.2, TOML:"]
        lines += [f"    {line}" if line else "" for line in torchtitan_toml(found).splitlines()]
    else:
        shape, names = fsdp_mesh(best.layout)
        lines.append(f'  mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={names})')
        policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        lines.append(f"  policy = {policy}")
        lines.append("  fully_shard(each block and the model, mesh=mesh, mp_policy=policy)")
        lines.append(
            f"  micro-batch {best.layout.micro_batch}, accumulation {best.layout.accumulation}"
            + (", checkpoint each block's activations" if best.recompute else "")
        )
    return lines


def _megatron(question: Question, best: Option) -> list[str]:
    return megatron_arguments(
        question.model,
        best.layout,
        recompute=best.recompute,
        shard_optimiser=question.options.shard_optimiser,
    )


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
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _wrapped(text: str) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return wrap(text, WIDTH, initial_indent="", subsequent_indent=indent + "  ")
