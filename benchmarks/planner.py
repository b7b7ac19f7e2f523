"""The time of a plan, compared with a full search; its estimates and published runs.

    python benchmarks/planner.py

Plans are timed for Llama-type models of 8 and 70 billion parameters on nodes of 8 GPUs, the
last one short of a GPU. Up to 64 GPUs the same question is answered by trying every
layout (`planner_reference`), whose best throughput must be the same. All is processor time,
the least of several rounds. Goal: 50 ms for 1024 GPUs.

The third part is what one lost GPU costs a data-parallel training under the supervisor: the share
of the survivors that work, and the time of a step of the slowest copy, for a batch that is split
evenly, unevenly, or that may change.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.planner_reference import LLAMA, NARAYANAN, Run, try_all
from benchmarks.report import write_report
from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec, plan
from rmetric.guard.planner.cluster import GPUS, Cluster, Gpu, reach
from rmetric.guard.planner.costs import estimate, memory, step_flops
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import ENGINES
from rmetric.guard.supervisor.allocation import ShrinkData

ROUNDS = 7
#: How many model chunks a stage had in the Llama 3 runs, 126 layers over 16 stages: about 8.
LLAMA_CHUNKS = 8


def llama(layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_size=128, ffn=ffn,
        vocabulary=128256, sequence=8192,
    )  # fmt: skip


MODELS = {"8B": llama(32, 4096, 32, 14336), "70B": llama(80, 8192, 64, 28672)}


def least_milliseconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    costs = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        costs.append(time.process_time() - began)
    return 1e3 * min(costs)


def measure_plans() -> dict[str, float]:
    found = {}
    for gpus in (8, 64, 1024):
        for name, model in MODELS.items():
            for engine in ENGINES:
                for keep in (True, False):
                    sizes = [8] * (gpus // 8 - 1) + [7]
                    batch = BatchSpec(samples=2048, largest_change=0.0 if keep else 0.1)
                    question = (model, Cluster.of(sizes, "h100"), batch)
                    milliseconds = least_milliseconds(partial(plan, *question, engine=engine))
                    kept = "" if keep else "_batch_may_change"
                    found[f"{engine}_{name}_{gpus - 1}_gpus{kept}_ms"] = milliseconds
    return found


def measure_against_all() -> dict[str, float]:
    """Compare plan and full search for 63 GPUs; exits if they differ."""
    model, batch = MODELS["8B"], BatchSpec(samples=2048)
    cluster, engine = Cluster.of([8] * 7 + [7], "h100"), ENGINES["megatron"]
    everything: list[Any] = []
    all_ms = least_milliseconds(
        lambda: everything.append(list(try_all(model, cluster, batch, engine))), rounds=1
    )
    planned = plan(model, cluster, batch)
    most = max(each.tokens_per_second for each in everything[0])
    rates = [each.step.tokens_per_second for each in (planned.best, *planned.alternatives) if each]
    if not rates or max(rates) != most:
        sys.exit(f"the two disagree: {planned.best} and {most} tokens a second by trying all")
    plan_ms = least_milliseconds(lambda: plan(model, cluster, batch))
    return {
        "all_layouts_63_gpus_ms": all_ms,
        "all_layouts_that_work": len(everything[0]),
        "ratio": all_ms / plan_ms,
    }


def estimated_teraflops(run: Run, gpu: Gpu, *, recompute: bool, chunks: int) -> float:
    """Speed of one GPU with the best micro-batch that fits; `chunks` divide the bubble."""
    engine, data = ENGINES["megatron"], run.gpus // (run.tensor * run.pipeline)
    found = []
    for micro_batch in (1, 2, 4, 8):
        if run.batch % (data * micro_batch):
            continue
        layout = Layout(
            tensor=run.tensor, pipeline=run.pipeline, data=data, micro_batch=micro_batch,
            accumulation=run.batch // (data * micro_batch),
        )  # fmt: skip
        shard = not recompute
        needed = memory(run.model, layout, engine, recompute=recompute, shard_optimiser=shard)
        if needed.total > gpu.memory and recompute:
            continue
        step = estimate(
            run.model, layout, engine, gpu, reach((8,) * (run.gpus // 8), layout),
            recompute=recompute, shard_optimiser=shard,
        )  # fmt: skip
        seconds = step.seconds - step.bubble * (1 - 1 / chunks)
        flops = step_flops(run.model, run.batch, recompute=recompute)
        found.append(flops / seconds / run.gpus / 1e12)
    return max(found)


def measure_published() -> dict[str, Any]:
    rows = []
    for run in NARAYANAN:
        rows.append((run, estimated_teraflops(run, GPUS["a100"], recompute=True, chunks=1)))
    for run in LLAMA:
        mine = estimated_teraflops(run, GPUS["h100"], recompute=False, chunks=LLAMA_CHUNKS)
        rows.append((run, mine))
    table = [
        {
            "billions": run.billions,
            "gpus": run.gpus,
            "layout": f"TP{run.tensor} x PP{run.pipeline}",
            "published": run.published,
            "estimated": round(mine, 1),
            "ratio": round(mine / run.published, 3),
        }
        for run, mine in rows
    ]
    a100 = [mine / run.published for run, mine in rows[: len(NARAYANAN)]]
    return {
        "a100_ratio_median": median(a100),
        "a100_ratio_least": min(a100),
        "a100_ratio_most": max(a100),
        "runs": table,
    }


def measure_survivors() -> list[dict[str, Any]]:
    """One of N GPUs is lost, each a copy with micro-batches of one sample: what the rest do.

    Step: samples of the fullest copy over those before, for a changed batch by the samples of a
    step as well. It cannot be below N / (N - 1).
    """
    rows = []
    for gpus in (8, 64, 512, 1024):
        for batch in (64, 256, 1024, 2048):
            if batch < gpus:
                continue
            first, left = Layout.split(batch, data=gpus), gpus - 1
            row: dict[str, Any] = {"gpus": gpus, "batch": batch}
            ways: dict[str, dict[str, Any]] = {
                "even": {},
                "uneven": {"uneven_batch": True},
                "changed": {"largest_change": 0.1},
            }
            for name, how in ways.items():
                found = ShrinkData(first, batch, **how)({"": tuple(range(left))}, first).layout
                pace = found.fullest_copy / found.global_batch
                row[name] = {
                    "batch": found.global_batch,
                    "at_work": found.data / left,
                    "step": pace / (first.fullest_copy / batch),
                }
            rows.append(row)
    return rows


def survivor_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `measure_survivors` as a table of Markdown."""
    lines = [
        "| GPUs | batch | even: at work | step | `--uneven-batch`: at work | step "
        "| `--allow-batch-change`: batch | at work | step |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    for row in rows:
        even, uneven, changed = row["even"], row["uneven"], row["changed"]
        lines.append(
            f"| {row['gpus']} -> {row['gpus'] - 1} | {row['batch']} | {even['at_work']:.1%} "
            f"| {even['step']:.2f} | {uneven['at_work']:.1%} | {uneven['step']:.2f} "
            f"| {changed['batch']} | {changed['at_work']:.1%} | {changed['step']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    measured: dict[str, Any] = measure_plans() | measure_against_all() | measure_published()
    survivors = measure_survivors()
    print(survivor_table(survivors))
    for key, value in measured.items():
        if key != "runs":
            print(f"{key:52}{value:12.2f}")
    for row in measured["runs"]:
        print(row)
    rounded = {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in measured.items()
    }
    report = write_report("planner", rounded | {"survivors": survivors})
    print(f"written: results/benchmarks/{report.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
